"""Rewards that are networks: CLIP score, PickScore, HPSv2.1 and LAION's aesthetic score, in Flax.

This module has the factories that a config names; they keep the settings, and each process that scores reads the
files at its first call. `scorers` has the networks. A run computes them on its sampling meshes (`on_mesh`).
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8


@dataclasses.dataclass(frozen=True)
class Learned:
    """A learned reward that can be pickled.

    Attributes:
      name: a key of `scorers.OPEN`.
      settings: arguments of that function, and `batch`, as pairs.
    """

    name: str
    settings: tuple[tuple[str, Any], ...]

    def __call__(
        self, images: UInt8[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns one score per image, computed on this process's first device.

        Raises:
          ValueError: Names a file that is missing or invalid.
        """
        return _read(self)(images, prompts, metadata)

    @property
    def batch(self) -> int:
        """Images that a device scores at once."""
        return dict(self.settings)["batch"]

    def open(self) -> Any:
        """Returns the `scorers.Opened` of its files; raises ValueError, which names an invalid file."""
        from digen_jax.learned_rewards import scorers  # importing it is slow

        settings = {name: value for name, value in self.settings if name != "batch"}
        return scorers.OPEN[self.name](**settings)


@functools.lru_cache(maxsize=8)
def _read(reward: Learned) -> Any:
    from digen_jax.learned_rewards import scorers

    return scorers.on_host(*reward.open().load(), reward.batch)


def _learned(name: str, **settings: Any) -> Learned:
    return Learned(name, tuple(settings.items()))


def clip_score(*, folder: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """Returns CLIP's score; the settings are those of `scorers.open_clip_score`."""
    return _learned("clip_score", folder=folder, batch=batch, dtype=dtype)


def pickscore(
    *, folder: str, processor: str = "", batch: int = 16, dtype: str = "float32"
) -> Learned:
    """Returns PickScore; the settings are those of `scorers.open_pickscore`."""
    return _learned("pickscore", folder=folder, processor=processor, batch=batch, dtype=dtype)


def hpsv2(*, file: str, tokenizer: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """Returns HPSv2.1; the settings are those of `scorers.open_hpsv2`."""
    return _learned("hpsv2", file=file, tokenizer=tokenizer, batch=batch, dtype=dtype)


def aesthetic(*, folder: str, head: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """Returns LAION's rating; the settings are those of `scorers.open_aesthetic`."""
    return _learned("aesthetic", folder=folder, head=head, batch=batch, dtype=dtype)
