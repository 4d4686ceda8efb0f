"""Driver-side workers in other processes: starts, calls, pings and restarts them."""

import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import jax

from digen_jax.assemble import pipeline_of
from digen_jax.config.train_config import TrainConfig
from digen_jax.distributed import engine as ray_engine
from digen_jax.distributed import worker_process
from digen_jax.distributed.engine import POLL, Actor, ProcessDied, RayEngine, Ref
from digen_jax.distributed.transfer import Shares, TrainerTransfer, TreeMissing, pack
from digen_jax.distributed.worker_process import CallFailed, RolloutProcess, TrainingProcess
from digen_jax.errors import ConfigError
from digen_jax.parallel.encoding import PrecomputedPrompts
from digen_jax.process.job import START_TIMEOUT, Place
from digen_jax.process.shutdown import STOPPED, Stopped, exit_now, log_fatal
from digen_jax.prompt_store import stored_prompts
from digen_jax.rewards import moved
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.array_transfer import (
    ConditioningKey,
    EmbeddingsKey,
    Key,
    MissingSums,
    SamplesKey,
    SumsKey,
    TrainedWeightsKey,
    TransferError,
)
from digen_jax.runtime.clock import paused, remote_work
from digen_jax.runtime.driver import Driver, WorkerDisconnected
from digen_jax.runtime.sampling import failed, ready
from digen_jax.runtime.steps import ChunkAdvantages, ScoredChunk
from digen_jax.scheduling import commands
from digen_jax.scheduling.commands import TRAINER, Chunk, Deliver, Train, WeightsVersion

PING = 2.0  # seconds between two pings
PING_TIMEOUT = 8.0  # seconds without a reply to a ping until a worker is considered disconnected
OPEN_TIMEOUT = 1800.0  # seconds for a worker to load its model before it is restarted
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a failed worker is restarted
FINISH_TIMEOUT = 5.0  # seconds for work in progress at the end of the run
CLOSE_TIMEOUT = 2.0  # seconds for a worker to end its reward processes
PROFILE_TIMEOUT = 300.0  # seconds for a worker to write a profile
FREE_TIMEOUT = 60.0  # seconds for a worker to free data
CONTROL = -1  # serial of calls that free data

Trees = Mapping[Key, list[Ref]]  # see `TrainerTransfer.stored`
NO_TREES: Trees = MappingProxyType({})


class WorkerProxy:
    """Remote counterpart of `SamplingExecutor`: every method blocks until its work is done. Thread-safe.

    Methods that do work raise CallFailed or the worker's exception (see `RolloutProcess._errors`), or
    WorkerDisconnected if the worker disconnected or was removed, or the run ends.

    `opened` is the result of `RolloutProcess.open` in the first of the worker's processes, the actors.
    """

    def __init__(
        self,
        name: str,
        opened: worker_process.Member,
        actors: Sequence[Actor],
        engine: RayEngine,
        transfer: TrainerTransfer,
    ):
        self.name, self.devices, self.opened = name, opened.devices, opened
        self.device_kind = opened.device_kind
        self.processes = len(actors)
        self.heard = time.time()  # time of the last reply to a ping
        self.disconnected = threading.Event()
        self._actors, self._engine, self._transfer = actors, engine, transfer
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, list[Future]] = {}  # calls in progress, by serial
        self._seen: dict[int, tuple[float, float]] = {}  # (seconds of work, time of report)
        self._why: str | None = None  # reason why all calls raise

    def receive(self, weights_version: WeightsVersion) -> None:
        """Sends weights to the worker; no-op if they were deleted."""
        with paused():  # another call may be storing them
            refs = self._transfer.stored(weights_version)
        if refs is not None:
            self._work("receive", weights_version, trees={weights_version: refs}, group="sync")

    def encode(self, number: int) -> None:
        """Encodes a step's prompts. The conditioning stays on the worker until the trainer gets it."""
        self._transfer.put_ref(ConditioningKey(self.name, number), self._work("encode", number))

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """Generates a chunk's trajectories."""
        self._work("generate", chunk, weights_version)

    def decode(self, chunk: Chunk) -> None:
        """Decodes a chunk's images. They stay on the worker, and its samples until the trainer gets them."""
        samples = self._work("decode", chunk)
        if not chunk.evaluation:
            self._transfer.put_ref(SamplesKey(self.name, chunk), samples)

    def score(self, chunk: Chunk, pool: RewardPool | None = None) -> Future[ScoredChunk | None]:
        """Scores a decoded chunk by the rewards of the worker's process, in parallel with other work.

        Returns immediately; the future raises the errors of `SamplingExecutor.score`.
        """
        serial, found = next(self._serials), Future[ScoredChunk | None]()
        with self._lock:
            if self._why is not None:
                return failed(WorkerDisconnected(f"{self.name} {self._why}"))
            future = self._engine.call(self._actors[0], "score", chunk, group="score")
            self._calls[serial] = [future]
        future.add_done_callback(functools.partial(self._scored, serial, found))
        return found

    def scored(self, chunk: Chunk) -> None:
        """No-op: the worker has already freed the images."""

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees all data of a chunk."""
        self._free("drop_chunk", chunk)
        self._transfer.delete(SamplesKey(self.name, chunk))

    def drop_weights(self, weights_version: WeightsVersion) -> None:
        """Frees weights."""
        self._free("drop_weights", weights_version)

    def end_step(self, step: int) -> None:
        """Frees the data of an ended step and of all earlier ones."""
        self._free("end_step", step)
        self._transfer.delete(ConditioningKey(self.name, step))

    def remove(self) -> None:
        """Ends all calls with WorkerDisconnected; their work is reassigned."""
        self.end_calls("was removed")
        self.disconnected.set()

    def profile(self, folder: str) -> list[Future]:
        """Starts or ends a profile in all processes, in parallel with their work; see `RolloutProcess.profile`."""
        call = functools.partial(self._engine.call, group="score")
        return [call(actor, "profile", folder) for actor in self._actors]

    def ping(self) -> None:
        """Records the progress of calls in progress.

        Raises:
          WorkerDisconnected: A process died, or did not reply for `PING_TIMEOUT` seconds.
        """
        futures = [self._engine.call(actor, "ping", group="ping") for actor in self._actors]
        end = time.monotonic() + PING_TIMEOUT
        for one in futures:
            try:
                seen = one.result(max(0.0, end - time.monotonic()))
            except TimeoutError:
                silent = f"{self.name} did not answer for {PING_TIMEOUT:g} seconds"
                raise WorkerDisconnected(silent) from None
            except ProcessDied as error:
                raise self._as_disconnected(error) from error
            with self._lock:  # ignore calls that ended meanwhile
                for serial in seen.keys() & self._calls.keys():
                    self._seen[serial] = seen[serial], time.monotonic()
        self.heard = time.time()

    def end_calls(self, why: str) -> None:
        """Makes all current and later waits for the worker raise WorkerDisconnected."""
        with self._lock:
            self._why = self._why or why
            futures = [one for calls in self._calls.values() for one in calls]
        for one in futures:
            with suppress(InvalidStateError):
                one.set_exception(WorkerDisconnected(f"{self.name} {self._why}"))

    def _work(self, method: str, *given: Any, trees: Trees = NO_TREES, group: str = "work") -> Ref:
        """Calls a method in all processes, with `trees` as input; returns a reference to the first one's tree.

        The timers count the seconds of work of the slowest process.
        """
        serial, counts = next(self._serials), {key: len(refs) for key, refs in trees.items()}
        sent = method, given, counts, *itertools.chain.from_iterable(trees.values())
        try:
            with remote_work(functools.partial(self._so_far, serial)) as finish:
                # Data is freed before the next work starts.
                if wait(self._calls.get(CONTROL, ()), FREE_TIMEOUT).not_done:
                    raise CallFailed(f"{self.name} did not free data in {FREE_TIMEOUT:g} s")
                with self._lock:
                    if self._why is not None:
                        raise WorkerDisconnected(f"{self.name} {self._why}")
                    call = functools.partial(self._engine.call_pair, group=group)
                    work = [call(one, "work", serial, *sent) for one in self._actors]
                    futures = self._calls[serial] = [done for done, _ in work]
                self._wait(futures)
                finish(*max(one.result() for one in futures))
            return work[0][1]
        except TreeMissing as missing:
            found = {**trees, **self._stored(*missing.args)}
            return self._work(method, *given, trees=found, group=group)
        finally:
            with self._lock:
                self._calls.pop(serial, None)
                self._seen.pop(serial, None)

    def _wait(self, futures: list[Future]) -> None:
        """Waits for the calls of all processes; raises the root cause of their errors."""

        def errors() -> list[BaseException]:
            ended = [one.exception() for one in futures if one.done()]
            return [self._as_disconnected(error) for error in ended if error is not None]

        wait(futures, return_when=FIRST_EXCEPTION)
        if errors():
            if wait(futures, PING_TIMEOUT).not_done:  # blocked in a collective
                self.disconnected.set()
            # If a process dies, the others fail, too, and may report their errors first.
            raise min(errors(), key=lambda error: not isinstance(error, WorkerDisconnected))

    def _as_disconnected(self, error: BaseException) -> BaseException:
        """Converts ProcessDied to WorkerDisconnected (and sets `disconnected`), ObjectUnavailable to TransferError."""
        if isinstance(error, ray_engine.ObjectUnavailable):
            return TransferError(f"{self.name} lacks an object of a node that failed ({error})")
        if not isinstance(error, ProcessDied):
            return error
        self.disconnected.set()
        return WorkerDisconnected(f"{self.name} disconnected ({error})")

    def _so_far(self, serial: int) -> float:
        """Returns the seconds of work on a call: the last report plus the time since then."""
        now = time.monotonic()
        seconds, when = self._seen.get(serial, (0.0, now))
        return seconds + min(PING_TIMEOUT, now - when)

    def _free(self, method: str, *arguments: Any) -> None:
        """Frees data before any later work; no-op for a disconnected worker."""
        with self._lock:
            if self._why is not None or self.disconnected.is_set():
                return
            # Processes of one worker must free data at the same point of their work.
            alone = self.processes == 1
            call = functools.partial(self._engine.call, group="control" if alone else "work")
            futures = [call(one, method, *arguments) for one in self._actors]
            if alone:
                self._calls[CONTROL] = futures

    def _stored(self, *keys: Key) -> Trees:
        """Returns references to trees of other workers."""
        return {key: self._transfer.stored(key) or [] for key in keys}

    def _scored(self, serial: int, found: Future, future: Future) -> None:
        """Forwards scores, with times on this process's clock. Unexpected errors remove the worker."""
        with self._lock:
            self._calls.pop(serial, None)
        error = future.exception()
        if isinstance(error, CallFailed):
            self.disconnected.set()
            error = WorkerDisconnected(str(error))
        if error is not None:
            return found.set_exception(self._as_disconnected(error))
        scored_chunk: ScoredChunk | None = future.result()
        if scored_chunk is not None:
            exchanges = moved(scored_chunk.exchanges, time.perf_counter())
            stats = ready(scored_chunk.image_stats)
            scored_chunk = scored_chunk._replace(image_stats=stats, exchanges=exchanges)
        return found.set_result(scored_chunk)


class TrainingProxy(WorkerProxy):
    """Remote counterpart of `OtherTrainingExecutor`; results stay on the worker until another one gets them."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._transfer.sources[self.name] = functools.partial(self._work, "send", group="sync")

    def take_trained(self, weights_version: WeightsVersion) -> bool:
        """Sends the trained weights to the worker. Returns False if these are not the current ones."""
        key = TrainedWeightsKey(weights_version)
        with paused():
            refs = self._transfer.stored(key)
        if refs is not None:
            self._work("take_trained", weights_version, trees={key: refs}, group="sync")
        return refs is not None

    def encode(self, number: int) -> None:
        """Encodes a step's prompts."""
        self._work("encode", number)

    def decode(self, chunk: Chunk) -> None:
        """Decodes a chunk's images."""
        self._work("decode", chunk)

    def deliver(self, command: Deliver) -> None:
        """Transfers a chunk's samples from another worker."""
        samples = self._stored(SamplesKey(command.worker, command.chunk))
        self._work("deliver", command, trees=samples, group="sync")

    def train(self, command: Train, batch: ChunkAdvantages) -> None:
        """Adds the gradient of a chunk's passes to the update's sums."""
        self._work("train", command, batch)

    def offer_sums(self, others: Sequence[str]) -> None:
        """Offers its sums plus those of other workers until the update. Raises MissingSums."""
        trees = self._stored(*map(SumsKey, others))
        try:
            sums = self._work("offer_sums", others, trees=trees)
            self._transfer.put_ref(SumsKey(self.name), sums)
        except (WorkerDisconnected, CallFailed, TransferError) as error:
            raise MissingSums(self.name) from error

    def updated(self, first: int) -> None:
        """Frees the data of an update and of steps before `first`."""
        self._free("updated", first)
        self._transfer.delete(SumsKey(self.name))


class RemoteWorkers:
    """All workers of a run except the home worker; one thread per worker starts, monitors and restarts it.

    Args:
      config: Config of the run, placed on all its devices.
      engine: Starts the workers.
      accelerator: Accelerator of the workers, such as GPU. "" means virtual CPU devices.
      shares: This process among the trainer's. None means that the trainer has one process.
      job: The trainer's place in a JAX job shared with the workers. None means no shared job.
      kind: Process class of rollout workers.
      training_kind: Process class of training workers.

    Attributes:
      devices: Devices of the trainer's mesh.
      transfer: The trainer's transfer.
      step: The current step, at which new workers start.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: RayEngine,
        accelerator: str = "",
        shares: Shares | None = None,
        job: Place | None = None,
        kind: type[RolloutProcess] = RolloutProcess,
        training_kind: type[TrainingProcess] = TrainingProcess,
    ):
        self.devices: Sequence[jax.Device] = ()
        self.transfer, self.step = TrainerTransfer(engine, shares), 0
        self.transfer.sources[EmbeddingsKey.worker] = self._store_embeddings
        self._config, self._engine, self._job = config, engine, job
        self._kinds, self._accelerator = (kind, training_kind), accelerator
        self._files = worker_process.fingerprints(config)
        rollout, trainer = config.placement.meshes
        self._hosts = trainer.hosts
        most = max(rollout.workers, rollout.max_workers) if rollout.data else 0
        self._rollouts = [f"rollout {number}" for number in range(most)]
        self._training = commands.trainer_names(trainer.workers)[1:]
        self._names = [*self._rollouts, *self._training]
        self._extra = len(self._rollouts) - rollout.workers  # optional at the start
        self._ready: dict[str, WorkerProxy] = {}
        self._actors: dict[str, list[Actor]] = {}
        self._failed: ConfigError | None = None  # the config fails on workers
        self._driver: Driver | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        for name in self._names:
            threading.Thread(target=self._keep, args=(name,), name=name, daemon=True).start()

    def wait(self, seconds: float = START_TIMEOUT, stops: Callable[[], Any] = lambda: None) -> None:
        """Waits for `placement.rollout.workers` and the training workers, or until `stops` returns a true value.

        After `seconds`, proceeds without late workers.

        Raises:
          ConfigError: No worker is ready in time, or the config fails on a worker.
        """
        end = time.monotonic() + seconds
        with self._changed:
            if missing := self._missing():
                print(f"waiting for {', '.join(missing)}, at most {seconds:g} s", flush=True)
            while (missing := self._missing()) and not self._failed and not stops():
                if time.monotonic() <= end:
                    self._changed.wait(POLL)
                    continue
                if not self._ready.keys() & {*(self._rollouts or self._training)}:
                    section = "rollout" if self._rollouts else "trainer"
                    raise ConfigError(
                        f"no {section} worker is ready after {seconds:g} s: see their output above, or set fewer or "
                        f"smaller ones by config.placement.{section}"
                    )
                text = f"not ready after {seconds:g} s; starting without (can join later)"
                print(f"{', '.join(missing)} {text}", flush=True)
                break
            if self._failed:
                raise self._failed

    def _missing(self) -> list[str]:
        """Returns the missing workers that the start requires."""
        rollouts, training = (
            [name for name in names if name not in self._ready]
            for names in (self._rollouts, self._training)
        )
        return [*rollouts[: max(0, len(rollouts) - self._extra)], *training]

    @contextmanager
    def driving(self, make: Callable[[list], Driver], stops: Callable[[], Any]) -> Iterator[Driver]:
        """Waits for workers (see `wait`) and yields a driver that `make` builds from the ready ones.

        The driver is notified of workers that join or disconnect.
        """
        self.wait(stops=stops)
        with self._changed:
            ready = [self._ready[name] for name in self._names if name in self._ready]
            driver = self._driver = make(ready)
        try:
            yield driver
        finally:
            late = threading.Timer(FINISH_TIMEOUT, self._end_calls)
            late.daemon = True
            late.start()
            driver.close()
            late.cancel()
            with self._changed:
                self._driver = None

    def _end_calls(self) -> None:
        """Cancels waits for work in progress at the end of the run."""
        for one in self._workers():
            one.end_calls("is not needed: the run ends")

    def _workers(self) -> list[WorkerProxy]:
        with self._changed:
            return list(self._ready.values())

    def profile(self, folder: str) -> None:
        """Starts or ends a profile in all ready workers; reports those that fail. See `switch_profiler`."""
        calls = {one.name: one.profile(folder) for one in self._workers()}
        wait([call for own in calls.values() for call in own], PROFILE_TIMEOUT)
        for name, own in calls.items():
            for call in own:
                why = call.exception() if call.done() else f"no answer in {PROFILE_TIMEOUT:g} s"
                if why:
                    print(f"{name} has no profile ({why})", file=sys.stderr, flush=True)

    def places(self) -> dict[str, dict[str, Any]]:
        """Returns host, process and last reply of each ready worker, for `logging.status.status_updates`."""
        found: dict[str, dict[str, Any]] = {TRAINER: {"processes": self._hosts}}
        for one in self._workers():
            where = dict(host=one.opened.host, process=one.opened.pid)
            found[one.name] = where | dict(processes=one.processes, heard=one.heard)
        return found

    def close(self) -> None:
        """Ends all workers."""
        self._closed.set()
        with self._changed:
            actors = [one for started in self._actors.values() for one in started]
            self._changed.notify_all()
        closing = [self._engine.call(actor, "close", group="control") for actor in actors]
        wait(closing, CLOSE_TIMEOUT)
        for actor in actors:
            self._engine.kill(actor)

    def _keep(self, name: str) -> None:
        """Starts a worker, and restarts it after disconnects, with exponential backoff while it fails to start."""
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            try:
                proxy = self._start(name)
            except ConfigError as error:
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                    if self._driver is not None:
                        print(f"{name} cannot rejoin: {error}", file=sys.stderr, flush=True)
                return
            except Exception as error:
                why = f"did not start ({error})"
            else:
                pause = FIRST_PAUSE
                self._join(proxy)
                why = self._watch(proxy)
            if self._closed.is_set():
                return
            self._disconnected(name, why)
            if self._job is not None:
                return self._end(f"{name} {why}")
            print(f"{name} {why}; restarting it in {pause:g} s", flush=True)
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _start(self, name: str) -> WorkerProxy:
        """Starts a worker's processes and loads its model."""
        (variables, *folders), trains = ray_engine.surroundings(), name in self._training
        axes = self._config.placement.meshes[trains]
        hosts, devices = axes.hosts, dict[str, int]()
        if self._accelerator:
            devices = {self._accelerator: axes.devices // hosts}
        else:
            variables["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
        given = [(name, variables, *folders)] * hosts
        actors = self._engine.start(self._kinds[trains], given, devices)
        with self._changed:
            self._actors[name] = actors

        def call(actor: Actor, method: str, *arguments: Any) -> Any:
            return self._engine.call(actor, method, self._config, *arguments, group="work")

        checked = [call(actor, "check_files", self._files) for actor in actors]
        needed, stops = "a node with free resources", self._closed.is_set
        # Optional workers join when a node is free.
        ray_engine.wait_for_resources(checked, name, needed, stops, lambda: not self._missing())
        for one in checked:
            one.result(0)
        if self._job is not None:
            first = self._hosts + int(name.split()[-1]) * hosts
            place = self._job._replace(process=first, group=(first, hosts))
        elif hosts > 1:
            host, port = self._engine.coordinator_address(actors[0]).result()
            place = Place(host, port, hosts, 0)
        else:
            place = None
        opening = []
        for number, actor in enumerate(actors):
            own = place and place._replace(process=place.process + number)
            opening.append(call(actor, "open", self.step, own))
        late = wait(opening, OPEN_TIMEOUT, "FIRST_EXCEPTION").not_done
        opened = [one.result() for one in opening if one not in late]
        if late:
            raise ProcessDied(f"not ready after {OPEN_TIMEOUT:g} s")
        proxy = TrainingProxy if trains else WorkerProxy
        return proxy(name, opened[0], actors, self._engine, self.transfer)

    def _store_embeddings(self, key: Any) -> Ref:
        """Stores precomputed prompt embeddings."""
        return self._engine.put(pack(self._precomputed.read(key.prompts)))

    @functools.cached_property
    def _precomputed(self) -> PrecomputedPrompts:
        folder, family = pipeline_of(self._config)  # lazily, because it starts JAX
        return stored_prompts(self._config, folder, family)

    def _join(self, proxy: WorkerProxy) -> None:
        """Registers a ready worker and adds it to the run."""
        proxy.end_step(self.step - 1)  # steps may have ended since its start
        with self._changed:
            self._ready[proxy.name] = proxy
            self._changed.notify_all()
            if self._driver is not None:
                print(f"{proxy.name} joins", flush=True)
                self._driver.join(proxy)

    def _watch(self, proxy: WorkerProxy) -> str:
        """Pings a worker until it disconnects or is removed; returns the reason."""
        while not self._closed.is_set():
            try:
                proxy.ping()
            except WorkerDisconnected as error:
                return str(error).removeprefix(f"{proxy.name} ")
            if proxy.disconnected.wait(PING):
                return "disconnected or was removed"
        return "has ended"

    def _disconnected(self, name: str, why: str) -> None:
        """Kills a worker's processes and removes it from the run."""
        with self._changed:
            proxy, driver = self._ready.pop(name, None), self._driver
            actors = self._actors.pop(name, [])
        for actor in actors:
            self._engine.kill(actor)
        if proxy is not None:
            if driver is None:
                proxy.remove()
            else:
                driver.disconnected(name, why)

    def _end(self, why: str) -> None:
        """Ends the run, because JAX terminates all processes of a job if one disconnects."""
        one_job = "all processes are one job of JAX (--one_job)"
        error = Stopped(f"{why}, and {one_job}: {ray_engine.AGAIN}")
        with self._changed:
            driver = self._driver
        if driver is None:
            exit_now(log_fatal(str(error), STOPPED))
        driver.fail(error)
