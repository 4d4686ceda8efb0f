"""Gradients of transitions against loops over single transitions: packed, sharded, and with every loss setting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import quick
from tests.parallel import chunks, toy
from tests.parallel.chunks import ADV_CLIP, CLIP, KL, Policy, adapted, assert_gradient
from tests.parallel.toy import receive

pytestmark = pytest.mark.usefixtures("exact_and_split")


def built(tuning, mesh=(1, 1, 1), **fields):
    """(system, trainer state) with parameters at some distance from those that sampled."""
    parts = chunks.system(chunks.config(tuning, mesh, **fields))
    return parts, parts.trainer.init(chunks.tuned(tuning))


# ------------------------------------------------------------------------------ packing and meshes

# Trained steps, pack, (time, data, fsdp), images of a pass; further fields.
CASES = [
    ("lora", "replicate", 4, 2, (1, 2, 2), 12, {}),
    ("lora", "replicate", 4, 4, (4, 2, 1), 6, {}),
    ("lora", "fsdp", 3, 2, (2, 1, 2), 4, dict(rollout=(2, 1))),
    ("full", "replicate", 3, 4, (4, 1, 1), 4, {}),
    ("full", "fsdp", 3, 4, (4, 1, 2), 6, {}),
]


@pytest.mark.parametrize(
    ("tuning", "tactic", "steps", "pack", "mesh", "images", "fields"), quick(CASES, 0, 2, 3)
)
def test_the_gradient_of_packed_and_sharded_steps_is_the_plain_loops(
    tuning, tactic, steps, pack, mesh, images, fields
):
    fields = dict(tactic=tactic, images=images, trainer__pack=pack) | fields
    parts, state = built(tuning, mesh, **fields)
    replicated = tactic == "replicate" or mesh[2] == 1
    assert parts.placement.trainer.is_replicated(state.tuned) == replicated
    train_batch = chunks.train_batch(parts, steps=steps)
    totals = parts.trainer.accumulate(state, parts.base, train_batch, None)
    expected, ratios = chunks.plain_of_stored(tuning, steps)
    clipped = np.abs(ratios - 1) > CLIP
    assert 5 < clipped.sum() < clipped.size - 5
    assert (ratios < 1 - CLIP).any() and (ratios > 1 + CLIP).any()
    assert float(totals.sums["weight"]) == 12 * steps
    assert int(totals.sums["clip_fraction"]) == clipped.sum()
    assert_gradient(totals, expected)
    np.testing.assert_allclose(totals.sums["ratio"], ratios.sum(), rtol=1e-5)
    passes = -(-steps // pack) * 12 // images
    pieces = None
    for piece in ((passes - 1, 1), (0, passes - 1)):  # in any order
        added = (state, parts.base, train_batch, pieces)
        pieces = parts.trainer.accumulate(*added, piece=piece) if piece[1] else pieces
    assert toy.difference(chunks.mean(pieces), chunks.mean(totals)) < 1e-6
    assert float(pieces.sums["weight"]) == 12 * steps
    assert parts.trainer._accumulate._cache_size() <= 2  # all passes, and any piece
    again = parts.trainer.accumulate(state, parts.base, train_batch, totals)
    assert toy.difference(chunks.mean(again), expected) < 1e-5
    assert float(again.sums["weight"]) == 24 * steps


def test_devices_that_share_their_images_are_counted_once():
    """Replicated parameters: the sum is over the devices with other samples, not over the axis tensor."""
    rules = (("text_encoder/", "mlp", "tensor"), (".*", "replicate"))
    parts, state = built("lora", (1, 1, 2), tensor=2, images=12, placement__rules=rules)
    assert parts.placement.trainer.is_replicated((parts.start, parts.base))
    totals = parts.trainer.accumulate(state, parts.base, chunks.train_batch(parts), None)
    assert float(totals.sums["weight"]) == 48
    assert_gradient(totals, chunks.plain_of_stored("lora")[0])


# ------------------------------------------------------------------------------ old log-probabilities


@functools.cache
def with_wrong_stored():
    """Stored log-probabilities as if the sampler's arithmetic were much coarser than the trainer's."""
    stored = chunks.sampled()[1].samples.log_prob
    return stored + np.float32(0.02) * np.random.default_rng(5).normal(size=stored.shape)


@pytest.mark.parametrize(
    ("tuning", "old", "mesh"), [("full", "recomputed", (2, 2, 1)), ("lora", "current", (1, 2, 2))]
)
def test_recomputed_and_current_log_probabilities_do_not_depend_on_the_stored_ones(
    tuning, old, mesh
):
    """The behavior policy is that of a state, whose update consumes other arrays than the kept ones."""
    by = 0.02 if old == "recomputed" else 0.05
    parts, state = built(tuning, mesh, algorithm__old_log_probs=old, trainer__pack=2)
    given = chunks.train_batch(parts)
    stored = jax.device_put(np.float32(with_wrong_stored()), given.samples.log_prob.sharding)
    given = given._replace(samples=given.samples._replace(log_prob=stored))
    behavior = parts.trainer.init(chunks.tuned(tuning, by)).tuned
    totals = parts.trainer.accumulate(state, parts.base, given, None, behavior)
    expected, ratios = chunks.plain(tuning, chunks.log_probs(tuning, by).astype(np.float32))
    assert_gradient(totals, expected)
    clipped = np.abs(ratios - 1) > CLIP
    assert int(totals.sums["clip_fraction"]) == clipped.sum()
    if old == "current":
        np.testing.assert_allclose(ratios, 1, atol=1e-6)
        assert not clipped.any() and float(totals.sums["approx_kl"]) == 0
    else:
        assert 5 < clipped.sum() < clipped.size - 5
        approx_kl = (np.log(ratios) ** 2).sum() / 2
        np.testing.assert_allclose(totals.sums["approx_kl"], approx_kl, rtol=1e-3)
        with pytest.raises(ValueError, match="behavior"):
            parts.trainer.accumulate(state, parts.base, given, None)
    # The reported ratios are to the stored log-probabilities.
    ratios = np.exp(chunks.log_probs(tuning, 0.05) - with_wrong_stored())
    np.testing.assert_allclose(totals.sums["ratio"], ratios.sum(), rtol=1e-5)
    deviation = np.abs(ratios - 1).sum()
    np.testing.assert_allclose(totals.sums["ratio_deviation"], deviation, rtol=1e-4)


# ------------------------------------------------------------------------------ settings of the loss

BOUND, SMALLEST = 0.015, 0.75


def bounded(r):
    return jnp.clip(r, 1 - CLIP, 1 + CLIP)


def flow_grpo(a, new, old, noise, dt):
    r = jnp.exp(new.log_prob - old.log_prob)
    return jnp.maximum(-a * r, -a * bounded(r))


def guard(a, new, old, noise, dt):
    bias = jnp.mean((new.mean - old.mean) ** 2) / (2 * noise**2)
    r = jnp.exp((new.log_prob - old.log_prob + bias) * noise)
    return jnp.maximum(-a * r, -a * bounded(r)) / -dt


def cispo(a, new, old, noise, dt):
    r = jax.lax.stop_gradient(jnp.exp(new.log_prob - old.log_prob))
    return -bounded(r) * a * new.log_prob


def topr(a, new, old, noise, dt):
    r = jax.lax.stop_gradient(jnp.exp(new.log_prob - old.log_prob))
    return -jnp.where(a > 0, 1.0, 0.5 * jnp.minimum(r, 1)) * a * new.log_prob


def dual(a, new, old, noise, dt):
    r = jnp.exp(new.log_prob - old.log_prob)
    inner = jnp.minimum(a * r, a * jnp.clip(r, 1 - CLIP, 1 + 2 * CLIP))
    return -jnp.where(a < 0, jnp.maximum(inner, 1.02 * a), inner)


def decoupled(a, new, old, noise, dt):
    """In the first update of a step nothing has changed since its start: only the weight is not 1."""
    w = jnp.minimum(jnp.exp(new.log_prob - old.log_prob), 1.004)
    r = jnp.exp(new.log_prob - jax.lax.stop_gradient(new.log_prob))
    return -jax.lax.stop_gradient(w) * a * r


def flash(a, new, old, noise, dt):
    """Flash-GRPO's weight of a step, with its g = noise / sqrt(-dt)."""
    root = jnp.sqrt(-dt)
    weight = 1 / (root / new.g + (new.g * root * (1 - new.sigma)) / (2 * new.sigma))
    return 0.5 * weight * flow_grpo(a, new, old, noise, dt)


METHODS = {
    "guard": (guard, dict(ratio="guard")),
    "cispo, velocity kl": (cispo, dict(surrogate="cispo", kl="velocity")),
    "topr, kl with dt": (topr, dict(surrogate="topr", negative_weight=0.5, kl="gaussian_dt")),
    "dual clip, clip higher, late steps": (
        dual,
        dict(dual_clip=1.02, clip_high=2 * CLIP, smallest_sigma=SMALLEST),
    ),
    "rejection": (flow_grpo, dict(rejection_bound=BOUND)),
    "decoupled": (decoupled, dict(importance_cap=1.004)),
    "flash": (flash, dict(step_weight="flash", step_weight_scale=0.5)),
    "capped noise": (flow_grpo, dict(kind="flow_capped")),
}


@functools.cache
def differentiated(name):
    method, settings = METHODS[name]
    capped = settings.get("kind") == "flow_capped"

    def loss(tuned, start, sample, advantage, prompt, null):
        new = Policy(adapted(start, tuned, chunks.SCALE), sample, prompt, null, capped)
        old = Policy(start, sample, prompt, null, capped)
        advantage = jnp.clip(advantage, -ADV_CLIP, ADV_CLIP)
        value = method(advantage, new, old, new.noise, new.dt)
        match settings.get("kl"):
            case "velocity":
                kl = jnp.mean((new.velocity - old.velocity) ** 2)
            case "gaussian_dt":
                kl = jnp.mean((new.mean - old.mean) ** 2) / (2 * new.noise**2)
            case _:
                kl = jnp.mean((new.mean - old.mean) ** 2) / (2 * new.g**2)
        return value + KL * kl, jnp.abs(new.log_prob - old.log_prob)

    return jax.jit(jax.grad(loss, has_aux=True))


@functools.cache
def plain(name):
    """(mean gradient over the samples that count, how many do)."""
    settings, found = METHODS[name][1], []
    for step, image in np.ndindex(chunks.STEPS, len(chunks.ROWS)):
        sample, *prompts = chunks.transition(step, image)
        given = chunks.tuned("lora"), chunks.start(), sample, chunks.ADVANTAGES[image], *prompts
        gradient, moved = differentiated(name)(*given)
        rejected = moved > settings.get("rejection_bound", np.inf)
        if not rejected and sample[2] >= settings.get("smallest_sigma", 0):
            found.append(jax.tree.map(np.float64, jax.device_get(gradient)))
    return jax.tree.map(lambda *leaves: sum(leaves) / len(found), *found), len(found)


@functools.cache
def with_means():
    """The images of `chunks`, sampled by a sampler that stores means."""
    parts = chunks.system(chunks.config("full", algorithm__ratio="guard"))
    _, (images,) = toy.rollout(parts, chunks.config("full", images=12), parts.start)
    t = jax.device_get(images.samples)
    np.testing.assert_array_equal(t.x_next, chunks.sampled()[1].samples.x_next)
    return t


def train_batch(parts, means=False):
    prompts, images = chunks.sampled()
    images = images._replace(samples=with_means() if means else images.samples)
    return receive(parts, prompts, images, chunks.ADVANTAGES)


@pytest.mark.parametrize(
    ("name", "old"),
    [
        *((name, "rollout") for name in METHODS if name != "capped noise"),
        ("guard", "recomputed"),
        ("capped noise", "recomputed"),  # the stored log-probabilities are of another kind of step
    ],
)
def test_the_gradient_is_that_of_single_transitions(name, old):
    settings = METHODS[name][1] | {"old_log_probs": old}
    section = {"kind": "sampler"}
    fields = {f"{section.get(f, 'algorithm')}__{f}": value for f, value in settings.items()}
    mesh = {"guard": (2, 2, 1), "rejection": (1, 2, 2)}.get(name, (1, 1, 1))
    parts, state = built("lora", mesh, trainer__pack=2, **fields)
    stores = parts.trainer.algorithm.stores_means
    assert stores == (old == "rollout" and name == "guard")
    behavior = parts.start if old == "recomputed" else None
    given = train_batch(parts, stores)
    totals = parts.trainer.accumulate(state, parts.base, given, None, behavior)
    expected, count = plain(name)
    every = chunks.STEPS * len(chunks.ROWS)
    assert float(totals.sums["weight"]) == count
    assert (count < every) == (name == "rejection" or "late steps" in name)
    if count < every:
        assert float(totals.sums["left_out"]) == every - count > 5
    assert_gradient(totals, expected)
    flow_grpos, _ = chunks.plain_of_stored("lora")
    assert toy.difference(chunks.mean(totals), flow_grpos) > 1e-3


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def of_trajectory(tuned, proximal, start, samples, sigma_max, advantage, prompt, null):
    """One image's loss by the ratio of all its steps to the step's start, weighted by that policy's to the sampler."""
    to_start = to_sampler = kl = 0.0
    for step in range(chunks.STEPS):
        sample = (*(part[step] for part in samples), sigma_max)
        new, old, sampler = (
            Policy(params, sample, prompt, null)
            for params in (adapted(start, tuned, chunks.SCALE), proximal, start)
        )
        to_start += (new.log_prob - old.log_prob) / chunks.STEPS
        to_sampler += (old.log_prob - sampler.log_prob) / chunks.STEPS
        kl += jnp.mean((new.mean - sampler.mean) ** 2) / (2 * new.g**2)
    advantage = jnp.clip(advantage, -ADV_CLIP, ADV_CLIP)
    r, w = jnp.exp(to_start), jnp.minimum(jnp.exp(to_sampler), 1.004)
    each = -w * jnp.minimum(advantage * r, advantage * bounded(r))
    return chunks.STEPS * each + KL * kl, (r, w)


def test_a_trajectorys_ratio_to_the_steps_start_is_weighted_by_that_ones_to_the_sampler():
    fields = dict(algorithm__ratio="sequence_mean", algorithm__importance_cap=1.004)
    parts, state = built("lora", (1, 2, 2), trainer__pack=chunks.STEPS, **fields)
    snapshot = chunks.tuned("lora", 0.02)
    proximal = jax.device_put(snapshot, jax.tree.map(lambda leaf: leaf.sharding, state.tuned))
    given = train_batch(parts)
    totals = parts.trainer.accumulate(state, parts.base, given, None, None, proximal)

    start, seen, found = chunks.start(), [], []
    snapshot = adapted(jax.tree.map(jnp.asarray, start), snapshot, chunks.SCALE)
    for image, advantage in enumerate(chunks.ADVANTAGES):
        steps = [chunks.transition(step, image) for step in range(chunks.STEPS)]
        *samples, (sigma_max, *_) = (
            np.stack(part) for part in zip(*(sample for sample, *_ in steps), strict=True)
        )
        inputs = chunks.tuned("lora"), snapshot, start, samples, sigma_max, advantage
        gradient, both = of_trajectory(*inputs, *steps[0][1:])
        seen.append(both)
        found.append(jax.tree.map(np.float64, jax.device_get(gradient)))
    ratios, weights = np.array(seen).T
    assert (np.abs(ratios - 1) > CLIP).any() and (np.abs(ratios - 1) < CLIP).any()
    assert weights.min() < 0.994 and weights.max() > 0.998
    total = float(totals.sums["weight"])
    assert_gradient(totals, jax.tree.map(lambda *leaves: sum(leaves) / total, *found))
    found = totals.sums["importance_weight"]
    np.testing.assert_allclose(found, chunks.STEPS * weights.sum(), rtol=1e-5)


@pytest.mark.parametrize(("mesh", "fields"), [((1, 1, 1), {}), ((2, 2, 1), dict(trainer__pack=4))])
def test_each_step_of_an_image_may_have_its_own_advantage(mesh, fields):
    advantages = np.random.default_rng(4).normal(size=(12, chunks.STEPS)).astype(np.float32)
    parts = chunks.system(chunks.config("full", mesh, images=12, **fields))
    state = parts.trainer.init(chunks.tuned("full"))
    batch = chunks.train_batch(parts, advantages=advantages)
    totals = parts.trainer.accumulate(state, parts.base, batch, None)
    old = chunks.sampled()[1].samples.log_prob
    expected, _ = chunks.plain("full", old, advantages=advantages)
    chunks.assert_gradient(totals, expected)
