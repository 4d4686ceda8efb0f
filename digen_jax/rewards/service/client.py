"""Client of reward servers, and the reward "served", which uses it in each scoring process."""

import dataclasses
import functools
import json
import math
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Num, UInt8

from digen_jax.errors import ConfigError
from digen_jax.images import to_uint8
from digen_jax.rewards import recorder
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.http_client import FailoverClient, Request, RetryableError, parse_addresses
from digen_jax.rewards.service import REWARDS, SCORE, TOKEN, VERSION
from digen_jax.rewards.service.wire import Malformed, decode_answer, encode_request

ANSWER = 2**16, 64  # maximum response size in bytes: base, and per image


class RemoteReward:
    """Reward that is computed by reward servers. Thread-safe.

    Args:
      servers: Addresses, such as "http://127.0.0.1:8100".
      names: Scores required in every answer; other scores are also returned.
      options: Options of `FailoverClient`.

    Raises:
      ConfigError: An address or a number is invalid.
    """

    def __init__(self, servers: Sequence[str], names: Sequence[str] = (), **options: Any):
        self._names = tuple(names)
        self._max_images, self._max_pixels = sys.maxsize, math.inf  # per request
        self.checked = False  # whether `check` has succeeded
        self._client = FailoverClient(servers, **options)

    def check(self, prompts: Sequence[str] = ()) -> dict[str, Any]:
        """Returns each server's description by address, and adopts the strictest limits.

        Args:
          prompts: Prompts to be scored. If there are any, unreachable servers are retried.

        Raises:
          ConfigError: A server rejects the token or has another version, or none is reachable and there are no prompts.
          Stopped: No server answers in time.
        """
        answers = self._client.get_each(REWARDS, "launch/reward_server.py", prompts)
        found = {url: _parse_description(url, content) for url, content in answers.items()}
        limits = [description["limits"] for description in found.values()]
        self._max_images = min(one["images"] for one in limits)
        self._max_pixels = min(one["pixels"] for one in limits)
        self.checked = True
        return found

    def __call__(
        self,
        images: Num[np.ndarray, "b h w 3"] | Num[np.ndarray, "b t h w 3"],
        prompts: list[str],
        metadata: list[dict],
    ) -> dict[str, Float32[np.ndarray, "b"]]:
        """Returns the scores by name.

        Raises:
          Stopped: Attempts or deadline are exhausted; names the last server, a prompt and the reason.
          RewardError: A server rejects the request itself.
        """
        pixels = max(1, math.prod(images.shape[1:-1]))
        count = int(max(1, min(self._max_images, self._max_pixels // pixels)))
        found = []
        for start in range(0, len(prompts), count):
            part = slice(start, start + count)
            found.append(self._request(to_uint8(images[part]), prompts[part], metadata[part]))
        names = [name for name in found[0] if all(name in one for one in found)]
        return {name: np.concatenate([one[name] for one in found]) for name in names}

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _request(
        self, images: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> dict[str, Float32[np.ndarray, "b"]]:
        """Sends one request. Retries have the same id."""
        try:
            kind, body = encode_request(images, prompts, metadata, secrets.token_hex(16))
        except ValueError as error:
            raise RewardError(str(error)) from error

        def read(content: bytes) -> dict[str, Float32[np.ndarray, "b"]]:
            try:
                return decode_answer(content, len(prompts), self._names)
            except Malformed as error:
                reason = f"sent an answer that {error}"
                raise RetryableError(reason, error.image, down=True) from error

        max_bytes = ANSWER[0] + ANSWER[1] * len(prompts)
        return self._client.post(Request(SCORE, prompts, max_bytes, kind, lambda _: body), read)


def _parse_description(url: str, content: bytes) -> dict[str, Any]:
    """Returns a server's validated answer to GET /rewards."""
    try:
        found = json.loads(content)
        version, limits = found["version"], [found["limits"][one] for one in ("images", "pixels")]
        valid = all(isinstance(one, int) and one > 0 for one in limits)
    except (ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise ConfigError(f"{url} is no reward server: its {REWARDS} has another format")
    if version != VERSION:
        raise ConfigError(
            f"reward server {url} has version {version!r} of the format, but this code has version "
            f"{VERSION}: use the same code"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Served:
    """Reward "served". Each scoring process opens connections at its first call.

    The fields are the arguments of `served`.
    """

    servers: tuple[str, ...]
    score: str
    attempt: float
    deadline: float
    retries: int

    def __call__(
        self, images: UInt8[np.ndarray, "b ..."], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"] | dict[str, Float32[np.ndarray, "b"]]:
        """Returns the scores with the configured name, the server's only score, or all scores by name.

        Raises:
          ConfigError, RewardError, Stopped: See `RemoteReward.check` and `RemoteReward`.
        """
        reward = _remote(self)
        if not reward.checked:
            reward.check(prompts)
        found = reward(images, prompts, metadata)
        if self.score:
            return found[self.score]
        return next(iter(found.values())) if len(found) == 1 else found


@functools.lru_cache(maxsize=8)
def _remote(settings: Served) -> RemoteReward:
    return RemoteReward(
        settings.servers,
        (settings.score,) if settings.score else (),
        token=os.environ.get(TOKEN) or None,
        attempt=settings.attempt,
        deadline=settings.deadline,
        retries=settings.retries,
        listener=recorder("reward server"),
    )


def served(
    servers: Sequence[str] = (),
    score: str = "",
    attempt: float = 600.0,
    deadline: float = 1800.0,
    retries: int = 8,
) -> Served:
    """Returns a reward computed by `launch/reward_server.py`; the variable DIGEN_REWARD_TOKEN is the bearer token.

    Args:
      servers: Addresses, such as "http://127.0.0.1:8100"; the one with the fewest requests in flight is used.
      score: Name of the server's score to train on. "" means its only score, or all, to be selected by the section's
        `weight`.
      attempt: Timeout of one attempt, in seconds.
      deadline: Timeout of all attempts of a request, in seconds.
      retries: Attempts after the first.

    Raises:
      ConfigError: An address is missing or invalid.
    """
    given = parse_addresses(servers, "served", "reward server", "http://127.0.0.1:8100")
    return Served(given, score, attempt, deadline, retries)
