"""configs/flux_kontext.py: Flow-GRPO's numbers, and a step at the published model's size."""

import dataclasses
import runpy

import jax
import numpy as np
import pytest

from digen_jax import assemble
from digen_jax.config.load import fit_config, load_config
from digen_jax.errors import ConfigError
from digen_jax.models.family import Size
from digen_jax.models.published import published_folder
from digen_jax.planning.memory import model_footprint
from digen_jax.planning.programs import step_records
from tests.pipelines import ROOT


def load(*gpus):
    path = ROOT / "configs" / "flux_kontext.py"
    config = runpy.run_path(str(path))["get_config"](*gpus)
    config.prompts.file = config.evaluation.prompts = str(ROOT / "tests" / "data" / "edits.jsonl")
    config.rewards = ("shapes_geneval",)
    config.model.folder = str(published_folder(config.model.folder))
    return config


@pytest.mark.parametrize("gpus", [1, 7, 8, 28])
def test_it_has_the_published_batch_and_steps(gpus):
    found = fit_config(load_config(load(str(gpus))), gpus)
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (48, 21, 2)
    assert (found.sampler.steps, found.trained_steps, found.sampler.guidance) == (6, 5, 2.5)
    assert found.sampler.chunk == found.trainer.micro_batch == 3 * gpus
    assert found.model.source == Size(512, 512)
    assert (found.algorithm.old_log_probs, found.algorithm.kl_coefficient) == ("recomputed", 0)
    assert found.advantages.drop_zero_std


@pytest.mark.parametrize("argument", ["0", "x", "", "-1"])
def test_it_wants_a_number_of_gpus(argument):
    with pytest.raises(ConfigError, match=r"must be a number of GPUs, such as :8$"):
        load(argument)


@pytest.fixture(scope="module")
def opened():
    """(the recipe, its family)"""
    config = load_config(load())
    return config, assemble.recipe_model(config)[1]


def test_it_tunes_the_published_layers_and_keeps_what_decodes(opened):
    """PEFT's `target_modules`: as of FLUX.1-dev, and each single block's layer of 3072 to 12288."""
    config, family = opened
    tuned, _, frozen, ahead = assemble.parameter_shapes(config, family)
    count = 64 * (19 * (8 * 6144 + 4 * 15360) + 38 * (3 * 6144 + 15360))
    assert sum(leaf.size for leaf in jax.tree.leaves(tuned)) == count
    assert {*frozen} == {"vae"} and {*ahead} == {"text_encoder", "text_encoder_2", "vae"}


def test_a_prompt_has_as_many_bytes_as_its_arrays(opened):
    config, family = opened
    tokens = family.tokenize(step_records(config, family)[:2])
    shapes = jax.eval_shape(family.encode, family.shapes(), tokens)
    assert [leaf.shape for leaf in shapes] == [(2, 128, 4096), (2, 768), (2, 64, 64, 16)]
    assert shapes.context.dtype == jax.numpy.bfloat16 and shapes.source.dtype == np.float32
    one = 2 * 128 * 4096 + 2 * 768 + 4 * 64 * 64 * 16
    assert model_footprint(config).conditioning == 48 * one
    guided = dataclasses.replace(config.sampler, true_cfg_scale=2.0)
    guided = dataclasses.replace(config, sampler=guided)
    assert model_footprint(guided).conditioning == 2 * 48 * one
