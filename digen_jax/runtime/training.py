"""The trainer mesh's executor: takes samples, accumulates gradients of fragments, updates and publishes."""

import functools
import threading
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int

from digen_jax.engine.early import OpenGroup
from digen_jax.engine.hosts import put
from digen_jax.engine.packing import Endpoints
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.sampler import EncodedPrompts
from digen_jax.engine.spread import check_spread
from digen_jax.engine.system import System, resharded
from digen_jax.engine.trainer import Experience, TrainState
from digen_jax.runtime.link import ConditioningOf, Link, SamplesOf
from digen_jax.runtime.scores import StepScores
from digen_jax.runtime.steps import Images, Steps
from digen_jax.runtime.versions import Versions
from digen_jax.scheduling.commands import TRAINER, Deliver, Fragment, Publication
from digen_jax.scheduling.settings import Settings


class TrainingExecutor:
    """Trains on its mesh; every method returns when its work is done."""

    def __init__(
        self,
        system: System,
        settings: Settings,
        steps: Steps,
        versions: Versions,
        link: Link,
        state: TrainState,
    ):
        self.state = state
        self.samples: dict[Fragment, Images] = {}  # delivered, not yet trained
        self._settings = settings
        fixed = system.trainer.algorithm.set_steps > 0
        self._fixed = system.untuned() if fixed else None  # weights that sample a fixed set
        self._system, self._steps, self._versions, self._link = system, steps, versions, link
        self._prompts: dict[int, EncodedPrompts] = {}  # by step
        self._taking = threading.Lock()
        self._totals = None
        self._groups: dict[int, OpenGroup] = {}  # groups that are trained early, by number
        self._history: list[dict[str, jax.Array]] = []  # of the step's updates
        self._compared = False  # whether the ratios of an update on fresh samples were checked
        self._stale = False  # whether an older version generated some of the update's samples

    def deliver(self, command: Deliver) -> None:
        """Takes a fragment's samples from the worker that generated it, and with the first ones the step's prompts."""
        group, fragment = self._system.placement.trainer, command.fragment
        step, key = self._steps.find(fragment), SamplesOf(command.worker, command.fragment)
        if step is None:
            self._link.withdraw(key)
            return
        with self._taking:  # one lock for the fragments of all workers
            if fragment.step not in self._prompts:
                prompts = ConditioningOf(command.worker, fragment.step)
                found = self._link.take(prompts, lambda tree: _everywhere(tree, group), TRAINER)
                if found is None:  # its worker was given up just now
                    return
                self._prompts[fragment.step] = found
        taken = self._link.take(key, lambda tree: shardings(tree, group), TRAINER)
        self._link.withdraw(key)
        if taken is None:
            return
        rows = step.rows[step.cut(fragment.index)]
        self.samples[fragment] = Images(command.version, rows, *taken)
        if self._steps.find(fragment) is None:
            self.drop_fragment(fragment)

    def drop_fragment(self, fragment: Fragment) -> None:
        """Frees a fragment that will not be trained."""
        self.samples.pop(fragment, None)

    def train(self, fragment: Fragment, scores: StepScores, early: bool = False) -> None:
        """Adds a fragment's gradient to the update's; `early`: through the sums of its group."""
        images = self.samples.pop(fragment)
        if early:
            return self._train_early(fragment, scores, images)
        trainer, base = self._system.trainer, self._system.base
        experience = self._experience(fragment, scores, images)
        self._stale |= images.version != fragment.step
        read = trainer.algorithm.reads_behaviour
        behaviour = self._versions[Publication(images.version)] if read else None
        self._totals = jax.block_until_ready(
            trainer.accumulate(self.state, base, experience, self._totals, behaviour, self._start())
        )
        return None

    def _start(self) -> Any:
        """The parameters at the step's start, if they are read and an update has changed them; else None."""
        if not self._system.trainer.algorithm.reads_start or not self._history:
            return None
        return self._versions[Publication(self._steps.first)]

    def _experience(self, fragment: Fragment, scores: StepScores, images: Images) -> Experience:
        """A scored fragment in the trainer's form."""
        system, prompts = self._system, self._prompts[fragment.step]
        if system.trainer.algorithm.ranks:
            return receive(system, prompts, images, scores.ranking(fragment.index))
        lesson = scores.lesson(fragment.index)
        if len(lesson.places) < len(images.rows):
            images = selected(images, lesson.places, system.placement.trainer)
        return receive(system, prompts, images, lesson.advantages, lesson.weight)

    def _train_early(self, fragment: Fragment, scores: StepScores, images: Images) -> None:
        """Adds a fragment to its group's sums; the group's last one adds these to the update's."""
        trainer, number, step = self._system.trainer, int(images.rows[0]), scores.images
        values = scores.values[step.cut(fragment.index)]
        # They are not known yet: nothing may read them.
        advantages = np.full_like(values, np.nan)
        experience = receive(self._system, self._prompts[fragment.step], images, advantages)
        begun, base = self._groups.pop(number, None), self._system.base
        group = trainer.accumulate_early(self.state, base, experience, values, begun)
        jax.block_until_ready(group.sums)
        if len(group.rewards) < np.count_nonzero(step.rows == number):
            self._groups[number] = group
        else:
            std = self._system.advantages.std
            self._totals = jax.block_until_ready(trainer.close(group, self._totals, std))

    def update(self, scores: StepScores, version: int | None) -> None:
        """One optimizer update of the step with these scores; the step's last update makes a version.

        Raises:
          ConfigError: rounding moves the ratios too far; checked before the first update on fresh samples.
        """
        self._compare()
        state = self._versions.to_consume(self.state)
        std = None if self._totals.unscaled is None else scores.std
        self.state, metrics = self._system.trainer.update(state, self._totals, std)
        self._totals = None
        self._history.append(metrics)
        jax.block_until_ready(self.state)
        if version is not None:
            for step in [step for step in self._prompts if step < version]:
                del self._prompts[step]
                self._link.withdraw(ConditioningOf(TRAINER, step))
            updates = version * self._settings.updates
            self.state = self._system.trainer.end_step(self.state, updates)
            self.publish(version)

    def _compare(self) -> None:
        """Checks once how far rounding moves the ratios, for samples of exactly the trained parameters."""
        fresh = not self._stale and not self._history
        self._stale = False
        if not fresh or self._compared:
            return
        self._compared = True
        check_spread(self._system.trainer.algorithm, self._totals.sums)

    def publish(self, version: int) -> None:
        """Publishes the behaviour policy as a version; if an evaluation with other weights is due, these too."""
        tree, settings = self._fixed, self._settings
        if tree is None:
            tree = self._system.trainer.published(self.state)
        self._add(Publication(version), tree)
        if settings.evaluated_apart and settings.evaluated_images(version):
            self._add(Publication(version, evaluated=True), self.state.evaluated)

    def _add(self, publication: Publication, tree: Any) -> None:
        """Publishes a tree, which may be a part of the state that the next update consumes."""
        own = (field for field in ("tuned", "ema") if getattr(self.state, field) is tree)
        self._versions.add(publication, tree, next(own, None))

    def metrics(self) -> dict[str, float]:
        """The means over a step's updates; forgets them."""
        history, self._history = self._history, []
        means = jax.tree.map(lambda *values: sum(values) / len(values), *history)
        return {name: float(value) for name, value in means.items()}


def shardings(samples: tuple[Any, Any], trainer: DeviceGroup) -> tuple[Any, Any]:
    """Shardings of (a fragment's samples, its sigmas) on the trainer mesh: images are split over the devices."""
    trained, whole = samples[0], trainer.replicated
    if isinstance(trained, Endpoints):
        return Endpoints(trainer.batch, trainer.batch, whole), whole
    split = trainer.batch_of_steps
    means = None if trained.mean is None else split
    sigma = split if trained.sigma.ndim == 2 else whole
    return type(trained)(split, split, split, sigma, sigma, means), whole


def on_trainer(images: Images, trainer: DeviceGroup) -> Images:
    """Moves a fragment from any mesh to the trainer mesh."""
    samples = images.samples, images.sigmas
    moved, sigmas = resharded(samples, shardings(samples, trainer))
    return images._replace(samples=moved, sigmas=sigmas)


def _everywhere(tree: Any, trainer: DeviceGroup) -> Any:
    return jax.tree.map(lambda _: trainer.replicated, tree)


def selected(images: Images, places: Int[np.ndarray, "k"], trainer: DeviceGroup) -> Images:
    """The images at some places of a fragment on the trainer mesh, in their order, with the same sharding.

    A place may occur more than once. The number of places must be a multiple of the devices.
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
    """Selects `places` on axis `axis`, the images'; arrays without this axis are unchanged."""

    def gather(a: Array) -> Array:
        if a.ndim <= axis:
            return a
        return jax.lax.with_sharding_constraint(a[(slice(None),) * axis + (places,)], sharding)

    return jax.tree.map(gather, tree)


def receive(
    system: System,
    prompts: EncodedPrompts,
    images: Images,
    advantages: Float[Any, "b"],
    weight: Float32[Any, "b"] | None = None,
) -> Experience:
    """A fragment on the trainer mesh in the trainer's form; `weight` None: all images train.

    For an algorithm that `ranks`, `advantages` are any numbers in the order of the images' ranks.
    """
    group = system.placement.trainer
    samples, rows = images.samples, images.rows
    weight = np.ones(len(rows), np.float32) if weight is None else weight
    prepared = system.trainer.algorithm.prepare(advantages, weight, rows)
    if prepared.pairs is not None:
        samples, rows = _paired(samples, prepared.pairs, group), rows[prepared.pairs[:, 0]]
    conditioning, null = prompts
    each = (put(a, group.batch) for a in (rows, prepared.advantages, prepared.weight))
    return Experience(samples, conditioning, null, *each, images.sigmas[1])


def _paired(
    samples: Endpoints, pairs: Int[np.ndarray, "groups 2"], group: DeviceGroup
) -> Endpoints:
    """Pairs of images as one sample, with the key of the preferred image, which is the first."""
    x0 = _gathered(samples.x0, put(pairs, group.replicated), 0, group.batch)
    keys = _gathered(samples.keys, put(pairs[:, 0], group.replicated), 0, group.batch)
    return Endpoints(x0, keys, samples.sigmas)
