"""Verifiable reward of the shapes task: reads the image, then applies GenEval's rules."""

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax.errors import ConfigError
from digen_jax.images import to_uint8
from digen_jax.rewards import Reward
from digen_jax.rewards.geneval import check_images, satisfies
from digen_jax.rewards.sanity_check import SanityCheck
from examples.shapes.read import find_objects
from examples.shapes.render import render
from examples.shapes.scene import Background, Object, Scene


def make() -> Reward:
    """Returns the reward."""
    return shapes_geneval


def sanity_check() -> SanityCheck:
    """Returns a red circle and a blue star side by side, with matching and other prompts."""
    required = [
        [("circle", "red", 1)],
        [("circle", "blue", 1)],
        [("star", "blue", 1), ("circle", "red", 1)],
        [("circle", "red", 2)],
    ]
    metadata = [
        {"include": [dict(zip(("class", "color", "count"), one, strict=True)) for one in entries]}
        for entries in required
    ]
    objects = Object("circle", "red", 0.27, 0.4, 0.18), Object("star", "blue", 0.72, 0.6, 0.19)
    image = render(Scene(objects, Background("grey", (0.5, 0.5, 0.5))))
    images = np.stack([to_uint8(image)] * len(required))
    prompts = [
        " and ".join(f"{count} {color} {shape}" for shape, color, count in entries)
        for entries in required
    ]
    return SanityCheck(images, prompts, metadata, expected=(1.0, 0.0, 1.0, 0.0))


def shapes_geneval(
    images: UInt8[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
) -> Float[np.ndarray, "b"]:
    """Returns 1 for each image that shows all objects its record includes and none that it excludes, else 0.

    An image with an object that resembles no shape also gets 0: otherwise training would learn to add such objects.

    Raises:
      ConfigError: the images are clips, or a record has no `include`, such as a line of plain text.
    """
    check_images("shapes_geneval", images)
    for prompt, record in zip(prompts, metadata, strict=True):
        if "include" not in record:
            raise ConfigError(
                f"shapes_geneval cannot score {prompt!r}: its record has no `include`; use a JSONL "
                "prompt file in GenEval's format"
            )
    scores = []
    for image, record in zip(images, metadata, strict=True):
        found = find_objects(image / np.float32(255))
        named = all(thing.label is not None for thing in found)
        scores.append(named and satisfies(found, record))
    return np.asarray(scores, np.float32)
