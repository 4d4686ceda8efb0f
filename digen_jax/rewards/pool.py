"""Scores batches concurrently with generation, in separate processes or in a thread.

A reward process holds all rewards of a run and is called for one at a time, so that each has a separate time limit. It
maps the images from shared memory, whose pages are copied only if a reward writes to them. It is a process group, so
that its children are killed with it, and it exits with the calling process. It imports JAX only if the user's reward
does, by default without accelerators.
"""

import contextlib
import functools
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
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.images import SharedMemory, find_shared, share
from digen_jax.process.shutdown import SIGNALS, Stopped, before_exit, guard_exit, mark_hung
from digen_jax.process.terminal import complete_lines
from digen_jax.rewards import Exchange, moved
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.errors import RewardFailed, user_code

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from digen_jax.process.terminal import keep_writable; keep_writable(); "
    "from digen_jax.rewards.pool import serve; serve(int(sys.argv[2]))"
)


class RewardProcessDied(RuntimeError):
    """Raised if a process died while scoring, or was killed at its limit."""


class RewardTimeout(RewardProcessDied):
    """Raised if a reward process was killed at its limit."""


class RewardHung(Stopped):
    """Raised if a reward hangs in a thread of this process, which can be neither killed nor reused."""


class Scored(NamedTuple):
    """Scores of a batch, seconds per reward, and requests to servers."""

    scores: rewards.Scores
    seconds: float
    exchanges: tuple[Exchange, ...] = ()


class RewardProcess:
    """Scoring process that restarts after it dies. Not thread-safe, except for `close`.

    `payload` is a pickled `rewards.Rewards`. JAX in the process may use accelerators only if `accelerator`.
    """

    def __init__(self, payload: bytes, names: tuple[str, ...], accelerator: bool = False):
        self._payload, self._names = payload, names
        self._environment = {} if accelerator else {"JAX_PLATFORMS": "cpu"}
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def call(self, number: int, batch: rewards.Batch, limit: float, field: str) -> rewards.Answer:
        """Returns the answer of one reward for images to which it applies.

        `limit` is the time limit in seconds, and `field` the config field that sets it.

        Raises:
          RewardProcessDied: The process died, or was killed at the limit (RewardTimeout).
          ConfigError: See `rewards.NamedReward.answer`.
        """
        if self._link.closed or self._process.poll() is not None:
            self._start()
        late = threading.Event()
        timer = threading.Timer(limit, self._kill, [late])
        timer.daemon = True
        if limit < math.inf:
            timer.start()
        try:
            images, prompts, metadata = batch
            shared = find_shared(share(images))
            assert shared is not None
            self._link.send((number, shared[1], prompts, metadata))
            with _socket_of(self._link) as link:
                socket.send_fds(link, [b"\0"], [shared[0].file.fileno()])
            found = self._link.recv()
        except (EOFError, OSError):
            self._kill()
            self._link.close()
            reward = f"reward {self._names[number]!r}"
            if late.is_set():
                text = f"{reward} took more than {limit:g} seconds ({field}) and was killed"
                raise RewardTimeout(text) from None
            text = f"{reward} died in its process ({self._exit_code()})"
            raise RewardProcessDied(f"{text}, perhaps because memory ran out") from None
        finally:
            timer.cancel()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Kills the process and prevents restarts."""
        with self._lock:
            self._closed = True
            self._kill()
        self._exit_code()
        _running.discard(self)

    def _start(self) -> None:
        """Starts a process and sends it the rewards."""
        here, there = socket.socketpair()
        with self._lock, here, there:
            if self._closed:
                raise RewardProcessDied("the process of a reward was closed")
            path = json.dumps([str(folder) for folder in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, path, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                env=os.environ | self._environment,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
            self._link = multiprocessing.connection.Connection(here.detach())
        _running.add(self)
        with contextlib.suppress(OSError):  # if the process has died, `call` raises
            self._link.send((self._payload, self._names))

    def _kill(self, late: threading.Event | None = None) -> None:
        """Kills the process and its children."""
        if late is not None:
            late.set()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _exit_code(self) -> str:
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


@complete_lines(external_bar=True)
def serve(descriptor: int) -> None:
    """Main function of a reward process: scores batches until the process at the other end of a socket exits."""
    # The run handles signals to all processes of a job. SIG_IGN is not used, because children would inherit it.
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    os.set_inheritable(descriptor, False)
    link = multiprocessing.connection.Connection(descriptor)
    # The calling process must detect the exit of this one even if a forked child is still running.
    os.register_at_fork(after_in_child=link.close)
    received: queue.SimpleQueue = queue.SimpleQueue()

    def receive() -> None:
        """Receives while the reward runs, so that this process exits with the calling one."""
        try:
            received.put(link.recv())
            while True:
                number, layout, prompts, metadata = link.recv()
                with _socket_of(link) as files:
                    _, (file,), *_ = socket.recv_fds(files, 1, 1)
                os.set_inheritable(file, False)
                images = layout.view(SharedMemory.of(file))
                received.put((number, (images, prompts, metadata)))
                del images
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=receive, daemon=True).start()
    payload, names = received.get()
    try:
        with user_code(", ".join(names), "cannot be imported in its process:"):
            found, failed = pickle.loads(payload), None
            found = found() if callable(found) else found  # see `_pickled`
    except BaseException as error:
        found, failed = None, error
    while True:
        number, batch = received.get()
        try:
            if failed is not None:
                raise failed
            answer: Any = found.members[number].answer(batch)
        except BaseException as error:
            answer = _picklable(error)
        del batch  # frees the images
        link.send(answer)


def _socket_of(link: multiprocessing.connection.Connection) -> socket.socket:
    """Returns a socket to send or receive an open file, which the caller closes."""
    return socket.fromfd(link.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


def _picklable(error: BaseException) -> BaseException:
    """Returns a picklable version of an error, with its traceback as a note."""
    origin = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # pickling a custom class may raise anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In the process of the reward:\n{origin}")
    return error


class RewardThread:
    """Scoring thread in this process. A hung reward cannot be killed."""

    def __init__(self, found: rewards.Rewards):
        self._rewards, self._hangs = found, False
        guard_exit()
        self._thread = ThreadPoolExecutor(1, "reward")

    def call(self, number: int, batch: rewards.Batch, limit: float, field: str) -> rewards.Answer:
        """Like `RewardProcess.call`, but raises RewardHung past the limit and in every later call."""
        reward = self._rewards.members[number]
        if not self._hangs:
            future = self._thread.submit(reward.answer, batch)
            try:
                return future.result(min(limit, threading.TIMEOUT_MAX))
            except TimeoutError:
                if future.done():
                    raise  # the reward raised it
        self._hangs = True
        mark_hung("reward")
        raise RewardHung(
            f"reward {reward.settings.title!r} took more than {limit:g} seconds in a thread of this "
            "process, where it cannot be killed and retried: fix it, set config.reward_pool.processes to 1 "
            f"or more, or raise {field}; then the same command continues"
        )

    def close(self) -> None:
        """Ends the thread after its current reward."""
        self._thread.shutdown(wait=False)


class RewardPool:
    """Scores batches of images concurrently, without blocking the caller.

    Rewards score a batch sequentially. Rewards on meshes are skipped.

    Args:
      found: Rewards.
      processes: Number of processes; 0 means a thread of this process. Functions that other processes cannot import,
        such as those of a notebook, also use a thread, which is logged.
      retries: Maximum retries of a failed reward in `score`.
      limit: Maps the expected seconds of a batch, None if unknown, to the time limit of rewards without one. A
        process that takes longer is killed and restarted.
      accelerator: Whether JAX in the processes may use accelerators.
    """

    def __init__(
        self,
        found: rewards.Rewards,
        processes: int,
        retries: int = 0,
        limit: Callable[[float | None], float] = lambda expected: math.inf,
        accelerator: bool = False,
    ):
        self.rewards = found
        self._retries, self._limit = retries, limit
        idle = all(one.on_mesh for one in found.members)
        payload = _pickled(found) if processes and not idle else None
        if processes and payload is None and not idle:
            print(
                f"reward {found.label!r} is not in a module that other processes can import, so it runs in a "
                "thread of this process, where it cannot be killed if it hangs: define it in a file, and set "
                "module:function",
                file=sys.stderr,
            )
        names = tuple(one.settings.title for one in found.members)
        self._scorers: list[RewardProcess | RewardThread] = (
            [RewardThread(found)]
            if payload is None
            else [RewardProcess(payload, names, accelerator) for _ in range(processes)]
        )
        self._free: queue.SimpleQueue = queue.SimpleQueue()  # scorers without a batch
        for scorer in self._scorers:
            self._free.put(scorer)
        self._closed = False
        # Number of scored images and seconds, by reward.
        self._images, self._seconds = [0] * len(names), [0.0] * len(names)
        self._threads = ThreadPoolExecutor(len(self._scorers), "rewards")

    def submit(
        self,
        images: UInt8[np.ndarray, "b ..."],
        prompts: list[str],
        metadata: list[dict],
        known: rewards.Answers = (),
    ) -> Future:
        """Returns a future `Scored` of images or clips, and of a prompt and a record for each.

        The rewards that apply to the prompts are called once. `known` are answers of rewards on a mesh, which are
        merged into the scores. The future raises errors of `rewards.NamedReward.answer`; RewardProcessDied if a
        process died or was killed at its limit; Stopped if a thread hangs.
        """
        if not self._closed:
            return self._threads.submit(self._work, (images, prompts, metadata), known)
        canceled: Future = Future()
        canceled.cancel()
        return canceled

    def later(self, result: Any) -> Future:
        """Returns a future of a known result, which is set by a thread of the pool."""
        return self._threads.submit(lambda: result)

    def score(self, *batch: Any) -> rewards.Scores:
        """Returns the scores of a batch; see `submit`. Retries failed rewards, then raises `final_error`."""
        return self.retry(lambda: self.submit(*batch)).scores

    def retry(self, submit: Callable[[], Future]) -> Any:
        """Returns the result of a submitted future. Resubmits it if a reward fails."""
        left = self._retries
        while True:
            future = submit()
            error = future.exception()
            if error is None:
                return future.result()
            if not is_retryable(error):
                raise error
            if not left:
                raise self.final_error(error)
            self.log_retry(error)
            left -= 1

    def log_retry(self, error: BaseException) -> None:
        """Logs a failed reward that is retried."""
        print(f"{error}\n  it is called again", file=sys.stderr, flush=True)

    def final_error(self, error: BaseException) -> BaseException:
        """Returns the error to raise after a reward failed in every attempt on the same images.

        This is RewardFailed, or Stopped if the process died or hung.
        """
        often = f"{self._retries + 1} times" if self._retries else "once"
        if not isinstance(error, RewardProcessDied):
            return RewardFailed(f"{error}\n  it has failed {often} on the same images")
        advice = "call it by itself, in a Python shell, to see why"
        if isinstance(error, RewardTimeout):
            advice = "fix it, or raise that limit"
        failed = f"{error}, having failed {often} on the same images"
        return Stopped(f"{failed}: {advice}; the same command continues")

    def close(self) -> None:
        """Drops queued batches and kills the processes. A thread ends after its current reward."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for scorer in self._scorers:
            scorer.close()
        self._threads.shutdown()

    def _work(self, batch: rewards.Batch, known: rewards.Answers) -> Scored:
        """Scores a batch with a free process or thread."""
        scorer = self._free.get()
        try:
            return self._score(scorer, batch, known)
        except BaseException:
            if self._closed:
                raise CancelledError from None
            raise
        finally:
            self._free.put(scorer)

    def _score(self, scorer: Any, batch: rewards.Batch, known: rewards.Answers) -> Scored:
        """Calls the rewards that apply to a batch sequentially."""
        answers, spent, exchanges = [*known], 0.0, list[Exchange]()
        if isinstance(scorer, RewardProcess):  # once for all rewards
            batch = share(batch[0]), *batch[1:]
        for number, reward in enumerate(self.rewards.members):
            places = reward.applying(batch[2])
            if reward.on_mesh or not len(places):
                continue
            scored, seconds = self._images[number], self._seconds[number]
            limit, field = reward.settings.limit, f"config.rewards[{number}].limit"
            if not limit:
                limit = self._limit(seconds / scored * len(places) if scored else None)
                field = "config.runtime.deadline"
            answer = scorer.call(number, rewards.subset(batch, places), limit, field)
            exchanges += moved(answer.exchanges, time.perf_counter())
            answers.append((number, places, answer))
            self._images[number] += len(places)
            self._seconds[number] += answer.seconds
            spent += answer.seconds
        return Scored(self.rewards.merged(len(batch[0]), answers), spent, tuple(exchanges))


def is_retryable(error: BaseException) -> bool:
    """Returns whether to retry after a failure. Invalid return values are not retried."""
    return isinstance(error, RewardFailed | RewardProcessDied)


def _pickled(found: rewards.Rewards) -> bytes | None:
    """Pickles the rewards, by name if a function is not picklable. Returns None if neither is possible."""
    functions = [getattr(one.function, "func", one.function) for one in found.members]
    if any(getattr(one, "__module__", "__main__") == "__main__" for one in functions):
        return None
    # Lambdas, closures, and objects with locks are not picklable.
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
        return pickle.dumps(found)
    settings = tuple(one.settings for one in found.members)
    try:
        same = [getattr(one.function, "func", one.function) for one in resolve(settings).members]
    except ConfigError:
        return None
    named = zip(settings, same, functions, strict=True)
    if any(":" in one.name and function is not original for one, function, original in named):
        return None
    return pickle.dumps(functools.partial(resolve, settings))  # called in the other process
