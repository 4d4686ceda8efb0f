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
from digen_jax.rewards.process import Gone, Process, Scored, timed


def for_ever(expected: float | None) -> float:
    """No limit to the seconds of a batch."""
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
        """Scores a batch; Stopped where it takes more seconds than the limit, and from then on."""
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
            "be killed and asked again: mend it, set config.reward.processes to 1 or more, or raise "
            "config.runtime.deadline, and the same command goes on"
        )

    def close(self) -> None:
        """Ends the thread once what it does is done."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, batch = asked
            try:
                future.set_result(timed(self._reward, self._names, batch))
            except BaseException as error:
                future.set_exception(error)


class RewardPool:
    """Scores batches of images, several at a time, without holding up who asks.

    Args:
      reward: the function; of several (`rewards.Several`) all score a batch, one after the other.
      names: what errors call it: one name, or of several all.
      processes: that score side by side; 0 is a thread in this process. A function that no other
        process can import, such as one from a notebook's cell, gets a thread too, which is said.
      retries: times that `score` asks again where the reward fails.
      limit: seconds that a batch may take of which so many are expected, None: nothing is known yet. A
        process that takes longer is killed and another one started.
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
        self._scorers: list[Process | Thread] = (
            [Thread(reward, names)]
            if payload is None
            else [Process(payload, names) for _ in range(processes)]
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
        """A future `Scored`, asked for once.

        It raises what `rewards.call` does; Gone, where its process died or was killed at its
        limit; Stopped, where a thread hangs.
        """
        future = Future()
        if self._closed:
            future.cancel()
        self._jobs.put((future, (images, prompts, metadata)))
        return future

    def score(
        self, images: Float[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"] | Float32[np.ndarray, "b k"]:
        """The scores, once they are there; asked for again where the reward fails.

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
        """Says that the reward has failed, and is asked again."""
        what = f"reward {self.name!r} {error}" if isinstance(error, Gone) else error
        print(f"{what}\n  it is asked again", file=sys.stderr, flush=True)

    def final(self, error: BaseException) -> BaseException:
        """What to raise once the reward has failed on the same pictures as often as it is asked.

        RewardFailed, or Stopped where its process died or hung.
        """
        failures = self._retries + 1
        often = f"{failures} times" if failures > 1 else "once"
        if not isinstance(error, Gone):
            return RewardFailed(f"{error}\n  it has failed {often} on the same pictures")
        return Stopped(
            f"reward {self.name!r} {error}, having failed {often} on the same pictures: {error.advice}; "
            "the same command goes on"
        )

    def close(self) -> None:
        """Kills the processes; a thread ends once what it does is done. What has not begun is forgotten."""
        self._closed = True
        for scorer in self._scorers:
            self._jobs.put(None)
            if isinstance(scorer, Process):
                scorer.close()
        for keeper in self._keepers:
            keeper.join()
        for scorer in self._scorers:
            scorer.close()

    def _keep(self, scorer: Process | Thread) -> None:
        """Has one batch after the other scored."""
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
    """Whether it makes sense to ask a reward again that failed so: not where what it returns is wrong."""
    return isinstance(error, RewardFailed | Gone)


def _sendable(reward: rewards.Reward) -> bytes | None:
    """The reward as another process can read it, or None."""
    single = reward.rewards if isinstance(reward, rewards.Several) else (reward,)
    if any(getattr(one, "__module__", "__main__") == "__main__" for one in single):
        return None
    try:
        return pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
