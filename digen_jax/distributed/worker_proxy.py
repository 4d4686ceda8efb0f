"""The driver's side of a worker: the interface of its executors, by calls to its processes."""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from digen_jax.distributed.engine import Actor, ObjectLost, ProcessLost, RayEngine, Ref
from digen_jax.distributed.transfer import TrainerLink, TreeMissing
from digen_jax.distributed.worker_process import NotDone, Opened, RowsMissing
from digen_jax.parallel.encoding import Rows
from digen_jax.rewards.exchanges import moved
from digen_jax.runtime.clock import elsewhere, paused
from digen_jax.runtime.link import (
    ConditioningOf,
    Key,
    LinkError,
    LostSums,
    SamplesOf,
    SumsOf,
    TrainedOf,
)
from digen_jax.runtime.scoring import ChunkScorer, ScoredChunk, TrainBatch, failed, ready
from digen_jax.runtime.worker import Gone
from digen_jax.scheduling.commands import Chunk, Deliver, Train, WeightsVersion

PING_TIMEOUT = 8.0  # seconds without an answer to a ping after which a worker is lost
FREE_TIMEOUT = 60.0  # seconds in which data is freed
CONTROL = -1  # instead of the serial of a call that frees data

Trees = Mapping[Key, list[Ref]]  # see `TrainerLink.stored`
NO_TREES: Trees = MappingProxyType({})


class WorkerProxy:
    """As `SamplingExecutor`: every method returns when its work is done. Any thread may call.

    Args:
      name: The worker's name.
      opened: Result of `open` in its first process.
      actors: Its processes.
      engine: Calls them.
      link: The trainer's link.
      rows: Reads precomputed prompt embeddings by their keys.

    Raises (every method that works):
      NotDone: the work failed there; or a `RewardMistake` or the like, as in one process.
      Gone: the worker is lost or was given up, or the run ends.
    """

    def __init__(
        self,
        name: str,
        opened: Opened,
        actors: Sequence[Actor],
        engine: RayEngine,
        link: TrainerLink,
        rows: Callable[[Sequence[str]], list[Rows]] | None = None,
    ):
        self.name, self.devices, self.opened = name, opened.devices, opened
        self.processes = len(actors)
        self.heard = time.time()  # when a ping was answered last
        self.lost = threading.Event()
        self._actors, self._engine, self._link, self._rows = actors, engine, link, rows
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, list[Future]] = {}  # in progress, by serial
        self._seen: dict[int, tuple[float, float]] = {}  # serial: (seconds of work, when reported)
        self._why: str | None = None  # nothing is waited for, for this reason

    # ------------------------------------------------------------------------ for the executors

    def receive(self, weights_version: WeightsVersion) -> None:
        """Has published weights received; weights that were withdrawn are no longer needed."""
        with paused():  # another worker's call may be storing them
            refs = self._link.stored(weights_version)
        if refs is not None:
            self._work("receive", weights_version, trees={weights_version: refs}, group="sync")

    def encode(self, number: int) -> None:
        """Has a step's prompts encoded; their conditioning stays there until the trainer takes it."""
        self._link.hold(ConditioningOf(self.name, number), self._work("encode", number))

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """Has a chunk's trajectories generated."""
        self._work("generate", chunk, weights_version)

    def decode(self, chunk: Chunk) -> None:
        """Has a chunk's images decoded, which stay there, as do its samples until the trainer takes them."""
        samples = self._work("decode", chunk)
        if not chunk.evaluation:
            self._link.hold(SamplesOf(self.name, chunk), samples)

    def score(self, chunk: Chunk, scorer: ChunkScorer | None = None) -> Future[ScoredChunk | None]:
        """Has a decoded chunk scored by the rewards of its process, in parallel with other work; returns at once.

        The future raises the errors of the rewards there as `ChunkScorer.submit`'s does.
        """
        serial, found = next(self._serials), Future()
        with self._lock:
            if self._why is not None:
                return failed(Gone(f"{self.name} {self._why}"))
            asked = self._engine.call(self._actors[0], "score", chunk, group="score")
            self._calls[serial] = [asked]
        asked.add_done_callback(functools.partial(self._scored, serial, found))
        return found

    def scored(self, chunk: Chunk) -> None:
        """The process has freed the images before it sent their scores."""

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees all data of a chunk."""
        self._free("drop_chunk", chunk)
        self._link.withdraw(SamplesOf(self.name, chunk))

    def drop_weights(self, weights_version: WeightsVersion) -> None:
        """Frees published weights."""
        self._free("drop_weights", weights_version)

    def end_step(self, step: int) -> None:
        """Has the processes forget a step that has ended, and those before it."""
        self._free("end_step", step)
        self._link.withdraw(ConditioningOf(self.name, step))

    def give_up(self) -> None:
        """Ends all calls, which raise Gone; another worker repeats the work."""
        self.end_calls("was given up")
        self.lost.set()

    # -------------------------------------------------------------------------- for the registry

    def ping(self) -> None:
        """Notes the progress of the calls in progress.

        Raises:
          Gone: A process is lost, or did not answer for `PING_TIMEOUT` seconds.
        """
        asked = [self._engine.call(actor, "ping", group="ping") for actor in self._actors]
        end = time.monotonic() + PING_TIMEOUT
        for one in asked:
            try:
                seen = one.result(max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise Gone(f"{self.name} has been silent for {PING_TIMEOUT:g} seconds") from None
            except ProcessLost as error:
                raise self._as_gone(error) from error
            with self._lock:  # calls that have ended meanwhile are left out
                for serial in seen.keys() & self._calls.keys():
                    self._seen[serial] = seen[serial], time.monotonic()
        self.heard = time.time()

    def end_calls(self, why: str) -> None:
        """Ends all waits for its work, also those that begin later: they raise Gone."""
        with self._lock:
            self._why = self._why or why
            asked = [one for calls in self._calls.values() for one in calls]
        for one in asked:
            with suppress(InvalidStateError):
                one.set_exception(Gone(f"{self.name} {self._why}"))

    # ---------------------------------------------------------------------------------- helpers

    def _work(
        self, method: str, *arguments: Any, trees: Trees = NO_TREES, group: str = "work"
    ) -> Ref:
        """Waits for a call of all processes, which get `trees` with it; returns a reference to the first one's tree.

        Its seconds of work count, those of the slowest process.
        """
        serial, counts = next(self._serials), {key: len(refs) for key, refs in trees.items()}
        sent = method, arguments, counts, *itertools.chain.from_iterable(trees.values())
        try:
            with elsewhere(functools.partial(self._so_far, serial)) as counts:
                # Data is freed before later work.
                if wait(self._calls.get(CONTROL, ()), FREE_TIMEOUT).not_done:
                    raise NotDone(f"{self.name} did not free data in {FREE_TIMEOUT:g} s")
                with self._lock:
                    if self._why is not None:
                        raise Gone(f"{self.name} {self._why}")
                    call = functools.partial(self._engine.call_for_tree, group=group)
                    work = [call(one, "work", serial, *sent) for one in self._actors]
                    asked = self._calls[serial] = [done for done, _ in work]
                self._wait(asked)
                counts(*max(one.result() for one in asked))
            return work[0][1]
        except RowsMissing as missing:
            (texts,) = missing.args
            rows = dict(zip(texts, self._rows(texts), strict=True))
            self._free("add_rows", self._engine.put(rows))
            return self._work(method, *arguments, trees=trees, group=group)
        except TreeMissing as missing:
            (key,) = missing.args
            found = {**trees, key: self._link.stored(key) or []}
            return self._work(method, *arguments, trees=found, group=group)
        finally:
            with self._lock:
                self._calls.pop(serial, None)
                self._seen.pop(serial, None)

    def _wait(self, asked: list[Future]) -> None:
        """Waits for the calls of all processes; raises the error that explains the others."""

        def errors() -> list[BaseException]:
            ended = [one.exception() for one in asked if one.done()]
            return [self._as_gone(error) for error in ended if error is not None]

        wait(asked, return_when=FIRST_EXCEPTION)
        if errors():
            if wait(asked, PING_TIMEOUT).not_done:  # they wait for the failed one in a collective
                self.lost.set()
            # If a process is lost, the others fail, too, and may report it first.
            found = errors()
            raise next((error for error in found if isinstance(error, Gone)), found[0])

    def _as_gone(self, error: BaseException) -> BaseException:
        """Gone instead of the loss of a process, which is noted; LinkError if an argument's node is lost."""
        if isinstance(error, ObjectLost):
            return LinkError(f"{self.name} lacks an object of a lost node ({error})")
        if not isinstance(error, ProcessLost):
            return error
        self.lost.set()
        return Gone(f"{self.name} is lost ({error})")

    def _so_far(self, serial: int) -> float:
        """Seconds of work on a call: what its process has reported last, and the time since then."""
        now = time.monotonic()
        seconds, when = self._seen.get(serial, (0.0, now))
        return seconds + min(PING_TIMEOUT, now - when)

    def _free(self, method: str, *arguments: Any) -> None:
        """Has data freed before any later work; a worker that is lost gets no call."""
        with self._lock:
            if self._why is not None or self.lost.is_set():
                return
            # Processes that work together must free data at the same point of their work.
            alone = self.processes == 1
            group = "control" if alone else "work"
            asked = [
                self._engine.call(one, method, *arguments, group=group) for one in self._actors
            ]
            if alone:
                self._calls[CONTROL] = asked

    def _scored(self, serial: int, found: Future, asked: Future) -> None:
        """Passes scores on, in this process's time. Rewards that do not work for another reason lose the worker."""
        with self._lock:
            self._calls.pop(serial, None)
        error = asked.exception()
        if isinstance(error, NotDone):
            self.lost.set()
            error = Gone(str(error))
        if error is not None:
            return found.set_exception(self._as_gone(error))
        scored_chunk: ScoredChunk | None = asked.result()
        if scored_chunk is not None:
            exchanges = moved(scored_chunk.exchanges, time.perf_counter())
            scored_chunk = scored_chunk._replace(
                looks=ready(scored_chunk.looks), exchanges=exchanges
            )
        return found.set_result(scored_chunk)


class TrainingProxy(WorkerProxy):
    """As `OtherTrainingExecutor`, too; trees that the worker makes stay there until another one takes them."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._link.sources[self.name] = functools.partial(self._work, "send", group="sync")

    def take_trained(self, weights_version: WeightsVersion) -> bool:
        """Has the weights that are trained taken; returns False if these are others."""
        key = TrainedOf(weights_version)
        with paused():
            refs = self._link.stored(key)
        if refs is not None:
            self._work("take_trained", weights_version, trees={key: refs}, group="sync")
        return refs is not None

    def encode(self, number: int) -> None:
        """Has a step's prompts encoded."""
        self._work("encode", number)

    def decode(self, chunk: Chunk) -> None:
        """Has a chunk's images decoded."""
        self._work("decode", chunk)

    def deliver(self, command: Deliver) -> None:
        """Has a chunk's samples taken from another worker."""
        key = SamplesOf(command.worker, command.chunk)
        self._work("deliver", command, trees={key: self._link.stored(key) or []}, group="sync")

    def train(self, command: Train, batch: TrainBatch) -> None:
        """Has the gradient of a chunk's passes added to the update's."""
        self._work("train", command, batch)

    def offer_sums(self, others: Sequence[str]) -> None:
        """Has the sums of other workers added to its own, which the link offers until the update. Raises LostSums."""
        trees = {key: self._link.stored(key) or [] for key in map(SumsOf, others)}
        try:
            self._link.hold(SumsOf(self.name), self._work("offer_sums", others, trees=trees))
        except (Gone, NotDone, LinkError) as error:
            raise LostSums(self.name) from error

    def updated(self, first: int) -> None:
        """Has the data of an update freed, and of steps before `first`."""
        self._free("updated", first)
        self._link.withdraw(SumsOf(self.name))
