"""Sanity checks of rewards before a run: images with known scores."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.rewards.built_in import find_sanity_check
from digen_jax.rewards.errors import user_code


@dataclasses.dataclass(frozen=True)
class SanityCheck:
    """Images, and a prompt and a record for each, with known scores or preferences.

    A reward without weights has known scores; a learned reward has known preferences. If a reward returns several
    scores, the first one with a weight is checked.
    """

    images: UInt8[np.ndarray, "b ..."]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    expected: Sequence[float] | Float[np.ndarray, "b"] = ()  # scores; empty means unknown
    tolerance: float = 0.0  # maximum difference from the expected scores
    prefers: tuple[tuple[int, int], ...] = ()  # pairs of images; the first one must score higher
    verified: bool = True  # whether the check was ever run with the reward's real weights

    def failure(self, scores: Float[np.ndarray, "b"]) -> str | None:
        """Describes the first failure of the scores, or returns None."""
        for i, expected in enumerate(np.asarray(self.expected, np.float32)):
            if not abs(scores[i] - expected) <= self.tolerance:
                return f"image {i} ({self.prompts[i]!r}) scores {scores[i]:.7g} instead of {expected:.7g}"
        for better, worse in self.prefers:
            if not scores[better] > scores[worse]:
                high, low = (f"image {i} ({self.prompts[i]!r})" for i in (better, worse))
                return f"{high} scores {scores[better]:.7g}, not more than {low} with {scores[worse]:.7g}"
        return None


def run_sanity_checks(found: rewards.Rewards, score: Callable[..., rewards.Scores]) -> None:
    """Runs the sanity check of every reward that has one, with a scoring function such as `RewardPool.score`.

    Rewards on a mesh are skipped, because `score` does not compute them.

    Raises:
      ConfigError: A reward fails; names the reward and both scores.
      Stopped: See `RewardPool.score`.
    """
    for reward in found.members:
        make, name = find_sanity_check(reward), reward.settings.title
        if make is None or reward.on_mesh:
            continue
        with user_code(name, "has a sanity check that raised"):
            check = make()
        if not isinstance(check, SanityCheck):
            wrong = f"the sanity check of reward {name!r} returned a {type(check).__name__}"
            raise ConfigError(f"{wrong}: return a {SanityCheck.__module__}.SanityCheck")
        # Restricts scoring to this reward.
        metadata = [record | {"rewards": [name]} for record in check.metadata]
        columns = score(check.images, check.prompts, metadata).columns
        column = found.names.index(next(iter(reward.settings.entries.values())))
        if failure := check.failure(columns[:, column]):
            doubt = "; it was never run with the real weights, so it may itself be wrong"
            doubt = "" if check.verified else doubt
            raise ConfigError(f"reward {name!r} fails its sanity check: {failure}{doubt}")
