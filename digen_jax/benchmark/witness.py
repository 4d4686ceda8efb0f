"""launch/train.py with a witness: it notes hashes of the weights that are published, and of those that meshes take.

WITNESS=FOLDER python -m digen_jax.benchmark.witness [options of launch/train.py]
"""

import hashlib
import os
import pathlib
import runpy
import sys
from typing import Any

import jax
import numpy as np

from digen_jax.engine.system import rounded
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.versions import Versions
from digen_jax.scheduling.commands import Publication

FOLDER = "WITNESS"  # the variable with the folder of the notes, a file for each process
GIVEN, TAKEN = "given", "taken"
SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "train.py"


def digest(tree: Any) -> str:
    """A hash of the bits of all arrays, by their places in the tree."""
    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.ascontiguousarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        found.update(array.view(np.uint8).data)
    return found.hexdigest()[:32]


def note(kind: str, publication: Publication, tree: Any) -> None:
    """Appends a line, which survives a kill."""
    name = f"{publication.version}{'e' * publication.evaluated}"
    with pathlib.Path(os.environ[FOLDER], str(os.getpid())).open("a") as file:
        file.write(f"{kind} {name} {digest(tree)}\n")


def torn(folder: pathlib.Path) -> tuple[int, list[str]]:
    """(how often weights were taken, those that were never published so)."""
    lines = [
        line.split() for file in folder.iterdir() for line in file.read_text().splitlines(True)
    ]
    # A process that was killed may leave an unfinished line.
    whole = [line for line in lines if len(line) == 3 and len(line[2]) == 32]
    given = {(name, found) for kind, name, found in whole if kind == GIVEN}
    taken = [(name, found) for kind, name, found in whole if kind == TAKEN]
    return len(taken), [name for name, found in taken if (name, found) not in given]


def watch() -> None:
    """From now on this process notes what it publishes and takes."""
    add, receive = Versions.add, SamplingExecutor.receive

    def added(self: Versions, publication: Publication, tree: Any, own: str | None = None) -> None:
        # First, since a mesh may take it at once.
        note(GIVEN, publication, tree if self._dtype is None else rounded(tree, self._dtype))
        add(self, publication, tree, own)

    def received(self: SamplingExecutor, publication: Publication) -> None:
        receive(self, publication)
        weights = self.weights.get(publication)
        if weights is not None:
            note(TAKEN, publication, weights.tuned)

    Versions.add, SamplingExecutor.receive = added, received


if __name__ == "__main__":
    watch()
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(sys.argv[0], run_name="__main__")
