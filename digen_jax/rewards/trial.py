"""Tries a reward before anything slow starts: on made-up pictures, with real prompts and metadata."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from digen_jax.errors import ConfigError
from digen_jax.rewards.bytes_watch import Watched

KINDS = 8  # of records, at most


def try_out(
    score: Callable[..., Any], files: Iterable[Sequence[dict[str, Any]]], height: int, width: int
) -> None:
    """Scores two made-up images for the first record of each kind in every prompt file.

    Two, because a reward that returns one number for any batch would pass with one. Records are of one kind where
    they have the same task, the same rewards and the same fields. The images notice a reward that reads them as
    something else than bytes: see `bytes_watch`.

    Args:
      score: as `RewardPool.score`.
      files: the records of each.
      height: of the images, in pixels.
      width: likewise.

    Raises:
      ConfigError: the reward raises an exception or returns something wrong; Stopped, see `RewardPool.score`.
    """
    for records in files:
        chosen = _kinds(records)
        bright = picture(height, width)
        made_up = np.stack([bright, bright // 2] * len(chosen)).view(Watched)
        chosen = [record for record in chosen for _ in range(2)]
        prompts = [record["prompt"] for record in chosen]
        try:
            score(made_up, prompts, chosen)
        except ConfigError as error:
            what = (
                "it was tried on made-up images (uint8, from 0 to 255), two for each of the first prompts, before "
                "anything was computed"
            )
            raise type(error)(f"{error}\n  {what}") from error


def picture(height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Ramps of colours: red rises from left to right, green from top to bottom, and blue falls in both directions."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    ramps = np.stack([red, green, 255 - (red + green) / 2], axis=-1)
    return ramps.round().astype(np.uint8)


def _kinds(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first record of each kind, in the file's order."""
    found: dict[tuple, dict[str, Any]] = {}
    for record in records:
        kind = (record.get("tag"), str(record.get("rewards")), *sorted(record))
        found.setdefault(kind, record)
        if len(found) == KINDS:
            break
    return list(found.values())
