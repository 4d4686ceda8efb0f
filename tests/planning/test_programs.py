"""What programs are predicted to need, against the programs of whole meshes as the compiler made them."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from digen_jax.assemble import build, outline
from digen_jax.config.load import complete, read_config
from digen_jax.parallel.system import SampledImages, make_train_batch, move_to_trainer
from digen_jax.planning.footprint import model_footprint
from digen_jax.planning.plan import make_problem
from digen_jax.planning.programs import (
    beyond_arguments,
    lower_generate,
    lower_gradient,
    measured_programs,
    sampler_weights,
    trained_samples,
)
from digen_jax.scheduling.layouts import PoolLayout, device_bytes
from tests.planning.test_plan import calibration
from tests.tiny_runs import tiny_config


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


def lying_bytes(*trees):
    leaves = jax.tree.leaves(trees)
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)


def planned(recipe):
    """(system, its programs, bytes that a device of the trainer's mesh holds, those of the tuned parameters)."""
    axes, programs = recipe.placement.trainer, measured_programs(recipe, print)
    system = outline(recipe, jax.devices()[: axes.devices])
    footprint = dataclasses.replace(model_footprint(recipe), programs=programs)
    problem = make_problem(recipe, axes.devices, calibration(), footprint)
    shared, chunk = axes.tensor * axes.sequence, recipe.sampler.chunk
    layout = PoolLayout(1, axes.devices, axes.time, chunk=chunk, shared=shared)
    held = device_bytes(problem, layout).trainer
    return system, programs, held, footprint.tuned(axes.fsdp, axes.tensor)


def training_bytes(recipe, system, programs, held, tuned):
    """(predicted, compiled) bytes of a device by program: what lies there, temporaries and results."""
    axes = recipe.placement.trainer
    kept = held["trajectories"] + held["conditioning"]
    training = held["parameters"] + held["gradient"] + kept
    state = tuned + held["gradient"] + held["optimizer"]
    predicted = {
        "gradient": training + programs.gradient(axes.images, axes.time),
        "update": state + programs.update(tuned),
    }
    lowered = {
        "gradient": lower_gradient(system, recipe, trained_samples(recipe)),
        "update": system.trainer.lower_update(system.start),
    }
    found = {}
    for name, each in lowered.items():
        bytes_of = each.compile().memory_analysis()
        used = bytes_of.argument_size_in_bytes + bytes_of.temp_size_in_bytes
        compiled = used + bytes_of.output_size_in_bytes - bytes_of.alias_size_in_bytes
        found[name] = predicted[name], compiled
    return found


def sampling_bytes(recipe, system, programs, held, tuned):
    """As `training_bytes`."""
    axes = recipe.placement.trainer
    sampling = held["parameters"] + held["frozen"]
    needed = programs.sampling(axes.images * axes.time, axes.fsdp, axes.tensor, axes.sequence)
    weights, sampler = sampler_weights(system), system.sampler
    there = lying_bytes(weights)
    records = [{"prompt": ""}] * recipe.drawn_groups
    prompts = lying_bytes(sampler.encoded(weights, records))
    lowered = {
        "encoding": sampler.lower_encode(weights, records),
        "generating": lower_generate(system, sampler, recipe, recipe.sampler.chunk),
        "evaluating": lower_generate(system, system.evaluator, recipe, recipe.evaluation.batch),
        "decoding": sampler.lower_decode(weights, recipe.sampler.chunk),
    }
    predicted = {name: sampling + held["conditioning"] + needed[name] for name in lowered}
    predicted["generating"] += held["trajectories"]
    return {
        name: (predicted[name], there + prompts + beyond_arguments(each))
        for name, each in lowered.items()
    }


@pytest.mark.slow
def test_predicted_memory_is_that_of_the_compiled_programs(base):
    recipe = read_config(tiny(base, "lora", 16, "blocks", time=2, data=2, tensor=2))
    plan = planned(recipe)
    found = training_bytes(recipe, *plan) | sampling_bytes(recipe, *plan)
    errors = {name: mine / compiled - 1 for name, (mine, compiled) in found.items()}
    assert max(map(abs, errors.values())) < 0.1, errors


@pytest.mark.slow
def test_the_programs_are_those_that_a_run_calls(base):
    """Compiled without arrays, they take a step's own arrays as they lie, and return what the step does."""
    recipe = read_config(tiny(base, "full", 8, data=2))
    devices = jax.devices()[:2]
    system, lying = build(recipe, devices), outline(recipe, devices)
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

    gradient = lower_gradient(lying, recipe, trained_samples(recipe)).compile()
    empty = jax.tree.map(jax.numpy.zeros_like, own)
    given = system.trainer.policies(state, None, None)
    found = gradient(state.tuned, system.base, given, train_batch, empty)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    update = lying.trainer.lower_update(lying.start).compile()
    updated, _ = update(state, found, None)
    assert jax.tree.map(np.shape, updated.tuned) == jax.tree.map(np.shape, lying.start)
