"""The reward "served": scores that reward servers make, for a config's list of rewards."""

import dataclasses
import functools
import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, UInt8

from digen_jax.rewards.request_log import noting
from digen_jax.rewards.service import TOKEN
from digen_jax.rewards.service.client import RemoteReward
from digen_jax.rewards.service.http import addresses


@dataclasses.dataclass(frozen=True)
class Served:
    """A reward that asks servers. Each process that scores has its own connections; the first call opens them.

    The fields are those of `served`.
    """

    servers: tuple[str, ...]
    score: str
    attempt: float
    deadline: float
    retries: int

    def __call__(
        self, images: UInt8[np.ndarray, "b ..."], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"] | dict[str, Float32[np.ndarray, "b"]]:
        """The scores of the asked name; a server's only ones; or all of them by name.

        Raises:
          ConfigError, RewardError, Stopped: as `RemoteReward.check` and `RemoteReward`.
        """
        client = _client(self)
        if not client.checked:
            client.check(prompts)
        found = client(images, prompts, metadata)
        if self.score:
            return found[self.score]
        return next(iter(found.values())) if len(found) == 1 else found


@functools.lru_cache(maxsize=8)
def _client(asked: Served) -> RemoteReward:
    return RemoteReward(
        asked.servers,
        (asked.score,) if asked.score else (),
        token=os.environ.get(TOKEN) or None,
        limit=asked.attempt,
        deadline=asked.deadline,
        retries=asked.retries,
        listen=noting("reward server"),
    )


def served(
    servers: Sequence[str] = (),
    score: str = "",
    attempt: float = 600.0,
    deadline: float = 1800.0,
    retries: int = 8,
) -> Served:
    """The reward of `launch/reward_server.py`; the environment's DIGEN_REWARD_TOKEN is the token.

    Args:
      servers: addresses, such as "http://127.0.0.1:8100"; the one with the fewest requests is asked.
      score: the name of the server's score that is trained; "": its only one, or all, of which the section's `weight`
        then names some.
      attempt: seconds of one attempt.
      deadline: seconds of all attempts of a request.
      retries: attempts after the first.

    Raises:
      ConfigError: an address is missing or none.
    """
    given = addresses(servers, "served", "reward server", "http://127.0.0.1:8100")
    return Served(given, score, attempt, deadline, retries)
