import pickle

import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.learned_rewards.sanity_checks import of_pictures, of_prompts
from digen_jax.rewards import Rewards
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.sanity_check import run_sanity_checks
from digen_jax.rewards.settings import RewardSettings


def test_canaries_of_prompts_show_what_the_right_prompt_says():
    canary = of_prompts(64)
    assert canary.images.shape == (8, 64, 64, 3) and canary.images.dtype == np.uint8
    assert canary.prefers == ((0, 1), (2, 3), (4, 5), (6, 7)) and not canary.verified
    for right, wrong in canary.prefers:
        np.testing.assert_array_equal(canary.images[right], canary.images[wrong])
        assert canary.prompts[right] != canary.prompts[wrong]
    red = canary.images[0]
    assert canary.prompts[0] == "a photo of a red circle"
    assert red[32, 32, 0] > 200 > 50 > red[32, 32, 1] and np.ptp(red[2, 2].astype(int)) < 10
    assert canary.images[-1].std() > 20


def test_canaries_of_pictures_have_one_prompt():
    canary = of_pictures(64)
    assert canary.prompts[0] == canary.prompts[1] and canary.prefers == ((0, 1),)
    rough = [np.abs(np.diff(image.astype(int), axis=1)).mean() for image in canary.images]
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
