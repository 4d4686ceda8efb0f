"""Fixed pool of rendered shapes with captions, on which the embedded model is trained from scratch."""

import multiprocessing
import pathlib
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from examples.shapes.captions import tags, train_record
from examples.shapes.render import render
from examples.shapes.scene import sample_scene

CHUNK = 1000
TAGGED = 0.5  # share of captions that name everything; other captions are prompts as in RL


class Pool(NamedTuple):
    """Images as bytes, with one caption each: a prompt, or tags of everything that is visible."""

    images: UInt8[np.ndarray, "n h w 3"]
    captions: list[str]


def render_pool(count: int, size: int, seed: int, processes: int = 2) -> Pool:
    """Renders `count` captioned images, which depend on `seed` and not on the number of processes."""
    chunks = [(seed, i, min(CHUNK, count - i * CHUNK), size) for i in range(-(-count // CHUNK))]
    with multiprocessing.get_context("spawn").Pool(processes) as workers:
        parts = workers.starmap(_render_chunk, chunks)
    images = np.concatenate([images for images, _ in parts])
    return Pool(images, [caption for _, captions in parts for caption in captions])


def cached_pool(path: pathlib.Path, count: int, size: int, seed: int) -> Pool:
    """Returns a pool from a file, or renders and writes it; replaces a file with another count, size or seed."""
    key = [count, size, seed]
    if path.exists():
        with np.load(path) as file:
            if "key" in file and file["key"].tolist() == key:
                return Pool(file["images"], file["captions"].tolist())
    pool = render_pool(count, size, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(part, key=key, images=pool.images, captions=np.asarray(pool.captions))
    part.replace(path)
    return pool


def _render_chunk(seed: int, chunk: int, count: int, size: int):
    rng = np.random.default_rng([seed, chunk])
    images, captions = np.empty((count, size, size, 3), np.uint8), []
    for i in range(count):
        record = train_record(rng)
        scene = sample_scene(record, rng)
        images[i] = np.round(render(scene, size) * 255)
        captions.append(tags(scene) if rng.random() < TAGGED else record["prompt"])
    return images, captions
