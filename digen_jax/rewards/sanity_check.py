"""Canaries: pictures of which it is known how a reward must judge them, scored before a run begins."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.rewards.built_in import find_sanity_check
from digen_jax.rewards.errors import blamed


@dataclasses.dataclass(frozen=True)
class SanityCheck:
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


def run_sanity_checks(found: rewards.Rewards, score: Callable[..., rewards.Scores]) -> None:
    """Lets every reward that has a sanity check score it.

    Args:
      found: the rewards; those on a mesh are passed over, as `score` does not ask them.
      score: as `RewardPool.score`.

    Raises:
      ConfigError: a score is not as it must be; names the reward, and both numbers.
      Stopped: see `RewardPool.score`.
    """
    for reward in found.members:
        make, name = find_sanity_check(reward), reward.settings.title
        if make is None or reward.on_mesh:
            continue
        with blamed(name, "has a sanity check that raised"):
            check = make()
        if not isinstance(check, SanityCheck):
            raise ConfigError(
                f"the sanity check of reward {name!r} returned a {type(check).__name__}: return a "
                "digen_jax.rewards.sanity_check.SanityCheck"
            )
        # So that only this reward is asked.
        metadata = [record | {"rewards": [name]} for record in check.metadata]
        given = score(check.images, check.prompts, metadata).columns
        column = found.names.index(next(iter(reward.settings.entries.values())))
        if wrong := _mistake(check, given[:, column]):
            raise ConfigError(f"reward {name!r} fails its sanity check: {wrong}{_doubt(check)}")


def _mistake(check: SanityCheck, given: np.ndarray) -> str | None:
    """What is wrong with the scores of a sanity check's images; None: nothing."""
    for number, expected in enumerate(np.float32(check.expected)):
        if not abs(given[number] - expected) <= check.tolerance:
            of = f"picture {number} ({check.prompts[number]!r})"
            return f"{of} scores {given[number]:.7g}, but it must score {expected:.7g}"
    for better, worse in check.prefers:
        if not given[better] > given[worse]:
            return (
                f"picture {better} ({check.prompts[better]!r}) scores {given[better]:.7g}, not more than picture "
                f"{worse} ({check.prompts[worse]!r}) with {given[worse]:.7g}"
            )
    return None


def _doubt(check: SanityCheck) -> str:
    if check.verified:
        return ""
    return "; this sanity check was never tried with the real weights, so it may itself be wrong"
