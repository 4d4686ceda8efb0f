"""Communication of the trainer's gradient: no trajectory is gathered, and sums are reduced once if possible."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.parallel import accumulate, trainer
from digen_jax.parallel.accumulate import MicroBatch
from digen_jax.parallel.objectives import Policies
from tests.parallel import chunks
from tests.parallel.test_transitions import built

pytestmark = pytest.mark.usefixtures("exact_and_split")


def compiled(tactic, mesh):
    """(trainer state, text of the compiled program that adds a chunk to the totals)."""
    tuning = "full" if tactic == "fsdp" else "lora"
    parts, state = built(tuning, mesh, tactic=tactic, trainer__pack=4)
    train_batch, program = chunks.train_batch(parts), parts.trainer
    args = (state.tuned, parts.base, Policies(), train_batch)
    totals = jax.eval_shape(program._start, args[0])
    given = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        totals,
        program.shardings_of(totals),
    )
    return state, program._accumulate.lower(*args, given).compile().as_text()


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
