"""Compiled programs: memory, parameters gathered a block at a time, sums in place, and what devices send."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.parallel import accumulate, trainer
from digen_jax.parallel.accumulate import MicroBatch
from digen_jax.planning.programs import trace_gradient, trained_samples
from tests.compiling import users_options
from tests.parallel import chunks
from tests.parallel import test_axes as axes
from tests.parallel.test_transitions import built

pytestmark = pytest.mark.usefixtures("exact_and_split")


def outlined(base, tuning, mesh, **fields):
    return axes.outlined(axes.config(base, tuning, mesh, **fields))


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
    gathers = [shapes for kind, shapes, _ in collectives(text) if kind == "all-gather"]
    assert stacks and gathers and not stacks.intersection(itertools.chain(*gathers))


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


# --------------------------------------------------------------------- communication of the gradient


def compiled(tactic, mesh):
    """(trainer state, text of the compiled program that adds a chunk to the totals)."""
    tuning = "full" if tactic == "fsdp" else "lora"
    parts, state = built(tuning, mesh, tactic=tactic, trainer__pack=4)
    train_batch = chunks.train_batch(parts)
    traced = parts.trainer.trace_accumulate(state.tuned, parts.base, train_batch)
    return state, traced.lower().compile().as_text()


COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\("
)


def collectives(text):
    """(kind, shapes of the result, whether it is of the backward pass) of all."""
    found = []
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            shapes = [
                tuple(map(int, re.findall(r"\d+", s))) for s in re.findall(r"\[(.*?)\]", match[1])
            ]
            found.append((match[2], shapes, "transpose(" in line))
    return found


def sent_latents(text):
    """The collectives that move arrays shaped like latents, except for the gradients of a pass."""
    end = chunks.SIZE
    found = collectives(text)
    return [kind for kind, shapes, back in found if not back and any(s[-3:] == end for s in shapes)]


def merged_first(train_batch, images, steps, group, times):
    """As `passes`, but the steps and images of a pass are merged before they are constrained."""
    s, b = train_batch.samples.log_prob.shape
    t = train_batch.samples
    sigmas = (jnp.broadcast_to(a[:, None], (s, b)) for a in t[3:5])
    per_image = (jnp.broadcast_to(a, (s, b)) for a in (train_batch.rows, train_batch.advantages))
    micro = MicroBatch(type(t)(*t[:3], *sigmas), *per_image, jnp.ones((s, b)))
    sharding = NamedSharding(group.mesh, PartitionSpec(None, group.mesh.axis_names))

    def cut(a):
        a = a.reshape(s // steps, steps, images, b // images, *a.shape[2:])
        a = jnp.moveaxis(a, 3, 1).reshape(-1, steps * images, *a.shape[4:])
        return jax.lax.with_sharding_constraint(a, sharding)

    return jax.tree.map(cut, micro)


def bodies(text):
    """The text of all computations that a while loop reaches."""
    computations, name = {}, None
    for line in text.splitlines():
        if line.endswith("{") and (match := re.match(r"(?:ENTRY )?%?([\w.\-]+) ", line)):
            name = match[1]
            computations[name] = ""
        elif name:
            computations[name] += line + "\n"
    todo = re.findall(r"body=%?([\w.\-]+)", text)
    reached = set()
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += re.findall(
                r"(?:body|calls|to_apply|condition)=%?([\w.\-]+)", computations[name]
            )
    return "".join(computations[name] for name in reached)


def test_no_trajectory_is_gathered(monkeypatch):
    """If parameters are split, the loop reduces gradients and gathers parameters.

    If steps and images of a pass were merged before they are constrained, latents would be sent.
    """
    _, text = compiled("fsdp", (2, 2, 2))
    assert {"all-reduce", "all-gather"} <= {kind for kind, *_ in collectives(bodies(text))}
    assert sent_latents(text) == []
    monkeypatch.setattr(trainer, "passes", merged_first)
    monkeypatch.setattr(accumulate, "merge_pass", lambda micro, group: micro)
    assert sent_latents(compiled("fsdp", (2, 2, 2))[1])


def test_the_gradient_of_replicated_parameters_is_reduced_once_and_outside_the_loop():
    state, text = compiled("replicate", (2, 2, 1))
    assert collectives(bodies(text)) == []
    ((kind, shapes, _),) = collectives(text)
    assert kind == "all-reduce"
    metrics = [()] * 10  # loss, policy_loss, six of the ratio, kl, weight
    assert sorted(shapes) == sorted([leaf.shape for leaf in jax.tree.leaves(state.tuned)] + metrics)
