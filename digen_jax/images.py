"""Images as arrays: conversion to bytes, and the form in which rewards get them."""

import numpy as np
from jaxtyping import Num, UInt8


def stills(clips: Num[np.ndarray, "*b t h w 3"]) -> Num[np.ndarray, "*b h w 3"]:
    """The middle frame of each clip; for a picture, which has one frame, the picture."""
    return clips[..., clips.shape[-4] // 2, :, :, :]


def as_judged(clips: Num[np.ndarray, "b t h w 3"]) -> np.ndarray:
    """The reward's input: pictures [b h w 3] where clips have one frame, else the clips."""
    return clips[:, 0] if clips.shape[1] == 1 else clips


def to_uint8(images: Num[np.ndarray, "*b h w 3"]) -> UInt8[np.ndarray, "*b h w 3"]:
    """Images in [0, 1] as bytes, clipped and rounded; images that are bytes stay as they are.

    Raises:
      ValueError: an image holds a NaN.
    """
    if images.dtype == np.uint8:
        return images
    if np.isnan(images).any():
        raise ValueError("an image holds NaN: the sampler or the decoder has gone wrong")
    return np.round(np.clip(images, 0, 1) * 255).astype(np.uint8)
