"""Canaries: pictures of which it is known how a reward must judge them, scored before a run begins."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.rewards.built_in import find_canary
from digen_jax.rewards.mistakes import blamed


@dataclasses.dataclass(frozen=True)
class Canary:
    """Pictures with prompts, and what the reward must say of them.

    A reward without weights has scores that are known; a learned one must prefer some pictures to others. Of a
    reward that returns several scores the first that has a weight is looked at.
    """

    images: UInt8[np.ndarray, "b ..."]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    expected: (
        Sequence[float] | Float[np.ndarray, "b"]
    ) = ()  # the score of each picture; empty: they are not known
    tolerance: float = 0.0  # of these scores
    # (a picture, another) by number: the first must score higher
    prefers: tuple[tuple[int, int], ...] = ()
    verified: bool = True  # False: it was never scored with the reward's real weights


def check_canaries(found: rewards.Rewards, score: Callable[..., rewards.Scores]) -> None:
    """Lets every reward that has a canary score it.

    Args:
      found: the rewards; those on a mesh are passed over, as `score` does not ask them.
      score: as `RewardPool.score`.

    Raises:
      ConfigError: a score is not as it must be; names the reward, and both numbers.
      Stopped: see `RewardPool.score`.
    """
    for reward in found.members:
        make, name = find_canary(reward), reward.settings.title
        if make is None or reward.on_mesh:
            continue
        with blamed(name, "has a canary that raised"):
            canary = make()
        if not isinstance(canary, Canary):
            raise ConfigError(
                f"the canary of reward {name!r} returned a {type(canary).__name__}: return a rewards.canary.Canary"
            )
        # So that only this reward is asked.
        metadata = [record | {"rewards": [name]} for record in canary.metadata]
        given = score(canary.images, canary.prompts, metadata).columns
        column = found.names.index(next(iter(reward.settings.entries.values())))
        if wrong := _mistake(canary, given[:, column]):
            raise ConfigError(f"reward {name!r} fails its canary: {wrong}{_doubt(canary)}")


def _mistake(canary: Canary, given: np.ndarray) -> str | None:
    """What is wrong with the scores of a canary's pictures; None: nothing."""
    for number, expected in enumerate(np.float32(canary.expected)):
        if not abs(given[number] - expected) <= canary.tolerance:
            of = f"picture {number} ({canary.prompts[number]!r})"
            return f"{of} scores {given[number]:.7g}, but it must score {expected:.7g}"
    for better, worse in canary.prefers:
        if not given[better] > given[worse]:
            return (
                f"picture {better} ({canary.prompts[better]!r}) scores {given[better]:.7g}, not more than picture "
                f"{worse} ({canary.prompts[worse]!r}) with {given[worse]:.7g}"
            )
    return None


def _doubt(canary: Canary) -> str:
    if canary.verified:
        return ""
    return "; this canary was never tried with the real weights, so it may itself be wrong"
