"""Scoring beside generation: the reward in processes of its own, or in a thread of this one."""

import math
import pickle
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from digen_jax import rewards
from digen_jax.process.ending import Stopped, hangs
from digen_jax.rewards.mistakes import RewardFailed
from digen_jax.rewards.process import Gone, RewardProcess, Scored, timed


def for_ever(expected: float | None) -> float:
    """A batch has no time limit."""
    return math.inf


class Thread:
    """Scores in a thread of this process. A reward that hangs in it cannot be killed.

    Args:
      reward, names: see `RewardPool`.
    """

    def __init__(self, reward: rewards.Reward, names: tuple[str, ...]):
        self._reward, self._names = reward, names
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self._hangs = False
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def score(self, batch: tuple[Any, ...], limit: float = math.inf) -> Scored:
        """Scores a batch; raises Stopped where it takes longer than the limit, and in every call after that."""
        future = Future()
        if not self._hangs:
            self._asked.put((future, batch))
        try:
            return future.result(0 if self._hangs else min(limit, threading.TIMEOUT_MAX))
        except TimeoutError:
            if future.done() and not self._hangs:
                raise  # the reward's own
        self._hangs = True
        hangs("reward")
        name = rewards.label(self._names)
        raise Stopped(
            f"reward {name!r} took more than {limit:g} seconds in a thread of this process, where it cannot "
            "be killed and asked again: fix it, set config.reward.processes to 1 or more, or raise "
            "config.runtime.deadline, and the same command continues"
        )

    def close(self) -> None:
        """Ends the thread after its current batch."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, batch = asked
            try:
                future.set_result(timed(self._reward, self._names, batch))
            except BaseException as error:
                future.set_exception(error)


class RewardPool:
    """Scores batches of images, several at a time, without blocking the caller.

    Args:
      reward: the function; several rewards (`rewards.Several`) score a batch one after the other.
      names: the reward's names in errors.
      processes: how many score at the same time; 0: a thread in this process. A function that no other
        process can import, such as one from a notebook's cell, gets a thread, too, and a line says so.
      retries: how often `score` asks again where the reward fails.
      limit: from the expected seconds of a batch, None if unknown, to the seconds that it may take. A
        process that takes longer is killed and replaced.
    """

    def __init__(
        self,
        reward: rewards.Reward,
        names: tuple[str, ...],
        processes: int,
        retries: int = 0,
        limit: Callable[[float | None], float] = for_ever,
    ):
        self.reward, self.name = reward, rewards.label(names)
        self._retries, self._limit = retries, limit
        payload = _sendable(reward) if processes else None
        if processes and payload is None:
            print(
                f"reward {self.name!r} is in no file that another process could import: it scores in a thread",
                file=sys.stderr,
            )
        self._scorers: list[RewardProcess | Thread] = (
            [Thread(reward, names)]
            if payload is None
            else [RewardProcess(payload, names) for _ in range(processes)]
        )
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._closed = False
        self._images, self._seconds = 0, 0.0  # that were scored
        self._keepers = [
            threading.Thread(target=self._keep, args=(scorer,), name="rewards", daemon=True)
            for scorer in self._scorers
        ]
        for keeper in self._keepers:
            keeper.start()

    def submit(
        self, images: Float[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Future:
        """A future `Scored`; the reward is asked once.

        The future raises what `rewards.call` raises; Gone, if its process died or was killed at its
        limit; Stopped, if a thread hangs.
        """
        future = Future()
        if self._closed:
            future.cancel()
        self._jobs.put((future, (images, prompts, metadata)))
        return future

    def score(
        self, images: Float[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"] | Float32[np.ndarray, "b k"]:
        """Waits for the scores; asks again where the reward fails.

        Raises:
          Exception: see `final`.
        """
        for left in reversed(range(self._retries + 1)):
            future = self.submit(images, prompts, metadata)
            error = future.exception()
            if error is None:
                return future.result().scores
            if not may_pass(error):
                raise error
            if left:
                self.tell(error)
        raise self.final(error)

    def tell(self, error: BaseException) -> None:
        """Prints that the reward has failed and is asked again."""
        what = f"reward {self.name!r} {error}" if isinstance(error, Gone) else error
        print(f"{what}\n  it is asked again", file=sys.stderr, flush=True)

    def final(self, error: BaseException) -> BaseException:
        """The error to raise after the reward has failed on the same pictures in every attempt.

        RewardFailed, or Stopped if its process died or hung.
        """
        failures = self._retries + 1
        often = f"{failures} times" if failures > 1 else "once"
        if not isinstance(error, Gone):
            return RewardFailed(f"{error}\n  it has failed {often} on the same pictures")
        return Stopped(
            f"reward {self.name!r} {error}, having failed {often} on the same pictures: {error.advice}; "
            "the same command continues"
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
            future, batch = job
            if self._closed or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            expected = self._seconds / self._images * len(batch[0]) if self._images else None
            try:
                found = scorer.score(batch, self._limit(expected))
            except BaseException as error:
                future.set_exception(CancelledError() if self._closed else error)
            else:
                self._images += len(batch[0])
                self._seconds += found.seconds
                future.set_result(found)


def may_pass(error: BaseException) -> bool:
    """Whether to ask a reward again after this failure: not if it returned something wrong."""
    return isinstance(error, RewardFailed | Gone)


def _sendable(reward: rewards.Reward) -> bytes | None:
    """The reward pickled for another process; None if it cannot be."""
    single = reward.rewards if isinstance(reward, rewards.Several) else (reward,)
    if any(getattr(one, "__module__", "__main__") == "__main__" for one in single):
        return None
    try:
        return pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
