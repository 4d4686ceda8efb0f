"""The training loop: prompts -> rollout -> rewards -> advantages -> updates -> publication.

One step after the other, generation and training in turn. Everything that a step computes is a
function of the parameters, the prompts' serials and the seed, so a resumed run repeats an unbroken one.
"""

import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from digen_jax import rewards
from digen_jax.algorithms.advantages import group_advantages, zero_std_groups
from digen_jax.flow.sampling import Trajectory, image_keys
from digen_jax.runtime.evaluation import by_tag
from digen_jax.runtime.sampler import Prompts, Weights
from digen_jax.runtime.system import System
from digen_jax.runtime.trainer import Experience, State


@dataclasses.dataclass
class Stopwatch:
    """Seconds spent in each named phase of a step."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Consecutive images of a step, its groups one after the other."""

    rows: Int[np.ndarray, "b"]  # each image's group within the step
    trajectory: Trajectory
    scores: Float[np.ndarray, "b"]


def run_step(
    system: System,
    config: Any,
    state: State,
    weights: Weights,
    records: list[dict],
    reward: rewards.Reward,
) -> tuple[State, Weights, dict[str, float]]:
    """One step: (state after it, weights as published, metrics)."""
    watch = Stopwatch()
    begin = time.perf_counter()
    prompts = system.sampler.encode(weights, [record["prompt"] for record in records])
    fragments = rollout(system, config, weights, prompts, records, reward, watch)
    scores = np.concatenate([fragment.scores for fragment in fragments])
    rows = np.concatenate([fragment.rows for fragment in fragments])
    with watch.phase("train"):
        state, metrics = learn(system, config, state, prompts, fragments, len(records))
        metrics = {name: float(value) for name, value in metrics.items()}
    with watch.phase("publish"):
        weights = jax.block_until_ready(system.publish(state.tuned))
    still = zero_std_groups(scores, rows, len(records))
    shown = [records[row] for row in rows]
    metrics |= {
        "reward": float(scores.mean()),
        "reward_std": float(scores.std()),
        "zero_std_groups": float(still.mean()),
        **{f"reward/{tag}": mean for tag, mean in by_tag(shown, scores).items()},
        **{f"reward_std/{tag}": std for tag, std in by_tag(shown, scores, np.std).items()},
        "images_per_second": len(scores) / (time.perf_counter() - begin),
        **{f"seconds/{name}": seconds for name, seconds in watch.seconds.items()},
    }
    return state, weights, metrics


def rollout(
    system: System,
    config: Any,
    weights: Weights,
    prompts: Prompts,
    records: list[dict],
    reward: rewards.Reward,
    watch: Stopwatch,
) -> list[Fragment]:
    """All of a step's images, fragment by fragment; one is scored while the next is generated."""
    size, images = config.sampler.fragment, config.batch.images
    rows = np.repeat(np.arange(len(records), dtype=np.int32), images)
    serials = np.asarray([record["serial"] for record in records])[rows]
    numbers = np.tile(np.arange(images), len(records))
    keys = image_keys(jax.random.key(config.seed), serials, numbers)
    cuts = [slice(i, i + size) for i in range(0, len(rows), size)]
    begun = [system.sampler.generate(weights, prompts, rows[cut], keys[cut]) for cut in cuts]
    fragments = []
    for cut, (pictures, trajectory) in zip(cuts, begun, strict=True):
        with watch.phase("rollout"):
            pictures = np.asarray(pictures)
        with watch.phase("reward"):
            shown = [records[row] for row in rows[cut]]
            texts = [record["prompt"] for record in shown]
            scores = rewards.call(reward, config.reward.name, pictures, texts, shown)
        fragments.append(Fragment(rows[cut], trajectory, scores))
    return fragments


def learn(
    system: System,
    config: Any,
    state: State,
    prompts: Prompts,
    fragments: list[Fragment],
    groups: int,
) -> tuple[State, dict[str, jax.Array]]:
    """The step's updates, each on its own consecutive groups; metrics are the updates' means."""
    scores = np.concatenate([fragment.scores for fragment in fragments])
    rows = np.concatenate([fragment.rows for fragment in fragments])
    advantages = group_advantages(scores, rows, groups, config.algorithm.advantage_std)
    pieces = np.split(advantages, len(fragments))
    prompts = jax.device_put(prompts, system.placement.trainer.replicated)
    trained = [
        receive(system, prompts, fragment, piece)
        for fragment, piece in zip(fragments, pieces, strict=True)
    ]
    share = len(trained) // config.trainer.updates
    recomputed = system.trainer.algorithm.old_log_probs == "recomputed"
    behaviour = system.trainer.snapshot(state) if recomputed else None
    history = []
    for first in range(0, len(trained), share):
        totals = None
        for experience in trained[first : first + share]:
            totals = system.trainer.accumulate(state, system.base, experience, totals, behaviour)
        state, metrics = system.trainer.update(state, totals)
        history.append(metrics)
    return state, jax.tree.map(lambda *values: sum(values) / len(values), *history)


def receive(
    system: System, prompts: Prompts, fragment: Fragment, advantages: Float[np.ndarray, "b"]
) -> Experience:
    """A fragment moved from the rollout mesh to the trainer mesh, its images split over the devices."""
    group = system.placement.trainer
    transitions = fragment.trajectory.transitions
    experience = Experience(
        transitions, *prompts, fragment.rows, advantages, fragment.trajectory.sigmas[1]
    )
    whole = group.replicated
    shardings = Experience(
        type(transitions)(*(group.batch_of_steps,) * 3, whole, whole),
        *(jax.tree.map(lambda _: whole, part) for part in prompts),
        group.batch,
        group.batch,
        whole,
    )
    return jax.device_put(experience, shardings)


class Interrupt:
    """Remembers a first Ctrl-C or SIGTERM, so that a step is finished and saved; a second one ends at once.

    `asked` is the signal's number, 0 while there was none.
    """

    def __init__(self):
        self.asked = 0

    def __enter__(self) -> "Interrupt":
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = number
        print("\nfinishing this step, then saving; once more ends at once", file=sys.stderr)
