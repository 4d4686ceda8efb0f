"""What the processes of one run have in common: the job's token, the config, the code."""

import dataclasses
import functools
import hashlib
import hmac
import json
import os
import pathlib
import re
from typing import Any

import jax

import digen_jax
from digen_jax.errors import ConfigError
from digen_jax.process.cluster import TOKEN

LEAST = 16  # characters of a token


@dataclasses.dataclass(frozen=True)
class Identity:
    """A process's token, and hashes of its config and of its code."""

    token: str
    config: str
    code: str

    @classmethod
    def of(cls, config: dict[str, Any], token: str) -> "Identity":
        """That of this process; `config` is a whole config that JSON can hold."""
        text = json.dumps(config, sort_keys=True)
        return cls(token, hashlib.sha256(text.encode()).hexdigest(), code_version())

    def knows(self, token: str) -> bool:
        """Whether a token is the job's; takes equally long for every wrong one of the same length."""
        return hmac.compare_digest(self.token.encode(), token.encode())

    def difference(self, config: str, code: str) -> str | None:
        """What another process has to change, as a sentence; None: nothing."""
        if code != self.code:
            return (
                f"its code is {code[:12]!r} and the leader's {self.code[:12]!r}: install the same version of digen_jax "
                "and of jax for all processes"
            )
        if config != self.config:
            return (
                f"its config is {config[:12]!r} and the leader's {self.config[:12]!r}: start all processes with the "
                "same command and the same prompt files"
            )
        return None


def job_token() -> str:
    """The job's token, from the environment.

    Raises:
      ConfigError: it is missing, too short, or has letters that a header cannot have.
    """
    token = os.environ.get(TOKEN, "")
    if len(token) < LEAST or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ConfigError(
            f"{TOKEN} must be a secret of {LEAST} or more ASCII characters without spaces, the same for all processes "
            "of a job and other for each job: set it, for example to what `openssl rand -hex 16` prints"
        )
    return token


@functools.cache
def code_version() -> str:
    """A hash of this package's source, and of the version of JAX, whose programs must be the same everywhere."""
    root, found = pathlib.Path(digen_jax.__file__).parent, hashlib.sha256(jax.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"\0{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()
