"""The recipe of Qwen-Image: its published numbers, and a step at its real size."""

import jax
import numpy as np
import pytest

from digen_jax import assemble
from digen_jax.config.load import fit_config, load_config, read_config
from digen_jax.errors import ConfigError
from digen_jax.models.published import published_folder
from digen_jax.planning.memory import model_footprint
from tests.cases import quick
from tests.test_configs import QWEN_IMAGE, gigabytes, load, shapes_of_a_step, traced, unread

__all__ = ["traced", "unread"]  # fixtures

WEIGHTS, AUTOENCODER = 20_430_401_088, 126_892_531
# PEFT's `target_modules`, counted by hand: in 60 blocks of width 3072 eight projections of attention, and two
# feed-forwards of 3072 to 12288 and back.
FACTORS = 64 * 60 * (8 * 6144 + 4 * 15360)


def here(argument="ocr,4", model="Qwen/Qwen-Image"):
    config = load(QWEN_IMAGE, argument)
    config.model.folder = str(published_folder(model))
    return config


@pytest.mark.parametrize("argument", ["ocr,0", "ocr,-1", "ocr,two", "8", "", "geneval,8"])
def test_it_wants_a_recipe_and_a_number_of_gpus(argument):
    with pytest.raises(ConfigError, match=r"recipe and a number of GPUs.* recipes are ocr$"):
        load(QWEN_IMAGE, argument)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_it_divides_among_the_gpus(gpus):
    config = load(QWEN_IMAGE, f"ocr,{gpus}")
    fit_config(load_config(config), gpus)
    assert config.sampler.chunk == 2 * config.trainer.micro_batch == 16 * gpus


def test_it_has_the_published_batch_window_and_objective():
    found = load_config(load(QWEN_IMAGE))
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (32, 16, 2)
    # Each of two steps is one of the first five: torch.randint(0, 5 - 2 + 1).
    assert found.trained_steps == found.noisy_steps == 2
    assert found.sampler.window.places == (0, 1, 2, 3)
    algorithm = read_config(load(QWEN_IMAGE)).algorithm
    assert (algorithm.old_log_probs, algorithm.kl_coefficient) == ("recomputed", 0)
    assert (algorithm.clip_range, found.lora.init) == (1e-5, "gaussian")


@pytest.mark.parametrize("model", quick([("Qwen/Qwen-Image",), ("Qwen/Qwen-Image-2512",)], 0))
def test_it_tunes_the_published_layers_and_shares_the_others(model):
    """Of what the docstring's memory is made."""
    sizes = model_footprint(load_config(here(model=model)))
    assert sizes.copies == 0
    for found, bytes_ in (
        (sizes.tuned, 4 * FACTORS),
        (sizes.base, 2 * WEIGHTS),
        (sizes.frozen, 2 * AUTOENCODER),
    ):
        assert bytes_ / 4 <= found(4, 1) < bytes_ / 4 * 1.01


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_whole_step_has_the_right_shapes(unread):
    config = here("ocr,1")
    system = assemble.build(fit_config(load_config(config), 1), jax.devices()[:1])
    prompts, images, trajectory, totals, (after, metrics) = shapes_of_a_step(config, system)
    assert prompts.conditioning.context.shape == (32, 256, 3584)
    assert prompts.conditioning.mask.shape == (32, 256)
    assert prompts.null.context.shape == (1, 256, 3584)
    assert (images.shape, images.dtype) == ((16, 1, 512, 512, 3), np.float32)
    assert trajectory.transitions.x.shape == (2, 16, 64, 64, 16)
    assert trajectory.sigmas.shape == (11,)
    assert "kl" not in metrics
    assert sum(leaf.size for leaf in jax.tree.leaves(system.start)) == FACTORS
    for tree in (totals.gradient, after.tuned):
        assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, system.start)
    # Factors, two moments and the gradient in float32; the rest in bfloat16. Prompts are encoded ahead.
    held = gigabytes(system.base, system.rollouts[0].frozen, after, totals.gradient)
    assert held == pytest.approx((2 * (WEIGHTS + AUTOENCODER) + 16 * FACTORS) / 1e9, rel=1e-4)
