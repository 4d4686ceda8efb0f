"""Sampled chunks of three groups of four images and four steps, and their gradients by plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from digen_jax.parallel.accumulate import TrainBatch
from digen_jax.parallel.system import SampledImages, System
from tests.parallel import toy
from tests.parallel.toy import mean, receive

GROUPS, IMAGES, STEPS = 3, 4, 4
ROWS = np.repeat(np.arange(GROUPS, dtype=np.int32), IMAGES)
ADVANTAGES = np.array([1.5, -0.4, -0.9, 0.2, -1.7, 0.3, 0.8, 0.6, 0.1, -0.2, 0.9, -0.8], np.float32)
# No other array ends with this shape, so that it can be found in a compiled program.
SIZE = (3, 5, 4)
CLIP, ADV_CLIP, KL, GUIDANCE, NOISE = 0.005, 1.0, 0.3, 3.0, 0.7
LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets="inside|outside")
SCALE = LORA["lora__alpha"] / LORA["lora__rank"]
ALL = slice(0, len(ROWS))


def config(
    tuning: str, mesh=(1, 1, 1), tactic="fsdp", images=4, tensor=1, rollout=(0, 1), **fields
) -> ConfigDict:
    """Config of a trainer mesh (time, data, fsdp), whose algorithm clips some ratios and advantages."""
    time, data, fsdp = mesh
    shape = dict(
        batch__groups=GROUPS,
        sampler__steps=STEPS + 1,
        sampler__window=dict(first=0, length=STEPS),
        sampler__chunk=images,
        sampler__guidance=GUIDANCE,
        sampler__noise_level=NOISE,
        evaluation__batch=8,
        trainer__micro_batch=images,
        algorithm__clip_range=CLIP,
        algorithm__adv_clip=ADV_CLIP,
        algorithm__kl_coefficient=KL,
    )
    lora = LORA if tuning == "lora" else {}
    meshes = toy.meshes(rollout, (data, fsdp, time, tensor)) | dict(
        placement__rules=((".*", tactic),)
    )
    return toy.config(**meshes | lora | shape | fields)


def system(config: ConfigDict) -> System:
    """Parts whose sampler's batches fit any mesh, as they are not used."""
    config = config.copy_and_resolve_references()
    config.sampler.chunk = config.evaluation.batch = 16
    axes, rollout = config.placement.trainer, config.placement.rollout
    devices = axes.time * axes.data * axes.fsdp * axes.tensor + rollout.data * rollout.fsdp
    return toy.system(config, devices, toy.ToyFamily(size=SIZE))


@functools.cache
def sampled():
    """(prompts, all images) on the host: the same for every trainer."""
    parts = system(config("full"))
    full = config("full", images=12)
    prompts, (images,) = toy.rollout(parts, full, parts.start)
    return jax.device_get((prompts, images))


@functools.cache
def tuned(tuning: str, by: float = 0.05):
    """Tuned parameters at some distance from those that sampled the images."""
    return jax.device_get(toy.moved(system(config(tuning)).start, by))


def train_batch(
    parts: System, images: slice = ALL, steps: int = STEPS, advantages: np.ndarray = ADVANTAGES
) -> TrainBatch:
    """Some images in the trainer's form, with the first steps of each."""
    prompts, all_images = sampled()
    t = all_images.samples
    t = type(t)(*(part[:steps, images] for part in t[:3]), *(part[:steps] for part in t[3:5]))
    part = SampledImages(0, ROWS[images], t, all_images.sigmas)
    return receive(parts, prompts, part, advantages[images])


# ------------------------------------------------------------------------------ by a plain loop


def adapted(start, tuned, scale):
    """The full network: `tuned` over the start, or its LoRA factors multiplied into the kernels."""
    params, flat = flatten_dict(start), flatten_dict(tuned["transformer"])
    for path, leaf in flat.items():
        if path[-1] == "a":
            kernel = (*path[:-1], "kernel")
            params[kernel] += scale * leaf @ flat[*path[:-1], "b"]
        elif path[-1] != "b":
            params[path] = leaf
    return unflatten_dict(params)


class Policy:
    """One transition of Flow-GRPO (arXiv 2505.05470): mean and log-probability of x_next, and velocity."""

    def __init__(self, params, sample, prompt, null, capped=False):
        x, x_next, sigma, sigma_next, sigma_max = sample
        network = toy.ToyFamily(size=SIZE).network

        def v(context, pooled):
            return network.apply({"params": params}, x[None], sigma[None], context, pooled)[0]

        self.velocity = v(*null) + GUIDANCE * (v(*prompt) - v(*null))
        self.sigma, self.dt = sigma, sigma_next - sigma
        self.g = NOISE * jnp.sqrt(sigma / (1 - jnp.where(sigma == 1, sigma_max, sigma)))
        if capped:
            self.g = jnp.minimum(self.g, 0.45 / jnp.sqrt(-self.dt))
        along_v = self.velocity * (1 + self.g**2 * (1 - sigma) / (2 * sigma)) * self.dt
        self.mean = x * (1 + self.g**2 / (2 * sigma) * self.dt) + along_v
        self.noise = self.g * jnp.sqrt(-self.dt)
        density = -((x_next - self.mean) ** 2) / (2 * self.noise**2) - jnp.log(self.noise)
        self.log_prob = jnp.mean(density - jnp.log(jnp.sqrt(2 * jnp.pi)))


def transition(step: int, image: int):
    """(x, x_next, sigma, sigma_next, sigma_max), conditioning and null of one sampled transition."""
    prompts, (_, _, t, sigmas) = sampled()
    sample = (t.x[step, image], t.x_next[step, image], t.sigma[step], t.sigma_next[step], sigmas[1])
    prompt = [part[ROWS[image]][None] for part in prompts.conditioning]
    return sample, prompt, tuple(prompts.null)


@functools.cache
def start():
    """Parameters of the network that sampled the images."""
    return toy.ToyFamily(size=SIZE).params()["transformer"]


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def _loss(tuned, start, sample, old_log_prob, advantage, prompt, null):
    new = Policy(adapted(start, tuned, SCALE), sample, prompt, null)
    reference = Policy(start, sample, prompt, null)
    ratio = jnp.exp(new.log_prob - old_log_prob)
    advantage = jnp.clip(advantage, -ADV_CLIP, ADV_CLIP)
    clipped = -advantage * jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    kl = jnp.mean((new.mean - reference.mean) ** 2) / (2 * new.g**2)
    return jnp.maximum(-advantage * ratio, clipped) + KL * kl, ratio


def plain(
    tuning: str,
    old_log_prob: np.ndarray,
    steps: int = STEPS,
    by: float = 0.05,
    drawn: np.ndarray | None = None,
    advantages: np.ndarray = ADVANTAGES,
):
    """(mean gradient in float64, ratios [s b]) of Flow-GRPO's loss by a loop over single transitions on one device.

    `drawn` [s b] says which transitions there are, None: all. `advantages` may be of each image's steps, [b s]. An
    image whose advantage is NaN is left out, and its ratios are 0.
    """
    drawn = np.ones((steps, len(ROWS)), bool) if drawn is None else drawn
    each = np.broadcast_to(advantages.T, drawn.shape)
    drawn = drawn & ~np.isnan(each)
    total, ratios = None, np.zeros((steps, len(ROWS)))
    for step, image in np.argwhere(drawn):
        sample, *prompts = transition(step, image)
        known = old_log_prob[step, image], each[step, image]
        (_, ratios[step, image]), found = _loss(
            tuned(tuning, by), start(), sample, *known, *prompts
        )
        found = jax.tree.map(np.float64, jax.device_get(found))
        total = found if total is None else jax.tree.map(np.add, total, found)
    return jax.tree.map(lambda a: a / drawn.sum(), total), ratios


@functools.cache
def plain_of_stored(tuning: str, steps: int = STEPS):
    """`plain` with the log-probabilities that were stored when the images were sampled."""
    return plain(tuning, sampled()[1].samples.log_prob, steps)


@functools.cache
def log_probs(tuning: str, by: float) -> np.ndarray:
    """The log-probabilities [s b] of a policy, one by one."""
    _, ratios = plain(tuning, np.zeros((STEPS, len(ROWS)), np.float32), by=by)
    return np.log(ratios)


def scaled(tree, by: float):
    return jax.tree.map(lambda a: by * jnp.asarray(a), tree)


def assert_gradient(totals, expected):
    """The mean gradient is the expected one; a hundredth more of it would be noticed."""
    assert toy.difference(mean(totals), expected) < 1e-5
    assert toy.difference(scaled(mean(totals), 1.01), expected) > 5e-3
