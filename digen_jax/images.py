"""Images as numbers: the one rule by which they become bytes."""

import numpy as np
from jaxtyping import Num, UInt8


def to_uint8(images: Num[np.ndarray, "*b h w 3"]) -> UInt8[np.ndarray, "*b h w 3"]:
    """Images in [0, 1] as bytes, rounded, values outside clipped; images of bytes stay as they are.

    Raises:
      ValueError: an image holds a NaN, which no byte can show.
    """
    if images.dtype == np.uint8:
        return images
    if np.isnan(images).any():
        raise ValueError("an image holds NaN: the sampler or the decoder has gone wrong")
    return np.round(np.clip(images, 0, 1) * 255).astype(np.uint8)
