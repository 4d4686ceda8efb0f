"""Whether two runs are one run: the lines of their metrics, and what they have changed of the parameters."""

import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Shaped

from digen_jax.checkpoints.checkpointer import newest_complete
from digen_jax.logging.metrics import without_timing

STEP = "images_per_second"  # that only the line of a step has
CHANCE = ("tag_share",)  # what depends on who was idle


def lines(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics, in their order."""
    file = workdir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def steps(workdir: pathlib.Path) -> list[int]:
    """The steps of which a run's metrics have a line, in their order."""
    return [line["step"] for line in lines(workdir) if STEP in line]


def metrics_off(workdir: pathlib.Path, other: pathlib.Path) -> float:
    """The largest difference of a metric of two runs, relative to that metric's largest value; inf: other lines."""
    found, expected = ([without_timing(line) for line in lines(one)] for one in (workdir, other))
    if [line.keys() for line in found] != [line.keys() for line in expected]:
        return math.inf
    largest: dict[str, float] = {}
    for line in expected:
        for name, value in line.items():
            largest[name] = max(largest.get(name, 0.0), abs(value))
    differences = [
        abs(line[name] - value) / max(largest[name], 1e-3)
        for line, of in zip(found, expected, strict=True)
        for name, value in of.items()
        if name not in CHANCE
    ]
    return max(differences, default=math.inf)


def tuned(workdir: pathlib.Path) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The tuned parameters of a run's newest checkpoint, by name."""
    folder = workdir / "checkpoints"
    step, _ = newest_complete(folder)
    arrays = folder.absolute() / str(step) / "arrays"
    with ocp.PyTreeCheckpointer() as reader:
        # As numpy's arrays: their devices may not be here.
        saved = {"tuned": reader.metadata(arrays).item_metadata.tree["tuned"]}
        here = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        wanted = ocp.args.PyTreeRestore(item=saved, restore_args=here, partial_restore=True)
        tree = reader.restore(arrays, args=wanted)["tuned"]
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def update_off(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], start: dict[str, np.ndarray]
) -> float:
    """The norm of the difference of two updates, relative to that of the expected one."""

    def norm(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
        return math.sqrt(sum(float(np.sum(np.square(one[k] - other[k]))) for k in expected))

    return norm(found, expected) / norm(expected, start)
