"""Every setting of the policy-gradient loss in the trainer, against a loop over single transitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parallel import chunks, toy
from tests.parallel.test_trainer import ADV_CLIP, CLIP, GUIDANCE, KL, NOISE, adapted
from tests.parallel.toy import receive

pytestmark = pytest.mark.usefixtures("exact_and_split")

THRESHOLD, BOUND, SMALLEST = 4e-3, 0.015, 0.75


def bounded(r):
    return jnp.clip(r, 1 - CLIP, 1 + CLIP)


def flow_grpo(a, new, old, noise, dt):
    r = jnp.exp(new.log_prob - old.log_prob)
    return jnp.maximum(-a * r, -a * bounded(r))


def guard(a, new, old, noise, dt):
    bias = jnp.mean((new.mean - old.mean) ** 2) / (2 * noise**2)
    r = jnp.exp((new.log_prob - old.log_prob + bias) * noise)
    return jnp.maximum(-a * r, -a * bounded(r)) / -dt


def flow_dppo(a, new, old, noise, dt):
    r = jnp.exp(new.log_prob - old.log_prob)
    far = jnp.mean((new.mean - old.mean) ** 2) / (2 * noise**2) >= THRESHOLD
    away = ((a > 0) & (r > 1)) | ((a < 0) & (r < 1))
    return jnp.where(far & away, 0.0, -a * r)


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


METHODS = {
    "flow_grpo": (flow_grpo, {}),
    "guard": (guard, dict(ratio="guard")),
    "flow_dppo": (flow_dppo, dict(surrogate="divergence", kl_threshold=THRESHOLD)),
    "cispo, velocity kl": (cispo, dict(surrogate="cispo", kl="velocity")),
    "topr, kl with dt": (topr, dict(surrogate="topr", negative_weight=0.5, kl="gaussian_dt")),
    "dual clip, clip higher, late steps": (
        dual,
        dict(dual_clip=1.02, clip_high=2 * CLIP, smallest_sigma=SMALLEST),
    ),
    "rejection": (flow_grpo, dict(rejection_bound=BOUND)),
    "decoupled": (decoupled, dict(importance_cap=1.004)),
    "capped noise": (flow_grpo, dict(kind="flow_capped")),
}


class Policy:
    """For one transition: the mean of x_next, its log-probability and the velocity, as the papers write them."""

    def __init__(self, params, sample, prompt, null, capped):
        x, x_next, sigma, sigma_next, sigma_max = sample
        network = toy.ToyFamily(size=chunks.SIZE).network

        def v(context, pooled):
            return network.apply({"params": params}, x[None], sigma[None], context, pooled)[0]

        self.velocity = v(*null) + GUIDANCE * (v(*prompt) - v(*null))
        self.dt = sigma_next - sigma
        self.g = NOISE * jnp.sqrt(sigma / (1 - jnp.where(sigma == 1, sigma_max, sigma)))
        if capped:
            self.g = jnp.minimum(self.g, 0.45 / jnp.sqrt(-self.dt))
        along_v = self.velocity * (1 + self.g**2 * (1 - sigma) / (2 * sigma)) * self.dt
        self.mean = x * (1 + self.g**2 / (2 * sigma) * self.dt) + along_v
        self.noise = self.g * jnp.sqrt(-self.dt)
        density = -((x_next - self.mean) ** 2) / (2 * self.noise**2) - jnp.log(self.noise)
        self.log_prob = jnp.mean(density - jnp.log(jnp.sqrt(2 * jnp.pi)))


@functools.cache
def differentiated(name):
    method, settings = METHODS[name]
    capped = settings.get("kind") == "flow_capped"

    def loss(tuned, start, sample, advantage, prompt, null):
        new = Policy(adapted(start, tuned, chunks.SCALE), sample, prompt, null, capped)
        old = Policy(start, sample, prompt, null, capped)
        if method is not flow_dppo:
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
    settings, start = METHODS[name][1], toy.ToyFamily(size=chunks.SIZE).params()["transformer"]
    tuned = chunks.tuned("lora")
    prompts, (_, _, t, sigmas) = chunks.sampled()
    found = []
    for step in range(chunks.STEPS):
        for image, row in enumerate(chunks.ROWS):
            sample = (t.x[step, image], t.x_next[step, image], t.sigma[step], t.sigma_next[step])
            prompt = [part[row][None] for part in prompts.conditioning]
            gradient, moved = differentiated(name)(
                tuned, start, (*sample, sigmas[1]), chunks.ADVANTAGES[image], prompt,
                tuple(prompts.null),
            )  # fmt: skip
            rejected = moved > settings.get("rejection_bound", np.inf)
            if not rejected and t.sigma[step] >= settings.get("smallest_sigma", 0):
                found.append(jax.tree.map(np.float64, jax.device_get(gradient)))
    return jax.tree.map(lambda *leaves: sum(leaves) / len(found), *found), len(found)


@functools.cache
def with_means():
    """The images of `chunks`, sampled by a sampler that stores means."""
    fields = {"algorithm__ratio": "guard"}
    parts = chunks.system(chunks.config("full", **fields))
    _, (images,) = toy.rollout(parts, chunks.config("full", images=12), parts.start)
    t = jax.device_get(images.samples)
    np.testing.assert_array_equal(t.x_next, chunks.sampled()[1].samples.x_next)
    return t


def train_batch(parts, means):
    prompts, images = chunks.sampled()
    images = images._replace(samples=with_means() if means else images.samples)
    return receive(parts, prompts, images, chunks.ADVANTAGES)


@pytest.mark.parametrize(
    ("name", "old"),
    [
        *((name, "rollout") for name in METHODS if name not in ("flow_grpo", "capped noise")),
        ("guard", "recomputed"),
        ("rejection", "recomputed"),
        ("capped noise", "recomputed"),  # the stored log-probabilities are of another kind of step
    ],
)
def test_the_gradient_is_that_of_single_transitions(name, old):
    settings = METHODS[name][1] | {"old_log_probs": old}
    section = {"kind": "sampler"}
    fields = {f"{section.get(f, 'algorithm')}__{f}": value for f, value in settings.items()}
    mesh = (2, 2, 1) if old == "rollout" else (1, 2, 2)
    config = chunks.config("lora", mesh, trainer__pack=2, **fields)
    parts = chunks.system(config)
    stores = parts.trainer.algorithm.stores_means
    assert stores == (old == "rollout" and name in ("guard", "flow_dppo"))
    state = parts.trainer.init(chunks.tuned("lora"))
    behavior = parts.start if old == "recomputed" else None
    totals = parts.trainer.accumulate(state, parts.base, train_batch(parts, stores), None, behavior)
    expected, count = plain(name)
    every = chunks.STEPS * len(chunks.ROWS)
    assert float(totals.sums["weight"]) == count
    assert (count < every) == (name == "rejection" or "late steps" in name)
    if count < every:
        assert float(totals.sums["left_out"]) == every - count > 5
    found = chunks.mean(totals)
    assert toy.difference(found, expected) < 1e-5
    assert toy.difference(chunks.scaled(found, 1.01), expected) > 5e-3
    assert toy.difference(found, plain("flow_grpo")[0]) > 1e-3


def test_an_update_without_a_single_sample_is_one_without_a_gradient():
    config = chunks.config("lora", algorithm__smallest_sigma=0.999)
    parts = chunks.system(config)
    state = parts.trainer.init(chunks.tuned("lora"))
    before = jax.device_get(state.tuned)
    late = train_batch(parts, False)
    late = late._replace(samples=late.samples._replace(sigma=late.samples.sigma * 0.9))
    state, metrics = parts.trainer.update(
        state, parts.trainer.accumulate(state, parts.base, late, None)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.tuned), before)
    assert metrics["gradient_norm"] == 0 and np.isfinite(metrics["loss"])


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def of_trajectory(tuned, proximal, start, samples, sigma_max, advantage, prompt, null):
    """One image's loss by the ratio of all its steps to the step's start, weighted by that policy's to the sampler."""
    to_start = to_sampler = kl = 0.0
    for step in range(chunks.STEPS):
        sample = (*(part[step] for part in samples), sigma_max)
        new, old, sampler = (
            Policy(params, sample, prompt, null, capped=False)
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
    fields["trainer__pack"] = chunks.STEPS
    parts = chunks.system(chunks.config("lora", (1, 2, 2), images=4, **fields))
    state, snapshot = parts.trainer.init(chunks.tuned("lora")), chunks.tuned("lora", 0.02)
    proximal = jax.device_put(snapshot, jax.tree.map(lambda leaf: leaf.sharding, state.tuned))
    given = train_batch(parts, False)
    totals = parts.trainer.accumulate(state, parts.base, given, None, None, proximal)

    start = toy.ToyFamily(size=chunks.SIZE).params()["transformer"]
    snapshot = adapted(jax.tree.map(jnp.asarray, start), snapshot, chunks.SCALE)
    prompts, (_, _, t, sigmas) = chunks.sampled()
    steps, total, seen = [(s, n) for s, n in zip(t.sigma, t.sigma_next, strict=True)], None, []
    for image, row in enumerate(chunks.ROWS):
        samples = t.x[:, image], t.x_next[:, image], *np.transpose(steps)
        gradient, both = of_trajectory(
            chunks.tuned("lora"), snapshot, start, samples, sigmas[1],
            chunks.ADVANTAGES[image], [part[row][None] for part in prompts.conditioning],
            tuple(prompts.null),
        )  # fmt: skip
        seen.append(both)
        found = jax.tree.map(np.float64, jax.device_get(gradient))
        total = found if total is None else jax.tree.map(np.add, total, found)
    ratios, weights = np.array(seen).T
    assert (np.abs(ratios - 1) > CLIP).any() and (np.abs(ratios - 1) < CLIP).any()
    assert weights.min() < 0.994 and weights.max() > 0.998
    expected = jax.tree.map(lambda leaf: leaf / totals.sums["weight"], total)
    assert toy.difference(chunks.mean(totals), expected) < 1e-5
    np.testing.assert_allclose(
        totals.sums["importance_weight"], chunks.STEPS * weights.sum(), rtol=1e-5
    )
