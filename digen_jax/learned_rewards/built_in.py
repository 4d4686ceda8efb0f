"""Learned rewards by their names in a config: what is asked for is kept, and read by the first call in a process."""

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8


@dataclasses.dataclass(frozen=True)
class Learned:
    """A learned reward that can be pickled: each process that scores reads the weights for itself.

    Attributes:
      module: of this package.
      settings: of its `make`, as pairs.
    """

    module: str
    settings: tuple[tuple[str, Any], ...]

    def __call__(
        self, images: UInt8[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """One score for each picture; raises ValueError, which names a file that is missing or broken."""
        return _read(self)(images, prompts, metadata)

    @property
    def batch(self) -> int:
        """The pictures that a device scores at once."""
        return dict(self.settings)["batch"]

    def opened(self) -> Any:
        """The `scorer.Opened` of its files; raises ValueError, which names a file that is missing or broken."""
        own = {name: value for name, value in self.settings if name != "batch"}
        return _module(self.module).opened(**own)


def _module(name: str) -> Any:
    # Not before it is needed: to name a reward in a config imports no network.
    return importlib.import_module(f"{__package__}.{name}")


@functools.lru_cache(maxsize=8)
def _read(asked: Learned) -> Any:
    return _module(asked.module).make(**dict(asked.settings))


def _learned(module: str, **settings: Any) -> Learned:
    return Learned(module, tuple(settings.items()))


def clip_score(*, folder: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """CLIP's score; the settings are those of `clip_score.make`."""
    return _learned("clip_score", folder=folder, batch=batch, dtype=dtype)


def pickscore(
    *, folder: str, processor: str = "", batch: int = 16, dtype: str = "float32"
) -> Learned:
    """PickScore; the settings are those of `pickscore.make`, with "" for a processor in the folder itself."""
    return _learned(
        "pickscore", folder=folder, processor=processor or None, batch=batch, dtype=dtype
    )


def hpsv2(*, file: str, tokenizer: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """HPSv2.1; the settings are those of `hpsv2.make`."""
    return _learned("hpsv2", file=file, tokenizer=tokenizer, batch=batch, dtype=dtype)


def aesthetic(*, folder: str, head: str, batch: int = 16, dtype: str = "float32") -> Learned:
    """LAION's rating; the settings are those of `aesthetic.make`."""
    return _learned("aesthetic", folder=folder, head=head, batch=batch, dtype=dtype)
