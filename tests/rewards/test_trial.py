import functools

import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.rewards.mistakes import RewardFailed
from digen_jax.rewards.trial import KINDS, try_out

COLORS = {"prompt": "a red circle", "tag": "colors", "include": []}
PLAIN = {"prompt": "a cat"}


def scored(reward):
    return functools.partial(rewards.call, reward, ("mine:f",))


def test_a_record_of_each_kind_is_tried_on_pictures_of_the_runs_size():
    seen = []

    def reward(images, prompts, metadata):
        seen.append((images.shape, prompts, metadata))
        return images.mean((1, 2, 3))

    many = [{"prompt": f"{n}", f"field{n}": n} for n in range(KINDS + 3)]
    try_out(scored(reward), [[COLORS, COLORS, PLAIN, COLORS | {"prompt": "b"}], many], 16, 24)
    first, second = seen
    assert first == ((2, 16, 24, 3), ["a red circle", "a cat"], [COLORS, PLAIN])
    assert second[0] == (KINDS, 16, 24, 3) and second[2] == many[:KINDS]


def test_what_a_reward_cannot_score_is_refused_before_anything_is_computed():
    reward = rewards.resolve(("shapes_geneval",))
    with pytest.raises(
        ConfigError, match=r"cannot score .a cat.: (?s:.*)it was tried on grey pictures"
    ):
        try_out(scored(reward), [[COLORS], [COLORS, PLAIN]], 32, 32)


def test_the_users_own_lines_are_said():
    def reward(images, prompts, metadata):
        return [record["text"] for record in metadata]

    with pytest.raises(RewardFailed, match=r"(?s)KeyError: 'text'\n.*test_trial.py, line .*grey"):
        try_out(scored(reward), [[PLAIN]], 8, 8)


def test_scores_are_checked():
    with pytest.raises(ConfigError, match="returned nan for image 0"):
        try_out(scored(lambda *_: np.full(1, np.nan)), [[PLAIN]], 8, 8)
