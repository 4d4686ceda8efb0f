"""A model's pictures in a folder: one file for each, and a grid to look at."""

import pathlib
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from digen_jax.images import middle_frames, to_uint8
from digen_jax.inference.evaluation import sample_clips
from digen_jax.inference.model import Model
from digen_jax.logging.evaluation import Evaluation
from digen_jax.logging.images import image_grid, save_frames
from digen_jax.models.family import Record
from digen_jax.parallel.sampler import Sampler
from digen_jax.process.terminal import track

# A grid of more images would be too large to look at.
LARGEST_GRID = 64


def sample_to_folder(
    model: Model,
    sampler: Sampler,
    records: Sequence[Record],
    output: pathlib.Path,
    batch: int,
    seed: int,
    images: int = 1,
) -> None:
    """Writes the PNGs of each record's prompt, numbered and named by it, and `grid.png` with the first of them.

    Clips get animations as well.

    Image j of record i depends on the seed, i, j and the record, not on the batch.
    """
    output.mkdir(parents=True, exist_ok=True)
    every = [record for record in records for _ in range(images)]
    batch = model.batch(batch, len(every))
    shown = []
    for first in track(range(0, len(every), batch), "sampling", "batch"):
        part = every[first : first + batch]
        clips = to_uint8(sample_clips(sampler, model.weights, part, first, batch, seed, images))
        for number, (clip, record) in enumerate(zip(clips, part, strict=True), first):
            which = f"{number // images:05d}" + (f"_{number % images:02d}" if images > 1 else "")
            _save_clip(output / f"{which}_{slug(record['prompt'])}.png", clip)
        shown += list(middle_frames(clips[: LARGEST_GRID - len(shown)]))
    _grid(np.stack(shown), [record["prompt"] for record in every]).save(output / "grid.png")


def evaluation_to_folder(found: Evaluation, output: pathlib.Path) -> None:
    """Writes an evaluation's pictures as PNGs named by score and prompt, and `grid.png` with the first of them.

    Clips get animations as well.
    """
    output.mkdir(parents=True, exist_ok=True)
    prompts = [record["prompt"] for record in found.records]
    for number, (clip, prompt) in enumerate(zip(found.clips, prompts, strict=True)):
        name = f"{number:05d}_{found.scores[number]:.3f}_{slug(prompt)}.png"
        _save_clip(output / name, clip)
    shown = slice(LARGEST_GRID)
    _grid(middle_frames(found.clips[shown]), prompts, found.scores[shown]).save(output / "grid.png")


def slug(prompt: str) -> str:
    """The words of a prompt as a part of a file name, in any alphabet, at most 48 letters."""
    return re.sub(r"\W+", "-", prompt).strip("-")[:48].rstrip("-").lower() or "empty"


def _save_clip(path: pathlib.Path, clip: UInt8[np.ndarray, "t h w 3"]) -> None:
    save_frames(path, [Image.fromarray(frame) for frame in clip])


def _grid(
    images: UInt8[np.ndarray, "n h w 3"],
    prompts: Sequence[str],
    scores: Float[np.ndarray, "n"] | None = None,
) -> Image.Image:
    columns = min(8, len(images), max(4, round(len(images) ** 0.5)))
    return image_grid(images, prompts[: len(images)], columns, scores)
