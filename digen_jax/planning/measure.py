"""Costs of commands on the available devices, timed with one chunk in the parts of a run."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from digen_jax import rewards
from digen_jax.config.train_config import TrainConfig
from digen_jax.images import reward_input, to_uint8
from digen_jax.learned_rewards.on_mesh import named
from digen_jax.parallel.accumulate import trained_part
from digen_jax.parallel.mesh import put
from digen_jax.parallel.system import (
    SampledImages,
    System,
    make_train_batch,
    move_to_trainer,
    select_images,
)
from digen_jax.rewards.built_in import on_mesh
from digen_jax.scheduling.settings import Costs

REPEATS = 3  # after one call that compiles; their median is used

UNMEASURED = ("score_latency", "switch")


def measure(
    system: System,
    recipe: TrainConfig,
    records: list[dict],
    asked: rewards.Rewards,
    note: Callable[[str], None],
) -> Costs:
    """Measures seconds of commands on the system's own meshes.

    Args:
      system: built from the recipe; its trainer's state is consumed.
      recipe: defines the step and the chunk.
      records: the prompts of a step, one a group.
      asked: score the images; the seconds of those on the mesh are a part of decoding.
      note: called for each part, before its compilation and with its seconds.
    """

    def timed_part(name: str, call: Callable[[], Any]) -> tuple[Any, float]:
        note(f"{name}: compiling and timing")
        result, seconds = timed(call)
        note(f"{name}: {seconds:.4g} s")
        return result, seconds

    size = recipe.sampler.chunk
    rows = np.repeat(np.arange(len(records), dtype=np.int32), recipe.batch.images)[:size]
    numbers = np.tile(np.arange(recipe.batch.images), len(records))[:size]
    drawn = system.rng.draw(0, rows, numbers)
    state = system.trainer.init(system.start)
    weights, sync = timed_part("sync", lambda: system.rollout_weights(state.tuned))
    prompts, encode = timed_part("encode", lambda: system.sampler.encode(weights, records))
    made, generate = timed_part(
        "generate", lambda: system.sampler.generate(weights, prompts, rows, *drawn)
    )
    decoded, decode = timed_part("decode", lambda: system.sampler.decode(weights, made))
    shown = [records[row] for row in rows]
    batch = reward_input(to_uint8(np.asarray(decoded))), [one["prompt"] for one in shown], shown
    on_meshes, others = divided(system, asked)
    judging = 0.0
    if on_meshes:
        _, judging = timed_part("score on the mesh", lambda: columns(on_meshes, batch))
    _, score = timed_part("score", lambda: columns(others, batch))
    samples = trained_part(made, put(drawn.keys, system.sampler.group.batch))
    images = SampledImages(0, rows, samples, made.sigmas)
    advantages = np.linspace(-1, 1, size, dtype=np.float32)
    local = jax.device_put(prompts, system.placement.trainer.replicated)

    trainer, count = system.placement.trainer, system.advantages.kept(size, recipe.batch.images)
    delivered, deliver = timed_part("deliver", lambda: move_to_trainer(images, trainer)[2:])

    def accumulate() -> Any:
        given = SampledImages(0, rows, *delivered)
        if count < size:
            given = select_images(given, np.arange(count), trainer)
        train_batch = make_train_batch(system, local, given, advantages[:count])
        return system.trainer.accumulate(state, system.base, train_batch, None, state.tuned)

    totals, train = timed_part("train", accumulate)
    _, update = timed_part("update", _updates(system, state, totals))
    return Costs(
        generate=generate / size,
        train=train / size,
        decode=(decode + judging) / size,
        encode=encode,
        score=score / size,
        update=update,
        sync=sync,
        deliver=deliver / size,
    )


def divided(
    system: System, asked: rewards.Rewards
) -> tuple[dict[int, rewards.NamedReward], dict[int, rewards.NamedReward]]:
    """(the rewards on the sampling mesh, all others), by their numbers."""
    here = named(on_mesh([one.settings for one in asked.members]), system.rollouts[0].scorers)
    others = {i: one for i, one in enumerate(asked.members) if i not in here}
    return here, others


def columns(members: Mapping[int, rewards.NamedReward], batch: rewards.Batch) -> list[np.ndarray]:
    """The scores of some rewards."""
    return [answer.columns for _, _, answer in rewards.answers(members, batch)]


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """(the result of a call, the median of its seconds after a first call that may compile)."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def _updates(system: System, state: Any, totals: Any) -> Callable[[], Any]:
    """A call that updates; each consumes the state of the previous one."""
    held = [state]

    def update() -> Any:
        held[0], metrics = system.trainer.update(held[0], totals)
        return held[0], metrics

    return update
