"""Learned rewards in Flax: CLIP score, PickScore, HPSv2.1 and LAION's aesthetic score.

This module contains the factories referenced by configs. They store only settings; each scoring process reads the
files at its first call. The networks are in `scorers`. A run computes them on its rollout meshes (`on_mesh`).
"""

import dataclasses
import functools
from typing import Any, cast

import numpy as np
from jaxtyping import Float32, UInt8

# Settings of how clips are scored: fields of `parallel.reward_model.FrameReduction`.
FRAMES = ("every", "reduce", "top_share")


@dataclasses.dataclass(frozen=True)
class Learned:
    """Picklable learned reward."""

    name: str  # key of `scorers.OPEN`
    # Arguments of that function, `batch`, and those of `FrameReduction`, as pairs.
    settings: tuple[tuple[str, Any], ...]

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns one score per image or clip, computed on the first device of this process.

        Raises:
          ValueError: A file is missing or invalid.
        """
        return _read(self)(images, prompts, metadata)

    @property
    def batch(self) -> int:
        """Batch size per device."""
        return dict(self.settings)["batch"]

    @property
    def frames(self) -> dict[str, Any]:
        """Arguments of `parallel.reward_model.FrameReduction`."""
        return {name: value for name, value in self.settings if name in FRAMES}

    def open(self) -> Any:
        """Returns the `scorers.Opened` of the files. Raises ValueError for an invalid file."""
        from digen_jax.learned_rewards import scorers  # slow import

        own = ("batch", *FRAMES)
        settings = {name: value for name, value in self.settings if name not in own}
        return cast(Any, scorers.OPEN[self.name])(**settings)


@functools.lru_cache(maxsize=8)
def _read(reward: Learned) -> Any:
    from digen_jax.learned_rewards import scorers
    from digen_jax.parallel.reward_model import FrameReduction

    scorer, params = reward.open().load()
    return scorers.on_host(scorer, params, reward.batch, FrameReduction(**reward.frames))


def _learned(name: str, settings: dict[str, Any]) -> Learned:
    return Learned(name, tuple(settings.items()))


# The last three arguments of all are those of `parallel.reward_model.FrameReduction`.
def clip_score(
    *,
    folder: str,
    batch: int = 16,
    dtype: str = "float32",
    every: int = 1,
    reduce: str = "mean",
    top_share: float = 0.3,
) -> Learned:
    """Returns CLIP score; see `scorers.open_clip_score` for the settings."""
    return _learned("clip_score", locals())


def pickscore(
    *,
    folder: str,
    processor: str = "",
    batch: int = 16,
    dtype: str = "float32",
    every: int = 1,
    reduce: str = "mean",
    top_share: float = 0.3,
) -> Learned:
    """Returns PickScore; see `scorers.open_pickscore` for the settings."""
    return _learned("pickscore", locals())


def hpsv2(
    *,
    file: str,
    tokenizer: str,
    batch: int = 16,
    dtype: str = "float32",
    every: int = 1,
    reduce: str = "mean",
    top_share: float = 0.3,
) -> Learned:
    """Returns HPSv2.1; see `scorers.open_hpsv2` for the settings."""
    return _learned("hpsv2", locals())


def aesthetic(
    *,
    folder: str,
    head: str,
    batch: int = 16,
    dtype: str = "float32",
    every: int = 1,
    reduce: str = "mean",
    top_share: float = 0.3,
) -> Learned:
    """Returns LAION's aesthetic score; see `scorers.open_aesthetic` for the settings."""
    return _learned("aesthetic", locals())
