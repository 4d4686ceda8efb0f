"""Learned rewards in Flax: CLIP score, PickScore, HPSv2.1 and LAION's aesthetic score.

This module contains the classes referenced by configs. They store only settings; each scoring process reads the
files at its first call. The networks are in `scorers`. A run computes them on its rollout meshes (`on_mesh`).
"""

import dataclasses
import functools
from typing import Any, ClassVar, cast

import numpy as np
from jaxtyping import Float32, UInt8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """Picklable learned reward. Subclasses add the settings that name its files.

    Attributes:
      batch: Batch size per device.
      dtype: Dtype of parameters and computation.
      every, reduce, top_share: How a clip is scored; see `parallel.reward_model.FrameReduction`.
    """

    name: ClassVar[str]  # key of `scorers.OPEN`
    batch: int = 16
    dtype: str = "float32"
    every: int = 1
    reduce: str = "mean"
    top_share: float = 0.3

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns one score per image or clip, computed on the first device of this process.

        Raises:
          ValueError: A file is missing or invalid.
        """
        return _read(self)(images, prompts, metadata)

    @property
    def files(self) -> dict[str, str]:
        """Settings of the subclass."""
        shared = Learned.__dataclass_fields__
        return {name: value for name, value in vars(self).items() if name not in shared}

    @property
    def reduction(self) -> Any:
        """Returns the `FrameReduction`."""
        from digen_jax.parallel.reward_model import FrameReduction  # slow import

        return FrameReduction(self.every, self.reduce, self.top_share)

    def open(self) -> Any:
        """Returns the `scorers.RewardFiles`. Raises ValueError for an invalid file."""
        from digen_jax.learned_rewards import scorers  # slow import

        return cast(Any, scorers.OPEN[self.name])(**self.files, dtype=self.dtype)


@functools.lru_cache(maxsize=8)
def _read(reward: Learned) -> Any:
    """Returns the `RewardModel` on the first device of this process."""
    import jax

    from digen_jax.parallel.mesh import make_mesh
    from digen_jax.parallel.placement import DeviceGroup
    from digen_jax.parallel.reward_model import RewardModel

    opened, group = reward.open(), DeviceGroup(make_mesh(jax.local_devices()[:1]))
    settings = reward.batch, reward.reduction
    return RewardModel(reward.name, opened.scorer, opened.read(None), group, *settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipScore(Learned):
    """CLIP score; see `scorers.open_clip_model` for the files."""

    name = "clip_score"
    folder: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PickScore(Learned):
    """PickScore; see `scorers.open_clip_model` for the files."""

    name = "pickscore"
    folder: str
    processor: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hpsv2(Learned):
    """HPSv2.1; see `scorers.open_hpsv2` for the files."""

    name = "hpsv2"
    file: str
    tokenizer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AestheticScore(Learned):
    """LAION's aesthetic score; see `scorers.open_aesthetic` for the files."""

    name = "aesthetic"
    folder: str
    head: str
