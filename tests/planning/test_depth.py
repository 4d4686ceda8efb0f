"""The size of compiled programs does not grow with the number of blocks, which are scanned."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest

from digen_jax.assemble import outline
from digen_jax.config.load import complete, read_config
from digen_jax.parallel.system import cast
from digen_jax.planning.programs import trace_generate, trace_gradient, trained_samples
from tests.tiny_runs import pipeline, tiny_config


def of_depth(base, path, layers):
    """The tiny pipeline with more blocks and no weights."""
    folder = path / f"{layers}-layers"
    shutil.copytree(pipeline(base), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    network = folder / "transformer" / "config.json"
    network.write_text(json.dumps(json.loads(network.read_text()) | {"num_layers": layers}))
    return folder


def traced(base, folder, kind):
    config = complete(tiny_config(base, kind))
    config.model.update(folder=str(folder), remat="blocks")
    config.placement.mode = "given"
    config.placement.rollout.data = 0
    train_config = read_config(config)
    system = outline(train_config, jax.devices()[:1])
    return {
        "sampling": trace_generate(system, system.sampler, train_config, 8),
        "gradient": trace_gradient(system, train_config, trained_samples(train_config)),
        "update": system.trainer.trace_update(system.start),
        "weights_version": cast.trace(system.start, jnp.dtype("bfloat16")),
    }


@pytest.mark.slow
def test_programs_of_sixty_blocks_are_as_large_as_those_of_eight(base, tmp_path):
    few, many = (traced(base, of_depth(base, tmp_path, layers), "lora") for layers in (8, 60))
    for name in few:
        texts = [len(of[name].lower().as_text()) for of in (few, many)]
        assert texts[1] < 1.1 * texts[0], name
    operations = [of["gradient"].lower().compile().as_text().count(" = ") for of in (few, many)]
    assert operations[1] < 1.1 * operations[0]
