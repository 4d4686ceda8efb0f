"""Fixed pool of rendered shapes with captions, on which the embedded model is trained from scratch."""

import multiprocessing
import pathlib
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from examples.shapes.captions import tags, train_record
from examples.shapes.render import render_batch
from examples.shapes.scene import sample_scene
from examples.shapes.vocabulary import MOTION_TASKS, TASKS

CHUNK = 1000
TAGGED = 0.5  # share of images' captions that name everything; other captions are prompts as in RL


class Pool(NamedTuple):
    """Images or clips as bytes, with one caption each: a prompt, or tags of everything that is visible."""

    images: UInt8[np.ndarray, "n *t h w 3"]
    captions: list[str]


def render_pool(
    count: int, size: int, seed: int, frames: int = 1, processes: int | None = None
) -> Pool:
    """Renders `count` captioned images or clips, which depend on `seed` and not on the number of processes.

    Args:
      count: Number of images or clips.
      size: Pixels along each side.
      seed: Seed of their content.
      frames: Frames of a clip. 1 means images.
      processes: Number of processes. None means one per core.
    """
    starts = range(0, count, CHUNK)
    chunks = [(seed, i, min(CHUNK, count - start), size, frames) for i, start in enumerate(starts)]
    with multiprocessing.get_context("spawn").Pool(processes) as workers:
        parts = workers.starmap(_render_chunk, chunks)
    images = np.concatenate([images for images, _ in parts])
    return Pool(images, [caption for _, captions in parts for caption in captions])


def cached_pool(path: pathlib.Path, count: int, size: int, seed: int, frames: int = 1) -> Pool:
    """Returns a pool from a file, or renders and writes it; replaces a file with other arguments."""
    key = [count, size, seed, frames]
    if path.exists():
        with np.load(path) as file:
            if "key" in file and file["key"].tolist() == key:
                return Pool(file["images"], file["captions"].tolist())
    pool = render_pool(*key)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(part, key=key, images=pool.images, captions=np.asarray(pool.captions))
    part.replace(path)
    return pool


def _render_chunk(seed: int, chunk: int, count: int, size: int, frames: int):
    rng, captions = np.random.default_rng([seed, chunk]), []
    clips = np.empty((count, frames, size, size, 3), np.uint8)
    for clip in clips:
        record = train_record(rng, TASKS if frames == 1 else MOTION_TASKS)
        scene = sample_scene(record, rng, frames)
        clip[:] = np.round(render_batch(scene.clip(frames), size) * 255)
        tagged = frames == 1 and rng.random() < TAGGED
        captions.append(tags(scene) if tagged else record["prompt"])
    return clips[:, 0] if frames == 1 else clips, captions
