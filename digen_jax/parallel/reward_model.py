"""Networks that score images, on a mesh whose devices all score different images."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float32, Int, Num, UInt8

from digen_jax.errors import ConfigError
from digen_jax.images import to_uint8
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
        self, params: Any, images: UInt8[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """Returns one score per image, for `jax.jit`."""
        ...


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

    Raises:
      ValueError: `batch` is not a positive integer.
    """

    def __init__(self, name: str, scorer: Scorer, params: Any, group: DeviceGroup, batch: int = 16):
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch must be a positive integer, not {batch!r}")
        self.name, self.scorer, self.params, self.batch = name, scorer, params, batch
        self.group = group.as_scorer

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
        """Returns one score per image [h, w, 3], uint8 or floats in [0, 1]; `metadata` is not used.

        If the devices span several processes, all must call it with the same images, and all get all scores.

        Raises:
          ConfigError: the images are clips.
        """
        if images.ndim != 4:
            raise ConfigError(f"the reward {self.name!r} scores images, not clips")
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
        return RewardModel(self.name, self.scorer, params, group, self.batch)

    def trace(self, images: int, height: int, width: int) -> jax.stages.Traced:
        """Traces the program for a number of images; the parameters may be shapes."""
        rows, batch = self.rows(images), self.group.batch
        pixels = jax.ShapeDtypeStruct((rows, height, width, 3), np.uint8, sharding=batch)
        ids = jax.ShapeDtypeStruct((rows, self.scorer.tokens), np.int32, sharding=batch)
        return self._score.trace(self.params, pixels, ids)


def scorer_shapes(name: str, shapes: Any, group: DeviceGroup) -> Any:
    """Returns the shapes of a scorer's parameters, sharded by the mesh's rules for component `name`.

    Raises:
      ConfigError: no rule matches a parameter.
    """
    return sharded_shapes({name: shapes}, group.as_scorer)[name]
