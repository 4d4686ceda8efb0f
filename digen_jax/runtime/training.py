"""The trainer mesh's executor: accumulates fragments, updates, and keeps the published versions."""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int

from digen_jax.engine.early import OpenGroup
from digen_jax.engine.hosts import put
from digen_jax.engine.packing import Endpoints
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.sampler import Prompts, Weights
from digen_jax.engine.system import Rollout, System
from digen_jax.engine.trainer import Experience, State
from digen_jax.runtime.clock import paused
from digen_jax.runtime.sampling import moved
from digen_jax.runtime.steps import Images, Step, Steps
from digen_jax.scheduling.commands import Fragment


class TrainingExecutor:
    """Trains on its mesh; every method returns once its work is done."""

    def __init__(
        self, system: System, steps: Steps, versions: "Versions", state: State, updates: int = 1
    ):
        self.state = state
        self._updates = updates  # of a step
        fixed = system.trainer.algorithm.set_steps > 0
        self._fixed = system.untuned() if fixed else None  # what samples a fixed set
        self._system, self._steps, self._versions = system, steps, versions
        self._totals = None
        self._groups: dict[int, OpenGroup] = {}  # those that are trained early, by number
        self._history: list[dict[str, jax.Array]] = []  # of the step's updates

    def train(self, fragment: Fragment, early: bool = False) -> None:
        """Adds a fragment's gradient to the update's; `early`: by way of its group's own sums."""
        step = self._steps.of(fragment)
        images = step.sampled.pop(fragment.index)
        if early:
            return self._train_early(step, step.cut(fragment.index), images)
        trainer, base = self._system.trainer, self._system.base
        experience = self._experience(step, fragment.index, images)
        read = trainer.algorithm.reads_behaviour
        behaviour = self._versions[images.version] if read else None
        self._totals = jax.block_until_ready(
            trainer.accumulate(self.state, base, experience, self._totals, behaviour, self._start())
        )
        return None

    def _start(self) -> Any:
        """The parameters at the step's start, where they are read and an update has changed them."""
        if not self._system.trainer.algorithm.reads_start or not self._history:
            return None
        return self._versions[self._steps.first]

    def _experience(self, step: Step, index: int, images: Images) -> Experience:
        """A scored fragment as the trainer takes it."""
        system = self._system
        if system.trainer.algorithm.ranks:
            return receive(system, step.prompts, images, step.ranking(index))
        lesson = step.lesson(index)
        if len(lesson.places) < len(images.rows):
            images = taken(images, lesson.places, system.placement.trainer)
        return receive(system, step.prompts, images, lesson.advantages, lesson.weight)

    def _train_early(self, step: Step, cut: slice, images: Images) -> None:
        """Adds a fragment to its group's sums, and these to the update's with the group's last one."""
        trainer, number, scores = self._system.trainer, int(step.rows[cut.start]), step.values[cut]
        # Whatever they will be: nobody may read them.
        advantages = np.full_like(scores, np.nan)
        experience = receive(self._system, step.prompts, images, advantages)
        begun, base = self._groups.pop(number, None), self._system.base
        group = trainer.accumulate_early(self.state, base, experience, scores, begun)
        jax.block_until_ready(group.sums)
        if len(group.rewards) < np.count_nonzero(step.rows == number):
            self._groups[number] = group
        else:
            std = self._system.advantages.std
            self._totals = jax.block_until_ready(trainer.close(group, self._totals, std))

    def update(self, version: int | None) -> None:
        """One optimizer update; the step's last one makes a version."""
        state = self.state._replace(tuned=self._versions.to_consume(self.state.tuned))
        step = self._steps[self._steps.first]
        std = None if self._totals.unscaled is None else step.reward_std
        self.state, metrics = self._system.trainer.update(state, self._totals, std)
        self._totals = None
        self._history.append(metrics)
        jax.block_until_ready(self.state)
        if version is not None:
            self.state = self._system.trainer.end_step(self.state, version * self._updates)
            self.publish(version)

    def publish(self, version: int) -> None:
        """Makes the behaviour policy a version."""
        tree = self._fixed
        if tree is None:
            tree = self._system.trainer.published(self.state)
        self._versions.add(version, tree, own=tree is self.state.tuned)

    def metrics(self) -> dict[str, float]:
        """The means over a step's updates, which are forgotten."""
        history, self._history = self._history, []
        means = jax.tree.map(lambda *values: sum(values) / len(values), *history)
        return {name: float(value) for name, value in means.items()}


class Versions:
    """The weights of each version that may be asked for, on the trainer mesh.

    The newest ones may be the trainer's own arrays. With `keep` an update consumes a copy of them, as
    something may still refer to the version; without it the version ends there.
    May be used by several threads.
    """

    def __init__(self, keep: bool):
        self._keep = keep
        self._trees: dict[int, Any] = {}
        self._own: int | None = None  # the version whose arrays are the trainer's own
        self._readers: list[tuple[Rollout, int]] = []  # with the versions that they read
        self._hung: set[int] = set()  # versions that a mesh may read for ever
        self._changed = threading.Condition()

    def __getitem__(self, version: int) -> Any:
        return self._trees[version]

    def __contains__(self, version: int) -> bool:
        return version in self._trees

    def add(self, version: int, tuned: Any, own: bool = True) -> None:
        """A version's weights; `own`: the arrays are the trainer's, whose next update consumes them."""
        with self._changed:
            self._trees[version] = tuned
            self._own = version if own else self._own

    def drop(self, version: int) -> None:
        """Frees a version's weights."""
        with self._changed:
            self._trees.pop(version, None)

    def send(self, version: int, rollout: Rollout) -> Weights | None:
        """A version on a sampling mesh, once it is there; None where it has ended. Any thread may ask."""
        with self._changed:
            if version not in self._trees:
                return None
            tuned = self._trees[version]
            reader = rollout, version
            self._readers.append(reader)
        try:
            return jax.block_until_ready(rollout.weights(tuned))
        finally:
            with self._changed:
                self._readers = [one for one in self._readers if one is not reader]
                self._changed.notify_all()

    def give_up(self, rollout: Rollout) -> None:
        """Nobody waits for a sampling mesh any more; what it reads is never consumed."""
        with self._changed:
            self._hung |= {version for reader, version in self._readers if reader is rollout}
            self._readers = [one for one in self._readers if one[0] is not rollout]
            self._changed.notify_all()

    def to_consume(self, tuned: Any) -> Any:
        """What an update is to consume in place of the trainer's arrays, which may be a version's."""
        with self._changed:
            version, self._own = self._own, None
            if version is None:
                return tuned
            if self._keep:
                return jax.tree.map(jnp.copy, tuned)
            with paused():  # the trainer: who reads has a deadline of its own
                self._changed.wait_for(lambda: not self._readers)
            del self._trees[version]
            return jax.tree.map(jnp.copy, tuned) if version in self._hung else tuned


def taken(images: Images, places: Int[np.ndarray, "k"], trainer: DeviceGroup) -> Images:
    """The images at some places of a fragment that lies on the trainer mesh, in their order, split as before.

    A place may come more than once. The devices divide the number of places.
    """
    samples, at = images.samples, put(places, trainer.replicated)
    if isinstance(samples, Endpoints):
        x0, keys = _gathered((samples.x0, samples.keys), at, 0, trainer.batch)
        samples = Endpoints(x0, keys, samples.sigmas)
    else:
        samples = _gathered(samples, at, 1, trainer.batch_of_steps)
    return images._replace(rows=images.rows[places], samples=samples)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gathered(tree: Any, places: Int[Array, "..."], axis: int, sharding: NamedSharding) -> Any:
    """Of arrays whose axis `axis` is that of the images those at `places`; what has no such axis stays as it is."""

    def gather(a: Array) -> Array:
        if a.ndim <= axis:
            return a
        return jax.lax.with_sharding_constraint(a[(slice(None),) * axis + (places,)], sharding)

    return jax.tree.map(gather, tree)


def receive(
    system: System,
    prompts: Prompts,
    images: Images,
    advantages: Float[Any, "b"],
    weight: Float32[Any, "b"] | None = None,
) -> Experience:
    """A fragment as the trainer takes it, on its mesh; `weight` None: all images train.

    For an algorithm that `ranks`, `advantages` are any numbers of the images' order.
    """
    group = system.placement.trainer
    images = moved(images, group)
    samples, rows = images.samples, images.rows
    weight = np.ones(len(rows), np.float32) if weight is None else weight
    prepared = system.trainer.algorithm.prepare(advantages, weight, rows)
    if prepared.pairs is not None:
        samples, rows = _paired(samples, prepared.pairs, group), rows[prepared.pairs[:, 0]]
    conditioning, null = jax.device_put(tuple(prompts), group.replicated)
    each = (put(a, group.batch) for a in (rows, prepared.advantages, prepared.weight))
    return Experience(samples, conditioning, null, *each, images.sigmas[1])


def _paired(
    samples: Endpoints, pairs: Int[np.ndarray, "groups 2"], group: DeviceGroup
) -> Endpoints:
    """Pairs of images as one, with the key of the preferred image, which is the first."""
    x0 = _gathered(samples.x0, put(pairs, group.replicated), 0, group.batch)
    keys = _gathered(samples.keys, put(pairs[:, 0], group.replicated), 0, group.batch)
    return Endpoints(x0, keys, samples.sigmas)
