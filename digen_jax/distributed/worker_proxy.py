"""The driver's side of a rollout worker: the interface of its sampling executor, by calls to its processes."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

from digen_jax.distributed.engine import Actor, Engine, Lost
from digen_jax.distributed.transfer import TrainerLink
from digen_jax.distributed.worker_process import Done, NotDone, Opened, RowsMissing
from digen_jax.engine.encoding import Rows
from digen_jax.rewards.exchanges import moved
from digen_jax.runtime.clock import elsewhere, paused
from digen_jax.runtime.judging import Judge, Judged, failed, ready
from digen_jax.runtime.link import ConditioningOf, SamplesOf
from digen_jax.runtime.worker import Gone
from digen_jax.scheduling.commands import Chunk, Publication

SILENCE = 8.0  # seconds without an answer to a ping after which a worker is lost


class WorkerProxy:
    """As `SamplingExecutor`: every method returns when its work is done. For any thread.

    Args:
      name: the worker's.
      opened: what its first process has returned.
      actors: its processes.
      engine: calls them.
      link: the trainer's.
      rows: precomputed prompt embeddings of keys; None if workers encode.

    Raises (every method that works):
      NotDone: the work failed there; or a `RewardMistake` or the like, as in one process.
      Gone: the worker is lost, was given up, or nobody waits for it any longer.
    """

    def __init__(
        self,
        name: str,
        opened: Opened,
        actors: Sequence[Actor],
        engine: Engine,
        link: TrainerLink,
        rows: Callable[[Sequence[str]], list[Rows]] | None = None,
    ):
        self.name, self.devices, self.opened = name, opened.devices, opened
        self.processes = len(actors)
        self.heard = time.time()  # when a ping was answered last
        self.lost = threading.Event()
        self._actors, self._engine, self._link = list(actors), engine, link
        self._rows = rows
        self._serials = itertools.count()
        self._controls = 0  # calls that free data, which come before later work
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], Future] = {}  # calls in progress: see `_held`
        self._seen: dict[
            int, tuple[float, float]
        ] = {}  # serial: (seconds of work, when they were reported)
        self._why: str | None = None  # nothing is waited for, for this reason

    # ------------------------------------------------------------------------ for the executors

    def receive(self, publication: Publication) -> None:
        """Has published weights received; weights that were withdrawn are no longer needed."""
        with paused():  # another worker's call may be storing them
            refs = self._link.stored(publication)
        if refs is not None:
            self._work("receive", publication, *refs, group="sync")

    def encode(self, number: int) -> None:
        """Has a step's prompts encoded; their conditioning stays there until the trainer takes it."""
        encoded = self._with_rows(lambda: self._work_for_tree("encode", number))
        self._link.hold(ConditioningOf(self.name, number), encoded)

    def generate(self, chunk: Chunk, publication: Publication) -> None:
        """Has a chunk's trajectories generated."""
        self._with_rows(lambda: self._work("generate", chunk, publication))

    def decode(self, chunk: Chunk) -> None:
        """Has a chunk's images decoded, which stay there, as do its samples until the trainer takes them."""
        samples = self._work_for_tree("decode", chunk)
        if not chunk.evaluation:
            self._link.hold(SamplesOf(self.name, chunk), samples)

    def score(self, chunk: Chunk, judge: Judge | None = None) -> Future[Judged | None]:
        """Has a decoded chunk scored by the rewards of its process, in parallel with other work; returns at once.

        The future raises the errors of the rewards there as `Judge.submit`'s does.
        """
        found: Future = Future()
        try:
            asked = self._call("score", chunk, group="score")
        except Gone as error:
            return failed(error)
        asked.add_done_callback(lambda done: self._scored(found, done))
        return found

    def scored(self, chunk: Chunk) -> None:
        """The scores are here: the process has freed the images before it sent them."""

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees all data of a chunk."""
        self._free("drop_chunks", (chunk,))
        self._link.withdraw(SamplesOf(self.name, chunk))

    def drop_weights(self, publication: Publication) -> None:
        """Frees published weights."""
        self._free("drop_weights", publication)

    def end_step(self, step: int) -> None:
        """The step has ended: its process forgets it and those before it, too."""
        self._free("end_step", step)
        self._link.withdraw(ConditioningOf(self.name, step))

    def give_up(self) -> None:
        """Another worker repeats its work; calls in progress raise Gone."""
        self.let_go("was given up")
        self.lost.set()

    # -------------------------------------------------------------------------- for the registry

    def ping(self) -> None:
        """Notes how far the calls in progress are.

        Raises:
          Gone: a process is lost, or was silent for `SILENCE` seconds.
        """
        asked = [self._engine.call(actor, "ping", group="ping") for actor in self._actors]
        begin = time.monotonic()
        for one in asked:
            try:
                seen = one.result(max(0.0, begin + SILENCE - time.monotonic()))
            except TimeoutError:
                raise Gone(f"{self.name} has been silent for {SILENCE:g} seconds") from None
            except Lost as error:
                raise Gone(f"{self.name} is lost ({error})") from error
            now = time.monotonic()
            with self._lock:
                for serial in seen.keys() & {
                    serial for serial, _ in self._waiting
                }:  # others have ended meanwhile
                    self._seen[serial] = seen[serial], now
        self.heard = time.time()

    def let_go(self, why: str) -> None:
        """Ends all waits for its work, also those that begin later."""
        with self._lock:
            self._why = self._why or why
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(Gone(f"{self.name} {self._why}"))

    def kill(self) -> None:
        """Kills its processes."""
        for actor in self._actors:
            self._engine.kill(actor)

    # ---------------------------------------------------------------------------------- helpers

    def _with_rows(self, call: Callable[[], Any]) -> Any:
        """Calls; sends the prompt embeddings that the worker is missing, and calls again."""
        while True:
            try:
                return call()
            except RowsMissing as missing:
                found = self._rows(missing.texts)
                rows = dict(zip(missing.texts, found, strict=True))
                self._free("add_rows", self._engine.put(rows))

    @property
    def _before(self) -> int:
        """Control calls to wait for in a process before it works; several processes get all calls in one order."""
        return self._controls if self.processes == 1 else 0

    def _work(self, method: str, *arguments: Any, group: str = "work") -> None:
        with self._lock:
            serial, after = next(self._serials), self._before
            asked = [
                self._engine.call(actor, method, serial, after, *arguments, group=group)
                for actor in self._actors
            ]
        self._wait(serial, asked)

    def _work_for_tree(self, method: str, *arguments: Any) -> Any:
        """As `_work`; returns the reference to the first process's tree."""
        with self._lock:
            serial, after = next(self._serials), self._before
            asked = [
                self._engine.call_for_tree(actor, method, serial, after, *arguments, group="work")
                for actor in self._actors
            ]
        self._wait(serial, [future for future, _ in asked])
        return asked[0][1]

    def _wait(self, serial: int, asked: list[Future]) -> None:
        """Waits for a call of all processes; its seconds of work count, those of the slowest one."""
        try:
            with elsewhere(lambda: self._so_far(serial)) as counts:
                held = [self._held((serial, number), one) for number, one in enumerate(asked)]
                wait(held, return_when=FIRST_EXCEPTION)
                if any(one.done() and one.exception() for one in held):
                    if wait(held, SILENCE).not_done:  # they wait for the failed one in a collective
                        self.lost.set()
                    errors = [one.exception() for one in held if one.done() and one.exception()]
                    # If a process is lost, the others fail, too, and may report it first.
                    raise next((one for one in errors if isinstance(one, Gone)), errors[0])
                slowest: Done = max((one.result() for one in held), key=lambda one: one.seconds)
                counts(slowest.seconds, slowest.parts)
        finally:
            with self._lock:
                self._seen.pop(serial, None)

    def _so_far(self, serial: int) -> float:
        """Seconds of work on a call: what its process has reported last, and the time since then."""
        with self._lock:
            seconds, when = self._seen.get(serial, (0.0, time.monotonic()))
        return seconds + min(SILENCE, time.monotonic() - when)

    def _call(self, method: str, *arguments: Any, group: str) -> Future:
        """Calls the first process; the future raises Gone where that is lost or nobody waits for it."""
        with self._lock:
            serial = next(self._serials)
            asked = self._engine.call(self._actors[0], method, *arguments, group=group)
        return self._held((serial, 0), asked)

    def _held(self, call: tuple[int, int], asked: Future) -> Future:
        """A future of the same result that `let_go` ends; `call` is (serial, number of the process)."""
        found: Future = Future()
        with self._lock:
            if self._why is not None:
                raise Gone(f"{self.name} {self._why}")
            self._waiting[call] = found

        def settle(done: Future) -> None:
            error = done.exception()
            with self._lock:
                if self._waiting.get(call) is found:
                    del self._waiting[call]
            with suppress(InvalidStateError):
                if error is None:
                    found.set_result(done.result())
                elif isinstance(error, Lost):
                    self.lost.set()
                    found.set_exception(Gone(f"{self.name} is lost ({error})"))
                else:
                    found.set_exception(error)

        asked.add_done_callback(settle)
        return found

    def _free(self, method: str, *arguments: Any) -> None:
        """Has data freed before any later work; a worker that is lost gets no call."""
        with self._lock:
            if self._why is not None or self.lost.is_set():
                return
            self._controls += 1
            # Processes that work together must free data at the same point of their work.
            group = "control" if self.processes == 1 else "work"
            for actor in self._actors:
                self._engine.call(actor, method, *arguments, group=group)

    def _scored(self, found: Future, done: Future) -> None:
        """Passes scores on, in this process's time. Rewards that do not work for another reason lose the worker."""
        try:
            judged = done.result()
        except NotDone as error:
            self.lost.set()
            found.set_exception(Gone(str(error)))
        except BaseException as error:
            found.set_exception(error)
        else:
            if judged is not None:
                exchanges = moved(judged.exchanges, time.perf_counter())
                judged = judged._replace(looks=ready(judged.looks), exchanges=exchanges)
            found.set_result(judged)
