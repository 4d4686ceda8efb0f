"""Rewards over HTTP: a server that scores with its own processes, and a client that is a reward.

`wire` has the format, `server` the app, `serving` the process that runs it, and `client.RemoteReward` asks. `asking`
repeats requests, those of other clients as well.
"""

import contextlib
from collections.abc import Iterator

from digen_jax.errors import ConfigError

VERSION = 1  # of the format
TOKEN = "DIGEN_REWARD_TOKEN"  # the environment's variable that holds a server's token
SCORE, HEALTH, REWARDS = "/v1/score", "/health", "/rewards"

# Modules of packages that only the service needs, and what installs them.
PACKAGES = {
    "fastapi": "requirements-reward.txt",
    "starlette": "requirements-reward.txt",
    "uvicorn": "requirements-reward.txt",
    "python_multipart": "requirements-reward.txt",
    "httpx": "requirements.txt",
    "stamina": "requirements.txt",
}


@contextlib.contextmanager
def installed(what: str) -> Iterator[None]:
    """Turns a failed import of one of the service's packages into a sentence.

    Args:
      what: needs them, such as "a reward server".

    Raises:
      ConfigError: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in PACKAGES:
            raise
        raise ConfigError(
            f"{what} needs the package {module}, which is not installed: pip install -r {PACKAGES[module]}"
        ) from error
