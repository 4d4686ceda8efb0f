"""The metrics of two runs that differ by rounding alone."""

import pathlib
from typing import Any

import pytest

from digen_jax.logging.metrics import read_metrics, without_timing

# A number that is rounded to another byte of a picture moves the statistics of small pictures by so much.
BYTE = 1e-3


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """A record for each step of a run, without what differs between equal runs."""
    return [without_timing(line) for line in read_metrics(workdir / "metrics.jsonl")]


def assert_same_metrics(
    found: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    rel: float = 3e-5,
    abs: float = 1e-7,
) -> None:
    """Every number of every record is equal up to `rel` or `abs`; statistics of pictures up to `BYTE` or `abs`."""
    for line, other in zip(found, expected, strict=True):
        parts = [{k: v for k, v in one.items() if "images/" in k} for one in (line, other)]
        assert parts[0] == pytest.approx(parts[1], rel=max(rel, BYTE), abs=abs)
        assert line | parts[1] == pytest.approx(other, rel=rel, abs=abs)
