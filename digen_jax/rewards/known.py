"""Pictures whose scores are known, by which a reward is tried where it will run."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8


class Known(NamedTuple):
    """Pictures or clips and their scores.

    Attributes:
      images: bytes.
      prompts: one for each picture.
      metadata: likewise.
      expected: the scores.
      tolerance: the largest difference from them that is allowed.
    """

    images: UInt8[np.ndarray, "b *t h w 3"]
    prompts: list[str]
    metadata: list[dict]
    expected: Float32[np.ndarray, "b"]
    tolerance: float
