"""Executors of training workers: each accumulates gradients of chunks, and the home worker updates."""

import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from digen_jax.algorithms.old_log_probs import check_ratio_spread
from digen_jax.parallel.accumulate import OpenGroup, Totals
from digen_jax.parallel.sampler import EncodedPrompts
from digen_jax.parallel.system import (
    SampledImages,
    System,
    make_train_batch,
    resharded,
    sample_shardings,
    select_images,
)
from digen_jax.parallel.trainer import TrainState
from digen_jax.runtime.array_transfer import (
    ArrayTransfer,
    ConditioningKey,
    ExactWeightsKey,
    MissingSums,
    SamplesKey,
    SumsKey,
    SyncedWeights,
    TrainedWeightsKey,
    TransferError,
)
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import ChunkAdvantages, Steps, StepScores
from digen_jax.scheduling.commands import TRAINER, Chunk, Deliver, Train, WeightsVersion
from digen_jax.scheduling.settings import Settings


class Sums(NamedTuple):
    """Sums of an update; `stale`: older versions generated some of the samples."""

    totals: Totals | None
    stale: Any  # a bool, or an array of one


class GradientExecutor:
    """Accumulates gradients of chunks on a mesh; every method returns when its work is done.

    Args:
      name: Name of the worker.
      system: Parts of the run on its mesh.
      steps: Steps of the run.
      transfer: Moves arrays between workers.
      trainers: Names of all training workers: each may get the samples that another one has.
    """

    def __init__(
        self,
        name: str,
        system: System,
        steps: Steps,
        transfer: ArrayTransfer,
        trainers: Collection[str],
    ):
        self.name, self.system = name, system
        self.devices = system.placement.trainer.mesh.size
        self.samples: dict[Chunk, SampledImages] = {}  # not yet trained
        self._steps, self._transfer, self._trainers = steps, transfer, trainers
        self._prompts: dict[int, EncodedPrompts] = {}  # by step
        self._prompts_lock = threading.Lock()
        self._totals: Totals | None = None
        self._trained: set[Chunk] = set()  # since the last update
        self._groups: dict[int, OpenGroup] = {}  # groups that are trained early, by number
        self._stale = False  # whether an older version generated some of the update's samples
        # Weights that sample a fixed set of images.
        self._fixed = system.untuned() if system.trainer.algorithm.set_steps > 0 else None

    def current(self, weights_version: WeightsVersion) -> TrainState:
        """Returns the parameters that are trained, and the slow copy."""
        raise NotImplementedError

    def version_weights(self, weights_version: WeightsVersion) -> Any:
        """Returns the weights of a version that sample, in the trainer's type."""
        raise NotImplementedError

    def deliver(self, command: Deliver) -> None:
        """Gets a chunk's samples from another worker, and with the first ones the step's prompts."""
        self._get_samples(command.worker, command.chunk, command.version)

    def _get_samples(self, worker: str, chunk: Chunk, version: int) -> None:
        group, several = self.system.placement.trainer, len(self._trainers) > 1
        step, key = self._steps.find(chunk), SamplesKey(worker, chunk)
        if step is None:
            self._transfer.delete(key)
            return
        with self._prompts_lock:  # one lock for the chunks of all workers
            if chunk.step not in self._prompts:

                def replicated(tree: Any) -> Any:
                    return jax.tree.map(lambda _: group.replicated, tree)

                prompts = ConditioningKey(worker, chunk.step)
                found = self._transfer.get(prompts, replicated, self.name)
                if found is None:  # its worker was just removed
                    raise TransferError(f"{worker} has no prompts of step {chunk.step}")
                self._prompts[chunk.step] = found
                if several:
                    self._transfer.put(ConditioningKey(self.name, chunk.step), found)
        samples = self._transfer.get(key, lambda tree: sample_shardings(tree, group), self.name)
        if not (several and worker in self._trainers):
            self._transfer.delete(key)
        if samples is None:
            if self._steps.find(chunk) is None:
                return
            raise TransferError(f"{worker} has no samples of chunk {chunk.index}")
        if several:
            self._transfer.put(SamplesKey(self.name, chunk), samples)
        self.samples[chunk] = SampledImages(
            version, step.rows[step.slice_of(chunk.index)], *samples
        )
        if self._steps.find(chunk) is None:
            self.drop_chunk(chunk)

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees a chunk that will not be trained."""
        if self.samples.pop(chunk, None) is not None:
            self._transfer.delete(SamplesKey(self.name, chunk))

    def train(self, command: Train, batch: ChunkAdvantages) -> None:
        """Adds the gradient of a chunk's passes to the update's, for early training through the sums of its group."""
        chunk, trainer = command.chunk, self.system.trainer
        state = self.current(WeightsVersion(chunk.step, update=command.update))
        if chunk not in self.samples:  # this worker has sampled it
            self._get_samples(self.name, chunk, command.version)
        images, prompts = self.samples[chunk], self._prompts[chunk.step]
        self._trained.add(chunk)
        if command.early:
            return self._train_early(chunk, batch.advantages, images, state)
        self._stale |= images.version != chunk.step
        if len(batch.places) < len(images.rows):
            images = select_images(images, batch.places, self.system.placement.trainer)
        train_batch = make_train_batch(self.system, prompts, images, batch.advantages, batch.weight)
        algorithm, behavior, start = trainer.algorithm, None, None
        if algorithm.reads_behavior:
            behavior = self.version_weights(WeightsVersion(images.version))
        if algorithm.reads_start and command.update:  # else no update has changed the parameters
            start = self.version_weights(WeightsVersion(chunk.step))
        piece, base = (command.first, command.count), self.system.base
        totals = trainer.accumulate(state, base, train_batch, self._totals, behavior, start, piece)
        self._totals = jax.block_until_ready(totals)
        return None

    def _train_early(
        self,
        chunk: Chunk,
        values: Float32[np.ndarray, "b"],
        images: SampledImages,
        state: TrainState,
    ) -> None:
        """Adds a chunk to its group's sums; the group's last chunk adds these to the update's."""
        trainer, number = self.system.trainer, int(images.rows[0])
        # Advantages are not known yet: nothing may read them.
        unknown = np.full_like(values, np.nan)
        train_batch = make_train_batch(self.system, self._prompts[chunk.step], images, unknown)
        group, base = self._groups.pop(number, None), self.system.base
        group = trainer.accumulate_early(state, base, train_batch, values, group)
        jax.block_until_ready(group.sums)
        if len(group.rewards) < np.count_nonzero(self._steps[chunk.step].rows == number):
            self._groups[number] = group
        else:
            std = self.system.advantages.std
            self._totals = jax.block_until_ready(trainer.close(group, self._totals, std))

    def sums(self, others: Sequence[str] = ()) -> Sums:
        """Returns the sums since the last update, added to those of other workers.

        Raises:
          MissingSums: A worker disconnected.
        """
        trainer, totals, stale = self.system.trainer, None, self._stale
        replicated = self.system.placement.trainer.replicated

        def shardings(sums: Sums) -> Sums:
            return Sums(trainer.shardings_of(sums.totals), replicated)

        for worker in others:
            try:
                other = self._transfer.get(SumsKey(worker), shardings, self.name)
            except TransferError as error:
                raise MissingSums(worker) from error
            if other is None:
                raise MissingSums(worker)
            totals, stale = trainer.add(totals, other.totals), stale or bool(other.stale)
        if totals is None:
            totals = self._totals
        elif self._totals is not None:
            totals = trainer.add(totals, self._totals)
        return Sums(jax.block_until_ready(totals), stale)

    def updated(self, first: int) -> None:
        """Frees the sums and samples of an update, and the samples and prompts of steps before `first`."""
        self._totals, self._stale = None, False
        # Another worker may have trained samples that this one has.
        for chunk in {*self._trained, *(one for one in list(self.samples) if one.step < first)}:
            self.drop_chunk(chunk)
        self._trained.clear()
        for step in [step for step in list(self._prompts) if step < first]:
            del self._prompts[step]
            self._transfer.delete(ConditioningKey(self.name, step))


class OtherTrainingExecutor(GradientExecutor):
    """A training worker that does not update: it stores the weights that it receives."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._weights: dict[WeightsVersion, TrainState] = {}
        self._version_weights: dict[WeightsVersion, Any] = {}

    def current(self, weights_version: WeightsVersion) -> TrainState:
        """See `GradientExecutor`."""
        return self._weights[weights_version]

    def take_trained(self, weights_version: WeightsVersion) -> bool:
        """Gets the weights that are trained; returns False if these are others."""
        params = self.system.placement.trainer.params

        def own_shardings(tree: Any) -> Any:
            tuned, copy = tree
            return params(tuned), None if copy is None else params(copy)

        found = self._transfer.get(TrainedWeightsKey(weights_version), own_shardings, self.name)
        if found is None:
            return False
        tuned, copy = found
        self._weights = {weights_version: TrainState(tuned, None, None, copy)}
        if not weights_version.update:
            tree = copy if self.system.trainer.algorithm.samples_from_copy else tuned
            self._version_weights[weights_version] = tree if self._fixed is None else self._fixed
        return True

    def version_weights(self, weights_version: WeightsVersion) -> Any:
        """See `GradientExecutor`; weights that were not received yet are transferred now."""
        if weights_version not in self._version_weights:
            params = self.system.placement.trainer.params
            found = self._transfer.get(ExactWeightsKey(weights_version), params, self.name)
            if found is None:
                number = weights_version.version
                raise TransferError(f"the weights of version {number} are not available")
            self._version_weights[weights_version] = found
        return self._version_weights[weights_version]

    def drop_weights(self, weights_version: WeightsVersion) -> None:
        """Frees the weights of a version."""
        self._version_weights.pop(weights_version, None)

    def share_weights(self, sampler: SamplingExecutor, weights_version: WeightsVersion) -> None:
        """Gives weights to this worker's sampler, unless it has received them."""
        if weights_version not in sampler.weights:
            sampler.hold(weights_version, self.version_weights(weights_version))

    def offer_sums(self, others: Sequence[str]) -> None:
        """Makes its sums available until the update, with those of other workers added. Raises MissingSums."""
        if self._totals is None:  # its process was restarted after it had trained
            raise MissingSums(self.name)
        self._transfer.put(SumsKey(self.name), self.sums(others))

    def updated(self, first: int) -> None:
        """See `GradientExecutor`."""
        self._transfer.delete(SumsKey(self.name))
        super().updated(first)


class TrainingExecutor(GradientExecutor):
    """The home worker: it trains, adds the sums of the others to its own, and updates."""

    def __init__(
        self,
        system: System,
        settings: Settings,
        steps: Steps,
        versions: SyncedWeights,
        transfer: ArrayTransfer,
        state: TrainState,
        trainers: Collection[str] = (TRAINER,),
    ):
        super().__init__(TRAINER, system, steps, transfer, trainers)
        self.state = state
        # The parameters on this worker's mesh if the state is sharded over all training workers.
        self._copy: TrainState | None = None
        self._settings, self._versions = settings, versions
        # The trained weights that are available to other training workers.
        self._available: WeightsVersion | None = None
        self._history: list[dict[str, jax.Array]] = []  # of the step's updates
        self._compared = False  # whether the ratios of an update on fresh samples were checked

    def current(self, weights_version: WeightsVersion) -> TrainState:
        """See `GradientExecutor`."""
        return self._copy or self.state

    def version_weights(self, weights_version: WeightsVersion) -> Any:
        """See `GradientExecutor`."""
        tree = self._versions[weights_version]
        return tree if self.system.joint_trainer is None else self._resharded(tree)

    def _resharded(self, tree: Any) -> Any:
        return resharded(tree, self.system.placement.trainer.params(tree))

    def update(self, scores: StepScores, version: int | None, others: Sequence[str] = ()) -> None:
        """One optimizer update; the last one of a step creates a version.

        Args:
          scores: Scores of the step.
          version: The version that the update creates. None means that it is not the step's last.
          others: Training workers whose sums are added.

        Raises:
          MissingSums: One of them disconnected; nothing has changed.
          ConfigError: Rounding moves the ratios too far; checked before the first update on fresh samples.
        """
        trainer, (totals, stale) = self.system.updater, self.sums(others)
        self._totals = self._copy = None  # so that the update has their memory
        totals = resharded(totals, trainer.shardings_of(totals))
        if not (stale or self._history or self._compared):
            self._compared = True
            check_ratio_spread(trainer.algorithm, totals.sums)
        # Before an update consumes the arrays that other training workers may get.
        if self._available is not None and not self._transfer.drain(
            TrainedWeightsKey(self._available)
        ):
            # A worker that hangs may still read them.
            self.state = jax.tree.map(jnp.copy, self.state)
        state = self._versions.to_consume(self.state)
        std = None if totals.unscaled is None else scores.std
        self.state, metrics = trainer.update(state, totals, std)
        self._history.append(metrics)
        jax.block_until_ready(self.state)
        self.updated(self._steps.first if version is None else version)
        if version is not None:
            self.state = trainer.end_step(self.state, version * self._settings.updates)
            self.add_version(version)
        else:
            self._make_available(WeightsVersion(self._steps.first, update=len(self._history)))

    def add_version(self, version: int) -> None:
        """Makes the behavior policy available as a version, and the evaluated weights if they differ and are due."""
        settings, tree = self._settings, self._fixed
        if tree is None:
            tree = self.system.updater.sampling_params(self.state)
        self._add(WeightsVersion(version), tree)
        if settings.separate_eval_weights and settings.evaluated_images(version):
            self._add(WeightsVersion(version, evaluated=True), self.state.evaluated)
        self._make_available(WeightsVersion(version))

    def _add(self, weights_version: WeightsVersion, tree: Any) -> None:
        fields = (field for field in ("tuned", "ema") if getattr(self.state, field) is tree)
        self._versions.add(weights_version, tree, next(fields, None))

    def _make_available(self, weights_version: WeightsVersion) -> None:
        """Makes the trained parameters available to the other training workers until the next update."""
        if self.system.joint_trainer is not None:
            tuned, copy = self.state.tuned, self.state.copy
            own_copy = None if copy is None else self._resharded(copy)
            self._copy = TrainState(self._resharded(tuned), None, None, own_copy)
        if len(self._trainers) > 1:
            self._available = weights_version
            self._transfer.put(
                TrainedWeightsKey(weights_version), (self.state.tuned, self.state.copy)
            )

    def metrics(self) -> dict[str, float]:
        """Returns the means over a step's updates, and resets them."""
        history, self._history = self._history, []
        means = jax.tree.map(lambda *values: sum(values) / len(values), *history)
        return {name: float(value) for name, value in means.items()}
