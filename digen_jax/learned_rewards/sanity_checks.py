"""Pairs of which a learned reward must score one higher, to see that its weights were read and its pictures arrive.

Not verified: no published weights were available when these were chosen.

The photograph is matplotlib's sample grace_hopper.jpg, a portrait of Grace Hopper; this project has no copy of it. Its
JPEG comment names the source, http://commons.wikimedia.org/wiki/File:Grace_Hopper.jpg. matplotlib's licence has no word
on it. The change that added it (matplotlib/matplotlib, pull request 1599, 2012) calls it a public domain image, as
works of the US Navy are in the United States (17 U.S.C. 105).
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from matplotlib import cbook
from PIL import Image, ImageDraw

from digen_jax.images import read_image, resize_image
from digen_jax.rewards.sanity_check import SanityCheck

# (shape, colour, background) of a rendered image, and a wrong prompt for it.
RENDERED = (
    ("circle", "red", "lightgray", "a photo of a blue triangle"),
    ("triangle", "yellow", "slategray", "a photo of a red square"),
    ("square", "green", "gray", "a photo of an orange circle"),
)
PHOTOGRAPH = "grace_hopper.jpg"
PORTRAIT = "a portrait photo of a woman in a navy uniform"


def of_prompts(size: int = 512) -> SanityCheck:
    """Pictures with their own prompts and with wrong ones: for rewards that read prompts."""
    both = []
    for shape, color, background, wrong in RENDERED:
        image = _render(shape, color, background, size)
        both += (image, f"a photo of a {color} {shape}"), (image, wrong)
    photograph = _photograph(size)
    both += (photograph, PORTRAIT), (photograph, "a photo of a bowl of fruit on a table")
    return _pairs(both)


def of_pictures(size: int = 512) -> SanityCheck:
    """A photograph, and what is left of it under noise, with the same prompt: for rewards that read none, too."""
    photograph = _photograph(size)
    noise = np.random.default_rng(0).integers(0, 256, photograph.shape)
    spoiled = (photograph * 0.2 + noise * 0.8).astype(np.uint8)
    return _pairs([(photograph, PORTRAIT), (spoiled, PORTRAIT)])


def of_objects(size: int = 512) -> SanityCheck:
    """A photograph of a person, with a prompt for one and for a dog: for the reward by a detector."""
    photograph = _photograph(size)
    prompts = ["a photo of a person", "a photo of a dog"]
    metadata = [
        {"prompt": prompt, "tag": "single_object", "include": [{"class": label, "count": 1}]}
        for prompt, label in zip(prompts, ("person", "dog"), strict=True)
    ]
    images = np.stack([photograph] * 2)
    return SanityCheck(images, prompts, metadata, prefers=((0, 1),), verified=False)


def _pairs(both: Sequence[tuple[UInt8[np.ndarray, "h w 3"], str]]) -> SanityCheck:
    """A canary of pictures with prompts, of which the first, third and so on must each score above the next one."""
    images, prompts = np.stack([image for image, _ in both]), [prompt for _, prompt in both]
    prefers = tuple((i, i + 1) for i in range(0, len(both), 2))
    metadata = [{"prompt": prompt} for prompt in prompts]
    return SanityCheck(images, prompts, metadata, prefers=prefers, verified=False)


def _render(shape: str, color: str, background: str, size: int) -> UInt8[np.ndarray, "h w 3"]:
    image = Image.new("RGB", (size, size), background)
    draw, circle = ImageDraw.Draw(image), (size / 2, size / 2, 0.3 * size)
    if shape == "circle":
        draw.circle(circle[:2], circle[2], color)
    else:
        draw.regular_polygon(circle, {"triangle": 3, "square": 4}[shape], fill=color)
    return np.asarray(image)


def _photograph(size: int) -> UInt8[np.ndarray, "h w 3"]:
    """The photograph as a square of its upper part, where the face is."""
    file = pathlib.Path(cbook.get_sample_data(PHOTOGRAPH, asfileobj=False))
    picture: Image.Image = read_image(file)
    side = min(picture.size)
    return resize_image(picture.crop((0, 0, side, side)), size, size)
