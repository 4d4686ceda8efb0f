"""Sampled chunks of three groups of four images and four steps, and their gradients one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from digen_jax.parallel.system import SampledImages, System
from digen_jax.parallel.trainer import TrainBatch
from tests.parallel import toy
from tests.parallel.test_trainer import gradient_config, plain_loss
from tests.parallel.toy import receive

GROUPS, IMAGES, STEPS = 3, 4, 4
ROWS = np.repeat(np.arange(GROUPS, dtype=np.int32), IMAGES)
ADVANTAGES = np.array([1.5, -0.4, -0.9, 0.2, -1.7, 0.3, 0.8, 0.6, 0.1, -0.2, 0.9, -0.8], np.float32)
# No other array ends with this shape, so that it can be found in a compiled program.
SIZE = (3, 5, 4)
SCALE = 3.0  # alpha / rank of test_trainer's LoRA


def config(tuning: str, mesh=(1, 1, 1), tactic="fsdp", images=4, **fields) -> ConfigDict:
    """Of a trainer mesh (time, data, fsdp) alone; its algorithm clips some ratios and advantages."""
    time, data, fsdp = mesh
    shape = dict(
        batch__groups=GROUPS,
        sampler__steps=STEPS + 1,
        sampler__window=dict(first=0, length=STEPS),
        evaluation__batch=8,
    )
    full = gradient_config(tuning, chunk=images, micro=images, **shape | fields)
    full.placement.rollout.data = 0
    full.placement.trainer.update(time=time, data=data, fsdp=fsdp)
    full.placement.rules = ((".*", tactic),)
    return full


def system(config: ConfigDict) -> System:
    """Parts whose sampler's batches fit any mesh, as they are not used."""
    config = config.copy_and_resolve_references()
    config.sampler.chunk = config.evaluation.batch = 16
    axes = config.placement.trainer
    return toy.system(config, axes.time * axes.data * axes.fsdp, toy.ToyFamily(size=SIZE))


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
    parts: System, images: slice, steps: int = STEPS, advantages: np.ndarray = ADVANTAGES
) -> TrainBatch:
    """Some images in the trainer's form, with the first steps of each."""
    prompts, all_images = sampled()
    t = all_images.samples
    t = type(t)(*(part[:steps, images] for part in t[:3]), *(part[:steps] for part in t[3:5]))
    part = SampledImages(0, ROWS[images], t, all_images.sigmas)
    return receive(parts, prompts, part, advantages[images])


@functools.cache
def _differentiated():
    loss = functools.partial(plain_loss, toy.ToyFamily(size=SIZE).network)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def plain(
    tuning: str,
    old_log_prob: np.ndarray,
    steps: int = STEPS,
    by: float = 0.05,
    drawn: np.ndarray | None = None,
    advantages: np.ndarray = ADVANTAGES,
):
    """(mean gradient in float64, ratios [s b]) by a loop over single transitions on one device.

    `drawn` [s b] says which transitions there are, None: all. An image whose advantage is NaN is left
    out, and its ratios are 0.
    """
    drawn = np.ones((steps, len(ROWS)), bool) if drawn is None else drawn
    drawn = drawn & ~np.isnan(advantages)
    start = toy.ToyFamily(size=SIZE).params()["transformer"]
    prompts, (_, _, t, sigmas) = sampled()
    total, ratios = None, np.zeros((steps, len(ROWS)))
    for step in range(steps):
        for image, row in enumerate(ROWS):
            if not drawn[step, image]:
                continue
            sample = (t.x[step, image], t.x_next[step, image], old_log_prob[step, image])
            sample += (t.sigma[step], t.sigma_next[step], sigmas[1], advantages[image])
            prompt = [part[row][None] for part in prompts.conditioning]
            args = (tuned(tuning, by), start, SCALE, sample, prompt, tuple(prompts.null))
            (_, ratios[step, image]), found = _differentiated()(*args)
            found = jax.tree.map(np.float64, jax.device_get(found))
            total = found if total is None else jax.tree.map(np.add, total, found)
    return jax.tree.map(lambda a: a / drawn.sum(), total), ratios


@functools.cache
def plain_of_stored(tuning: str, steps: int):
    """`plain` with the log-probabilities that were stored when the images were sampled."""
    return plain(tuning, sampled()[1].samples.log_prob, steps)


@functools.cache
def log_probs(tuning: str, by: float) -> np.ndarray:
    """The log-probabilities [s b] of a policy, one by one."""
    _, ratios = plain(tuning, np.zeros((STEPS, len(ROWS)), np.float32), by=by)
    return np.log(ratios)


def mean(totals):
    """The gradient that an update takes."""
    return jax.tree.map(lambda g: g / totals.sums["weight"], totals.gradient)


def scaled(tree, by: float):
    return jax.tree.map(lambda a: by * jnp.asarray(a), tree)
