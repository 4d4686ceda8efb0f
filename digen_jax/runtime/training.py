"""Training executors: every training worker accumulates gradients of chunks; the home worker runs the optimizer."""

import functools
import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from digen_jax.algorithms.losses import check_ratio_spread
from digen_jax.parallel.accumulate import OpenGroup, Totals
from digen_jax.parallel.policy import EncodedPrompts
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


class Sums(NamedTuple):
    """Gradient sums of an update. `stale` is true if older versions generated some of the samples."""

    totals: Totals | None
    stale: Any  # bool or bool array


class GradientExecutor:
    """Accumulates gradients of chunks on a mesh; every method blocks until its work is done.

    `system` is on the worker's mesh. All training workers, named `trainers`, can get samples from one another.
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
        mesh = system.placement.trainer.mesh
        self.devices, self.device_kind = mesh.size, mesh.devices.flat[0].device_kind
        self.samples: dict[Chunk, SampledImages] = {}  # not yet trained
        self._steps, self._transfer, self._trainers = steps, transfer, trainers
        self._prompts: dict[int, EncodedPrompts] = {}  # by step
        self._prompts_lock = threading.Lock()
        self._totals: Totals | None = None
        self._trained: set[Chunk] = set()  # since the last update
        self._groups: dict[int, OpenGroup] = {}  # by group number: groups in early training
        self._stale = False  # see `Sums`
        # Sampling weights of algorithms that train on a fixed set of images.
        self._fixed = system.untuned() if system.trainer.algorithm.set_steps > 0 else None

    def current(self, weights_version: WeightsVersion) -> TrainState:
        """Returns the trained parameters and their `TrainState.copy`."""
        raise NotImplementedError

    def version_weights(self, weights_version: WeightsVersion) -> Any:
        """Returns the sampling weights of a version in the trainer's dtype."""
        raise NotImplementedError

    def deliver(self, command: Deliver) -> None:
        """Gets a chunk's samples and, for the first chunk of a step, the encoded prompts from another worker."""
        self._get_samples(command.worker, command.chunk, command.version)

    def _get_samples(self, worker: str, chunk: Chunk, version: int) -> None:
        group, several = self.system.placement.trainer, len(self._trainers) > 1
        step, key = self._steps.find(chunk), SamplesKey(worker, chunk)
        if step is None:
            self._transfer.delete(key)
            return
        with self._prompts_lock:  # chunks arrive from several threads
            if chunk.step not in self._prompts:
                replicated = functools.partial(jax.tree.map, lambda _: group.replicated)
                prompts = ConditioningKey(worker, chunk.step)
                found = self._transfer.get(prompts, replicated, self.name)
                if found is None:  # the worker was just removed
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
        """Frees a chunk's samples."""
        if self.samples.pop(chunk, None) is not None:
            self._transfer.delete(SamplesKey(self.name, chunk))

    def train(self, command: Train, batch: ChunkAdvantages) -> None:
        """Adds the gradient of a chunk's passes to the update's sums; in early training, to its group's sums."""
        chunk, trainer = command.chunk, self.system.trainer
        state = self.current(WeightsVersion(chunk.step, update=command.update))
        if chunk not in self.samples:  # sampled on this worker
            self._get_samples(self.name, chunk, command.version)
        images, prompts = self.samples[chunk], self._prompts[chunk.step]
        self._trained.add(chunk)
        if command.early:
            return self._train_early(chunk, batch.advantages, images, state)
        self._stale |= images.version != chunk.step
        if len(batch.places) < len(images.rows):
            images = select_images(images, batch.places, self.system.placement.trainer)
        records = self._steps[chunk.step].records
        train_batch = make_train_batch(
            self.system, prompts, images, batch.advantages, batch.weight, records
        )
        algorithm, behavior, start = trainer.algorithm, None, None
        if algorithm.reads_behavior:
            behavior = self.version_weights(WeightsVersion(images.version))
        if algorithm.reads_start and command.update:  # else they are the current ones
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
        """Adds a chunk to its group's sums. The group's last chunk adds these to the update's sums."""
        trainer, number = self.system.trainer, int(images.rows[0])
        # Advantages are not known yet; NaN exposes any read.
        unknown = np.full_like(values, np.nan)
        train_batch = make_train_batch(self.system, self._prompts[chunk.step], images, unknown)
        group, base = self._groups.pop(number, None), self.system.base
        group = trainer.accumulate_early(state, base, train_batch, values, group)
        jax.block_until_ready(group.sums)
        if len(group.rewards) < np.count_nonzero(self._steps[chunk.step].rows == number):
            self._groups[number] = group
        else:
            std: Any = self.system.advantages.std
            self._totals = jax.block_until_ready(trainer.close(group, self._totals, std))

    def sums(self, others: Sequence[str] = ()) -> Sums:
        """Returns the sums since the last update plus those of other workers.

        Raises:
          MissingSums: A worker disconnected.
        """
        trainer, totals, stale = self.system.trainer, None, self._stale

        def shardings(sums: Sums) -> Sums:
            return Sums(trainer.shardings_of(sums.totals), self.system.placement.trainer.replicated)

        for worker in others:
            try:
                other = self._transfer.get(SumsKey(worker), shardings, self.name)
            except TransferError as error:
                raise MissingSums(worker) from error
            if other is None:
                raise MissingSums(worker)
            totals, stale = trainer.add(totals, other.totals), stale or bool(other.stale)
        if self._totals is not None:
            totals = trainer.add(totals, self._totals)
        return Sums(jax.block_until_ready(totals), stale)

    def updated(self, first: int) -> None:
        """Frees the sums and samples of an update, and the samples and prompts of steps before `first`."""
        self._totals, self._stale = None, False
        # Also samples that another worker trained.
        for chunk in {*self._trained, *(one for one in list(self.samples) if one.step < first)}:
            self.drop_chunk(chunk)
        self._trained.clear()
        for step in [step for step in list(self._prompts) if step < first]:
            del self._prompts[step]
            self._transfer.delete(ConditioningKey(self.name, step))


class OtherTrainingExecutor(GradientExecutor):
    """Executor of a training worker without the optimizer; it stores received weights."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._weights: dict[WeightsVersion, TrainState] = {}
        self._version_weights: dict[WeightsVersion, Any] = {}

    def current(self, weights_version: WeightsVersion) -> TrainState:
        """See `GradientExecutor`."""
        return self._weights[weights_version]

    def take_trained(self, weights_version: WeightsVersion) -> bool:
        """Gets the trained weights. Returns False if these are not the current ones."""
        params = self.system.placement.trainer.params

        def own_shardings(tree: Any) -> Any:
            tuned, copy = tree
            return params(tuned), None if copy is None else params(copy)

        found = self._transfer.get(TrainedWeightsKey(weights_version), own_shardings, self.name)
        if found is None:
            return False
        tuned, copy = found
        state = TrainState(tuned, None, None, copy)
        self._weights = {weights_version: state}
        if not weights_version.update:
            updates = weights_version.version * self._steps.settings.updates
            tree = self.system.trainer.sampling_params(state, updates)
            tree = tree if self._fixed is None else self._fixed
            if tree is not None:  # a separate copy that samples is not sent with these
                self._version_weights[weights_version] = tree
        return True

    def version_weights(self, weights_version: WeightsVersion) -> Any:
        """See `GradientExecutor`. Transfers weights that were not received yet."""
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
        """Passes weights to this worker's sampler, unless it has received them."""
        if weights_version not in sampler.weights:
            sampler.hold(weights_version, self.version_weights(weights_version))

    def offer_sums(self, others: Sequence[str]) -> None:
        """Offers its sums plus those of other workers until the update. Raises MissingSums."""
        if self._totals is None:  # the process restarted after training
            raise MissingSums(self.name)
        self._transfer.put(SumsKey(self.name), self.sums(others))

    def updated(self, first: int) -> None:
        """See `GradientExecutor`."""
        self._transfer.delete(SumsKey(self.name))
        super().updated(first)


class TrainingExecutor(GradientExecutor):
    """Executor of the home worker: trains, reduces the sums of all workers, and runs the optimizer."""

    def __init__(
        self,
        system: System,
        steps: Steps,
        versions: SyncedWeights,
        transfer: ArrayTransfer,
        state: TrainState,
        trainers: Collection[str] = (TRAINER,),
    ):
        super().__init__(TRAINER, system, steps, transfer, trainers)
        self.state = state
        # Parameters on this worker's mesh if the state is sharded over all training workers.
        self._copy: TrainState | None = None
        self._versions = versions
        # Version of the trained weights offered to other training workers.
        self._available: WeightsVersion | None = None
        self._history: list[dict[str, jax.Array]] = []  # metrics of the step's updates
        self._compared = False  # whether ratios on fresh samples were checked

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
        """Runs an optimizer update with the sums of this worker and `others`.

        The last update of a step creates `version`; None means that this is not the last one.

        Raises:
          MissingSums: One of them disconnected; the state is unchanged.
          ConfigError: Rounding errors of the ratios are too large; checked before the first update on fresh samples.
        """
        trainer, (totals, stale) = self.system.updater, self.sums(others)
        self._totals = self._copy = None  # frees memory for the update
        totals = resharded(totals, trainer.shardings_of(totals))
        if not (stale or self._history or self._compared):
            self._compared = True
            check_ratio_spread(trainer.algorithm, totals.sums)
        # Before the update consumes arrays that other training workers may be reading.
        if self._available is not None and not self._transfer.drain(
            TrainedWeightsKey(self._available)
        ):
            # A hung worker may still read them.
            self.state = jax.tree.map(jnp.copy, self.state)
        state = self._versions.to_consume(self.state)
        std = None if totals.unscaled is None else scores.std
        self.state, metrics = trainer.update(state, totals, std)
        self._history.append(metrics)
        jax.block_until_ready(self.state)
        self.updated(self._steps.first if version is None else version)
        if version is not None:
            self.state = trainer.end_step(self.state, version * self._steps.settings.updates)
            self.add_version(version)
        else:
            self._make_available(WeightsVersion(self._steps.first, update=len(self._history)))

    def add_version(self, version: int) -> None:
        """Offers the behavior policy as a version, and separate evaluation weights if an evaluation is due."""
        settings, tree = self._steps.settings, self._fixed
        if tree is None:
            updates = version * settings.updates
            tree = self.system.updater.sampling_params(self.state, updates)
        self._add(WeightsVersion(version), tree)
        if settings.separate_eval_weights and settings.evaluated_images(version):
            self._add(WeightsVersion(version, evaluated=True), self.state.evaluated)
        self._make_available(WeightsVersion(version))

    def _add(self, weights_version: WeightsVersion, tree: Any) -> None:
        fields = (field for field in ("tuned", "ema") if getattr(self.state, field) is tree)
        self._versions.add(weights_version, tree, next(fields, None))

    def _make_available(self, weights_version: WeightsVersion) -> None:
        """Offers the trained parameters to the other training workers until the next update."""
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
        """Returns the metrics averaged over a step's updates, and resets them."""
        history, self._history = self._history, []
        means = jax.tree.map(lambda *values: sum(values) / len(values), *history)
        return {name: float(value) for name, value in means.items()}
