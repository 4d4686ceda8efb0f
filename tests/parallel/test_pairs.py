"""Diffusion DPO with several rewards: the pairs of a run, and that it trains these."""

import functools

import numpy as np
import pytest

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.parallel.accumulate import FinalImages
from digen_jax.parallel.system import SampledImages
from digen_jax.runtime.steps import Steps, StepScores
from tests.algorithms.test_advantages import oracle
from tests.parallel import toy
from tests.parallel.test_matching import (
    GROUPS,
    IMAGES,
    PROMPTS,
    ROWS,
    SIGMAS,
    X0,
    best_and_worst,
    config,
    keys,
    parameters,
    plain,
)

pytestmark = pytest.mark.usefixtures("exact_and_split")

# Two rewards of which the first varies more. In the second group they cancel out, up to rounding; in the third
# one only the second reward says anything.
FIRST = np.float32([9.0, 5.0, 0.0, 1.0, 0.0, 0.0, 0.5, 0.5, 0.5, 3.0, 0.0, 1.0])
SECOND = np.float32([0.1, 0.9, 0.3, 0.0, 1.0, 1.0, 0.2, 0.7, 0.1, 0.0, 0.4, 0.5])
REWARDS = np.stack([FIRST, SECOND], axis=1)
SETTINGS = {
    "rewards": AdvantageSettings(std="group", reward_weights=(1.0, 1.0)),
    "gdpo": AdvantageSettings(std="group", combine="gdpo", reward_weights=(1.0, 1.0)),
    "advantages": AdvantageSettings(std="global", combine="advantages", reward_weights=(1.0, 1.0)),
}
PAIRED = {"rewards": (0, 2, 3), "gdpo": (0, 2, 3), "advantages": (0, 1, 2, 3)}


def ordered(name):
    """Numbers that order each group's images, from the definitions in float64."""
    return oracle(SETTINGS[name], REWARDS, ROWS.tolist())


@functools.cache
def system():
    return toy.system(config("diffusion_dpo", micro=4, pack=2, chunk=6), 1)


def accumulated(settings):
    """The totals of a step's two chunks, trained by a run's own executor."""
    parts = system()._replace(advantages=settings)
    steps = Steps(iter([toy.records(GROUPS)]), IMAGES, 6, parts.rng, 0)
    state = parts.trainer.init(parameters("full")[0])

    def part_of(cut):
        return SampledImages(0, ROWS[cut], FinalImages(X0[cut], keys()[cut], SIGMAS), SIGMAS)

    known = StepScores(steps[0], REWARDS, settings, np.ones(len(REWARDS), bool))
    return toy.trained(parts, steps, state, known, PROMPTS, part_of)


@pytest.mark.parametrize("name", SETTINGS)
def test_pairs_are_chosen_by_the_advantage_of_all_rewards(name):
    chosen = best_and_worst(ordered(name), PAIRED[name])
    others = SETTINGS.keys() - {name}
    assert all(best_and_worst(ordered(other), PAIRED[other]) != chosen for other in others)
    totals = accumulated(SETTINGS[name])
    gradient, sums = plain("diffusion_dpo", "full", "published", True, chosen=chosen)
    assert toy.difference(totals.gradient, gradient) < 1e-5
    assert float(totals.sums["weight"]) == sums["weight"]
