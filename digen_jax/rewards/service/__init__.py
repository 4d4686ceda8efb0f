"""Rewards over HTTP: a server that scores in its own processes (`server`), and a client that is a reward (`client`).

`wire` has the format of requests and answers. `rewards.http_client` has retries and failover.
"""

import contextlib
from collections.abc import Iterator

from digen_jax.errors import ConfigError

VERSION = 1  # of the format
TOKEN = "DIGEN_REWARD_TOKEN"  # environment variable with a server's token
SCORE, HEALTH, REWARDS = "/v1/score", "/health", "/rewards"
PACKAGES = ("starlette", "uvicorn", "python_multipart")  # of requirements-reward.txt


@contextlib.contextmanager
def server_packages() -> Iterator[None]:
    """Turns a failed import of a package that only a server needs into a ConfigError."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in PACKAGES:
            raise
        raise ConfigError(
            f"a reward server needs the package {module}: run pip install -r requirements-reward.txt"
        ) from error
