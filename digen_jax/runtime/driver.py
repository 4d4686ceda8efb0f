"""Runs the scheduler on the real clock: one thread for each worker, the home worker's being the caller's.

A worker in another process has threads here, too, which wait for it.
"""

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from digen_jax.errors import ConfigError
from digen_jax.process.ending import Stopped, hangs
from digen_jax.process.exhausted import during, out_of_memory
from digen_jax.rewards.exchanges import moved
from digen_jax.rewards.pool import RewardPool, may_pass
from digen_jax.runtime.clock import Stopwatch
from digen_jax.runtime.executors import Executor, LostSums, Samples
from digen_jax.runtime.judging import Judged
from digen_jax.runtime.link import LOSS, LinkError
from digen_jax.runtime.log import CommandLog
from digen_jax.runtime.orders import Orders
from digen_jax.runtime.present import present
from digen_jax.runtime.scores import sent
from digen_jax.runtime.summary import Summary
from digen_jax.runtime.watch import Watch, end_process
from digen_jax.runtime.worker import Gone, Line, WorkerThreads
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Decode,
    Deliver,
    Encode,
    Evaluate,
    Generate,
    Publish,
    Score,
    Update,
)
from digen_jax.scheduling.deadlines import Deadline, expected
from digen_jax.scheduling.events import Completed, Event, Failed, Joined, Lost
from digen_jax.scheduling.scheduler import FAILURES, Scheduler, SchedulerError
from digen_jax.scheduling.timeline import Interval


class Begun(NamedTuple):
    """The work in flight at a step's end, as a checkpoint holds it in addition to the trainer's state."""

    scheduler: dict[str, Any]  # Scheduler.save()
    kept: dict[int, Any]  # version: tuned parameters that begun chunks need, except the newest
    layout: str = ""  # recipe.layout of the process that saved it, in which the costs were measured


class Driver:
    """Runs training step by step. Between two calls the sampling meshes continue with the next work.

    Args:
      executor: executes commands.
      scheduler: before its first event.
      rewards: scores; the caller closes it.
      begun: the work in flight when the run was saved; None: nothing.
      log: gets all commands in their order; in a run it is a `CommandLog`.
      orders: tells other processes what to do as soon as it begins.
      watch: ends work that takes too long; the caller closes it. None: no deadline.
      evaluated: called on the main thread with a version and the result of its evaluation.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        rewards: RewardPool,
        begun: Begun | None = None,
        log: CommandLog | list[Command] | None = None,
        orders: Orders | None = None,
        watch: Watch | None = None,
        evaluated: Callable[[int, Any], None] = lambda version, found: None,
    ):
        self.executor, self._scheduler = executor, scheduler
        self._evaluated = evaluated
        self.begun = begun
        self.intervals: list[Interval] = []  # of the step that ended last
        self._rewards, self._log = rewards, log
        self._orders = orders or Orders()
        self._watch = watch or Watch(Deadline(0))
        self._lock = threading.RLock()
        # Commands for the trainer, or an error that ends the run.
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        rollouts = [name for name in executor.devices if name != TRAINER]
        self._workers = {name: WorkerThreads(name) for name in rollouts}
        self._hung: list[str] = []  # workers
        self._closed = False
        self._left, self._away = 0.0, 0.0  # when `step` returned, and seconds spent outside of it
        self._start = time.perf_counter()
        settings = scheduler.state.settings
        self._last_update = settings.updates - 1
        self._summary = Summary(executor.devices, settings.groups * settings.images)
        for name in (*self._workers, TRAINER):
            self._post(Joined(self.now(), name, *executor.roles(name)))

    # ------------------------------------------------------------------------ for the main thread

    def now(self) -> float:
        """Seconds since this driver was created."""
        return time.perf_counter() - self._start

    def step(self) -> dict[str, float]:
        """Runs until the present step has ended; returns its metrics.

        Raises:
          ConfigError: the reward returns a wrong value. An error of the reward itself is raised as it is.
          Stopped: the reward hangs or dies, or the trainer cannot take over from workers that hang.
          SchedulerError: a piece of work failed too often.
        """
        self._away += self.now() - self._left
        while not self._ends_step(self._next()):
            pass
        self._orders.step_done()
        metrics = self.executor.end_step()
        self._left = self.now()
        return metrics | self._summary.numbers

    def finish(self) -> None:
        """After the last step: runs until its version is evaluated. Raises the same errors as `step`."""
        while not self._over():
            self._next()

    def _over(self) -> bool:
        """Whether no work is left."""
        with self._lock:
            return self._scheduler.finished and self._inbox.empty()

    def _next(self) -> Command | None:
        """Waits for the trainer's next command and executes it; None: it failed, and others may repeat it."""
        item = self._inbox.get()
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, Evaluate):
            self._orders.announce("do", item)
            begin = self.now()
            self._evaluated(item.version, self.executor.evaluated(item))
            self._away += self.now() - begin
            return item
        begin = self.now()
        late = self._watched(item, lambda *late: end_process("the trainer", *late))
        try:
            with self._orders.together("do", item), late as stopwatch:
                self.executor.do(item)
        except Exception as error:
            if not self._others_may_do(item, error):
                raise
            if not isinstance(error, LostSums):
                traceback.print_exception(error)
            self._post(Failed(self.now(), item, repr(error)))
            return None
        self._completed(item, begin, stopwatch.seconds, parts=stopwatch.parts)
        return item

    def _others_may_do(self, command: Command, error: Exception) -> bool:
        """Whether the trainer's work has failed that another worker may do: sampling, or training of lost sums.

        Raises:
          Stopped: there is no other worker left, because they hang.
        """
        if isinstance(error, LostSums):
            return True
        if not isinstance(command, Encode | Generate | Decode):
            return False
        if self._hung and not self._workers:
            raise Stopped(
                f"{' and '.join(self._hung)} hung, and the trainer could not take over ({error!r}): all steps "
                "before this one are saved, and the same command continues"
            ) from error
        ends = isinstance(error, Stopped | ConfigError) and not may_pass(error)
        return bool(self._workers) and not ends and not self._orders.torn

    def rest(self) -> list[Interval]:
        """The intervals since the last step ended."""
        with self._lock:
            return self._summary.take(self.now())

    def snapshot(self) -> dict[str, Any]:
        """What every worker does or waits for at present, as JSON: see `present`. For any thread."""
        with self._lock:
            return present(self._scheduler, self._summary, self.executor.devices, self.now())

    def join(self, sampler: Samples) -> None:
        """Adds a sampling mesh, in mid-run, too; one of the same name was lost before. Any thread may call."""
        try:
            with self._lock:
                if self._closed:
                    return
                self.executor.join(sampler)
                self._workers[sampler.name] = WorkerThreads(sampler.name)
                self._summary.devices[sampler.name] = sampler.devices
                self._post(Joined(self.now(), sampler.name, *self.executor.roles(sampler.name)))
        except BaseException as error:
            self._stop(error)

    def lost(self, name: str, why: str) -> None:
        """A sampling mesh's process is gone: the others repeat its work. Any thread may call."""
        with self._lock:
            worker = None if self._closed else self._workers.get(name)
        try:
            if worker is not None:
                self._give_up(worker, why)
        except BaseException as error:
            self._stop(error)

    def fail(self, error: BaseException) -> None:
        """Ends the run with an error. Any thread may call."""
        self._stop(error)

    def close(self) -> None:
        """Ends the threads after their present work."""
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.close()

    # ------------------------------------------------------------------------------------- events

    def _post(self, event: Event) -> None:
        """Sends an event to the scheduler, and the resulting commands to their workers. Any thread may call."""
        with self._lock:
            if self._closed:
                return
            commands = self._scheduler.handle(event)
            if self._log is not None:
                self._log.extend(commands)
            command = getattr(event, "command", None)
            if isinstance(event, Completed) and self._ends_step(command):
                self._step_ended(command.step + 1)
            self._summary.seen(event, commands, self._scheduler, self.now())
            for command in commands:
                self._send(command)

    def _step_ended(self, version: int) -> None:
        """Saves the work in flight, from which another process can continue."""
        # The newest version, and its evaluated weights, are in the trainer's state.
        kept = [p for p in self._scheduler.kept if p.version < version]
        trees = {p.version: self.executor.published(p) for p in kept}
        self.begun = Begun(self._scheduler.save(), trees)
        self.intervals = self._summary.end_step(self.now(), self._away)
        self._away = 0.0

    def _ends_step(self, command: Command | None) -> bool:
        return isinstance(command, Update) and command.update == self._last_update

    def _send(self, command: Command) -> None:
        worker = getattr(command, "worker", None)
        if isinstance(command, Deliver) and command.to != TRAINER:
            worker = command.to
        if isinstance(command, Score):
            asked = self.now()
            future = self.executor.score(command, self._rewards)
            future.add_done_callback(lambda done: self._scored(command, asked, done))
        elif worker == TRAINER or isinstance(command, Evaluate):
            self._inbox.put(command)
        elif worker is None:
            self._orders.announce("do", command)
            self.executor.do(command)
        else:
            found = self._workers[worker]
            line = found.line(command)
            line.submit(self._do, found, line, command)

    def _completed(
        self,
        command: Command,
        begin: float,
        seconds: float,
        values: tuple[float, ...] = (),
        parts: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        end = self.now()
        parts = [(kind, *(time - self._start for time in span)) for kind, *span in parts]
        with self._lock:
            self._summary.work(command, begin, end, parts)
            self._post(Completed(end, command, seconds, values))

    def _stop(self, error: BaseException) -> None:
        """Makes the main thread raise an error at its next command."""
        self._inbox.put(error)

    @contextmanager
    def _watched(self, command: Command, late: Callable[[str, float], None]) -> Iterator[Stopwatch]:
        """Times a block that executes a command; `late(what, seconds)` is called if it takes too long."""
        with self._lock:
            seconds = expected(self._scheduler.state.costs, command)
            what = self._scheduler.work(command)
        with during(what), self._watch.over(seconds, lambda limit: late(what, limit)) as stopwatch:
            yield stopwatch

    # ------------------------------------------------------------------------- in other threads

    def _do(self, worker: WorkerThreads, line: Line, command: Command) -> None:
        """Executes a sampling mesh's command; the scheduler handles a failure; after two in a row the mesh is lost."""
        try:
            begin = self.now()
            try:
                late = self._watched(command, lambda *late: self._hangs(worker, *late))
                with late as stopwatch:
                    self.executor.do(command)
            except Gone:  # `lost` follows, or has been called
                return None
            # Any error: another device may succeed where this one fails, and the scheduler limits the attempts.
            except Exception as error:
                ends = isinstance(error, Stopped | ConfigError) and not may_pass(error)
                if ends and self._is_current(worker):
                    raise  # no other device can do it either
                return self._failed(worker, line, command, error)
            worker.failed[line] = 0
            if isinstance(command, Deliver):
                # The trainer's other processes take it from this one, before they train on it.
                self._orders.announce("delivered", command)
            self._completed(command, begin, stopwatch.seconds, parts=stopwatch.parts)
        except BaseException as error:
            self._stop(error)

    def _failed(
        self, worker: WorkerThreads, line: Line, command: Command, error: Exception
    ) -> None:
        if isinstance(error, LinkError):
            # Arrays that do not come are often the first sign of a lost process, which is no failure of the work.
            worker.given_up.wait(LOSS)
        with self._lock:
            if not (self._is_current(worker) and self._scheduler.awaits(command)):
                return None
            if self._scheduler.is_superseded(command):
                return self._post(Failed(self.now(), command, repr(error)))
        # What a process that is gone was to send does not come.
        if sentence := str(error) if isinstance(error, LinkError) else out_of_memory(error):
            print(f"{worker.name}: {sentence}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        worker.failed[line] += 1
        with self._lock:
            useless = isinstance(command, Publish | Deliver) and worker.failed[line] == FAILURES
            if not useless:
                self._post(Failed(self.now(), command, repr(error)))
                useless = self._is_current(worker) and self._scheduler.is_useless(worker.name)
        return self._give_up(worker, f"has failed {FAILURES} times in a row") if useless else None

    def _hangs(self, worker: WorkerThreads, what: str, seconds: float) -> None:
        """A worker is late: it is given up, and the others repeat its work."""
        try:
            hangs(worker.name)
            self._hung.append(worker.name)
            limit = f"{seconds:g} seconds (config.runtime.deadline)"
            self._give_up(worker, f"hangs: {what} has taken more than {limit}")
        except BaseException as error:
            self._stop(error)

    def _is_current(self, worker: WorkerThreads) -> bool:
        """Whether it was not given up; its name may have come again."""
        with self._lock:
            return self._workers.get(worker.name) is worker

    def _give_up(self, worker: WorkerThreads, why: str) -> None:
        with self._lock:
            if not self._is_current(worker):
                return
            print(f"{worker.name} {why}: given up", file=sys.stderr, flush=True)
            del self._workers[worker.name]
            self.executor.give_up(worker.name)
            self._post(Lost(self.now(), worker.name))
            if not self._workers:
                words = "no other worker is left: the trainer samples until one joins"
                print(words, file=sys.stderr, flush=True)
        worker.give_up()

    def _scored(self, command: Score, asked: float, done: Future) -> None:
        """Takes scores; the timeline shows the reward's own time, the scheduler uses the whole waiting time."""
        try:
            error = done.exception()
            if isinstance(error, Gone):
                return  # `lost` follows, or has been called, after which the chunk is made again
            with self._lock:
                # What becomes of a lost mesh's images may come when another one makes their chunk again.
                if not self._scheduler.awaits(command):
                    return
                if error is not None and may_pass(error):
                    return self._not_scored(command, error)
                found: Judged | None = done.result()
                self.executor.scored(command, found)
                now = self.now()
                if found is not None:
                    self._summary.asked(command, moved(found.exchanges, -self._start))
            values, seconds = (), 0.0
            if found is not None:
                self._orders.announce("scored", (command, sent(found.scores.columns)))
                values, seconds = tuple(map(float, found.values)), found.seconds
            self._completed(command, max(asked, now - seconds), now - asked, values)
        except BaseException as error:
            self._stop(error)

    def _not_scored(self, command: Score, error: BaseException) -> None:
        """The reward failed: the scheduler decides whether to ask it again."""
        try:
            self._post(Failed(self.now(), command, repr(error)))
        except SchedulerError:
            raise self._rewards.final(error) from None
        self._rewards.tell(error)
