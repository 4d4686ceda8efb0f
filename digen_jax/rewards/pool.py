"""Scores batches in parallel with generation, in separate processes or in a thread of this process."""

import contextlib
import json
import math
import multiprocessing.connection
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import SIGNALS, Stopped, before_exit, guard_exit, mark_hung
from digen_jax.process.terminal import complete_lines
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.errors import RewardFailed, blamed
from digen_jax.rewards.request_log import Exchange, moved
from digen_jax.rewards.settings import RewardSettings

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from digen_jax.process.terminal import keep_writable; keep_writable(); "
    "from digen_jax.rewards.pool import serve; serve(int(sys.argv[2]))"
)


class Limit(NamedTuple):
    """The time that a reward may take, and the field of the config that sets it."""

    seconds: float = math.inf
    field: str = "config.runtime.deadline"


class RewardProcessDied(RuntimeError):
    """A process died while it scored, or took too long and was killed; `advice` says what to do."""

    def __init__(
        self, text: str, advice: str = "call it by itself, such as in a Python shell, to see why"
    ):
        super().__init__(text)
        self.advice = advice

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.advice)  # pickle would leave out the advice


class RewardTimeout(RewardProcessDied):
    """It took too long."""


class RewardProcess:
    """A process that scores and is started again after it has died. For one thread; `close` is for any.

    Args:
      payload: `rewards.Rewards`, pickled.
      names: the name of each reward in errors.
      accelerator: whether JAX has the machine's accelerators there, or only the CPU.
    """

    def __init__(self, payload: bytes, names: tuple[str, ...], accelerator: bool = False):
        self._told, self._names = (payload, names), names
        self._environment = {} if accelerator else {"JAX_PLATFORMS": "cpu"}
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def ask(self, number: int, batch: rewards.Batch, limit: Limit) -> rewards.Answer:
        """What one of the rewards says of images to which it applies.

        Raises:
          RewardProcessDied: the process died, or was killed at the limit (RewardTimeout).
          ConfigError: see `call.called`.
        """
        if self._link.closed or self._process.poll() is not None:
            self._start()
        late = threading.Event()
        timer = threading.Timer(limit.seconds, self._kill, [late])
        timer.daemon = True
        if limit.seconds < math.inf:
            timer.start()
        try:
            self._link.send((number, batch))
            found = self._link.recv()
        except (EOFError, OSError):
            self._kill()
            self._link.close()
            reward = f"reward {self._names[number]!r}"
            if late.is_set():
                raise RewardTimeout(
                    f"{reward} took more than {limit.seconds:g} seconds and was killed",
                    f"fix it, or raise {limit.field}",
                ) from None
            raise RewardProcessDied(
                f"{reward} died in its process ({self._end()}), perhaps because memory ran out"
            ) from None
        finally:
            timer.cancel()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Kills the process and starts no other one."""
        with self._lock:
            self._closed = True
            self._kill()
        self._end()
        _running.discard(self)

    def _start(self) -> None:
        """Starts a process and sends it the reward."""
        here, there = socket.socketpair()
        with self._lock, here, there:
            if self._closed:
                raise RewardProcessDied("the process of a reward was closed")
            path = json.dumps([str(folder) for folder in sys.path])
            command = [sys.executable, "-c", START, path, str(there.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=os.environ | self._environment,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
            self._link = multiprocessing.connection.Connection(here.detach())
        _running.add(self)
        with contextlib.suppress(OSError):  # if it has died already, `score` says so
            self._link.send(self._told)

    def _kill(self, late: threading.Event | None = None) -> None:
        """Kills the process and everything that it started."""
        if late is not None:
            late.set()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "and cannot be killed"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


_running: set[RewardProcess] = set()


def _kill_all() -> None:
    for process in list(_running):
        process._kill()


before_exit(_kill_all)


# -------------------------------------------------------------------------------- in the process


@complete_lines(beside=True)
def serve(descriptor: int) -> None:
    """Scores batches as they come, until the asking process has gone."""
    # The run handles signals to all processes of a job. SIG_IGN is not used, as children would inherit it.
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    os.set_inheritable(descriptor, False)
    link = multiprocessing.connection.Connection(descriptor)
    # So that the asking process sees the end of this one although a child that the reward has forked lives on.
    os.register_at_fork(after_in_child=link.close)
    told: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, told), daemon=True).start()
    payload, names = told.get()
    try:
        with blamed(", ".join(names), "cannot be imported in its process:"):
            found, failed = pickle.loads(payload), None
    except BaseException as error:
        found, failed = None, error
    while True:
        number, batch = told.get()
        try:
            if failed is not None:
                raise failed
            answer: Any = found.members[number].answer(batch)
        except BaseException as error:
            answer = _picklable(error)
        link.send(answer)


def _listen(link: multiprocessing.connection.Connection, told: queue.SimpleQueue) -> None:
    """Receives batches also while the reward works, so that this process ends when the asking one does."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            told.put(link.recv())
    os.killpg(0, signal.SIGKILL)


def _picklable(error: BaseException) -> BaseException:
    """An error pickled for another process, with its origin."""
    where = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    # Pickling may raise anything, as the exception's own class decides.
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In the process of the reward:\n{where}")
    return error


def for_ever(expected: float | None) -> float:
    """A batch has no time limit."""
    return math.inf


class RewardHung(Stopped):
    """A reward hangs in a thread of this process, which can neither be killed nor asked again."""


class Scored(NamedTuple):
    """A batch's scores, the seconds that its rewards took for them, and the requests that they sent to servers."""

    scores: rewards.Scores
    seconds: float
    exchanges: tuple[Exchange, ...] = ()


class Thread:
    """Scores in a thread of this process. A reward that hangs in it cannot be killed."""

    def __init__(self, found: rewards.Rewards):
        self._rewards = found
        guard_exit()
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self._hangs = False
        self._thread = threading.Thread(target=self._work, name="reward", daemon=True)
        self._thread.start()

    def ask(self, number: int, batch: rewards.Batch, limit: Limit) -> rewards.Answer:
        """As `RewardProcess.ask`; raises RewardHung past the limit, and in every later call."""
        future, asked = Future(), self._rewards.members[number]
        if not self._hangs:
            self._asked.put((future, asked, batch))
        try:
            return future.result(0 if self._hangs else min(limit.seconds, threading.TIMEOUT_MAX))
        except TimeoutError:
            if future.done() and not self._hangs:
                raise  # the reward's own
        self._hangs = True
        mark_hung("reward")
        raise RewardHung(
            f"reward {asked.settings.title!r} took more than {limit.seconds:g} seconds in a thread of this process, "
            "where it cannot be killed and asked again: fix it, set config.reward_pool.processes to 1 or more, or "
            f"raise {limit.field}, and the same command continues"
        )

    def close(self) -> None:
        """Ends the thread after its current batch."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, reward, batch = asked
            try:
                future.set_result(reward.answer(batch))
            except BaseException as error:
                future.set_exception(error)


class RewardPool:
    """Scores batches of images, several at a time, without blocking the caller.

    The rewards score a batch one after the other. Those that a run computes on its meshes are not asked.

    Args:
      found: the rewards.
      processes: how many batches are scored at the same time; 0 means in a thread of this process. A function that
        no other process can import, such as one from a notebook's cell, gets a thread, too, and a line says so.
      retries: how often `score` asks again where a reward fails.
      limit: from the expected seconds of a batch, None if unknown, to the seconds that a reward may take which has
        no limit of its own. A process that takes longer is killed and replaced.
      accelerator: whether JAX has the machine's accelerators in the processes; a run's own meshes have them else.
    """

    def __init__(
        self,
        found: rewards.Rewards,
        processes: int,
        retries: int = 0,
        limit: Callable[[float | None], float] = for_ever,
        accelerator: bool = False,
    ):
        self.rewards = found
        self._retries, self._limit = retries, limit
        idle = all(one.on_mesh for one in found.members)
        payload = _pickled(found) if processes and not idle else None
        if processes and payload is None and not idle:
            print(
                f"reward {found.label!r} is in no module that another process can import, so it scores in a thread of "
                "this one, where it cannot be killed if it hangs: define it in a file, and name it as module:function",
                file=sys.stderr,
            )
        names = tuple(one.settings.title for one in found.members)
        self._scorers: list[RewardProcess | Thread] = (
            [Thread(found)]
            if payload is None
            else [RewardProcess(payload, names, accelerator) for _ in range(processes)]
        )
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._closed = False
        # Of each reward: the images that it has scored, and its seconds.
        self._images, self._seconds = [0] * len(names), [0.0] * len(names)
        self._keepers = [
            threading.Thread(target=self._keep, args=(scorer,), name="rewards", daemon=True)
            for scorer in self._scorers
        ]
        for keeper in self._keepers:
            keeper.start()

    def submit(
        self,
        images: UInt8[np.ndarray, "b ..."],
        prompts: list[str],
        metadata: list[dict],
        known: rewards.Answers = (),
    ) -> Future:
        """A future `Scored`; the rewards that apply to the prompts are asked once.

        `known` is what rewards on a mesh have said of the images, and becomes a part of the scores.

        The future raises what `call.called` raises; RewardProcessDied if a reward's process
        died or was killed at its limit; Stopped if a thread hangs.
        """
        future = Future()
        if self._closed:
            future.cancel()
        self._jobs.put((future, (images, prompts, metadata), known))
        return future

    def score(
        self,
        images: UInt8[np.ndarray, "b ..."],
        prompts: list[str],
        metadata: list[dict],
        known: rewards.Answers = (),
    ) -> rewards.Scores:
        """Waits for the scores; asks again where a reward fails.

        Raises:
          Exception: see `final`.
        """
        return self.insist(lambda: self.submit(images, prompts, metadata, known)).scores

    def insist(self, ask: Callable[[], Future]) -> Any:
        """Waits for what a future of this pool has; asks again where a reward fails. Raises as `score`."""
        for left in reversed(range(self._retries + 1)):
            future = ask()
            error = future.exception()
            if error is None:
                return future.result()
            if not may_pass(error):
                raise error
            if left:
                self.tell(error)
        raise self.final(error)

    def tell(self, error: BaseException) -> None:
        """Prints that the reward has failed and is asked again."""
        print(f"{error}\n  it is asked again", file=sys.stderr, flush=True)

    def final(self, error: BaseException) -> BaseException:
        """The error to raise after the reward has failed on the same pictures in every attempt.

        RewardFailed, or Stopped if its process died or hung.
        """
        failures = self._retries + 1
        often = f"{failures} times" if failures > 1 else "once"
        if not isinstance(error, RewardProcessDied):
            return RewardFailed(f"{error}\n  it has failed {often} on the same pictures")
        return Stopped(
            f"{error}, having failed {often} on the same pictures: {error.advice}; the same command continues"
        )

    def close(self) -> None:
        """Kills the processes; a thread ends after its current batch. Batches that have not begun are dropped."""
        self._closed = True
        for scorer in self._scorers:
            self._jobs.put(None)
            if isinstance(scorer, RewardProcess):
                scorer.close()
        for keeper in self._keepers:
            keeper.join()
        for scorer in self._scorers:
            scorer.close()

    def _keep(self, scorer: RewardProcess | Thread) -> None:
        """Lets a process or thread score one batch after the other."""
        while (job := self._jobs.get()) is not None:
            future, batch, known = job
            if self._closed or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                found = self._scored(scorer, batch, known)
            except BaseException as error:
                future.set_exception(CancelledError() if self._closed else error)
            else:
                future.set_result(found)

    def _scored(
        self, scorer: RewardProcess | Thread, batch: rewards.Batch, known: rewards.Answers
    ) -> Scored:
        """Asks the rewards that apply to a batch, one after the other."""
        answers, spent, exchanges = [*known], 0.0, ()
        for number, places in self.rewards.parts(batch[2]):
            if self.rewards.members[number].on_mesh:
                continue
            limit = self._limit_of(number, len(places))
            answer = scorer.ask(number, rewards.cut(batch, places), limit)
            exchanges += moved(answer.exchanges, time.perf_counter())
            answers.append((number, places, answer))
            self._images[number] += len(places)
            self._seconds[number] += answer.seconds
            spent += answer.seconds
        return Scored(self.rewards.merged(len(batch[0]), answers), spent, exchanges)

    def _limit_of(self, number: int, images: int) -> Limit:
        """The time that a reward may take for so many images."""
        own = self.rewards.members[number].settings.limit
        if own:
            return Limit(own, f"config.rewards[{number}].limit")
        known = self._images[number]
        return Limit(self._limit(self._seconds[number] / known * images if known else None))


def may_pass(error: BaseException) -> bool:
    """Whether to ask a reward again after this failure: not if it returned something wrong."""
    return isinstance(error, RewardFailed | RewardProcessDied)


def _pickled(found: rewards.Rewards) -> bytes | None:
    """Returns the rewards pickled for another process, by name if a function cannot be; None if neither is possible."""
    functions = [getattr(one.function, "func", one.function) for one in found.members]
    if any(getattr(one, "__module__", "__main__") == "__main__" for one in functions):
        return None
    try:
        return pickle.dumps(found)
    except (
        pickle.PicklingError,
        AttributeError,
        TypeError,
    ):  # lambdas, closures, objects with locks
        pass
    settings = tuple(one.settings for one in found.members)
    try:
        same = [one.function for one in resolve(settings).members]
    except ConfigError:
        return None
    own = [":" in one.name for one in settings]
    pairs = zip(own, (getattr(one, "func", one) for one in same), functions, strict=True)
    if any(mine and one is not function for mine, one, function in pairs):
        return None
    return pickle.dumps(_Named(settings))


class _Named:
    """Is pickled as rewards that the other process finds by their names."""

    def __init__(self, settings: tuple[RewardSettings, ...]):
        self._settings = settings

    def __reduce__(self) -> tuple[Callable[..., rewards.Rewards], tuple[Any, ...]]:
        return resolve, (self._settings,)
