"""Tries a reward before anything slow starts: on grey pictures, with real prompts and metadata."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from digen_jax.errors import ConfigError

KINDS = 8  # of records, at most


def try_out(
    score: Callable[..., Any], files: Iterable[Sequence[dict[str, Any]]], height: int, width: int
) -> None:
    """Scores a grey picture for the first record of each kind in every prompt file.

    Records are of one kind where they have the same task and the same fields.

    Args:
      score: as `RewardPool.score`.
      files: the records of each.
      height: of the pictures, in pixels.
      width: likewise.

    Raises:
      ConfigError: the reward raises an exception or returns something wrong; Stopped, see `RewardPool.score`.
    """
    for records in files:
        chosen = _kinds(records)
        grey = np.full((len(chosen), height, width, 3), 0.5, np.float32)
        prompts = [record["prompt"] for record in chosen]
        try:
            score(grey, prompts, chosen)
        except ConfigError as error:
            what = (
                "it was tried on grey pictures of the first prompts, before anything was computed"
            )
            raise type(error)(f"{error}\n  {what}") from error


def _kinds(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first record of each kind, in the file's order."""
    found: dict[tuple, dict[str, Any]] = {}
    for record in records:
        found.setdefault((record.get("tag"), *sorted(record)), record)
        if len(found) == KINDS:
            break
    return list(found.values())
