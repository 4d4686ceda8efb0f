"""Files that must be the same on all nodes: this package, and the prompts."""

import functools
import hashlib
import pathlib
import socket
from typing import TYPE_CHECKING

import digen_jax
from digen_jax.errors import ConfigError

if TYPE_CHECKING:  # it imports JAX: see `worker_process`
    from digen_jax.config.train_config import TrainConfig

PACKAGE = "digen_jax"


def fingerprints(recipe: "TrainConfig") -> dict[str, str]:
    """A hash of this package's code, by its name, and of each prompt file, by its path; "" for a missing file."""
    found = {PACKAGE: _code()}
    for path in {*map(str, recipe.prompts.paths), str(recipe.evaluation.prompts)}:
        file = pathlib.Path(path)
        found[path] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    return found


@functools.cache
def _code() -> str:
    folder, found = pathlib.Path(digen_jax.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return found.hexdigest()


def check_same(expected: dict[str, str], recipe: "TrainConfig") -> None:
    """Checks that the files here have the fingerprints of another process.

    Args:
      expected: Its fingerprints.
      recipe: Config of the run.

    Raises:
      ConfigError: Names the file that differs.
    """
    own = fingerprints(recipe)
    for name, digest in expected.items():
        if own.get(name) != digest:
            what = "the code of digen_jax" if name == PACKAGE else name
            wrong = "is missing" if own.get(name) == "" else "differs"
            raise ConfigError(
                f"{what} {wrong} on {socket.gethostname()}: copy the same files to the same paths on all nodes, or use "
                "a shared disk"
            )
