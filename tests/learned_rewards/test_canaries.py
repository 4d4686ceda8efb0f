import numpy as np

from digen_jax.learned_rewards.canaries import failures, of_pictures, of_prompts


def test_canaries_of_prompts_show_what_the_right_prompt_says():
    canaries = of_prompts(64)
    assert len(canaries) == 4
    for (image, right), (same, wrong) in canaries:
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8
        assert image is same and right != wrong
    (red, prompt), _ = canaries[0]
    assert prompt == "a photo of a red circle"
    assert red[32, 32, 0] > 200 > 50 > red[32, 32, 1] and np.ptp(red[2, 2].astype(int)) < 10
    assert canaries[-1].right[0].std() > 20


def test_canaries_of_pictures_have_one_prompt():
    ((good, prompt), (bad, same)) = of_pictures(64)[0]
    rough = [np.abs(np.diff(image.astype(int), axis=1)).mean() for image in (good, bad)]
    assert prompt == same and rough[0] < rough[1] / 2


def test_failures_are_those_in_the_wrong_order_or_in_none():
    canaries = of_prompts(32)
    rights = {canary.right[1]: i for i, canary in enumerate(canaries)}

    def reward(images, prompts, metadata):
        assert images.shape == (8, 32, 32, 3) and [one["prompt"] for one in metadata] == prompts
        return np.asarray([(2.0, -1.0, 0.5, 0.0)[rights[p]] if p in rights else 0 for p in prompts])

    assert failures(reward, canaries) == [canaries[1], canaries[3]]
    assert failures(reward, [canaries[0]] * 4) == []
