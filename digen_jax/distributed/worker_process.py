"""Worker process: samples, decodes, scores and trains for the driver.

The classes do not depend on the engine that runs them; see `engine.GROUPS` for the threads of their methods. Top-level
imports of this module must not import JAX or huggingface_hub, which read variables that the constructor sets.
"""

import functools
import gc
import hashlib
import itertools
import os
import pathlib
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import digen_jax
from digen_jax.errors import ConfigError, DivergedError
from digen_jax.process.shutdown import Stopped, out_of_memory
from digen_jax.rewards import moved
from digen_jax.rewards.built_in import mesh_rewards
from digen_jax.rewards.pool import RewardProcessDied
from digen_jax.scheduling.commands import Chunk, Deliver, Train, WeightsVersion, trainer_names

if TYPE_CHECKING:
    from digen_jax.config.train_config import TrainConfig
    from digen_jax.models.family import Family
    from digen_jax.parallel.placement import MeshRole
    from digen_jax.parallel.system import Rollout, System
    from digen_jax.runtime.sampling import SamplingExecutor
    from digen_jax.runtime.steps import ChunkAdvantages

Parts = tuple[tuple[str, float, float], ...]  # (kind, start, end)


class CallFailed(RuntimeError):
    """Raised if a call failed in a worker that stays usable; the message has the worker's name and the error."""


class Member(NamedTuple):
    """Description of a ready worker."""

    devices: int  # number of devices
    host: str
    pid: int  # of its first process
    device_kind: str  # `jax.Device.device_kind`


class RolloutProcess:
    """Process of the rollout worker `name`; see `engine.surroundings` for the other arguments."""

    section: "MeshRole" = "rollout"  # of config.placement

    def __init__(self, name: str, variables: dict[str, str], folder: str, path: list[str]):
        self._name = name
        os.environ.update(variables)
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [one for one in path if one not in sys.path]
        self._first, self._pool = True, cast(Any, None)  # only the first process scores
        self._alone = True  # whether the worker has one process
        self._executor: SamplingExecutor | None = None  # see `_sampling`
        self._creating = threading.Lock()
        self._calls: dict[int, Any] = {}  # by serial: stopwatches of calls in progress
        self._profiled = False  # whether the profiler runs

    def __repr__(self) -> str:
        """Prefix of each line of output."""
        return self._name

    def check_files(self, config: "TrainConfig", expected: dict[str, str]) -> None:
        """Checks that this node has the trainer's files; see `check_same`. Raises ConfigError."""
        check_same(expected, config)

    def open(self, config: "TrainConfig", first: int, place: Any = None) -> Member:
        """Builds the worker at the step `first`: devices, rewards, model.

        `config` is placed on all devices of the run. `place` is the `job.Place` of this process in a JAX job, if any.

        Raises:
          ConfigError: A setting does not work here.
        """
        from digen_jax.process.job import join_job, prepare

        axes = getattr(config.placement.meshes, self.section)
        prepare(axes.devices // axes.hosts)
        if place is not None:
            join_job(place)

        from digen_jax.assemble import held_out_prompts, train_prompts
        from digen_jax.parallel.mesh import job_devices
        from digen_jax.process import job

        self._alone = place is None
        self._first = job.is_first()
        assists = not config.placement.rollout.data or config.placement.trainer.samples
        samples = self.section == "rollout" or assists  # else on demand
        if samples:
            self._open_rewards(config)
        devices = job_devices(axes.devices, f"config.placement.{self.section}")
        model = self._load(config, devices)
        batches = train_prompts(config).since(first)
        self._build(config, model, batches, first, held_out_prompts(config))
        if samples:
            self._sampling()
        kind = devices[0].device_kind
        print(f"ready on {len(devices)} x {kind}", flush=True)
        gc.collect()
        gc.freeze()  # keeps later collections short
        return Member(len(devices), socket.gethostname(), os.getpid(), kind)

    def _open_rewards(self, config: "TrainConfig") -> None:
        """Opens the rewards once, if this process scores."""
        from digen_jax.runtime.sampling import open_rewards

        if self._first and self._pool is None:
            self._pool = open_rewards(config)

    def _load(self, config: "TrainConfig", devices: Sequence[Any]) -> Any:
        """Loads the model."""
        from digen_jax.assemble import load_rollout, load_system, open_parts

        parts = open_parts(config, devices, self.section)
        load = load_rollout if self.section == "rollout" else load_system
        return load(config, parts, self._stored(config, parts.family))

    def _stored(self, config: "TrainConfig", family: "Family") -> Any:
        """Returns precomputed prompt embeddings, sent by the driver on request, or None if this worker encodes."""
        from digen_jax.parallel.encoding import PrecomputedPrompts
        from digen_jax.policies import encoder_shapes, is_precomputed
        from digen_jax.runtime.array_transfer import EmbeddingsKey

        def read(texts: Sequence[str]) -> list[Any]:
            prompts = tuple(dict.fromkeys(texts))
            found: Any = self._transfer.received(EmbeddingsKey(prompts))
            rows = dict(zip(prompts, found, strict=True))
            return [rows[text] for text in texts]

        if not is_precomputed(config, family):
            return None
        return PrecomputedPrompts(family, encoder_shapes(config, family), read)

    def _build(
        self,
        config: "TrainConfig",
        rollout: "Rollout | Callable[[], Rollout]",
        batches: Iterator[list[dict[str, Any]]],
        first: int,
        held_out: list[dict[str, Any]],
    ) -> None:
        """Builds all parts except the executor, which is created on first use.

        `batches` are the prompt records of each step from `first` on; `held_out` are those of evaluations. `rollout`
        may be a function that builds the programs and parameters of the mesh.
        """
        from digen_jax.distributed.transfer import WorkerTransfer
        from digen_jax.runtime.sampling import SamplingExecutor, try_scorers
        from digen_jax.runtime.steps import Steps

        self._steps = Steps.of(config, batches, first, held_out)
        self._transfer = WorkerTransfer()

        def create() -> SamplingExecutor:
            self._open_rewards(config)
            found = rollout() if callable(rollout) else rollout
            try_scorers(config, found.scorers)
            scorers = mesh_rewards(config.rewards, found.scorers)
            data = self._steps, self._transfer, scorers, config.advantages.reward_weights
            return SamplingExecutor(self._name, found, *data)

        self._create = create

    def _sampling(self) -> "SamplingExecutor":
        """Returns the sampling executor. The first call may load model components and start the rewards."""
        from digen_jax.runtime.clock import paused

        with self._creating:
            if self._executor is None:
                with paused():
                    self._executor = self._create()
            return self._executor

    def work(
        self, serial: int, method: str, arguments: tuple, trees: Mapping[Any, int], *stored: Any
    ) -> tuple[tuple[float, Parts], Any]:
        """Calls a method of this class, after receiving trees of other workers.

        Args:
          serial: Serial of the call in `ping`.
          method: Method name.
          arguments: Method arguments.
          trees: Number of objects in `stored` by key of a tree.
          *stored: Objects of all trees, in order.

        Returns:
          ((seconds of work without compilation, its parts in seconds before its end), result of the method).
        """
        import jax

        from digen_jax.distributed.transfer import received
        from digen_jax.runtime.clock import measured

        annotation = jax.profiler.TraceAnnotation(method)
        with self._errors(), measured() as stopwatch, annotation:
            self._calls[serial] = stopwatch
            objects = iter(stored)
            for key, count in trees.items():
                self._transfer.put(key, received([*itertools.islice(objects, count)]))
            try:
                tree = getattr(self, method)(*arguments)
                return (stopwatch.elapsed(), stopwatch.parts_ago()), tree
            finally:
                for key in trees:
                    self._transfer.delete(key)
                del self._calls[serial]

    def receive(self, weights_version: WeightsVersion) -> None:
        """Gets weights that the engine transferred to this node."""
        self._sampling().receive(weights_version)

    def encode(self, step: int) -> Any:
        """Encodes a step's prompts; returns the packed conditioning for the trainer."""
        from digen_jax.runtime.array_transfer import ConditioningKey

        self._sampling().encode(step)
        return self._packed(ConditioningKey(self._name, step))

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """Generates a chunk's trajectories, which stay in this process."""
        self._sampling().generate(chunk, weights_version)

    def decode(self, chunk: Chunk) -> Any:
        """Decodes a chunk's images, which stay in this process; returns its packed samples for the trainer.

        Returns None for an evaluation and for a dropped chunk.
        """
        from digen_jax.runtime.array_transfer import SamplesKey

        self._sampling().decode(chunk)
        if not self._first:
            self._sampling().scored(chunk)
        return self._packed(SamplesKey(self._name, chunk))

    def _packed(self, key: Any) -> Any:
        packed = self._transfer.packed(key)  # collective: gathers shards
        self._transfer.delete(key)
        return packed if self._first else None

    def score(self, chunk: Chunk) -> Any:
        """Scores a decoded chunk and frees its images; returns a `ScoredChunk`, or None for a dropped chunk.

        Times of `exchanges` are relative to the return.
        """
        with self._errors():
            try:
                future = self._sampling().score(chunk, self._pool)
            except KeyError:
                if chunk.evaluation or self._steps.find(chunk) is not None:
                    raise
                return None  # dropped by another thread
            scored_chunk = future.result()
            stats = scored_chunk.image_stats
            image_stats = None if stats is None else stats.result()
            self._sampling().scored(chunk)
            if not chunk.evaluation and self._steps.find(chunk) is None:
                return None
            ago = moved(scored_chunk.exchanges, -time.perf_counter())
            return scored_chunk._replace(image_stats=cast(Any, image_stats), exchanges=ago)

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees all data of a chunk."""
        if self._steps.find(chunk) is not None:
            self._steps.drop([chunk])  # first: discards a chunk in generation
        for one in self._executors():
            one.drop_chunk(chunk)

    def drop_weights(self, weights_version: WeightsVersion) -> None:
        """Frees weights."""
        for one in self._executors():
            one.drop_weights(weights_version)
        gc.collect()  # JAX arrays that alias stored objects are in reference cycles

    def _executors(self) -> list[Any]:
        return [] if self._executor is None else [self._executor]

    def end_step(self, step: int) -> None:
        """Frees the data of an ended step and of all earlier ones."""
        self._steps.forget(step + 1)
        self._transfer.end_step(step)

    def profile(self, folder: str) -> None:
        """Starts or ends a profile; see `switch_profiler`. No-op if this process joined after its start."""
        from digen_jax.logging.workdir import switch_profiler

        if folder or self._profiled:
            switch_profiler(folder, self._name)
            self._profiled = bool(folder)

    def ping(self) -> dict[int, float]:
        """Returns the seconds of work of each call in progress, by serial."""
        return {serial: one.elapsed() for serial, one in list(self._calls.items())}

    def close(self) -> None:
        """Ends the reward processes."""
        if self._pool is not None:
            self._pool.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Re-raises errors that the driver handles; converts others, possibly not picklable, to `CallFailed`."""
        from digen_jax.distributed.transfer import TreeMissing
        from digen_jax.runtime.array_transfer import MissingSums, TransferError, is_connection_error

        passed = ConfigError, Stopped, DivergedError, RewardProcessDied
        try:
            yield
        except (*passed, TreeMissing, TransferError, MissingSums):
            raise
        except CancelledError:
            raise CallFailed(f"{self._name} is closed") from None
        except Exception as error:
            message = out_of_memory(error)
            # If another process of the worker disconnects, collectives fail; the driver reports the disconnect.
            if not message and (self._alone or not is_connection_error(error)):
                traceback.print_exception(error)
            raise CallFailed(f"{self._name}: {message or repr(error)}") from None


class TrainingProcess(RolloutProcess):
    """Process of a training worker, which can also sample; results stay in this process until `send`."""

    section = "trainer"

    def _build(self, config: "TrainConfig", system: "System", *arguments: Any) -> None:
        """See `RolloutProcess`; `system` is on the worker's mesh."""
        from digen_jax.runtime.training import OtherTrainingExecutor

        assistant = functools.partial(system.assistant, config.runtime.tag_weights)
        super()._build(config, assistant, *arguments)
        data = self._steps, self._transfer
        names = trainer_names(config.placement.trainer.workers)
        self._training = OtherTrainingExecutor(self._name, system, *data, names)

    def _executors(self) -> list[Any]:
        return [*super()._executors(), self._training]

    def _packed(self, key: Any) -> None:
        """Returns None: results are sent by `send`."""

    def send(self, key: Any) -> Any:
        """Returns a packed tree for another worker, or None."""
        return self._transfer.packed(key)

    def take_trained(self, weights_version: WeightsVersion) -> None:
        """Gets the trained weights."""
        self._training.take_trained(weights_version)
        gc.collect()  # see `drop_weights`

    def deliver(self, command: Deliver) -> None:
        """Gets a chunk's samples from another worker."""
        self._steps.ensure(command.chunk.step)
        self._training.deliver(command)

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """See `RolloutProcess`. Uses the weights that this worker trains, unless it received weights to sample with."""
        self._training.share_weights(self._sampling(), weights_version)
        super().generate(chunk, weights_version)

    def train(self, command: Train, batch: "ChunkAdvantages") -> None:
        """Adds the gradient of a chunk's passes to the update's sums."""
        self._training.train(command, batch)

    def offer_sums(self, others: Sequence[str]) -> Any:
        """Returns the packed sums since the last update plus those of other workers."""
        from digen_jax.runtime.array_transfer import SumsKey

        self._training.offer_sums(others)
        return self.send(SumsKey(self._name))

    def updated(self, first: int) -> None:
        """Frees the data of an update and of steps before `first`."""
        self._training.updated(first)
        gc.collect()  # see `drop_weights`

    def drop_chunk(self, chunk: Chunk) -> None:
        """See `RolloutProcess`."""
        self._steps.ensure(chunk.step)  # discards samples in transfer
        super().drop_chunk(chunk)


PACKAGE = "digen_jax"


def fingerprints(config: "TrainConfig") -> dict[str, str]:
    """Returns hashes of this package's code (by package name) and of prompt files (by path; "" if missing)."""
    found = {PACKAGE: _code()}
    for path in {*map(str, config.prompts.paths), str(config.evaluation.prompts)}:
        file = pathlib.Path(path)
        found[path] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    return found


@functools.cache
def _code() -> str:
    folder, found = pathlib.Path(digen_jax.__file__).parent, hashlib.sha256()
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.toml")]):
        found.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return found.hexdigest()


def check_same(expected: dict[str, str], config: "TrainConfig") -> None:
    """Raises ConfigError if a local file is missing or does not match the fingerprints of another process."""
    own = fingerprints(config)
    for name, digest in expected.items():
        if own.get(name) != digest:
            what = "the code of digen_jax" if name == PACKAGE else name
            wrong = "is missing" if own.get(name) == "" else "differs"
            advice = "copy the same files to the same paths on all nodes, or use a shared disk"
            raise ConfigError(f"{what} {wrong} on {socket.gethostname()}: {advice}")
