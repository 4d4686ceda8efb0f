"""Time-step parallelism: packed and sharded steps against a plain loop, and its communication."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.parallel import accumulate as gradient
from digen_jax.parallel import trainer
from digen_jax.parallel.accumulate import MicroBatch
from digen_jax.parallel.objectives import Policies
from tests.cases import quick
from tests.parallel import chunks, toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

ALL = slice(0, 12)
# Trained steps, pack, (time, data, fsdp), images of a pass.
CASES = [
    ("lora", "replicate", 4, 2, (1, 2, 2), 12),
    ("lora", "replicate", 4, 4, (4, 2, 1), 6),
    ("lora", "fsdp", 3, 2, (2, 1, 2), 4),
    ("full", "replicate", 3, 4, (4, 1, 1), 4),
    ("full", "fsdp", 3, 4, (4, 1, 2), 6),
]


def built(tuning, tactic, pack, mesh, images):
    """(system, trainer state) with parameters some way from those that sampled."""
    parts = chunks.system(chunks.config(tuning, mesh, tactic, images, trainer__pack=pack))
    return parts, parts.trainer.init(chunks.tuned(tuning))


@pytest.mark.parametrize(
    ("tuning", "tactic", "steps", "pack", "mesh", "images"), quick(CASES, 0, 2, 3)
)
def test_the_gradient_of_packed_and_sharded_steps_is_the_plain_loops(
    tuning, tactic, steps, pack, mesh, images
):
    parts, state = built(tuning, tactic, pack, mesh, images)
    assert parts.placement.trainer.is_replicated(state.tuned) == (
        tactic == "replicate" or mesh[2] == 1
    )
    train_batch = chunks.train_batch(parts, ALL, steps)
    totals = parts.trainer.accumulate(state, parts.base, train_batch, None)
    expected, ratios = chunks.plain_of_stored(tuning, steps)
    assert float(totals.sums["weight"]) == 12 * steps
    assert toy.difference(chunks.mean(totals), expected) < 1e-5
    assert toy.difference(chunks.scaled(chunks.mean(totals), 1.01), expected) > 5e-3
    np.testing.assert_allclose(totals.sums["ratio"], ratios.sum(), rtol=1e-5)
    passes = -(-steps // pack) * 12 // images
    pieces = None
    for piece in ((passes - 1, 1), (0, passes - 1)):  # in any order
        added = (state, parts.base, train_batch, pieces)
        pieces = parts.trainer.accumulate(*added, piece=piece) if piece[1] else pieces
    assert toy.difference(chunks.mean(pieces), chunks.mean(totals)) < 1e-6
    assert float(pieces.sums["weight"]) == 12 * steps
    assert parts.trainer._accumulate._cache_size() <= 2  # all passes, and any piece
    once_more = parts.trainer.accumulate(state, parts.base, train_batch, totals)
    assert toy.difference(chunks.mean(once_more), expected) < 1e-5
    assert float(once_more.sums["weight"]) == 24 * steps


# ------------------------------------------------------------------------------ what is sent


def compiled(parts, state, steps):
    """The compiled program that adds a chunk to the totals: its text."""
    train_batch = chunks.train_batch(parts, ALL, steps)
    program, args = parts.trainer, (state.tuned, parts.base, Policies(), train_batch)
    totals = jax.eval_shape(program._begin, args[0])
    layout = program._layout(totals)
    given = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        totals,
        layout._replace(sums=jax.tree.map(lambda _: layout.sums, totals.sums)),
    )
    return program._accumulate.lower(*args, given).compile().as_text()


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


def test_no_trajectory_is_gathered():
    """If parameters are split, the loop reduces gradients and gathers parameters."""
    parts, state = built("full", "fsdp", 4, (2, 2, 2), 4)
    text = compiled(parts, state, 4)
    assert {"all-reduce", "all-gather"} <= {kind for kind, *_ in collectives(bodies(text))}
    assert sent_latents(text) == []


def test_merged_first_it_would_be_sent_around(monkeypatch):
    """Shows that the test above can fail."""
    monkeypatch.setattr(trainer, "passes", merged_first)
    monkeypatch.setattr(gradient, "merged", lambda micro, group: micro)
    parts, state = built("full", "fsdp", 4, (2, 2, 2), 4)
    assert sent_latents(compiled(parts, state, 4))


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


def test_where_parameters_are_whole_the_gradient_is_reduced_once_and_outside_the_loop():
    parts, state = built("lora", "replicate", 4, (2, 2, 1), 4)
    text = compiled(parts, state, 4)
    assert collectives(bodies(text)) == []
    ((kind, shapes, _),) = collectives(text)
    assert kind == "all-reduce"
    metrics = [()] * 10  # loss, policy_loss, six of the ratio, kl, weight
    assert sorted(shapes) == sorted([leaf.shape for leaf in jax.tree.leaves(state.tuned)] + metrics)
