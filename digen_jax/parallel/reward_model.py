"""Networks that score images, on a mesh whose devices all score different images."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float32, Int, Num

from digen_jax.images import Size, to_uint8
from digen_jax.parallel.mesh import fetch, put
from digen_jax.parallel.placement import DeviceGroup, chunked_map
from digen_jax.parallel.system import reshard, sharded_shapes


@runtime_checkable
class Scorer(Protocol):
    """A network that scores images; its parameters are passed to each call."""

    @property
    def tokens(self) -> int:
        """Number of token ids per prompt."""
        ...

    def tokenize(self, prompts: Sequence[str]) -> Int[np.ndarray, "b n"]:
        """Returns token ids for `score`, on the host."""
        ...

    def score(
        self, params: Any, images: Num[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """Returns one score per image, uint8 or, with a gradient, floats in [0, 1]; for `jax.jit`."""
        ...


@dataclasses.dataclass(frozen=True)
class FrameReduction:
    """How a clip's score is computed from the scores of its frames.

    Attributes:
      every: Interval of the scored frames, starting at the first.
      reduce: "mean", "first", "middle" (only this frame is scored), or "top", the mean of the best frames.
      top_share: Share of the scored frames in "top", rounded up.

    Raises:
      ValueError: A value is invalid.
    """

    every: int = 1
    reduce: str = "mean"
    top_share: float = 0.3

    def __post_init__(self):
        if self.reduce not in ("mean", "first", "middle", "top"):
            raise ValueError(f"reduce must be mean, first, middle or top, not {self.reduce!r}")
        if self.every < 1 or not 0 < self.top_share <= 1:
            raise ValueError(
                f"every must be 1 or more and top_share in (0, 1], not {self.every}, {self.top_share}"
            )

    def places(self, frames: int) -> list[int]:
        """Returns the indices of the scored frames of a clip."""
        if self.reduce in ("first", "middle"):
            return [0 if self.reduce == "first" else frames // 2]
        return list(range(0, frames, self.every))

    def __call__(self, scores: Float32[np.ndarray, "b k"]) -> Float32[np.ndarray, "b"]:
        """Returns the score of each clip from the scores of its frames at `places`."""
        if self.reduce == "top":
            best = math.ceil(scores.shape[1] * self.top_share)
            scores = np.sort(scores, axis=1)[:, -best:]
        return scores.mean(axis=1, dtype=np.float32)


MEAN = FrameReduction()


class RewardModel:
    """A scorer with its parameters on a mesh: a reward with images and scores on the host.

    Rows are split over all devices. Their number is padded so that few programs are compiled: to 1, 2, 4, ... images
    per device up to `batch`, then to multiples of `batch`.

    Args:
      name: Name of the reward, the first part of its parameters' names.
      scorer: The network.
      params: Parameters or their shapes, with the shardings of `scorer_shapes`.
      group: The mesh.
      batch: Maximum number of images that each device scores at once.
      reduction: How clips are scored.

    Raises:
      ValueError: `batch` is not a positive integer.
    """

    def __init__(
        self,
        name: str,
        scorer: Scorer,
        params: Any,
        group: DeviceGroup,
        batch: int = 16,
        reduction: FrameReduction = MEAN,
    ):
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch must be a positive integer, not {batch!r}")
        self.name, self.scorer, self.params, self.batch = name, scorer, params, batch
        self.group, self.reduction = group.as_scorer, reduction

        def score(params, images, ids):
            return chunked_map(
                lambda rows: scorer.score(params, *rows), (images, ids), batch, self.group
            )

        self._score = jax.jit(score)

    def __call__(
        self,
        images: Num[np.ndarray, "b ..."],
        prompts: Sequence[str],
        metadata: Sequence[Any] = (),
    ) -> Float32[np.ndarray, "b"]:
        """Returns one score per image [h, w, 3] or clip [t, h, w, 3], uint8 or floats in [0, 1].

        `metadata` is not used. If the devices span several processes, all must call it with the same images, and all
        get all scores.
        """
        if images.ndim == 5:
            places = self.reduction.places(images.shape[1])
            # A few clips at a time: the selected frames are copies.
            at_once = max(1, self.group.images * self.batch // len(places))
            scores = [
                self(
                    images[i : i + at_once, places].reshape(-1, *images.shape[2:]),
                    [prompt for prompt in prompts[i : i + at_once] for _ in places],
                ).reshape(-1, len(places))
                for i in range(0, len(images), at_once)
            ]
            return self.reduction(np.concatenate(scores))
        count = len(images)
        if not count:
            return np.zeros(0, np.float32)
        pixels, ids = np.asarray(to_uint8(images)), self.scorer.tokenize(prompts)
        # Padding rows repeat the last image.
        chosen = np.minimum(np.arange(self.rows(count)), count - 1)
        given = (put(rows[chosen], self.group.batch) for rows in (pixels, ids))
        return fetch(self._score(self.params, *given))[:count]

    def rows(self, images: int) -> int:
        """Returns the number of rows of the program for a number of images."""
        share = -(-images // self.group.images)
        if share > self.batch:
            return self.group.images * -(-share // self.batch) * self.batch
        return self.group.images * min(self.batch, 1 << (share - 1).bit_length())

    def moved(self, group: DeviceGroup) -> "RewardModel":
        """Returns the reward on another mesh."""
        params = reshard({self.name: self.params}, group.as_scorer)[self.name]
        return RewardModel(self.name, self.scorer, params, group, self.batch, self.reduction)

    def trace(self, images: int, size: Size) -> jax.stages.Traced:
        """Traces the program for a number of images or clips; the parameters may be shapes."""
        frames, batch = len(self.reduction.places(size.frames)), self.group.batch
        at_once = max(1, self.group.images * self.batch // frames) if size.frames > 1 else images
        rows = self.rows(min(images, at_once) * frames)
        shape = rows, size.height, size.width, 3
        pixels = jax.ShapeDtypeStruct(shape, np.uint8, sharding=batch)
        ids = jax.ShapeDtypeStruct((rows, self.scorer.tokens), np.int32, sharding=batch)
        return self._score.trace(self.params, pixels, ids)


def scorer_shapes(name: str, shapes: Any, group: DeviceGroup) -> Any:
    """Returns the shapes of a scorer's parameters, sharded by the mesh's rules for component `name`.

    Raises:
      ConfigError: no rule matches a parameter.
    """
    return sharded_shapes({name: shapes}, group.as_scorer)[name]
