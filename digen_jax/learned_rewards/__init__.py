"""Learned rewards in Flax: CLIP score, PickScore, HPSv2.1 and LAION's aesthetic score.

This module contains the factories referenced by configs. They store only settings; each scoring process reads the
files at its first call. The networks are in `scorers`. A run computes them on its rollout meshes (`on_mesh`).
"""

import dataclasses
import functools
from typing import Any, cast

import numpy as np
from jaxtyping import Float32, UInt8


@dataclasses.dataclass(frozen=True)
class Learned:
    """Picklable learned reward."""

    name: str  # key of `scorers.OPEN`
    settings: tuple[tuple[str, Any], ...]  # arguments of that function, and `batch`, as pairs

    def __call__(
        self, images: UInt8[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns one score per image, computed on the first device of this process.

        Raises:
          ValueError: A file is missing or invalid.
        """
        return _read(self)(images, prompts, metadata)

    @property
    def batch(self) -> int:
        """Batch size per device."""
        return dict(self.settings)["batch"]

    def open(self) -> Any:
        """Returns the `scorers.Opened` of the files. Raises ValueError for an invalid file."""
        from digen_jax.learned_rewards import scorers  # slow import

        settings = {name: value for name, value in self.settings if name != "batch"}
        return cast(Any, scorers.OPEN[self.name])(**settings)


@functools.lru_cache(maxsize=8)
def _read(reward: Learned) -> Any:
    from digen_jax.learned_rewards import scorers

    scorer, params = reward.open().load()
    return scorers.on_host(scorer, params, reward.batch)


def _learned(name: str, **settings: Any) -> Learned:
    return Learned(name, tuple(settings.items()))


def clip_score(*, folder: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """Returns CLIP score; see `scorers.open_clip_score` for the settings."""
    return _learned("clip_score", folder=folder, batch=batch, dtype=dtype)


def pickscore(
    *, folder: str, processor: str = "", batch: int = 16, dtype: str = "float32"
) -> Learned:
    """Returns PickScore; see `scorers.open_pickscore` for the settings."""
    return _learned("pickscore", folder=folder, processor=processor, batch=batch, dtype=dtype)


def hpsv2(*, file: str, tokenizer: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """Returns HPSv2.1; see `scorers.open_hpsv2` for the settings."""
    return _learned("hpsv2", file=file, tokenizer=tokenizer, batch=batch, dtype=dtype)


def aesthetic(*, folder: str, head: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """Returns LAION's aesthetic score; see `scorers.open_aesthetic` for the settings."""
    return _learned("aesthetic", folder=folder, head=head, batch=batch, dtype=dtype)
