"""launch/train.py for the benchmark `kills`, with a smooth reward and with hashes of weights.

DIGEN_JAX_WEIGHT_HASHES=FOLDER python benchmarks/kills_train.py [options of launch/train.py]

The trainer's process writes a hash of each version that it sends, the other workers of each version they receive.
"""

import hashlib
import os
import pathlib
import runpy
import sys
from functools import partialmethod
from typing import Any

from digen_jax.config.command_line import run_main
from digen_jax.distributed.launch import PART
from digen_jax.distributed.worker_process import RolloutProcess, TrainingProcess
from digen_jax.files import shipped
from digen_jax.scheduling.commands import WeightsVersion

FOLDER = "DIGEN_JAX_WEIGHT_HASHES"  # environment variable with the folder for the hashes
SENT, RECEIVED = "sent", "received"


def brightness(images: Any, prompts: list[str], metadata: list[dict]) -> Any:
    """Returns the mean brightness: a reward that changes little if images do."""
    return images.mean((1, 2, 3), dtype="float64") / 255


def digest(tree: Any) -> str:
    """Returns a hash of the bits of all arrays, by their paths in the tree."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.ascontiguousarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        found.update(array.view(np.uint8).data)
    return found.hexdigest()[:32]


def record(kind: str, weights_version: WeightsVersion, tree: Any) -> None:
    """Appends a line, which is kept if this process is killed."""
    name = f"{weights_version.version}{'e' * weights_version.evaluated}"
    with pathlib.Path(os.environ[FOLDER], str(os.getpid())).open("a") as file:
        file.write(f"{kind} {name} {digest(tree)}\n")


def compare_hashes(folder: pathlib.Path) -> tuple[int, list[str]]:
    """Returns the number of received weights, and the versions whose received bits were never sent."""
    files = [file.read_text().splitlines() for file in folder.iterdir()]
    lines = [line.split() for file in files for line in file]
    # A killed process may leave an unfinished line.
    full = [line for line in lines if len(line) == 3 and len(line[2]) == 32]
    sent = {(name, found) for kind, name, found in full if kind == SENT}
    received = [(name, found) for kind, name, found in full if kind == RECEIVED]
    return len(received), [name for name, found in received if (name, found) not in sent]


class HashingProcess(RolloutProcess):
    """Process of a rollout worker that writes hashes of the weights it receives."""

    def receive(self, weights_version: WeightsVersion) -> None:
        """Receives weights and writes their hash."""
        super().receive(weights_version)
        weights = self._sampling().weights.get(weights_version)
        if weights is not None:
            record(RECEIVED, weights_version, weights.tuned)


class HashingTrainingProcess(HashingProcess, TrainingProcess):
    """Process of a training worker that also writes hashes of the weights it trains."""

    def take_trained(self, weights_version: WeightsVersion) -> None:
        """Receives trained weights and writes their hash."""
        super().take_trained(weights_version)
        if not weights_version.update:
            record(RECEIVED, weights_version, self._training.version_weights(weights_version))


def record_weights() -> None:
    """Writes hashes in this process (the trainer's) and in its workers."""
    from digen_jax.distributed.workers import RemoteWorkers
    from digen_jax.parallel.system import cast
    from digen_jax.runtime.array_transfer import SyncedWeights

    add = SyncedWeights.add

    def added(
        self: SyncedWeights, weights_version: WeightsVersion, tree: Any, own: str | None = None
    ) -> None:
        # Write first, because a worker may receive it at once.
        record(SENT, weights_version, tree if self._dtype is None else cast(tree, self._dtype))
        add(self, weights_version, tree, own)

    SyncedWeights.add = added  # type: ignore[assignment, method-assign]
    kinds = dict(kind=HashingProcess, training_kind=HashingTrainingProcess)
    start = partialmethod(RemoteWorkers.__init__, **kinds)
    RemoteWorkers.__init__ = start  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).parents[1])  # instead of this file's folder
    from benchmarks import kills_train  # as the workers' processes import it

    if PART in os.environ:
        kills_train.record_weights()
    run_main(runpy.run_path(shipped("launch/train.py"))["main"])
