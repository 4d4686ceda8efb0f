import pickle

import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.learned_rewards.sanity_checks import image_pairs, prompt_pairs
from digen_jax.rewards import Rewards, RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.sanity_check import run_sanity_checks


def test_prompt_pairs_show_the_right_prompt():
    check = prompt_pairs(64)
    assert check.images.shape == (8, 64, 64, 3) and check.images.dtype == np.uint8
    assert check.prefers == ((0, 1), (2, 3), (4, 5), (6, 7)) and not check.verified
    for right, wrong in check.prefers:
        np.testing.assert_array_equal(check.images[right], check.images[wrong])
        assert check.prompts[right] != check.prompts[wrong]
    red = check.images[0]
    assert check.prompts[0] == "a photo of a red circle"
    assert red[32, 32, 0] > 200 > 50 > red[32, 32, 1] and np.ptp(red[2, 2].astype(int)) < 10
    assert check.images[-1].std() > 20


def test_image_pairs_have_one_prompt():
    check = image_pairs(64)
    assert check.prompts[0] == check.prompts[1] and check.prefers == ((0, 1),)
    rough = [np.abs(np.diff(image.astype(int), axis=1)).mean() for image in check.images]
    assert rough[0] < rough[1] / 2


def test_a_learned_reward_is_named_in_a_config_and_its_weights_are_read_when_it_first_scores(
    tmp_path,
):
    asked = RewardSettings("pickscore", settings={"folder": str(tmp_path), "batch": 2})
    found = pickle.loads(pickle.dumps(resolve([asked])))
    assert isinstance(found, Rewards)
    with pytest.raises(ConfigError, match=f"reward 'pickscore' raised .*{tmp_path}"):
        run_sanity_checks(found, found.score)
    with pytest.raises(ConfigError, match="no setting 'foldr'; did you mean 'folder'"):
        resolve([RewardSettings("pickscore", settings={"foldr": "x"})])
