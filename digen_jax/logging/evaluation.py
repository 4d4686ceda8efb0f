"""Scored images and image statistics: evaluations, and the best and worst images of a step.

Image statistics reveal reward hacking. Images are uint8, luma is BT.601 in [0, 255], and only the middle frame of a
clip is used. On one core an image takes about 0.05 ms at 32 x 32 pixels, 7 ms at 512 x 512 and 60 ms at 1024 x 1024
(`compute_image_stats` called in a loop). A run computes them in separate threads.
"""

import io
import os
import pathlib
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from digen_jax import rewards
from digen_jax.files import replace
from digen_jax.process.terminal import printable

# Minimum Sobel gradient of an edge, in luma per pixel: a tenth of black to white.
EDGE = 25.5
THUMBNAIL = 16  # side length of a thumbnail in pixels
CHUNK = 1 << 17  # pixels per batch, to fit a core's cache
THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
_pool = ThreadPoolExecutor(THREADS, "image statistics")


class ImageStats(NamedTuple):
    """Statistics of n images."""

    sharpness: Float32[np.ndarray, "b"]
    colourfulness: Float32[np.ndarray, "b"]
    edge_density: Float32[np.ndarray, "b"]
    thumbnails: Float32[np.ndarray, "b y x 3"]  # in [0, 1]

    @classmethod
    def concatenate(cls, parts: Sequence["ImageStats"]) -> "ImageStats":
        """Concatenates the statistics of several batches."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def means(self) -> dict[str, float]:
        """Returns the mean of each statistic, by name."""
        names = ("sharpness", "colourfulness", "edge_density")
        return {name: float(getattr(self, name).mean(dtype=np.float64)) for name in names}


def compute_image_stats(images: UInt8[np.ndarray, "b h w 3"]) -> ImageStats:
    """Computes image statistics. Images below 3 x 3 pixels have zero sharpness and no edges."""
    size, parts = max(1, CHUNK // (images.shape[1] * images.shape[2])), []
    for start in range(0, len(images), size):
        part = images[start : start + size].transpose(3, 0, 1, 2)
        colours = np.ascontiguousarray(part).astype(np.float32)
        red, green, blue = colours
        luma = 0.299 * red + 0.587 * green + 0.114 * blue
        found = sharpness(luma), colourfulness(colours), edge_density(luma), thumbnails(colours)
        parts.append(ImageStats(*found))
    return ImageStats.concatenate(parts)


def submit_image_stats(images: UInt8[np.ndarray, "b h w 3"]) -> Future[ImageStats]:
    """Computes image statistics in other threads. The images must not change until the future is done."""
    parts = np.array_split(images, max(1, min(THREADS, len(images))))
    found = [_pool.submit(compute_image_stats, part) for part in parts]
    # The pool is FIFO, so this call never blocks a part that has not started.
    return _pool.submit(lambda: ImageStats.concatenate([part.result() for part in found]))


def sharpness(luma: Float32[np.ndarray, "c h w"]) -> Float32[np.ndarray, "c"]:
    """Returns the variance of the 4-neighbor Laplacian over all pixels except the border.

    Source: Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
    """
    inner = luma[:, 1:-1, 1:-1]
    sides = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    laplacian = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + sides - 4 * inner
    flat = laplacian.reshape(len(luma), -1)
    return flat.var(axis=1) if flat.size else np.zeros(len(luma), np.float32)


def colourfulness(colours: Float32[np.ndarray, "3 c h w"]) -> Float32[np.ndarray, "c"]:
    """Returns sqrt(std(rg)^2 + std(yb)^2) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2), with rg = R - G, yb = (R + G)/2 - B.

    Source: Hasler and Suesstrunk, "Measuring colourfulness in natural images", SPIE 5007, 2003 (the metric M3).
    """
    red, green, blue = colours.reshape(3, colours.shape[1], -1)
    opponents = red - green, (red + green) / 2 - blue
    spread = sum(one.var(axis=1) for one in opponents)
    centre = sum(one.mean(axis=1) ** 2 for one in opponents)
    return np.sqrt(spread) + 0.3 * np.sqrt(centre)


def edge_density(luma: Float32[np.ndarray, "c h w"]) -> Float32[np.ndarray, "c"]:
    """Returns the fraction of pixels, excluding the border, with a Sobel gradient of at least `EDGE`.

    The gradient uses the 3 x 3 masks (1 2 1) x (-1 0 1), divided by 8, so that its unit is luma per pixel.
    Source: Sobel and Feldman's operator, as in Gonzalez and Woods, Digital Image Processing, section 10.2.
    """
    down = luma[:, :-2] + 2 * luma[:, 1:-1] + luma[:, 2:]
    x = down[:, :, 2:] - down[:, :, :-2]
    steps = luma[:, 2:] - luma[:, :-2]
    y = steps[:, :, :-2] + 2 * steps[:, :, 1:-1] + steps[:, :, 2:]
    edges = (x * x + y * y >= (8 * EDGE) ** 2).reshape(len(luma), -1)
    return edges.mean(axis=1, dtype=np.float32) if edges.size else np.zeros(len(luma), np.float32)


def thumbnails(colours: Float32[np.ndarray, "3 c h w"]) -> Float32[np.ndarray, "c y x 3"]:
    """Returns means over a grid of `THUMBNAIL` x `THUMBNAIL` blocks, in [0, 1]. Small images keep their size."""
    for axis in (2, 3):
        size = colours.shape[axis]
        edges = np.linspace(0, size, min(size, THUMBNAIL) + 1).astype(int)
        sums = np.add.reduceat(colours, edges[:-1], axis=axis)
        widths = np.diff(edges).astype(np.float32)
        colours = sums / np.expand_dims(widths, tuple(range(1, 4 - axis)))
    return colours.transpose(1, 2, 3, 0) / np.float32(255)


def diversity(small: Float32[np.ndarray, "n y x 3"]) -> float:
    """Returns the RMS distance per color value over pairs of n thumbnails; 0 means that all are equal.

    Color thumbnails detect repeated composition and colors. They ignore noise and texture, which structural similarity
    at full resolution counts as diversity and which a model can easily add. The mean over all pairs is twice the
    unbiased variance, so the cost is linear in n.
    """
    flat = small.reshape(len(small), -1).astype(np.float64)
    return float(np.sqrt(2 * flat.var(axis=0, ddof=1).mean()))


def group_diversity(
    small: Float32[np.ndarray, "n y x 3"], groups: Int[np.ndarray, "n"]
) -> float | None:
    """Returns the mean `diversity` of the groups with several images, or None if there are none."""
    each = [small[groups == group] for group in np.unique(groups)]
    found = [diversity(own) for own in each if len(own) > 1]
    return float(np.mean(found)) if found else None


class Sample(NamedTuple):
    """Images of a step, with their prompt records and scores."""

    records: list[dict[str, Any]]
    images: UInt8[np.ndarray, "k h w 3"]
    values: Float32[np.ndarray, "k"]


class Extremes(NamedTuple):
    """Best and worst images of a step, most extreme first. Ties are from different prompts."""

    best: Sample
    worst: Sample


class TaskScore(NamedTuple):
    """Mean reward and standard error. A standard error of None means a single image."""

    mean: float
    standard_error: float | None
    images: int


class Evaluation(NamedTuple):
    """One clip per prompt and its score: the weighted sum of all rewards.

    A run keeps only the first clips, for display, and only their middle frames if no image is due.
    """

    records: list[dict[str, Any]]
    clips: UInt8[np.ndarray, "k t h w 3"]
    scores: Float[np.ndarray, "n"]
    # By reward; NaN if it does not apply, see `rewards.each`.
    each: Mapping[str, Float[np.ndarray, "n"]] = MappingProxyType({})
    image_stats: ImageStats | None = None

    @classmethod
    def of(
        cls,
        records: list[dict[str, Any]],
        clips: Sequence[UInt8[np.ndarray, "_ t h w 3"]],
        scores: Sequence[rewards.Scores],
        names: tuple[str, ...],
        weights: Sequence[float],
    ) -> "Evaluation":
        """Concatenates batches; `names` and `weights` are per reward."""
        found = rewards.joined(scores)
        total, each = rewards.total(found.columns, weights), rewards.each(names, found)
        return cls(records, np.concatenate(clips), total, each)

    @property
    def known(self) -> dict[str, Float[np.ndarray, "_"]]:
        """Scores of each reward, for the images to which it applies. Rewards without such images are omitted."""
        found = {name: rewards.applicable(own) for name, own in self.each.items()}
        return {name: own for name, own in found.items() if len(own)}

    def metrics(self) -> dict[str, float]:
        """Returns mean rewards over all prompts, per task and per reward if there are several, and image statistics.

        Image diversity is across prompts.
        """
        means = {f"reward_of/{name}": own.mean() for name, own in self.known.items()}
        found = {"reward": self.scores.mean(), **means, **by_tag(self.records, self.scores)}
        if (stats := self.image_stats) is not None:
            found |= {f"images/{name}": value for name, value in stats.means().items()}
            if len(self.records) > 1:
                found["images/diversity"] = diversity(stats.thumbnails)
        return {f"evaluation/{name}": float(value) for name, value in found.items()}

    def by_task(self) -> dict[str, TaskScore]:
        """Returns the scores of all prompts as "all", per task, and per reward if there are several."""
        found = {}
        tasks = by_tag(self.records, self.scores, np.asarray)
        for name, scores in {"all": self.scores, **tasks, **self.known}.items():
            count = len(scores)
            error = float(scores.std(ddof=1) / np.sqrt(count)) if count > 1 else None
            found[name] = TaskScore(float(scores.mean()), error, count)
        return found


def by_tag(
    records: Sequence[dict[str, Any]],
    scores: Float[np.ndarray, "n"],
    statistic: Callable[[np.ndarray], Any] = np.mean,
) -> dict[str, Any]:
    """Returns a statistic of the scores per task, in task order; empty if the prompt file has no tasks."""
    found = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        if "tag" in record:
            found[record["tag"]].append(float(score))
    return {tag: statistic(np.asarray(part)) for tag, part in found.items()}


def score_table(columns: Mapping[str, Mapping[str, TaskScore]]) -> str:
    """Formats a line per task with mean and standard error in each column; `columns` maps headings to scores."""

    def cell(score: TaskScore) -> str:
        error = score.standard_error
        return f"{score.mean:.3f}" + ("" if error is None else f" ± {error:.3f}")

    rows = next(iter(columns.values()))
    lines = [f"{'':<24}{'images':>8}" + "".join(f"{head:>18}" for head in columns)]
    for name, first in rows.items():
        cells = (f"{cell(column[name]):>18}" for column in columns.values())
        lines.append(f"{printable(name):<24}{first.images:>8}" + "".join(cells))
    return "\n".join(lines)


def save_images(path: pathlib.Path, **arrays: Any) -> None:
    """Atomically writes images, scores and prompts of an evaluation as .npz."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    replace(path, file.getvalue())


def saved_images(path: pathlib.Path) -> dict[str, np.ndarray] | None:
    """Reads a file of `save_images`. Returns None if it is missing or damaged."""
    try:
        with np.load(path) as found:
            needed = {name: found[name] for name in ("step", "images", "scores")}
            return needed | {name: found[name] for name in found.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
