"""The recipes of configs/flux2_klein.py: the published numbers, the tuned layers, and a step at its real size."""

import jax
import numpy as np
import pytest

from digen_jax import assemble
from digen_jax.config.load import fit_config, load_config, read_config
from digen_jax.errors import ConfigError
from digen_jax.models.family import Size
from digen_jax.models.published import published_folder
from digen_jax.planning.memory import model_footprint
from tests.test_configs import KLEIN, gigabytes, load, recipes, shapes_of_a_step
from tests.test_configs import traced as traced
from tests.test_configs import unread as unread

RECIPES = list(recipes(KLEIN))
PARAMETERS = {"4B": 3_875_544_576, "9B": 9_078_581_248}


def of_published(argument):
    config = load(KLEIN, argument)
    config.model.folder = str(published_folder(config.model.folder))
    return config


@pytest.mark.parametrize(
    "argument", ["base_lora,0", "base_full,-1", "base_lora,two", "8", "", "b,8"]
)
def test_klein_wants_a_recipe_and_a_number_of_gpus(argument):
    with pytest.raises(ConfigError, match=r"recipe and a number of GPUs.* recipes are base_lora, "):
        load(KLEIN, argument)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_klein_divides_among_the_gpus(name, gpus):
    config = load(KLEIN, f"{name},{gpus}")
    fit_config(load_config(config), gpus)
    assert config.sampler.chunk == config.trainer.micro_batch == gpus


@pytest.mark.parametrize("name", RECIPES)
def test_klein_has_the_published_batch_and_steps(name):
    config = load(KLEIN, f"{name},8")
    found = load_config(config)
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (48, 16, 2)
    assert found.trained_steps == 1
    # Counted from 0; the last step, after which no noise is left, is never trained.
    of_base = name.startswith("base")
    assert found.sampler.window.places == ((1, 2, 3) if of_base else (1, 2))
    assert (config.sampler.steps, config.evaluation.steps) == ((8, 28) if of_base else (4, 10))
    assert (found.model.size, found.evaluation_size) == (Size(384, 384), Size(1024, 1024))
    assert config.sampler.guidance == config.evaluation.guidance == (4 if of_base else 1)
    algorithm = read_config(config).algorithm
    assert (algorithm.old_log_probs, algorithm.kl_coefficient) == ("recomputed", 0)
    assert (algorithm.clip_range, config.trainer.weight_decay) == (1e-4, 1e-4)
    assert config.trainer.learning_rate == (3e-4 if name.endswith("lora") else 1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_klein_tunes_the_published_layers(name):
    config = load_config(of_published(f"{name},8"))
    _, family = assemble.recipe_model(config)
    tuned, base, *_ = assemble.parameter_shapes(config, family)
    d = family.transformer.config.dim
    count = PARAMETERS["9B" if name.endswith("lora") else "4B"]
    if name.endswith("lora"):
        # By hand: eight projections of attention, d to 6 d and 3 d to d of two feed-forwards; d to 9 d.
        assert d == 4096
        count = 64 * (8 * (8 * 2 * d + 2 * (7 * d + 4 * d)) + 24 * 10 * d)
    assert sum(leaf.size for leaf in jax.tree.leaves(tuned)) == count
    assert {leaf.dtype for leaf in jax.tree.leaves(tuned)} == {np.dtype(np.float32)}
    kept = {leaf.dtype for leaf in jax.tree.leaves(base)}
    assert kept == ({np.dtype(jax.numpy.bfloat16)} if name.endswith("lora") else set())


def test_klein_shares_all_weights_among_eight_gpus():
    sizes = model_footprint(load_config(of_published("base_full,8")))
    weights = PARAMETERS["4B"]
    assert 4 * weights / 8 <= sizes.tuned(8, 1) < 4 * weights / 8 * 1.001
    assert sizes.base(8, 1) == 0
    assert 2 * 84_046_371 / 8 <= sizes.frozen(8, 1) < 2 * 84_046_371 / 8 * 1.01


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_whole_step_of_klein_has_the_right_shapes(unread):
    train_config = load_config(of_published("base_lora,1"))
    system = assemble.build(fit_config(train_config, 1), jax.devices()[:1])
    config = load(KLEIN, "base_lora,1")
    prompts, images, trajectory, totals, (after, _) = shapes_of_a_step(config, system)
    assert prompts.conditioning.context.shape == (48, 512, 12288)
    assert prompts.null is not None
    assert (images.shape, images.dtype) == ((1, 1, 384, 384, 3), np.float32)
    assert trajectory.transitions.x.shape == (1, 1, 24, 24, 128)
    assert trajectory.sigmas.shape == (9,)
    for tree in (totals.gradient, after.tuned, after.ema):
        assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, system.start)
    held = gigabytes(system.base, system.rollouts[0].frozen, after, totals.gradient)
    # Weights and autoencoder in bfloat16; the LoRA in five copies of float32.
    assert held == pytest.approx(2 * (9.0786 + 0.0840) + 20 * 0.1426, rel=1e-3)
