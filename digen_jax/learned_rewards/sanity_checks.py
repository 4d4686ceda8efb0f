"""Sanity checks of learned rewards: pairs in which the first image must score higher.

They detect unloaded weights and corrupted images. They are unverified: no published weights were available when they
were chosen.

The photograph is matplotlib's sample grace_hopper.jpg, a portrait of Grace Hopper; this repository has no copy. Its
JPEG comment names the source, http://commons.wikimedia.org/wiki/File:Grace_Hopper.jpg. matplotlib's license does not
mention it. The change that added it (matplotlib/matplotlib, pull request 1599, 2012) calls it a public domain image, as
are works of the US Navy in the United States (17 U.S.C. 105).
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from matplotlib import cbook
from PIL import Image, ImageDraw

from digen_jax.images import read_image, resize_image
from digen_jax.rewards.sanity_check import SanityCheck

# (shape, color, background) of a rendered image, and a wrong prompt.
RENDERED = (
    ("circle", "red", "lightgray", "a photo of a blue triangle"),
    ("triangle", "yellow", "slategray", "a photo of a red square"),
    ("square", "green", "gray", "a photo of an orange circle"),
)
PHOTOGRAPH = "grace_hopper.jpg"
PORTRAIT = "a portrait photo of a woman in a navy uniform"


def prompt_pairs(size: int = 512) -> SanityCheck:
    """Returns images with matching and wrong prompts, for rewards that use prompts."""
    pairs: list[tuple[np.ndarray, str]] = []
    for shape, color, background, wrong in RENDERED:
        image = _render(shape, color, background, size)
        pairs += (image, f"a photo of a {color} {shape}"), (image, wrong)
    photograph = _photograph(size)
    pairs += (photograph, PORTRAIT), (photograph, "a photo of a bowl of fruit on a table")
    return _check(pairs)


def image_pairs(size: int = 512) -> SanityCheck:
    """Returns a photograph and a noisy copy with one prompt, for rewards that may ignore prompts."""
    photograph = _photograph(size)
    noise = np.random.default_rng(0).integers(0, 256, photograph.shape)
    noisy = (photograph * 0.2 + noise * 0.8).astype(np.uint8)
    return _check([(photograph, PORTRAIT), (noisy, PORTRAIT)])


def object_pairs(size: int = 512) -> SanityCheck:
    """Returns a photograph of a person with prompts for a person and for a dog, for GenEval's detector."""
    photograph = _photograph(size)
    prompts = ["a photo of a person", "a photo of a dog"]
    metadata = [
        {"prompt": prompt, "tag": "single_object", "include": [{"class": label, "count": 1}]}
        for prompt, label in zip(prompts, ("person", "dog"), strict=True)
    ]
    images = np.stack([photograph] * 2)
    return SanityCheck(images, prompts, metadata, prefers=((0, 1),), verified=False)


def _check(pairs: Sequence[tuple[UInt8[np.ndarray, "h w 3"], str]]) -> SanityCheck:
    """Returns a check of (image, prompt) pairs: items 0, 2, ... must score higher than items 1, 3, ..."""
    images, prompts = np.stack([image for image, _ in pairs]), [prompt for _, prompt in pairs]
    prefers = tuple((i, i + 1) for i in range(0, len(pairs), 2))
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
    """Returns the upper square of the photograph, which contains the face."""
    image = read_image(pathlib.Path(cbook.get_sample_data(PHOTOGRAPH, asfileobj=False)))
    side = min(image.size)
    return resize_image(image.crop((0, 0, side, side)), size, size)
