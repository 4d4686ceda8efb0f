"""Pairs of which a learned reward must score one higher, to see that its weights were read and its pictures arrive.

Not verified: no published weights were at hand when these were chosen. The photograph is matplotlib's sample,
Grace Hopper's official portrait by the US Navy, which is in the public domain.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from matplotlib import cbook
from PIL import Image

from digen_jax.images import read_picture, resized, to_uint8
from digen_jax.shapes.render import render
from digen_jax.shapes.scene import Background, Object, Scene
from digen_jax.shapes.vocabulary import BACKGROUNDS

# (shape, colour, background) of a drawn picture, and a prompt that is wrong for it.
DRAWN = (
    ("circle", "red", "light", "a photo of a blue star"),
    ("star", "yellow", "slate", "a photo of a red cross"),
    ("heart", "green", "gray", "a photo of an orange triangle"),
)
PHOTOGRAPH = "grace_hopper.jpg"
PORTRAIT = "a portrait photo of a woman in a navy uniform"


class Canary(NamedTuple):
    """Two pictures with prompts, of which `right` must get a higher score than `wrong`."""

    right: tuple[UInt8[np.ndarray, "h w 3"], str]
    wrong: tuple[UInt8[np.ndarray, "h w 3"], str]


def of_prompts(size: int = 512) -> list[Canary]:
    """A picture with its own prompt and with a wrong one: for rewards that read prompts."""
    pairs = []
    for shape, color, background, wrong in DRAWN:
        place = Background(background, BACKGROUNDS[background])
        scene = Scene((Object(shape, color, 0.5, 0.5, 0.3),), place)
        pairs.append((to_uint8(render(scene, size)), f"a photo of a {color} {shape}", wrong))
    pairs.append((_photograph(size), PORTRAIT, "a photo of a bowl of fruit on a table"))
    return [Canary((image, right), (image, wrong)) for image, right, wrong in pairs]


def of_pictures(size: int = 512) -> list[Canary]:
    """A photograph, and what is left of it under noise, with the same prompt: for rewards that read none, too."""
    photograph = _photograph(size)
    noise = np.random.default_rng(0).integers(0, 256, photograph.shape)
    spoiled = (photograph * 0.2 + noise * 0.8).astype(np.uint8)
    return [Canary((photograph, PORTRAIT), (spoiled, PORTRAIT))]


def failures(reward: Callable[..., np.ndarray], canaries: Sequence[Canary]) -> list[Canary]:
    """The canaries that a reward puts in the wrong order, or in none.

    Args:
      reward: `f(images, prompts, metadata)`, which gets all pictures at once, as bytes.
      canaries: whose pictures have one size.
    """
    both = [one for canary in canaries for one in canary]
    images, prompts = np.stack([image for image, _ in both]), [prompt for _, prompt in both]
    scores = np.asarray(reward(images, prompts, [{"prompt": prompt} for prompt in prompts]))
    right, wrong = scores.reshape(-1, 2).T
    return [canary for canary, fine in zip(canaries, right > wrong, strict=True) if not fine]


def _photograph(size: int) -> UInt8[np.ndarray, "h w 3"]:
    """The photograph as a square of its upper part, where the face is."""
    file = pathlib.Path(cbook.get_sample_data(PHOTOGRAPH, asfileobj=False))
    picture: Image.Image = read_picture(file)
    side = min(picture.size)
    return resized(picture.crop((0, 0, side, side)), size, size)
