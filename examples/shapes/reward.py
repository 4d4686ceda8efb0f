"""Verifiable rewards of the shapes task: read the image or clip, then apply GenEval's rules; in clips also motions."""

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax.errors import ConfigError
from digen_jax.images import to_uint8
from digen_jax.rewards import Reward
from digen_jax.rewards.geneval import Detection, check_images, satisfies
from digen_jax.rewards.sanity_check import SanityCheck
from examples.shapes.read import find_motions, find_objects
from examples.shapes.render import render, render_batch
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


def make_motion() -> Reward:
    """Returns the reward of clips."""
    return shapes_motion


def motion_sanity_check() -> SanityCheck:
    """Returns a red circle that moves left above a blue star that stands still, with matching and other prompts."""
    required = [("moving left", 1.0), ("moving right", 0.0), ("standing still", 0.0)]
    objects = (
        Object("circle", "red", 0.7, 0.3, 0.16, (-1.25 / 32, 0.0)),
        Object("star", "blue", 0.4, 0.72, 0.17),
    )
    scene = Scene(objects, Background("grey", (0.5, 0.5, 0.5)))
    clip = to_uint8(render_batch(scene.clip(9)))
    still = {"class": "star", "count": 1, "color": "blue", "motion": "standing still"}
    circle = {"class": "circle", "count": 1, "color": "red"}
    metadata = [{"include": [circle | {"motion": motion}, still]} for motion, _ in required]
    prompts = [f"a red circle {motion} and a blue star standing still" for motion, _ in required]
    expected = [score for _, score in required]
    return SanityCheck(np.stack([clip] * len(required)), prompts, metadata, expected)


def shapes_geneval(
    images: UInt8[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
) -> Float[np.ndarray, "b"]:
    """Returns 1 for each image that shows all objects its record includes and none that it excludes, else 0.

    An image with an object that resembles no shape also gets 0: otherwise training would learn to add such objects.

    Raises:
      ConfigError: the images are clips, or a record has no `include`, such as a line of plain text.
    """
    check_images("shapes_geneval", images)
    _check_records("shapes_geneval", prompts, metadata)
    scores = [
        _read(image, record) is not None for image, record in zip(images, metadata, strict=True)
    ]
    return np.asarray(scores, np.float32)


def shapes_motion(
    clips: UInt8[np.ndarray, "b t h w 3"], prompts: list[str], metadata: list[dict]
) -> Float[np.ndarray, "b"]:
    """Returns 1 for each clip whose frames all score 1 as images and whose objects have their record's motions, else 0.

    Raises:
      ConfigError: a record has no `include`, or one without a motion; or the clips are images.
    """
    _check_records("shapes_motion", prompts, metadata, "motion")
    if clips.ndim != 5:
        raise ConfigError("shapes_motion scores clips, not images: set config.model.frames to 9")
    scores = [_moves(clip, record) for clip, record in zip(clips, metadata, strict=True)]
    return np.asarray(scores, np.float32)


def _moves(clip: UInt8[np.ndarray, "t h w 3"], record: dict) -> bool:
    frames = list[list[Detection]]()
    for image in clip:
        found = _read(image, record)
        if found is None:
            return False
        frames.append(found)
    return all(
        motion == entry["motion"]
        for entry in record["include"]
        for motion in find_motions(
            [[thing for thing in found if thing.label == entry["class"]] for found in frames]
        )
    )


def _read(image: UInt8[np.ndarray, "h w 3"], record: dict) -> list[Detection] | None:
    """Returns the objects in an image, or None if it scores 0."""
    found = find_objects(image / np.float32(255))
    named = all(thing.label is not None for thing in found)
    return found if named and satisfies(found, record) else None


def _check_records(
    name: str, prompts: list[str], metadata: list[dict], field: str = "class"
) -> None:
    for prompt, record in zip(prompts, metadata, strict=True):
        if not all(field in entry for entry in record.get("include", [{}])):
            missing = f"has no `{'include' if 'include' not in record else field}`"
            raise ConfigError(
                f"{name} cannot score {prompt!r}: its record {missing}; use a JSONL prompt file in GenEval's format, "
                "such as those in assets/prompts"
            )
