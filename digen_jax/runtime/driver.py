"""Runs the scheduler in real time, with one thread per worker. The home worker uses the caller's thread.

    scheduler --command--> driver --(one thread per worker)--> executors --> jitted programs
        ^------event-------'

For a worker in another process, the threads here wait for its replies.
"""

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from digen_jax.errors import ConfigError
from digen_jax.logging.command_log import CommandLog
from digen_jax.logging.timeline import Summary
from digen_jax.process.shutdown import Stopped, during, mark_hung, out_of_memory
from digen_jax.rewards import moved
from digen_jax.rewards.pool import RewardPool, is_retryable
from digen_jax.runtime.array_transfer import DISCONNECT_TIMEOUT, MissingSums, TransferError
from digen_jax.runtime.checkpointing import InFlight
from digen_jax.runtime.clock import Stopwatch, end_process, limited
from digen_jax.runtime.executors import Executors
from digen_jax.runtime.opening import CommandBroadcast
from digen_jax.runtime.steps import ScoredChunk
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Completed,
    Decode,
    Deliver,
    Encode,
    Evaluate,
    Event,
    Failed,
    Generate,
    Interval,
    Joined,
    Removed,
    Score,
    SyncWeights,
    Update,
)
from digen_jax.scheduling.pool import FAILURES, SchedulerError
from digen_jax.scheduling.scheduler import Scheduler

SIGNAL_PAUSE = 1.0  # maximum delay of signal handlers, in seconds


class WorkerDisconnected(RuntimeError):
    """Raised if a worker disconnected or was removed; the driver is notified separately."""


class SerialThread:
    """Executes calls in order in a daemon thread, which does not block interpreter exit."""

    def __init__(self, name: str):
        self.failures = 0  # consecutive failed calls, counted by the caller
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._closed, self._ended = False, threading.Event()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        """Queues a call, which must not raise. Drops it after `close`."""
        self._calls.put((call, arguments))

    def close(self, wait: bool = True) -> None:
        """Drops queued calls; with `wait`, blocks until the call in progress ends or `close(wait=False)` is called."""
        self._closed = True
        self._calls.put(None)
        if not wait:
            self._ended.set()
        self._ended.wait()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None and not self._closed:
            call, arguments = item
            call(*arguments)
        self._ended.set()


class WorkerThreads:
    """Threads of a worker: one for its work, and one for each kind of transfer to or from it."""

    def __init__(self, name: str):
        self.name = name
        self.removed = threading.Event()  # set when the worker is removed
        self._work = SerialThread(name)
        self._transfers = {kind: SerialThread(f"{kind} {name}") for kind in ("sync", "deliver")}

    def thread(self, command: Command) -> SerialThread:
        """Returns the thread that executes a command."""
        return self._transfers.get(command.kind, self._work)

    def close(self, wait: bool = True) -> None:
        """Closes all threads; see `SerialThread.close`."""
        for thread in (self._work, *self._transfers.values()):
            thread.close(wait)

    def remove(self) -> None:
        """Marks the worker as removed and closes its threads without waiting for calls in progress."""
        self.removed.set()
        self.close(wait=False)


class Driver:
    """Runs training step by step. Workers continue with the next work between calls of `step`.

    Args:
      executor: Executes commands.
      scheduler: Scheduler that has not handled an event.
      rewards: Reward pool; closed by the caller.
      log: Records all commands in order. None disables recording.
      broadcast: Sends commands to the trainer's other processes. None means a single process.
      deadline: `config.runtime.deadline`, for work that takes too long. 0 means none.
      evaluated: Called on the main thread with a version and its evaluation result.
    """

    def __init__(
        self,
        executor: Executors,
        scheduler: Scheduler,
        rewards: RewardPool,
        log: CommandLog | list[Command] | None = None,
        broadcast: CommandBroadcast | None = None,
        deadline: float = 0,
        evaluated: Callable[[int, Any], None] = lambda version, found: None,
    ):
        self.executor = executor
        self.in_flight = InFlight()  # at the end of the last completed step
        self.intervals: list[Interval] = []  # of the last completed step
        self._scheduler, self._rewards, self._evaluated = scheduler, rewards, evaluated
        self._log, self._broadcast = log, broadcast or CommandBroadcast()
        self._deadline = deadline
        self._lock = threading.RLock()
        # Commands for the home worker, or an error that ends the run.
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._workers = {name: WorkerThreads(name) for name in executor.devices if name != TRAINER}
        self._hung: list[str] = []  # workers
        self._closed = False
        self._left, self._away = 0.0, 0.0  # time when `step` returned, and seconds outside of it
        self._start = time.perf_counter()
        settings = scheduler.settings
        self._last_update = settings.updates - 1
        images = settings.groups * settings.images
        self._summary = Summary(executor.devices, images, executor.flops)
        for name in (*self._workers, TRAINER):
            self._post(Joined(self.now(), name, *executor.roles(name)))

    # ------------------------------------------------------------------------ for the main thread

    def now(self) -> float:
        """Returns the seconds since this driver was created."""
        return time.perf_counter() - self._start

    def step(self) -> dict[str, float]:
        """Runs until the current step ends; returns its metrics.

        Raises:
          ConfigError: The reward returned an invalid value. Exceptions of the reward itself propagate.
          Stopped: The reward hangs or died, or the home worker cannot take over from hung workers.
          SchedulerError: Work failed too often.
        """
        self._away += self.now() - self._left
        while not self._ends_step(self._next()):
            pass
        self._broadcast.step_done()
        metrics = self.executor.end_step()
        self._left = self.now()
        return metrics | self._summary.metrics

    def finish(self) -> None:
        """Runs the evaluation of the last version, after the last step. Raises the errors of `step`."""
        while True:
            with self._lock:
                if self._scheduler.finished and self._inbox.empty():
                    return
            self._next()

    def _next(self) -> Command | None:
        """Executes and returns the home worker's next command, or returns None if it failed and can be retried."""
        item = None
        while item is None:
            # With a timeout, so that a signal that arrives just before the wait is handled.
            with suppress(queue.Empty):
                item = self._inbox.get(timeout=SIGNAL_PAUSE)
        if isinstance(item, BaseException):
            raise item
        start = self.now()
        if isinstance(item, Evaluate):
            self._evaluated(item.version, self.executor.evaluated(item.version))
            self._away += self.now() - start
            return item
        watched = self._watched(item, lambda *late: end_process("the trainer", *late))
        try:
            self._broadcast.send("do", item)
            with self._broadcast.collective(), watched as stopwatch:
                self.executor.do(item)
        except Exception as error:
            if not self._others_may_do(item, error):
                raise
            if isinstance(error, MissingSums):
                self.disconnected(error.args[0], "did not send its sums")  # unless already removed
            else:
                traceback.print_exception(error)
            self._post(Failed(self.now(), item, repr(error)))
            return None
        self._completed(item, start, stopwatch)
        return item

    def _others_may_do(self, command: Command, error: Exception) -> bool:
        """Returns whether a failed command of the home worker can be retried: sampling, or an update without sums.

        Raises:
          Stopped: All other workers hang.
        """
        if isinstance(error, MissingSums):
            return True
        if not isinstance(command, Encode | Generate | Decode):
            return False
        if self._hung and not self._workers:
            raise Stopped(
                f"{' and '.join(self._hung)} hung, and the trainer could not take over ({error!r}). All steps before "
                "this one are saved; the same command continues"
            ) from error
        return bool(self._workers) and not _ends_run(error) and not self._broadcast.is_broken

    def rest(self) -> list[Interval]:
        """Returns the intervals since the end of the last step."""
        with self._lock:
            return self._summary.take(self.now())

    def snapshot(self) -> dict[str, Any]:
        """Returns the current state of each worker as JSON; see `Summary.snapshot`. Thread-safe."""
        with self._lock:
            return self._summary.snapshot(self._scheduler, self.now())

    def close(self) -> None:
        """Ends the threads after calls in progress."""
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.close()

    # -------------------------------------------------------------- for threads of other processes

    def join(self, worker: Any) -> None:
        """Adds a worker in another process, also mid-run. A worker with the same name must have been removed first."""
        with self._failing(), self._lock:
            if self._closed:
                return
            self.executor.join(worker)
            self._workers[worker.name] = WorkerThreads(worker.name)
            self._summary.devices[worker.name] = worker.devices
            self._post(Joined(self.now(), worker.name, *self.executor.roles(worker.name)))

    def disconnected(self, name: str, why: str) -> None:
        """Removes a disconnected worker and reassigns its work."""
        with self._lock:
            worker = None if self._closed else self._workers.get(name)
        if worker is not None:
            with self._failing():
                self._remove(worker, why)

    def fail(self, error: BaseException) -> None:
        """Makes the main thread raise an error at its next command."""
        self._inbox.put(error)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Passes any error of the block to the main thread."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    # ------------------------------------------------------------------------------------- events

    def _post(self, event: Event) -> None:
        """Sends an event to the scheduler, and the resulting commands to their workers. Thread-safe."""
        with self._lock:
            if self._closed:
                return
            commands = self._scheduler.handle(event)
            if self._log is not None:
                self._log.extend(commands)
            command: Any = getattr(event, "command", None)
            if isinstance(event, Completed) and self._ends_step(command):
                # For the checkpoint. The newest version and its evaluated weights are in the trainer's state.
                older = [p for p in self._scheduler.kept if p.version <= command.step]
                trees = {p.version: self.executor.versions[p] for p in older}
                self.in_flight = InFlight(self._scheduler.save(), trees)
                self.intervals = self._summary.end_step(self.now(), self._away)
                self._away = 0.0
            self._summary.record_event(event, commands, self._scheduler, self.now())
            for command in commands:
                self._send(command)

    def _ends_step(self, command: Command | None) -> bool:
        return isinstance(command, Update) and command.update == self._last_update

    def _send(self, command: Command) -> None:
        name = getattr(command, "worker", None)
        if isinstance(command, Deliver) and command.to != TRAINER:
            name = command.to
        if isinstance(command, Score):
            start = self.now()
            future = self.executor.score(command, self._rewards)
            future.add_done_callback(lambda done: self._scored(command, start, done))
        elif name == TRAINER or isinstance(command, Evaluate):
            self._inbox.put(command)
        elif name is None:
            self._broadcast.send("do", command)
            self.executor.do(command)
        else:
            worker = self._workers[name]
            worker.thread(command).submit(self._do, worker, command)

    def _completed(self, command: Command, start: float, stopwatch: Stopwatch) -> None:
        end = self.now()
        parts = [(kind, a - self._start, b - self._start) for kind, a, b in stopwatch.parts]
        with self._lock:
            self._summary.record_work(command, start, end, parts)
            self._post(Completed(end, command, stopwatch.seconds))

    @contextmanager
    def _watched(self, command: Command, late: Callable[[str, float], None]) -> Iterator[Stopwatch]:
        """Times a block that executes a command; calls `late(what, limit)` if it exceeds its limit in seconds.

        Raises WorkerDisconnected if the command is no longer in flight.
        """
        with self._lock:
            if command.serial not in self._scheduler.in_flight:
                raise WorkerDisconnected("its commands were reassigned")
            seconds = self._scheduler.costs.measured(command)
            what = self._scheduler.work(command)
        watched = limited(self._deadline, seconds, lambda limit: late(what, limit))
        with during(what), watched as stopwatch:
            yield stopwatch

    # ---------------------------------------------------------------------- in threads of workers

    def _do(self, worker: WorkerThreads, command: Command) -> None:
        """Executes a worker's command. The scheduler handles failures; repeated failures remove the worker."""
        with self._failing():
            start = self.now()
            watched = self._watched(command, lambda *late: self._timed_out(worker, *late))
            try:
                with watched as stopwatch:
                    self.executor.do(command)
            except WorkerDisconnected:  # `disconnected` is called separately
                return
            # Any error: another device may succeed, and the scheduler limits the attempts.
            except Exception as error:
                if _ends_run(error) and self._is_current(worker):
                    raise
                return self._failed(worker, command, error)
            worker.thread(command).failures = 0
            if isinstance(command, Deliver):
                # The trainer's other processes get the chunk from this one before they train on it.
                self._broadcast.send("delivered", command)
            self._completed(command, start, stopwatch)

    def _failed(self, worker: WorkerThreads, command: Command, error: Exception) -> None:
        if isinstance(error, TransferError):
            # Missing arrays are often the first sign of a disconnect.
            worker.removed.wait(DISCONNECT_TIMEOUT)
        with self._lock:
            if not (self._is_current(worker) and command.serial in self._scheduler.in_flight):
                return
            if self._scheduler.is_superseded(command):
                return self._post(Failed(self.now(), command, repr(error)))
        if message := str(error) if isinstance(error, TransferError) else out_of_memory(error):
            print(f"{worker.name}: {message}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        thread = worker.thread(command)
        thread.failures += 1
        with self._lock:
            useless = isinstance(command, SyncWeights | Deliver) and thread.failures == FAILURES
            if not useless:
                self._post(Failed(self.now(), command, repr(error)))
                if self._is_current(worker):  # repeated failures may have removed its roles
                    useless = not self._scheduler.workers[worker.name].roles
        if useless:
            self._remove(worker, f"has failed {FAILURES} times in a row")

    def _timed_out(self, worker: WorkerThreads, what: str, seconds: float) -> None:
        """Removes a worker that exceeded the deadline and reassigns its work."""
        with self._failing():
            mark_hung(worker.name)
            self._hung.append(worker.name)
            limit = f"{seconds:g} seconds (config.runtime.deadline)"
            self._remove(worker, f"hangs: {what} has taken more than {limit}")

    def _is_current(self, worker: WorkerThreads) -> bool:
        """Returns whether the worker is still registered; a new worker may have the same name."""
        with self._lock:
            return self._workers.get(worker.name) is worker

    def _remove(self, worker: WorkerThreads, why: str) -> None:
        with self._lock:
            if not self._is_current(worker):
                return
            print(f"{worker.name} {why}; reassigning its work", file=sys.stderr, flush=True)
            del self._workers[worker.name]
            self.executor.remove(worker.name)
            self._post(Removed(self.now(), worker.name))
            if not self._workers:
                message = "no other worker is left: the trainer does all work until one joins"
                print(message, file=sys.stderr, flush=True)
        worker.remove()

    def _scored(self, command: Score, start: float, done: Future[ScoredChunk | None]) -> None:
        """Handles scores. The timeline shows the reward's own time; the scheduler uses the total wait."""
        with self._failing():
            error = done.exception()
            if isinstance(error, WorkerDisconnected):
                return  # `disconnected` reassigns the chunk
            with self._lock:
                # Scores from a removed worker may arrive after its chunk was reassigned.
                if command.serial not in self._scheduler.in_flight:
                    return
                if error is not None and is_retryable(error):
                    try:  # the scheduler decides whether to retry
                        self._post(Failed(self.now(), command, repr(error)))
                    except SchedulerError:
                        raise self._rewards.final_error(error) from None
                    return self._rewards.log_retry(error)
                found = done.result()
                self.executor.scored(command, found)
                now = self.now()
                if found is not None:
                    self._summary.record_requests(command, moved(found.exchanges, -self._start))
            values, seconds = tuple[float, ...](), 0.0
            if found is not None:
                kl = None if found.kl is None else found.kl.tolist()
                self._broadcast.send("scored", (command, found.scores.columns.tolist(), kl))
                values, seconds = tuple(map(float, found.values)), found.seconds
            with self._lock:
                end = self.now()
                self._summary.record_work(command, max(start, now - seconds), end)
                self._post(Completed(end, command, now - start, values))


def _ends_run(error: Exception) -> bool:
    """Returns whether an error would recur on any other device."""
    return isinstance(error, Stopped | ConfigError) and not is_retryable(error)
