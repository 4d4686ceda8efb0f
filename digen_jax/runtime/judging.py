"""What becomes of decoded images: the rewards score them where they are, and only what others use of them leaves.

The leader has a judge for what its own process decodes, and a mesh in another process has its own. An image of a step
leaves its process only if it may be one of the best or worst that are shown, one of an evaluation only if it is shown.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Num, UInt8

from digen_jax import rewards
from digen_jax.engine.divergence import DivergedError, check_images
from digen_jax.images import as_judged, stills
from digen_jax.rewards.exchanges import Exchange
from digen_jax.rewards.pool import RewardPool, Scored
from digen_jax.runtime.evaluation import HeldOut
from digen_jax.runtime.image_statistics import Looks, look_beside
from digen_jax.runtime.scores import Kept, ends
from digen_jax.runtime.steps import Steps
from digen_jax.scheduling.commands import Chunk
from digen_jax.scheduling.settings import Settings


class Judged(NamedTuple):
    """What is known of a chunk's images."""

    scores: rewards.Scores
    values: Float32[np.ndarray, "b"] = np.zeros(0, np.float32)  # by which the scheduler compares
    seconds: float = 0.0  # that the rewards took
    exchanges: tuple[Exchange, ...] = ()  # with servers, on the clock of `time.perf_counter`
    looks: Future[Looks] | None = None  # None: nobody has looked at them
    kept: Kept | None = None  # of a step
    clips: UInt8[np.ndarray, "k t h w 3"] | None = None  # of an evaluation: the first ones


@dataclasses.dataclass(frozen=True)
class Judge:
    """Scores what is decoded in its process, and looks at it.

    Attributes:
      pool: the rewards.
      weights: of each column of scores.
      steps: of the process.
      held_out: the prompts of evaluations.
      settings: the scheduler's.
    """

    pool: RewardPool
    weights: Sequence[float]
    steps: Steps
    held_out: HeldOut
    settings: Settings

    def submit(
        self,
        chunk: Chunk,
        clips: Num[np.ndarray, "b t h w 3"],
        known: rewards.Answers = (),
    ) -> Future[Judged]:
        """A future `Judged` of images as bytes; `known` is what rewards on a mesh have said of them.

        The future raises what `RewardPool.submit`'s does, and DivergedError for NaN, for which no reward is to blame.
        """
        try:
            check_images(clips)
        except DivergedError as error:
            return failed(error)
        records, rows = self._of(chunk)
        # Beside the rewards, for whoever waits for both.
        looks = look_beside(stills(clips))
        asked = as_judged(clips), [record["prompt"] for record in records], records
        found = self.pool.submit(*asked, known)
        return then(found, lambda scored: self._judged(chunk, clips, rows, scored, looks))

    def _of(self, chunk: Chunk) -> tuple[list[dict[str, Any]], np.ndarray | None]:
        """(the record of each image, the group of each; None in an evaluation)."""
        if chunk.evaluation:
            return self.held_out.of(chunk), None
        step = self.steps.of(chunk)
        return step.shown(chunk.index), step.rows[step.cut(chunk.index)]

    def _judged(
        self,
        chunk: Chunk,
        clips: UInt8[np.ndarray, "b t h w 3"],
        rows: np.ndarray | None,
        scored: Scored,
        looks: Future[Looks],
    ) -> Judged:
        values = rewards.total(scored.scores.columns, self.weights)
        found = Judged(scored.scores, values, scored.seconds, scored.exchanges, looks)
        if rows is None:
            return found._replace(clips=self._shown(chunk, clips))
        shown = self.settings.is_shown(chunk.step + 1)
        places = ends(values, rows, self.settings.shown_images if shown else 0)
        return found._replace(kept=Kept(places, stills(clips)[places]))

    def _shown(
        self, chunk: Chunk, clips: UInt8[np.ndarray, "b t h w 3"]
    ) -> UInt8[np.ndarray, "k frames h w 3"]:
        """Those of an evaluation's first images; without a picture that is due only their middle frames."""
        count = max(0, self.settings.shown_images - self.held_out.first(chunk))
        first = clips[:count]
        if not self.settings.is_shown(chunk.step):
            first = stills(first)[:, None]
        return first.copy()  # so that the others can be freed


def then(found: Future, call: Callable[[Any], Any]) -> Future:
    """The future of what `call` makes of a future's result, or of the future that it makes; errors pass.

    It is called in the thread that has the result.
    """
    made: Future = Future()

    def settle(done: Future, call: Callable[[Any], Any]) -> None:
        try:
            result = call(done.result())
        except BaseException as error:
            made.set_exception(error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda last: settle(last, lambda same: same))
        else:
            made.set_result(result)

    found.add_done_callback(lambda done: settle(done, call))
    return made


def ready(result: Any) -> Future:
    """A future that has its result."""
    found: Future = Future()
    found.set_result(result)
    return found


def failed(error: BaseException) -> Future:
    """A future that has an error."""
    found: Future = Future()
    found.set_exception(error)
    return found
