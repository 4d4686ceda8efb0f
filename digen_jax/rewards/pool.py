"""Scoring beside generation: the reward in spawned processes of its own, or in a thread of this one.

A process that scores gets the reward and pictures as numbers; it imports JAX only where the user's
reward does, and then without an accelerator.
"""

import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from digen_jax import rewards
from digen_jax.settings import ConfigError


class Scored(NamedTuple):
    """A batch's scores, and the seconds that the reward took for them."""

    scores: Float32[np.ndarray, "b"] | Float32[np.ndarray, "b k"]  # see `rewards.call`
    seconds: float


Future = concurrent.futures.Future


class RewardPool:
    """Scores batches of images, several at a time, without holding up who asks.

    Args:
      reward: the function; of several (`rewards.Several`) all score a batch, one after the other.
      name: what errors call it; of several all names, with commas between them.
      processes: that score side by side; 0 is a thread in this process. A function that no other
        process can import, such as one from a notebook's cell, gets a thread too, which is said.
    """

    def __init__(self, reward: rewards.Reward, name: str, processes: int):
        self.reward, self.name = reward, name
        payload = _sendable(reward) if processes else None
        if processes and payload is None:
            print(
                f"reward {name!r} is in no file that another process could import: it scores in a thread",
                file=sys.stderr,
            )
        self._remote = payload is not None
        if self._remote:
            self._pool: Any = concurrent.futures.ProcessPoolExecutor(
                processes, multiprocessing.get_context("spawn"), _begin, (payload, name)
            )
            self._pool.submit(_nothing)  # starts a process while the model is being read
        else:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "reward")

    def submit(
        self, images: Float[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Future:
        """A future `Scored`; where the reward fails it raises what `rewards.call` does.

        A reward whose process dies raises ConfigError.
        """
        if not self._remote:
            return self._pool.submit(_score, self.reward, self.name, images, prompts, metadata)
        outer = Future()
        outer.set_running_or_notify_cancel()
        try:
            inner = self._pool.submit(_score_here, images, prompts, metadata)
        except BrokenProcessPool:
            outer.set_exception(self._died())
        else:
            inner.add_done_callback(lambda done: self._pass_on(done, outer))
        return outer

    def score(
        self, images: Float[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"] | Float32[np.ndarray, "b k"]:
        """The scores, once they are there."""
        return self.submit(images, prompts, metadata).result().scores

    def close(self) -> None:
        """Ends the processes; what has not begun is forgotten."""
        self._pool.shutdown(wait=not self._remote, cancel_futures=True)

    def _pass_on(self, done: Future, outer: Future) -> None:
        if done.cancelled():
            return outer.set_exception(RuntimeError("the pool of rewards was closed"))
        error = done.exception()
        if isinstance(error, BrokenProcessPool):
            error = self._died()
        return outer.set_exception(error) if error else outer.set_result(done.result())

    def _died(self) -> ConfigError:
        return ConfigError(
            f"the process of reward {self.name!r} has died, for want of memory perhaps: "
            "set config.reward.processes = 0 to see what it says"
        )


def _sendable(reward: rewards.Reward) -> bytes | None:
    """The reward as a spawned process can read it, or None."""
    single = reward.rewards if isinstance(reward, rewards.Several) else (reward,)
    if any(getattr(one, "__module__", "__main__") == "__main__" for one in single):
        return None
    try:
        return pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _score(reward: rewards.Reward, name: str, *batch: Any) -> Scored:
    begin = time.perf_counter()
    scores = rewards.call(reward, name, *batch)
    return Scored(scores, time.perf_counter() - begin)


# ------------------------------------------------------------------------------ in its processes

_reward: tuple[rewards.Reward, str] | None = None


def _begin(payload: bytes, name: str) -> None:
    """Prepares a process. Ctrl-C is for the run to answer, and its end is the process's end."""
    global _reward
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"
    _reward = pickle.loads(payload), name


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _score_here(*batch: Any) -> Scored:
    return _score(*_reward, *batch)


def _nothing() -> None:
    """Work for a process that is to start."""
