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

from digen_jax.errors import ConfigError, check_range
from digen_jax.images import to_uint8
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.http_client import FailoverClient, Request, parse_addresses
from digen_jax.rewards.service.wire import (
    REWARDS,
    SCORE,
    TOKEN,
    VERSION,
    decode_answer,
    encode_request,
)

ANSWER = 2**16, 64  # maximum response size in bytes: base, and per image


class RemoteReward:
    """Reward that is computed by reward servers, such as "http://127.0.0.1:8100". Thread-safe.

    The scores `names` are required in every answer; other scores are also returned. Further options are those of
    `FailoverClient`.

    Raises:
      ConfigError: An address or a number is invalid.
    """

    def __init__(self, servers: Sequence[str], names: Sequence[str] = (), **options: Any):
        self._names = tuple(names)
        self._max_images, self._max_pixels = sys.maxsize, math.inf  # per request
        self.groupwise = False  # whether each request must be a complete group
        self.checked = False  # whether `check` has succeeded
        self._client = FailoverClient(servers, **options)

    def check(self, prompts: Sequence[str] = ()) -> dict[str, Any]:
        """Returns each server's description by address, and adopts the strictest limits.

        If there are prompts to be scored, unreachable servers are retried.

        Raises:
          ConfigError: A server rejects the token or has another version, or none is reachable and there are no prompts.
          Stopped: No server answers in time.
        """
        answers = self._client.get_each(REWARDS, "launch/reward_server.py", prompts)
        found = {url: _parse_description(url, content) for url, content in answers.items()}
        self.groupwise = any(one.get("groupwise", False) for one in found.values())
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
        """Returns the scores by name. Raises like `FailoverClient.post`, and RewardError if a clip is too large."""
        pixels = max(1, math.prod(images.shape[1:-1]))
        if pixels > self._max_pixels:
            raise RewardError(
                f"a clip of {pixels} pixels is above the limit of the reward servers, {self._max_pixels}: start them "
                "with more --pixels, or set the reward's setting 'every'"
            )
        count = int(min(self._max_images, self._max_pixels // pixels))
        if self.groupwise and len(prompts) > count:
            raise RewardError(
                f"a group of {len(prompts)} images is above the limit of the reward servers, {count}: start them with "
                "more --images or --pixels"
            )
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

        request = Request(
            SCORE, prompts, ANSWER[0] + ANSWER[1] * len(prompts), kind, lambda _: body
        )
        return self._client.post(request, lambda one: decode_answer(one, len(prompts), self._names))


def _parse_description(url: str, content: bytes) -> dict[str, Any]:
    """Returns a server's validated answer to GET /rewards."""
    try:
        found = json.loads(content)
        version, limits = found["version"], [found["limits"][one] for one in ("images", "pixels")]
        valid = all(isinstance(one, int) and one > 0 for one in limits)
    except (ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise ConfigError(f"{url} is not a reward server: its {REWARDS} has another format")
    if version != VERSION:
        versions = f"version {version!r} of the format, and this code has version {VERSION}"
        raise ConfigError(f"reward server {url} has {versions}: use the same code")
    return found


@dataclasses.dataclass(frozen=True)
class Served:
    """Reward "served", computed by `launch/reward_server.py`. The variable DIGEN_REWARD_TOKEN is the bearer token.

    Each scoring process opens connections at its first call.
    """

    servers: Sequence[str] = ()  # addresses; the one with the fewest requests in flight is used
    # Name of the server's score to train on. "" means its only score, or all, to be selected by the section's `weight`.
    score: str = ""
    attempt: float = 600.0  # timeout of one attempt, in seconds
    deadline: float = 1800.0  # timeout of all attempts of a request, in seconds
    retries: int = 8  # attempts after the first
    every: int = 1  # of a clip, every n-th frame is sent, from the first one
    # whether the server's reward sees all images of a group at once; a group is one request
    groupwise: bool = False

    def __post_init__(self):
        """Raises ConfigError if an address is missing or invalid, or `every` is not positive."""
        check_range("every", self.every, 1)
        given = parse_addresses(self.servers, "reward server", "http://127.0.0.1:8100")
        object.__setattr__(self, "servers", given)

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
        if reward.groupwise != self.groupwise:
            what = "complete groups" if reward.groupwise else "each image by itself"
            raise ConfigError(
                f"the reward servers score {what}: set the reward's setting 'groupwise' to {reward.groupwise}"
            )
        found = reward(images[:, :: self.every] if images.ndim == 5 else images, prompts, metadata)
        if self.score:
            return found[self.score]
        return next(iter(found.values())) if len(found) == 1 else found


@functools.lru_cache(maxsize=8)
def _remote(settings: Served) -> RemoteReward:
    names = (settings.score,) if settings.score else ()
    options: dict[str, Any] = dict(attempt=settings.attempt, deadline=settings.deadline)
    options |= dict(retries=settings.retries, token=os.environ.get(TOKEN) or None)
    return RemoteReward(settings.servers, names, **options)
