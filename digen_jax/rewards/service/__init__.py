"""Rewards over HTTP: a server that scores in separate processes (`server`), and a client reward (`client`).

`wire` defines the format of requests and answers. `rewards.http_client` implements retries and failover.
"""

import contextlib
from collections.abc import Iterator

from digen_jax.errors import ConfigError

VERSION = 1  # format version
TOKEN = "DIGEN_REWARD_TOKEN"  # environment variable with the bearer token
SCORE, HEALTH, REWARDS = "/v1/score", "/health", "/rewards"
PACKAGES = ("starlette", "uvicorn", "python_multipart")  # of requirements-reward.txt


@contextlib.contextmanager
def server_packages() -> Iterator[None]:
    """Converts a failed import of server-only packages to a ConfigError."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in PACKAGES:
            raise
        needs = f"a reward server needs the package {module}"
        raise ConfigError(f"{needs}: run pip install -r requirements-reward.txt") from error
