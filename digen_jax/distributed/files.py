"""Files that must be the same on all nodes: this package, and the prompts."""

import functools
import hashlib
import pathlib
import socket

import digen_jax
from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError

PACKAGE = "digen_jax"


def fingerprints(recipe: Recipe) -> dict[str, str]:
    """A hash of this package's code, by its name, and of each prompt file, by its path; "" for a missing file."""
    found = {PACKAGE: _of_package()}
    for path in {*map(str, recipe.prompts.paths), str(recipe.evaluation.prompts)}:
        file = pathlib.Path(path)
        found[path] = _digest(file.read_bytes()) if file.is_file() else ""
    return found


def check_same(expected: dict[str, str], recipe: Recipe, whose: str) -> None:
    """Checks that the files here have the fingerprints of another process.

    Args:
      expected: its fingerprints.
      recipe: of the run.
      whose: the other process's, in words.

    Raises:
      ConfigError: names what differs.
    """
    own = fingerprints(recipe)
    for name, digest in expected.items():
        if own.get(name) != digest:
            what = "the code of digen_jax" if name == PACKAGE else name
            wrong = "missing" if own.get(name) == "" else f"not {whose}"
            raise ConfigError(
                f"{what} on {socket.gethostname()} is {wrong}: copy the same files to the same paths on all nodes, or "
                "use a shared disk"
            )


@functools.cache
def _of_package() -> str:
    folder = pathlib.Path(digen_jax.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return _digest(
        b"".join(str(file.relative_to(folder)).encode() + file.read_bytes() for file in files)
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
