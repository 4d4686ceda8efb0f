"""The memory of compiled programs: parameters gathered a block at a time, sums and state in place."""

import math
import re

import jax
import numpy as np
import pytest

from digen_jax.planning.programs import trace_gradient, trained_samples
from tests.compiling import users_options
from tests.parallel import test_axes as axes

pytestmark = pytest.mark.usefixtures("exact_and_split")


def outlined(base, tuning, mesh, **fields):
    return axes.outlined(axes.config(base, tuning, mesh, **fields))


def gathered(text):
    """The shapes of all results of gathers in a compiled program."""
    found = re.findall(r"= (.*?) all-gather(?:-start|-done)?\(", text)
    return {
        tuple(map(int, shape.split(",")))
        for result in found
        for shape in re.findall(r"\[([\d,]+)\]", result)
    }


def split_stacks(*trees):
    """The whole shapes of stacks of blocks' kernels that fsdp splits."""
    leaves = [leaf for leaf in jax.tree.leaves(trees) if leaf.ndim == 3 and min(leaf.shape) > 1]
    return {leaf.shape for leaf in leaves if "fsdp" in leaf.sharding.spec}


@pytest.mark.slow
def test_split_parameters_are_gathered_a_block_at_a_time(base):
    """In the gradient with remat, compiled as in a user's run: optimisations may move collectives."""
    config, system = outlined(
        base,
        "full",
        "data x fsdp x tensor",
        model__remat="blocks",
        batch__groups=6,
        sampler__chunk=24,
    )
    # Two blocks are in a scan, and no device has two rows, so a shape (2, ...) is a stack's.
    lowered = trace_gradient(system, config, trained_samples(config)).lower()
    text = lowered.compile(compiler_options=users_options()).as_text()
    stacks = split_stacks(system.start, system.base)
    assert stacks and gathered(text) and not stacks & gathered(text)


def own_bytes(*trees):
    """Bytes on one device."""
    shards = (
        (math.prod(a.sharding.shard_shape(a.shape)), a.dtype.itemsize)
        for a in jax.tree.leaves(trees)
    )
    return sum(size * each for size, each in shards)


def reused(lowered):
    """Bytes of a program's results on a device that reuse the memory of an argument."""
    return lowered.compile().memory_analysis().alias_size_in_bytes


def test_states_and_sums_are_split_like_parameters_and_updated_in_place(base):
    config, system = outlined(base, "full", "fsdp", trainer__ema=0.5, algorithm__kl_coefficient=0.1)
    trainer, tuned = system.trainer, system.start
    state, totals = trainer._state_shapes(tuned), trainer._totals_shapes(tuned)
    parameters = own_bytes(tuned)
    assert parameters < 0.3 * sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tuned)
    )
    scalars = 200
    assert own_bytes(totals) < parameters + scalars
    assert own_bytes(state) < 4 * parameters + scalars  # with two moments and the average

    assert reused(trainer.trace_update(tuned).lower()) == own_bytes(state)
    assert reused(trace_gradient(system, config, trained_samples(config)).lower()) == own_bytes(
        totals
    )
    sums = jax.eval_shape(trainer._start_group, tuned)
    sums = jax.tree.map(
        lambda leaf, at: leaf.update(sharding=at),
        sums,
        jax.tree.broadcast(trainer._layout(sums), sums),
    )
    assert reused(trainer._fold.lower(totals, sums, np.float32(1))) == own_bytes(totals)
    assert reused(trainer._update_copy.lower(tuned, tuned, np.float32(0.5))) == parameters
