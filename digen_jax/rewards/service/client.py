"""A reward that asks reward servers."""

import functools
import json
import math
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Num

from digen_jax.errors import ConfigError
from digen_jax.images import to_uint8
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.service import REWARDS, SCORE, VERSION
from digen_jax.rewards.service.asking import Asker, Passing, Request
from digen_jax.rewards.service.wire import Malformed, decode_answer, encode_request

ANSWER = 2**16, 64  # bytes of an answer at most: and for each score


class RemoteReward:
    """A reward whose scores reward servers make. Several threads may call it at the same time.

    Args:
      servers: their addresses, such as "http://127.0.0.1:8100".
      names: that the scores must have; others are returned, too.
      options: those of `Asker`.

    Raises:
      ConfigError: an address is none, or a number out of range.
    """

    def __init__(self, servers: Sequence[str], names: Sequence[str] = (), **options: Any):
        self._names = tuple(names)
        self._most = sys.maxsize, math.inf  # images and pixels of a request
        self.checked = False  # whether `check` has had an answer
        self._asker = Asker(servers, **options)

    def check(self, prompts: Sequence[str] = ()) -> dict[str, Any]:
        """Asks each server what it has, and keeps to the smallest limits; returns the answers by address.

        Args:
          prompts: that wait to be scored, for which servers that cannot be reached are asked again.

        Raises:
          Unreachable: none answers, and no prompt waits; Stopped: none answers in time.
          ConfigError: one refuses the token or has another version.
        """
        answers = self._asker.each(REWARDS, "launch/reward_server.py", prompts)
        found = {url: _told(url, content) for url, content in answers.items()}
        self.checked = True
        self._most = tuple(
            min(told["limits"][name] for told in found.values()) for name in ("images", "pixels")
        )
        return found

    def __call__(
        self,
        images: Num[np.ndarray, "b h w 3"] | Num[np.ndarray, "b t h w 3"],
        prompts: list[str],
        metadata: list[dict],
    ) -> dict[str, Float32[np.ndarray, "b"]]:
        """The scores by name.

        Raises:
          Stopped: the servers have failed too often or too long: names the last server, a prompt and the reason.
          RewardError: a server refuses the request, which would not change.
        """
        pixels = math.prod(images.shape[1:-1])
        count = int(max(1, min(self._most[0], self._most[1] // max(1, pixels))))
        found = []
        for i in range(0, len(prompts), count):
            part = slice(i, i + count)
            found.append(self._ask(to_uint8(images[part]), prompts[part], metadata[part]))
        names = [name for name in found[0] if all(name in one for one in found)]
        return {name: np.concatenate([one[name] for one in found]) for name in names}

    def close(self) -> None:
        """Closes the connections."""
        self._asker.close()

    def _ask(
        self, images: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> dict[str, Float32[np.ndarray, "b"]]:
        """One request, repeated with its id."""
        try:
            kind, body = encode_request(images, prompts, metadata, secrets.token_hex(16))
        except ValueError as error:
            raise RewardError(str(error)) from error
        most = ANSWER[0] + ANSWER[1] * len(prompts)
        request = Request(SCORE, prompts, most, kind, lambda _: body)
        return self._asker.ask(request, functools.partial(self._read, count=len(prompts)))

    def _read(self, content: bytes, count: int) -> dict[str, Float32[np.ndarray, "b"]]:
        """The scores in an answer; raises Passing where it has not `count` of each."""
        try:
            return decode_answer(content, count, self._names)[0]
        except Malformed as error:
            which = error.args[1] if len(error.args) > 1 else 0
            raise Passing(f"sent an answer that {error.args[0]}", which, down=True) from error


def _told(url: str, content: bytes) -> dict[str, Any]:
    """A server's answer to /rewards, checked."""
    try:
        told = json.loads(content)
        version, limits = told["version"], told["limits"]
        if not all(
            isinstance(limits[name], int) and limits[name] > 0 for name in ("images", "pixels")
        ):
            raise ValueError("limits")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{url} is no reward server: its {REWARDS} has another format") from error
    if version != VERSION:
        raise ConfigError(
            f"reward server {url} has version {version!r} of the format, this code {VERSION}: use the same code"
        )
    return told
