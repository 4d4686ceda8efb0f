"""Memory of a config's model, against its files, and its programs, against those of a run."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from digen_jax.assemble import build, outline
from digen_jax.config.load import complete, read_config
from digen_jax.parallel.accumulate import Policies
from digen_jax.parallel.placement import RolloutAxes, TrainerAxes
from digen_jax.parallel.system import SampledImages, cast, make_train_batch, move_to_trainer
from digen_jax.planning.memory import model_footprint
from digen_jax.planning.plan import make_problem, meshes
from digen_jax.planning.programs import (
    step_programs,
    trace_generate,
    trace_gradient,
    trained_samples,
)
from digen_jax.scheduling.layouts import PoolLayout
from tests.planning.test_plan import calibration, shapes
from tests.tiny_runs import pipeline, tiny_config


def tiny(base, kind, images, remat="none", **mesh):
    """Colocated on such a trainer mesh, with 64 image tokens, so that activations are most of the bytes."""
    config = complete(tiny_config(base, kind))
    config.model.update(height=64, width=64, remat=remat)
    return on_mesh(config, images, **mesh)


def on_mesh(config, images, **mesh):
    config.batch.update(groups=images // 4, images=4)
    config.sampler.chunk = config.trainer.micro_batch = images
    config.trainer.pack = mesh.get("time", 1)
    config.evaluation.batch = images // 2
    config.placement.mode = "given"
    config.placement.rollout.data = 0
    config.placement.trainer.update(dict(data=1, fsdp=1) | mesh)
    config.placement.rules = ((".*", "fsdp"),)
    return config


@pytest.mark.slow
def test_the_programs_are_those_that_a_run_calls(base):
    """Compiled without arrays, they take a step's own arrays as they lie, and return what the step does."""
    config = read_config(tiny(base, "full", 8, data=2))
    devices = jax.devices()[:2]
    system, lying = build(config, devices), outline(config, devices)
    rows = np.repeat(np.arange(2, dtype=np.int32), 4)
    drawn = system.rng.draw(0, rows, np.tile(np.arange(4), 2))
    weights = system.rollout_weights(system.start)
    prompts = system.sampler.encode(weights, [{"prompt": "a"}, {"prompt": "b"}])
    made = system.sampler.generate(weights, prompts, rows, *drawn)

    state = system.trainer.init(system.start)
    images = move_to_trainer(
        SampledImages(0, rows, made.transitions, made.sigmas), system.placement.trainer
    )
    train_batch = make_train_batch(system, prompts, images, np.linspace(-1, 1, 8, dtype=np.float32))
    own = system.trainer.accumulate(state, system.base, train_batch, None)

    gradient = trace_gradient(lying, config, trained_samples(config)).lower().compile()
    empty = jax.tree.map(jax.numpy.zeros_like, own)
    found = gradient(Policies(state.tuned, system.base), train_batch, empty)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    update = lying.trainer.trace_update(lying.start).lower().compile()
    updated, _ = update(state, found, None)
    assert jax.tree.map(np.shape, updated.tuned) == jax.tree.map(np.shape, lying.start)


# ------------------------------------------------------------------------------------ the footprint


def test_the_footprint_is_the_models(base, tmp_path):
    config = complete(tiny_config(base, "full"))
    config.placement.rules = ((".*", "replicate"),)
    found = model_footprint(read_config(config))
    from safetensors.numpy import load_file

    folder = pipeline(base)
    files = {part: next((folder / part).glob("*.safetensors")) for part in ("transformer", "vae")}
    total = {part: sum(a.nbytes for a in load_file(file).values()) for part, file in files.items()}
    assert found.tuned(1, 1) + found.base(1, 1) == total["transformer"]
    assert found.tuned(2, 1) == found.tuned(1, 1) and found.frozen(1, 1) > total["vae"]
    assert found.copies == 1
    lora = model_footprint(read_config(tiny_config(base, "lora")))
    assert lora.base(1, 1) == total["transformer"] and 0 < lora.tuned(1, 1) < found.tuned(1, 1) / 2
    assert (found.synced(1, 1), found.sampler_base(1, 1)) == (
        found.tuned(1, 1),
        found.base(1, 1),
    )
    config.precision.update(rollout="bfloat16", trajectory="bfloat16")
    half = model_footprint(read_config(config))
    assert half.synced(1, 1) == found.tuned(1, 1) / 2 and half.tuned(1, 1) == found.tuned(1, 1)
    # An autoencoder of three resolutions: 8 x 8 latents of 4 channels, twice, and the log-probability.
    side = 32 // 4
    assert found.trajectory == 2 * 4 * (2 * side * side * 4 + 1)
    assert half.trajectory == 2 * (2 * 2 * side * side * 4 + 4)
    # Of two prompts, and of the empty one for both: 12 tokens of width 32, and a pooled vector of width 16.
    assert found.conditioning == 3 * 4 * (12 * 32 + 16)
    # And of two negative prompts; equal ones are kept once.
    for names, rows in ((("x", "y"), 4), (("x", "x"), 3)):
        lines = [{"prompt": "a", "negative_prompt": name} for name in names]
        (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
        config.prompts.file = str(tmp_path / "p.jsonl")
        own = model_footprint(read_config(config))
        assert own.conditioning == rows * 4 * (12 * 32 + 16)


def test_text_encoders_that_encode_ahead_are_not_in_a_step(base):
    config = complete(tiny_config(base, "lora"))
    config.placement.rules = ((".*", "replicate"),)
    found = {}
    for kind in ("each_step", "precomputed"):
        config.prompts.encoding = kind
        found[kind] = model_footprint(read_config(config))
    from safetensors.numpy import load_file

    files = [next((pipeline(base) / f"text_encoder{n}").glob("*.safetensors")) for n in ("", "_2")]
    encoders = sum(a.nbytes for file in files for a in load_file(file).values())
    each, ahead = found["each_step"], found["precomputed"]
    assert each.encode is None and ahead.encode(1, 1) == pytest.approx(encoders, rel=0.01)
    assert each.frozen(1, 1) - ahead.frozen(1, 1) == ahead.encode(1, 1)
    assert each.conditioning == ahead.conditioning
    (encode,) = [
        p for p in step_programs(read_config(config), jax.devices()[:2]) if "encode" in p.name
    ]
    assert (encode.command, encode.what) == ("", "64 prompts, before the run samples")
    shapes = jax.tree.leaves(encode.trace().out_info)
    assert {leaf.shape[0] for leaf in shapes} == {64}


def forward(config, **fields):
    """The config for AWM."""
    config.sampler.update(kind="ode", noise_level=0.0, window=dict(length=0))
    config.algorithm = ConfigDict(dict(name="awm", **fields))
    return config


def test_of_the_forward_process_noise_levels_are_trained_and_the_image_alone_is_stored(base):
    config = complete(forward(tiny_config(base, "lora"), times=dict(count=5)))
    assert make_problem(read_config(config), 4, calibration()).transitions == 5
    found = model_footprint(read_config(config))
    assert (found.trajectory, found.copies) == (4 * (8 * 8 * 4 + 2), 1)


def test_parts_of_parameters_are_split_by_the_rules():
    config = shapes()
    config.placement.rules = ((".*bias", "replicate"), (".*", "fsdp"))
    found = model_footprint(read_config(config))
    whole, half = found.tuned(1, 1), found.tuned(2, 1)
    assert whole / 2 < half < 0.75 * whole
    assert whole / 4 < found.tuned(2, 2) < found.tuned(1, 2) < whole
    problem = make_problem(read_config(config), 4, calibration(), found)
    rollout, trainer = meshes(problem, PoolLayout(1, 2, rollout=1, rollout_devices=2))
    assert trainer == TrainerAxes(data=1, fsdp=2, samples=True)
    assert rollout in (RolloutAxes(data=1, fsdp=2), RolloutAxes(data=2))


# ---------------------------------------------------------------------------------- blocks are scanned


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
