"""The memory of compiled programs: parameters gathered a block at a time, sums and state in place."""

import math
import re

import jax
import numpy as np
import pytest

from digen_jax.planning.programs import lower_generate, lower_gradient, trained_samples
from tests.cases import quick
from tests.compiling import users_options
from tests.engine import test_axes as axes

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


CASES = [
    ("lora", "sampling", "fsdp"),
    ("full", "gradient with remat", "data x fsdp x tensor"),
]


@pytest.mark.parametrize(("tuning", "program", "mesh"), quick(CASES, 0))
def test_split_parameters_are_gathered_a_block_at_a_time(base, tuning, program, mesh):
    remat = "blocks" if program == "gradient with remat" else "none"
    # Two blocks are in a scan, and no device has two rows, so a shape (2, ...) is a stack's.
    recipe, system = outlined(
        base, tuning, mesh, model__remat=remat, batch__groups=6, sampler__chunk=24
    )
    if program == "sampling":
        lowered = lower_generate(system, system.sampler, recipe, 24)
    else:
        lowered = lower_gradient(system, recipe, trained_samples(recipe))
    # The program of a user's run: optimisations may move collectives.
    text = lowered.compile(compiler_options=users_options()).as_text()
    stacks, found = split_stacks(system.start, system.base), gathered(text)
    assert stacks and not stacks & found
    # One block of at least one of them; other blocks are split over tensor, too.
    assert mesh != "fsdp" or {shape[1:] for shape in stacks} & found
    if (program, mesh) == ("gradient with remat", "fsdp"):
        # XLA would move the smaller factor of a product, which is the activations here: six images of a
        # device in a pass, of 16 and 13 tokens. The widest parameter has 64 rows.
        assert not moved_rows(text, 65)


def moved_rows(text, rows):
    """The shapes with that many rows or more among the results of collectives that move parts of activations."""
    kinds = "all-to-all|collective-permute|all-reduce|reduce-scatter"
    found = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    shapes = {shape for result in found for shape in re.findall(r"\[([\d,]+)\]", result)}
    return {shape for shape in shapes if math.prod(map(int, shape.split(",")[:-1])) >= rows}


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
    recipe, system = outlined(base, "full", "fsdp", trainer__ema=0.5, algorithm__kl_coefficient=0.1)
    trainer, tuned = system.trainer, system.start
    state, totals = trainer._state_shapes(tuned), trainer._totals_shapes(tuned)
    parameters = own_bytes(tuned)
    assert parameters < 0.3 * sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tuned)
    )
    scalars = 200
    assert own_bytes(totals) < parameters + scalars
    assert own_bytes(state) < 4 * parameters + scalars  # with two moments and the average

    assert reused(trainer.lower_update(tuned)) == own_bytes(state)
    assert reused(lower_gradient(system, recipe, trained_samples(recipe))) == own_bytes(totals)
    sums = jax.eval_shape(trainer._zeros_of_group, tuned)
    sums = jax.tree.map(
        lambda leaf, at: leaf.update(sharding=at),
        sums,
        jax.tree.broadcast(trainer._layout(sums), sums),
    )
    assert reused(trainer._fold.lower(totals, sums, np.float32(1))) == own_bytes(totals)
    assert reused(trainer._follow.lower(tuned, tuned, np.float32(0.5))) == parameters
