import dataclasses

import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.rewards import RewardSettings, built_in
from digen_jax.rewards.built_in import BUILT_IN, resolve
from digen_jax.rewards.sanity_check import SanityCheck, run_sanity_checks
from examples.shapes import reward as shapes

IMAGES = np.stack([np.full((8, 8, 3), value, np.uint8) for value in (0, 102, 255)])
PROMPTS = ["black", "gray", "white"]
CHECK = SanityCheck(IMAGES, PROMPTS, [{"color": prompt} for prompt in PROMPTS])


def mean(images, prompts, metadata):
    assert [record["color"] for record in metadata] == prompts
    return images.mean((1, 2, 3)) / 255


def run(reward=mean, **fields):
    """Runs the check of a user's reward, next to one that has no check and must not be called."""

    def own(*batch):
        return reward(*batch)

    def other(*batch):
        raise AssertionError

    own.sanity_check = lambda: dataclasses.replace(CHECK, **fields)
    named = [rewards.NamedReward(RewardSettings(f.__name__), f) for f in (other, own)]
    found = rewards.Rewards(tuple(named))
    run_sanity_checks(found, found.score)


# The others need weights, which are not available, or a server.
WITH_WEIGHTS = "aesthetic", "clip_score", "geneval", "hpsv2", "judge", "pickscore", "served"


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in WITH_WEIGHTS])
def test_every_built_in_reward_without_weights_passes(name):
    found, calls = resolve([RewardSettings(name)]), []
    run_sanity_checks(found, lambda *batch: calls.append(batch) or found.score(*batch))
    assert len(calls) == 1


def test_the_check_of_shapes_detects_images_in_other_units(monkeypatch):
    real = shapes.find_objects
    monkeypatch.setattr(shapes, "find_objects", lambda image: real(image * 255))
    found = resolve([RewardSettings("shapes_geneval")])
    with pytest.raises(ConfigError, match="scores 0 instead of 1"):
        run_sanity_checks(found, found.score)


def test_a_users_check_that_passes():
    run(expected=(0.0, 0.4, 1.0), tolerance=1e-6)
    run(expected=np.float32([0.0, 0.4, 1.0]))
    run(prefers=((1, 0), (2, 0), (2, 1)))
    run(lambda *batch: {"own": mean(*batch), "other": [5.0] * 3}, prefers=((2, 1),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(expected=(0.0, 0.5, 1.0), tolerance=0.01), r"'own' .*'gray'.* 0.4 instead of 0.5"),
        (dict(prefers=((2, 0), (0, 1))), r"'own' .*'black'.* 0, not more than .*'gray'.* 0.4"),
        (dict(prefers=((1, 1),)), r"'gray'.* 0.4, not more than .*'gray'.* 0.4"),
        (dict(prefers=((0, 1),), verified=False), "never run with the real weights"),
    ],
)
def test_a_failure_names_the_reward_and_both_numbers(fields, message):
    with pytest.raises(ConfigError, match=message):
        run(**fields)


def test_an_invalid_check_is_refused(monkeypatch):
    def reward(images, prompts, metadata):
        return np.zeros(len(images))

    found = rewards.alone("own", reward)
    for check, message in (
        (lambda: (IMAGES, PROMPTS), "'own' returned a tuple"),
        (lambda: {}["image"], "'own' .* KeyError: 'image'"),
    ):
        reward.sanity_check = check
        with pytest.raises(ConfigError, match=message):
            run_sanity_checks(found, found.score)
    reward.canary = reward.sanity_check
    with pytest.raises(ConfigError, match="'canary' is now named 'sanity_check'"):
        run_sanity_checks(found, found.score)
    monkeypatch.setitem(built_in.BUILT_IN, "own", built_in.BuiltIn("json", "loads", "nothing"))
    with pytest.raises(ConfigError, match="module json has no function 'nothing'"):
        run_sanity_checks(found, found.score)
