"""Networks that score images, on a mesh on which every device has its own images."""

import functools
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
    """A network that scores pictures; its parameters are passed to each call."""

    @property
    def tokens(self) -> int:
        """The token ids of a prompt."""
        ...

    def tokenize(self, prompts: Sequence[str]) -> Int[np.ndarray, "b n"]:
        """Token ids for `score`, on the host."""
        ...

    def score(
        self, params: Any, images: UInt8[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """One score a picture, for `jax.jit`."""
        ...


class RewardModel:
    """A scorer with its parameters on a mesh: a reward, whose pictures and scores are on the host.

    Rows are split over all devices. Their number is padded so that few programs are compiled: for 1, 2, 4 and so on
    pictures a device up to `batch`, then for multiples of it.

    Args:
      name: of the reward, the first part of its parameters' names.
      scorer: the network.
      params: its parameters or their shapes, which lie as `scorer_shapes` says.
      group: the mesh.
      batch: pictures that each device scores at once, at most.

    Raises:
      ValueError: `batch` is no number of pictures.
    """

    def __init__(self, name: str, scorer: Scorer, params: Any, group: DeviceGroup, batch: int = 16):
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch must be a whole number from 1, not {batch!r}")
        self.name, self.scorer, self.params, self.batch = name, scorer, params, batch
        self.group = group.as_scorer
        self._score = jax.jit(functools.partial(_score, scorer, batch, self.group))

    def __call__(
        self,
        images: Num[np.ndarray, "b ..."],
        prompts: Sequence[str],
        metadata: Sequence[Any] = (),
    ) -> Float32[np.ndarray, "b"]:
        """One score for each picture [h, w, 3], of bytes or of numbers in [0, 1]; `metadata` is not used.

        If the devices belong to several processes, all call it with the same pictures, and all get all scores.

        Raises:
          ConfigError: the images are clips.
        """
        if images.ndim != 4:
            raise ConfigError(f"the reward {self.name!r} scores pictures, not clips")
        count = len(images)
        if not count:
            return np.zeros(0, np.float32)
        pictures, ids = np.asarray(to_uint8(images)), self.scorer.tokenize(prompts)
        # Surplus rows repeat the last.
        chosen = np.minimum(np.arange(self.rows(count)), count - 1)
        given = (put(rows[chosen], self.group.batch) for rows in (pictures, ids))
        return fetch(self._score(self.params, *given))[:count]

    def rows(self, images: int) -> int:
        """The rows of the program for so many images."""
        share = -(-images // self.group.images)
        if share > self.batch:
            return self.group.images * -(-share // self.batch) * self.batch
        return self.group.images * min(self.batch, 1 << (share - 1).bit_length())

    def moved(self, group: DeviceGroup) -> "RewardModel":
        """The same on another mesh."""
        params = reshard({self.name: self.params}, group.as_scorer)[self.name]
        return RewardModel(self.name, self.scorer, params, group, self.batch)

    def lower(self, images: int, height: int, width: int) -> jax.stages.Lowered:
        """The program for so many images, with nothing allocated: the parameters may be shapes."""
        rows, batch = self.rows(images), self.group.batch
        pictures = jax.ShapeDtypeStruct((rows, height, width, 3), np.uint8, sharding=batch)
        ids = jax.ShapeDtypeStruct((rows, self.scorer.tokens), np.int32, sharding=batch)
        return self._score.lower(self.params, pictures, ids)


def scorer_shapes(name: str, shapes: Any, group: DeviceGroup) -> Any:
    """The shapes of a scorer's parameters with shardings by the mesh's rules: as a reward's component of its name.

    Raises:
      ConfigError: no rule matches a parameter.
    """
    return sharded_shapes({name: shapes}, group.as_scorer)[name]


def _score(
    scorer: Scorer,
    batch: int,
    group: DeviceGroup,
    params: Any,
    images: UInt8[Array, "b h w 3"],
    ids: Int[Array, "b n"],
) -> Float32[Array, "b"]:
    return chunked_map(lambda rows: scorer.score(params, *rows), (images, ids), batch, group)
