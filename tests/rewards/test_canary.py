import dataclasses
import re

import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.rewards import built_in
from digen_jax.rewards.built_in import BUILT_IN, resolve
from digen_jax.rewards.sanity_check import SanityCheck, run_sanity_checks
from digen_jax.rewards.settings import RewardSettings
from examples.shapes import reward as shapes

IMAGES = np.stack([np.full((8, 8, 3), value, np.uint8) for value in (0, 102, 255)])
PROMPTS = ["black", "grey", "white"]
CANARY = SanityCheck(IMAGES, PROMPTS, [{"color": prompt} for prompt in PROMPTS])


def mean(images, prompts, metadata):
    assert [record["color"] for record in metadata] == prompts
    return images.mean((1, 2, 3)) / 255


def checked(reward=mean, **canary):
    """Checks a reward of a user's, beside one that has no canary and must not be asked."""

    def own(*given):
        return reward(*given)

    def other(*given):
        raise AssertionError

    own.sanity_check = lambda: dataclasses.replace(CANARY, **canary)
    named = [rewards.NamedReward(RewardSettings(f.__name__), f) for f in (other, own)]
    found = rewards.Rewards(tuple(named))
    run_sanity_checks(found, found.score)


# The others need weights, which are not at hand, or a server.
WITHOUT_WEIGHTS = [
    name
    for name in BUILT_IN
    if name not in ("aesthetic", "clip_score", "geneval", "hpsv2", "judge", "pickscore", "served")
]


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_every_built_in_reward_without_weights_passes_its_canary(name):
    found = resolve([RewardSettings(name)])
    asked = []
    run_sanity_checks(found, lambda *batch: asked.append(batch) or found.score(*batch))
    assert len(asked) == 1


def test_the_shapes_canary_notices_a_picture_in_other_units(monkeypatch):
    real = shapes.find_objects
    monkeypatch.setattr(shapes, "find_objects", lambda image: real(image * 255))
    found = resolve([RewardSettings("shapes_geneval")])
    sentence = (
        r"reward 'shapes_geneval' fails its sanity check: image \d \('.*'\) scores 0 instead of 1"
    )
    with pytest.raises(ConfigError, match=sentence):
        run_sanity_checks(found, found.score)


def test_a_canary_of_the_users_that_is_right_says_nothing():
    checked(expected=(0.0, 0.4, 1.0), tolerance=1e-6)
    checked(expected=np.float32([0.0, 0.4, 1.0]))
    checked(prefers=((1, 0), (2, 0), (2, 1)))
    checked(lambda *given: {"own": mean(*given), "other": [5.0] * 3}, prefers=((2, 1),))


@pytest.mark.parametrize(
    ("canary", "sentence"),
    [
        (
            dict(expected=(0.0, 0.5, 1.0), tolerance=0.01),
            "reward 'own' fails its sanity check: image 1 ('grey') scores 0.4 instead of 0.5",
        ),
        (
            dict(prefers=((2, 0), (0, 1))),
            "fails its sanity check: image 0 ('black') scores 0, not more than image 1 ('grey') with 0.4",
        ),
        (dict(prefers=((1, 1),)), "scores 0.4, not more than image 1 ('grey') with 0.4"),
        (
            dict(prefers=((0, 1),), verified=False),
            "with 0.4; it was never run with the real weights",
        ),
    ],
)
def test_a_reward_that_fails_is_named_with_both_numbers(canary, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        checked(**canary)


def test_a_canary_that_is_none_or_raises_is_refused(monkeypatch):
    def reward(images, prompts, metadata):
        return np.zeros(len(images))

    found = rewards.alone("own", reward)
    reward.sanity_check = lambda: (IMAGES, PROMPTS)
    with pytest.raises(
        ConfigError, match=r"the sanity check of reward 'own' returned a tuple: return a digen"
    ):
        run_sanity_checks(found, found.score)
    reward.sanity_check = lambda: {}["picture"]
    with pytest.raises(
        ConfigError, match="reward 'own' has a sanity check that raised KeyError: 'picture'"
    ):
        run_sanity_checks(found, found.score)
    monkeypatch.setitem(built_in.BUILT_IN, "own", built_in.BuiltIn("a:b", "json:nothing"))
    with pytest.raises(ConfigError, match="module json has no function 'nothing'"):
        run_sanity_checks(found, found.score)
