"""Samples prompts from fixed initial noise, without noise between steps: for evaluations, and to folders."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from digen_jax import rewards
from digen_jax.images import middle_frames, reward_input
from digen_jax.inference.model import FPS, Model
from digen_jax.logging.evaluation import Evaluation
from digen_jax.logging.images import image_grid, save_frames
from digen_jax.models.family import Record
from digen_jax.parallel.sampler import SEED, Sampler, Weights, fetch_clips, sample_fixed
from digen_jax.process.shutdown import during
from digen_jax.process.terminal import track

# Maximum number of images in a grid.
LARGEST_GRID = 64


def evaluate(
    sampler: Sampler,
    weights: Weights,
    records: Sequence[dict[str, Any]],
    scorer: rewards.Rewards,
    batch: int,
    seed: int = SEED,
    head: str = "evaluating",
) -> Evaluation:
    """Samples and scores one image per record.

    Image i depends only on the seed, i, the prompt and the weights. `head` labels the progress bar.
    """
    clips, scores = [], []
    for start in track(range(0, len(records), batch), head, "batch"):
        part = list(records[start : start + batch])
        images = sample_clips(sampler, weights, part, start, batch, seed)
        prompts = [record["prompt"] for record in part]
        scores.append(scorer.score(reward_input(images), prompts, part))
        clips.append(images)
    return Evaluation.of(list(records), clips, scores, scorer.names, scorer.weights)


def sample_clips(
    sampler: Sampler,
    weights: Weights,
    records: Sequence[Mapping[str, Any]],
    first: int,
    batch: int,
    seed: int = SEED,
    of_each: int = 1,
) -> UInt8[np.ndarray, "n t h w 3"]:
    """Samples clips first, first + 1, ... of a seed, one per record, for at most `batch` records.

    `of_each` is the number of consecutive repeats of each record.

    Raises:
      ValueError: An image has a NaN.
    """
    with during("the sampling of images"):
        trajectory = sample_fixed(sampler, weights, records, first, batch, seed, of_each)
        clips = fetch_clips(sampler.decode(weights, trajectory))
    if clips is None:
        raise ValueError("an image has a NaN: the sampler or the decoder has failed")
    return clips[: len(records)]


def sample_to_folder(
    model: Model,
    sampler: Sampler,
    records: Sequence[Record],
    output: pathlib.Path,
    batch: int,
    seed: int,
    images: int = 1,
    fps: int = FPS,
    animation: str = "webp",
) -> None:
    """Samples prompts and writes numbered PNGs, videos of clips, and a `grid.png` of the first images.

    Image j of record i depends on the seed, i, j and the record, not on the batch. `fps` and `animation` are those of
    `logging.images.save_frames`.
    """
    output.mkdir(parents=True, exist_ok=True)
    every = [record for record in records for _ in range(images)]
    batch = model.batch(batch, len(every))
    shown: list[np.ndarray] = []
    for first in track(range(0, len(every), batch), "sampling", "batch"):
        part = every[first : first + batch]
        clips = sample_clips(sampler, model.weights, part, first, batch, seed, images)
        for number, (clip, record) in enumerate(zip(clips, part, strict=True), first):
            which = f"{number // images:05d}" + (f"_{number % images:02d}" if images > 1 else "")
            _save_clip(output / f"{which}_{slug(record['prompt'])}.png", clip, fps, animation)
        shown += list(middle_frames(clips[: LARGEST_GRID - len(shown)]))
    _grid(np.stack(shown), [record["prompt"] for record in every]).save(output / "grid.png")


def evaluation_to_folder(
    found: Evaluation, output: pathlib.Path, fps: int = FPS, animation: str = "webp"
) -> None:
    """Writes evaluation images as PNGs named by score, videos of clips, and `grid.png` (see `sample_to_folder`)."""
    output.mkdir(parents=True, exist_ok=True)
    prompts = [record["prompt"] for record in found.records]
    for number, (clip, prompt) in enumerate(zip(found.clips, prompts, strict=True)):
        name = f"{number:05d}_{found.scores[number]:.3f}_{slug(prompt)}.png"
        _save_clip(output / name, clip, fps, animation)
    shown = slice(LARGEST_GRID)
    _grid(middle_frames(found.clips[shown]), prompts, found.scores[shown]).save(output / "grid.png")


def slug(prompt: str) -> str:
    """Converts a prompt to a file name of at most 48 characters, in any alphabet."""
    return re.sub(r"\W+", "-", prompt).strip("-")[:48].rstrip("-").lower() or "empty"


def _save_clip(
    path: pathlib.Path, clip: UInt8[np.ndarray, "t h w 3"], fps: int, animation: str
) -> None:
    save_frames(path, [Image.fromarray(frame) for frame in clip], fps, animation)


def _grid(
    images: UInt8[np.ndarray, "n h w 3"],
    prompts: Sequence[str],
    scores: Float[np.ndarray, "n"] | None = None,
) -> Image.Image:
    columns = min(8, len(images), max(4, round(len(images) ** 0.5)))
    return image_grid(images, prompts[: len(images)], columns, scores)
