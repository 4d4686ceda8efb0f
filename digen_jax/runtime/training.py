"""Executors of the training meshes: each accumulates gradients of chunks, and the home worker's updates."""

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int

from digen_jax.engine.early import OpenGroup
from digen_jax.engine.hosts import put
from digen_jax.engine.objective import Totals
from digen_jax.engine.packing import Endpoints
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.sampler import EncodedPrompts
from digen_jax.engine.spread import check_spread
from digen_jax.engine.system import System, resharded
from digen_jax.engine.trainer import Experience, TrainState
from digen_jax.runtime.link import (
    ConditioningOf,
    ExactOf,
    Link,
    LinkError,
    SamplesOf,
    TrainedOf,
)
from digen_jax.runtime.scores import StepScores
from digen_jax.runtime.steps import Images, Steps
from digen_jax.runtime.versions import Versions
from digen_jax.scheduling.commands import TRAINER, Chunk, Deliver, Publication, Train
from digen_jax.scheduling.settings import Settings


class Sums(NamedTuple):
    """What a worker has trained of an update; `stale`: older versions generated some of its samples."""

    totals: Totals | None
    stale: bool


class GradientExecutor:
    """Accumulates gradients of chunks on a mesh; every method returns when its work is done.

    `trainers` are the names of all training workers: each may take the samples that another one has.
    """

    def __init__(
        self, name: str, system: System, steps: Steps, link: Link, trainers: Collection[str]
    ):
        self.name, self.samples = name, {}  # Chunk: Images, not yet trained
        self.system, self._steps, self._link = system, steps, link
        self._trainers = trainers
        self._prompts: dict[int, EncodedPrompts] = {}  # by step
        self._taking = threading.Lock()
        self._totals: Totals | None = None
        self._trained: set[Chunk] = set()  # since the last update
        self._groups: dict[int, OpenGroup] = {}  # groups that are trained early, by number
        self._stale = False  # whether an older version generated some of the update's samples

    @property
    def devices(self) -> int:
        """Of its mesh."""
        return self.system.placement.trainer.mesh.size

    def deliver(self, command: Deliver) -> None:
        """Takes a chunk's samples from another worker, and with the first ones the step's prompts."""
        self._take(command.worker, command.chunk, command.version)

    def _take(self, worker: str, chunk: Chunk, version: int) -> None:
        group, several = self.system.placement.trainer, len(self._trainers) > 1
        step, key = self._steps.find(chunk), SamplesOf(worker, chunk)
        if step is None:
            self._link.withdraw(key)
            return
        with self._taking:  # one lock for the chunks of all workers
            if chunk.step not in self._prompts:
                prompts = ConditioningOf(worker, chunk.step)
                found = self._link.take(prompts, lambda tree: _everywhere(tree, group), self.name)
                if found is None:  # its worker was given up just now
                    raise LinkError(f"{worker} has no prompts of step {chunk.step}")
                self._prompts[chunk.step] = found
                if several:
                    self._link.offer(ConditioningOf(self.name, chunk.step), found)
        taken = self._link.take(key, lambda tree: shardings(tree, group), self.name)
        if not (several and worker in self._trainers):
            self._link.withdraw(key)
        if taken is None:
            if self._steps.find(chunk) is None:
                return
            raise LinkError(f"{worker} has no samples of chunk {chunk.index}")
        if several:
            self._link.offer(SamplesOf(self.name, chunk), taken)
        rows = step.rows[step.cut(chunk.index)]
        self.samples[chunk] = Images(version, rows, *taken)
        if self._steps.find(chunk) is None:
            self.drop_chunk(chunk)

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees a chunk that will not be trained."""
        if self.samples.pop(chunk, None) is not None:
            self._link.withdraw(SamplesOf(self.name, chunk))

    def add(
        self,
        command: Train,
        scores: StepScores,
        state: TrainState,
        published: Callable[[Publication], Any],
    ) -> None:
        """Adds the gradient of a chunk's passes to the update's; `early`: through the sums of its group.

        Args:
          command: says which passes.
          scores: of the step.
          state: the parameters that are trained, and the slow copy.
          published: gives the published weights of a version.
        """
        chunk = command.chunk
        if chunk not in self.samples:  # this worker has sampled it
            self._take(self.name, chunk, command.version)
        images = self.samples[chunk]
        self._trained.add(chunk)
        if command.early:
            return self._add_early(chunk, scores, images, state)
        trainer, base = self.system.trainer, self.system.base
        experience = self._experience(chunk, scores, images)
        self._stale |= images.version != chunk.step
        reads = trainer.algorithm
        behaviour = published(Publication(images.version)) if reads.reads_behaviour else None
        # At the step's start, unless no update has changed the parameters.
        start = published(Publication(chunk.step)) if reads.reads_start and command.update else None
        piece = command.first, command.count
        self._totals = jax.block_until_ready(
            trainer.accumulate(state, base, experience, self._totals, behaviour, start, piece)
        )
        return None

    def _experience(self, chunk: Chunk, scores: StepScores, images: Images) -> Experience:
        """A scored chunk in the trainer's form."""
        system, prompts = self.system, self._prompts[chunk.step]
        if system.trainer.algorithm.ranks:
            return receive(system, prompts, images, scores.ranking(chunk.index))
        lesson = scores.lesson(chunk.index)
        if len(lesson.places) < len(images.rows):
            images = selected(images, lesson.places, system.placement.trainer)
        return receive(system, prompts, images, lesson.advantages, lesson.weight)

    def _add_early(
        self, chunk: Chunk, scores: StepScores, images: Images, state: TrainState
    ) -> None:
        """Adds a chunk to its group's sums; the group's last one adds these to the update's."""
        trainer, number, step = self.system.trainer, int(images.rows[0]), scores.images
        values = scores.values[step.cut(chunk.index)]
        # They are not known yet: nothing may read them.
        advantages = np.full_like(values, np.nan)
        experience = receive(self.system, self._prompts[chunk.step], images, advantages)
        begun, base = self._groups.pop(number, None), self.system.base
        group = trainer.accumulate_early(state, base, experience, values, begun)
        jax.block_until_ready(group.sums)
        if len(group.rewards) < np.count_nonzero(step.rows == number):
            self._groups[number] = group
        else:
            std = self.system.advantages.std
            self._totals = jax.block_until_ready(trainer.close(group, self._totals, std))

    def sums(self) -> Sums:
        """The sums since the last update, which it forgets."""
        found, self._totals, self._stale = Sums(self._totals, self._stale), None, False
        return found

    def updated(self, first: int) -> None:
        """Frees what an update has trained, and the prompts of steps before `first`."""
        for chunk in self._trained:
            self.drop_chunk(chunk)
        self._trained.clear()
        for step in [step for step in self._prompts if step < first]:
            del self._prompts[step]
            self._link.withdraw(ConditioningOf(self.name, step))


class OtherTrainingExecutor(GradientExecutor):
    """A training worker that does not update: it holds the weights that it was sent."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._weights: dict[Publication, TrainState] = {}
        self._published: dict[Publication, Any] = {}
        algorithm = self.system.trainer.algorithm
        self._copied = algorithm.publishes_copy
        fixed = algorithm.set_steps > 0
        self._fixed = self.system.untuned() if fixed else None

    def receive(self, publication: Publication) -> bool:
        """Takes the weights that are trained; False: these are others."""
        found = self._link.take(TrainedOf(publication), self._shardings, self.name)
        if found is None:
            return False
        tuned, copy = found
        self._weights = {publication: TrainState(tuned, None, None, copy)}
        if not publication.update:
            fixed, own = self._fixed, copy if self._copied else tuned
            self._published[publication] = own if fixed is None else fixed
        return True

    def published(self, publication: Publication) -> Any:
        """The published weights of a version, in the trainer's type; they are taken if they were never sent."""
        if publication not in self._published:
            params = self.system.placement.trainer.params
            found = self._link.take(ExactOf(publication), params, self.name)
            if found is None:
                raise LinkError(f"the weights of version {publication.version} are gone")
            self._published[publication] = found
        return self._published[publication]

    def train(self, command: Train, scores: StepScores) -> None:
        """See `GradientExecutor.add`."""
        current = Publication(command.chunk.step, update=command.update)
        self.add(command, scores, self._weights[current], self.published)

    def drop_weights(self, publication: Publication) -> None:
        """Frees the published weights of a version."""
        self._published.pop(publication, None)

    def _shardings(self, tree: Any) -> Any:
        tuned, copy = tree
        params = self.system.placement.trainer.params
        return params(tuned), None if copy is None else params(copy)


class TrainingExecutor(GradientExecutor):
    """The home worker: it trains, adds the sums of the others to its own, updates and publishes."""

    def __init__(
        self,
        system: System,
        settings: Settings,
        steps: Steps,
        versions: Versions,
        link: Link,
        state: TrainState,
        trainers: Collection[str] = (TRAINER,),
    ):
        super().__init__(TRAINER, system, steps, link, trainers)
        self.state = state
        self._settings, self._versions = settings, versions
        fixed = system.trainer.algorithm.set_steps > 0
        self._fixed = system.untuned() if fixed else None  # weights that sample a fixed set
        self._offered: Publication | None = None  # to other training workers
        self._history: list[dict[str, jax.Array]] = []  # of the step's updates
        self._compared = False  # whether the ratios of an update on fresh samples were checked

    def train(self, command: Train, scores: StepScores) -> None:
        """See `GradientExecutor.add`."""
        self.add(command, scores, self.state, self._versions.__getitem__)

    def update(self, scores: StepScores, version: int | None, others: Sequence[Sums] = ()) -> None:
        """One optimizer update of the step with these scores; the step's last update makes a version.

        Args:
          scores: of the step.
          version: the one that it makes, None: it is not the step's last.
          others: the sums of other training workers, which are consumed.

        Raises:
          ConfigError: rounding moves the ratios too far; checked before the first update on fresh samples.
        """
        trainer, (totals, stale) = self.system.trainer, self.sums()
        for other in others:
            totals, stale = trainer.add(totals, other.totals), stale or other.stale
        self._compare(totals, stale)
        self._withdraw()
        state = self._versions.to_consume(self.state)
        std = None if totals.unscaled is None else scores.std
        self.state, metrics = trainer.update(state, totals, std)
        self._history.append(metrics)
        jax.block_until_ready(self.state)
        self.updated(self._steps.first if version is None else version)
        if version is not None:
            updates = version * self._settings.updates
            self.state = trainer.end_step(self.state, updates)
            self.publish(version)
        else:
            self._offer(Publication(self._steps.first, update=len(self._history)))

    def _compare(self, totals: Totals, stale: bool) -> None:
        """Checks once how far rounding moves the ratios, for samples of exactly the trained parameters."""
        if stale or self._history or self._compared:
            return
        self._compared = True
        check_spread(self.system.trainer.algorithm, totals.sums)

    def publish(self, version: int) -> None:
        """Publishes the behaviour policy as a version; if an evaluation with other weights is due, these too."""
        tree, settings = self._fixed, self._settings
        if tree is None:
            tree = self.system.trainer.published(self.state)
        self._add(Publication(version), tree)
        if settings.evaluated_apart and settings.evaluated_images(version):
            self._add(Publication(version, evaluated=True), self.state.evaluated)
        self._offer(Publication(version))

    def _add(self, publication: Publication, tree: Any) -> None:
        """Publishes a tree, which may be a part of the state that the next update consumes."""
        own = (field for field in ("tuned", "ema") if getattr(self.state, field) is tree)
        self._versions.add(publication, tree, next(own, None))

    def _offer(self, publication: Publication) -> None:
        """Offers the parameters that are trained to the other training workers, until the next update."""
        if len(self._trainers) > 1:
            self._offered = publication
            self._link.offer(TrainedOf(publication), (self.state.tuned, self.state.copy))

    def _withdraw(self) -> None:
        """Ends the offer before an update consumes these arrays."""
        if self._offered is not None and not self._link.settle(TrainedOf(self._offered)):
            # A worker that hangs may still read them.
            self.state = jax.tree.map(jnp.copy, self.state)

    def metrics(self) -> dict[str, float]:
        """The means over a step's updates; forgets them."""
        history, self._history = self._history, []
        means = jax.tree.map(lambda *values: sum(values) / len(values), *history)
        return {name: float(value) for name, value in means.items()}


def shardings(samples: tuple[Any, Any], trainer: DeviceGroup) -> tuple[Any, Any]:
    """Shardings of (a chunk's samples, its sigmas) on the trainer mesh: images are split over the devices."""
    trained, whole = samples[0], trainer.replicated
    if isinstance(trained, Endpoints):
        return Endpoints(trainer.batch, trainer.batch, whole), whole
    split = trainer.batch_of_steps
    means = None if trained.mean is None else split
    sigma = split if trained.sigma.ndim == 2 else whole
    return type(trained)(split, split, split, sigma, sigma, means), whole


def on_trainer(images: Images, trainer: DeviceGroup) -> Images:
    """Moves a chunk from any mesh to the trainer mesh."""
    samples = images.samples, images.sigmas
    moved, sigmas = resharded(samples, shardings(samples, trainer))
    return images._replace(samples=moved, sigmas=sigmas)


def _everywhere(tree: Any, trainer: DeviceGroup) -> Any:
    return jax.tree.map(lambda _: trainer.replicated, tree)


def selected(images: Images, places: Int[np.ndarray, "k"], trainer: DeviceGroup) -> Images:
    """The images at some places of a chunk on the trainer mesh, in their order, with the same sharding.

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
    """A chunk on the trainer mesh in the trainer's form; `weight` None: all images train.

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
