"""Statistics of images that no reward asks for, which show what a model gives up for its reward.

Images are bytes; luma is that of BT.601, from 0 to 255. In clips, only the middle frame counts. On one core they
take about 0.05 ms for an image of 32 x 32 pixels, 7 ms for 512 x 512 and 60 ms for 1024 x 1024 (`look` called in a
loop). In a run separate threads compute them in parallel to all other work.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, UInt8

# A Sobel gradient this large, in luma a pixel, is an edge: a tenth of the range from black to white.
EDGE = 25.5
THUMBNAIL = 16  # pixels of a thumbnail's sides
CHUNK = 1 << 17  # pixels that are worked on at a time, which stay in a core's cache

# A small part of the machine; numpy leaves Python's lock while it works on a chunk.
THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
_beside = ThreadPoolExecutor(THREADS, "image statistics")


class Looks(NamedTuple):
    """Statistics of some images."""

    sharpness: Float32[np.ndarray, "b"]
    colourfulness: Float32[np.ndarray, "b"]
    edge_density: Float32[np.ndarray, "b"]
    thumbnails: Float32[np.ndarray, "b y x 3"]  # in [0, 1]

    def means(self) -> dict[str, float]:
        """The means over the images, by name."""
        names = ("sharpness", "colourfulness", "edge_density")
        return {name: float(getattr(self, name).mean(dtype=np.float64)) for name in names}


def look(images: UInt8[np.ndarray, "b h w 3"]) -> Looks:
    """The statistics of images of at least 3 x 3 pixels; smaller ones have no sharpness and no edges."""
    size, parts = max(1, CHUNK // (images.shape[1] * images.shape[2])), []
    for start in range(0, len(images), size):
        part = images[start : start + size].transpose(3, 0, 1, 2)
        colours = np.ascontiguousarray(part).astype(np.float32)
        red, green, blue = colours
        luma = 0.299 * red + 0.587 * green + 0.114 * blue
        found = sharpness(luma), colourfulness(colours), edge_density(luma), thumbnails(colours)
        parts.append(Looks(*found))
    return joined(parts)


def look_beside(images: UInt8[np.ndarray, "b h w 3"]) -> Future[Looks]:
    """`look` in other threads; the images must stay as they are until then."""
    parts = np.array_split(images, max(1, min(THREADS, len(images))))
    found = [_beside.submit(look, part) for part in parts]
    # Threads take work in order: this call starts after the parts, and waits for those that are in progress.
    return _beside.submit(lambda: joined([part.result() for part in found]))


def joined(parts: Sequence[Looks]) -> Looks:
    """The statistics of several batches, one after the other."""
    return Looks(*map(np.concatenate, zip(*parts, strict=True)))


def sharpness(luma: Float32[np.ndarray, "c h w"]) -> Float32[np.ndarray, "c"]:
    """The variance of the Laplacian with four neighbours, over all pixels but the border.

    Source: Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
    """
    inner = luma[:, 1:-1, 1:-1]
    sides = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    laplacian = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + sides - 4 * inner
    flat = laplacian.reshape(len(luma), -1)
    return flat.var(axis=1) if flat.size else np.zeros(len(luma), np.float32)


def colourfulness(colours: Float32[np.ndarray, "3 c h w"]) -> Float32[np.ndarray, "c"]:
    """sqrt(std(rg)^2 + std(yb)^2) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2), with rg = R - G and yb = (R + G)/2 - B.

    Source: Hasler and Suesstrunk, "Measuring colourfulness in natural images", SPIE 5007, 2003 (the metric M3).
    """
    red, green, blue = colours.reshape(3, colours.shape[1], -1)
    opponents = red - green, (red + green) / 2 - blue
    spread = sum(one.var(axis=1) for one in opponents)
    centre = sum(one.mean(axis=1) ** 2 for one in opponents)
    return np.sqrt(spread) + 0.3 * np.sqrt(centre)


def edge_density(luma: Float32[np.ndarray, "c h w"]) -> Float32[np.ndarray, "c"]:
    """The share of pixels, without the border, whose Sobel gradient is `EDGE` or more.

    The gradient is that of the 3 x 3 masks (1 2 1) x (-1 0 1), divided by 8, so that its unit is luma a pixel.
    Source: Sobel and Feldman's operator, as in Gonzalez and Woods, Digital Image Processing, section 10.2.
    """
    down = luma[:, :-2] + 2 * luma[:, 1:-1] + luma[:, 2:]
    x = down[:, :, 2:] - down[:, :, :-2]
    steps = luma[:, 2:] - luma[:, :-2]
    y = steps[:, :, :-2] + 2 * steps[:, :, 1:-1] + steps[:, :, 2:]
    edges = (x * x + y * y >= (8 * EDGE) ** 2).reshape(len(luma), -1)
    return edges.mean(axis=1, dtype=np.float32) if edges.size else np.zeros(len(luma), np.float32)


def thumbnails(colours: Float32[np.ndarray, "3 c h w"]) -> Float32[np.ndarray, "c y x 3"]:
    """The means over a grid of `THUMBNAIL` x `THUMBNAIL` blocks, in [0, 1]; a small image keeps its size."""
    for axis in (2, 3):
        size = colours.shape[axis]
        edges = np.linspace(0, size, min(size, THUMBNAIL) + 1).astype(int)
        sums = np.add.reduceat(colours, edges[:-1], axis=axis)
        widths = np.diff(edges).astype(np.float32)
        colours = sums / np.expand_dims(widths, tuple(range(1, 4 - axis)))
    return colours.transpose(1, 2, 3, 0) / np.float32(255)


def diversity(small: Float32[np.ndarray, "n y x 3"]) -> float:
    """The root of the mean squared distance, of a pixel's colour, between two of n thumbnails; 0: all are the same.

    Thumbnails in colour see what a group repeats, composition and colours, and not noise or texture, which a
    structural similarity at full size counts as difference and a model can add for nothing. The mean over all pairs
    is twice the unbiased variance, so that n images cost n and not n^2 comparisons.
    """
    flat = small.reshape(len(small), -1).astype(np.float64)
    return float(np.sqrt(2 * flat.var(axis=0, ddof=1).mean()))


def group_diversity(
    small: Float32[np.ndarray, "n y x 3"], groups: Int[np.ndarray, "n"]
) -> float | None:
    """The mean `diversity` of the groups that have several images; None where none has."""
    each = [small[groups == group] for group in np.unique(groups)]
    found = [diversity(own) for own in each if len(own) > 1]
    return float(np.mean(found)) if found else None
