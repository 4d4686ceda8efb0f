"""Scenes of flat shapes, which may move, and random scenes that satisfy a prompt."""

import dataclasses
import itertools
import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from examples.shapes import split
from examples.shapes.vocabulary import BACKGROUNDS, COLORS, MOTIONS

# Lengths are fractions of the image's side; they were chosen in pixels of a 32 x 32 image.
PIXEL = 1 / 32
GAP = 2.2 * PIXEL
MARGIN = 1.0 * PIXEL
RADII = {1: (5.5, 9.0), 2: (5.0, 7.0), 3: (4.6, 5.8), 4: (4.5, 5.2)}
# In clips, so that there is room for the motions; and pixels per frame.
MOVING_RADII = {1: (6.0, 7.5), 2: (5.4, 6.0)}
SPEEDS = 1.0, 1.75
REACH = 1.15  # maximum extent of a shape, relative to its radius
_TRIES = 64
_NAMED_BACKGROUND = re.compile(r" on an? (\w+) background$")
_AXIS = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}


@dataclass(frozen=True)
class Object:
    """A flat shape: center, radius and velocity per frame are fractions of the image's side, y points down."""

    shape: str
    color: str
    x: float
    y: float
    radius: float
    velocity: tuple[float, float] = (0.0, 0.0)

    def moved(self, frames: int) -> "Object":
        """Returns the object after some frames."""
        x, y = self.velocity
        return dataclasses.replace(self, x=self.x + frames * x, y=self.y + frames * y)


@dataclass(frozen=True)
class Background:
    """A tint (RGB in [0, 1]) that brightens by `slope` across the image, along x and y."""

    name: str
    color: tuple[float, float, float]
    slope: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Scene:
    """Content of an image, or of a clip's first frame."""

    objects: tuple[Object, ...]
    background: Background

    def clip(self, frames: int) -> list["Scene"]:
        """Returns the scene in each frame of a clip."""
        return [
            Scene(tuple(thing.moved(frame) for thing in self.objects), self.background)
            for frame in range(frames)
        ]


def sample_scene(record: dict, rng: np.random.Generator, frames: int = 1) -> Scene:
    """Samples a scene that satisfies a prompt record in GenEval's format; everything else is random.

    The random part never shows a held-out combination (see `split`), and the scene has no object that the
    prompt does not name. In clips of `frames` frames objects move as the prompt says, inside and separate.

    Raises:
      ValueError: the record requires more objects than fit, or an unknown color.
    """
    wanted = [entry for entry in record["include"] for _ in range(entry["count"])]
    radii = RADII if frames == 1 else MOVING_RADII
    if len(wanted) not in radii:
        raise ValueError(
            f"{record['prompt']!r} asks for {len(wanted)} objects; scenes have 1 to {len(radii)}"
        )
    shapes = [entry["class"] for entry in wanted]
    colors = _sample_colors(wanted, rng)
    places = (
        (i, entry["position"]) for i, entry in enumerate(record["include"]) if "position" in entry
    )
    named = next(((relation, i, other) for i, (relation, other) in places), None)
    velocities = np.zeros((len(wanted), 2))
    if frames > 1:
        directions = [MOTIONS[entry["motion"]] for entry in wanted]
        velocities = np.asarray(directions) * rng.uniform(*SPEEDS, (len(wanted), 1)) * PIXEL
    layout = _sample_layout(shapes, named, rng, radii[len(wanted)], velocities, frames)
    objects = tuple(
        Object(shape, color, x, y, radius, (velocity[0], velocity[1]))
        for shape, color, radius, (x, y), velocity in zip(
            shapes, colors, *(part.tolist() for part in (*layout, velocities)), strict=True
        )
    )
    return Scene(objects, _sample_background(record["prompt"], shapes, rng))


def relation_between(a: Object, b: Object) -> str | None:
    """Returns the relation of `a` to `b` if it is clear, at most 24 degrees off."""
    offset = np.array([[a.x - b.x, a.y - b.y]])
    return next((relation for relation in _AXIS if _is_clearly(relation, offset)[0]), None)


def _sample_colors(wanted: list[dict], rng: np.random.Generator) -> list[str]:
    """Samples the named colors, and free ones that form no held-out combination."""
    shapes = [entry["class"] for entry in wanted]
    choices = []
    for entry in wanted:
        free = [color for color in COLORS if not split.color_held_out(color, entry["class"])]
        choices.append([entry["color"]] if "color" in entry else free)
        if not {*choices[-1]} <= {*COLORS}:
            raise ValueError(f"color {entry['color']!r} is not one of {', '.join(COLORS)}")
    named = all("color" in entry for entry in wanted)
    is_free_pair = len(shapes) == len(set(shapes)) == 2 and not named
    while True:
        colors = [options[rng.integers(len(options))] for options in choices]
        things = zip(colors, shapes, strict=True)
        if not is_free_pair or not split.colored_pair_held_out(*itertools.chain(*things)):
            return colors


def _sample_background(prompt: str, shapes: list[str], rng: np.random.Generator) -> Background:
    """Samples the background that the prompt names, or a free one, slightly tinted, with a gradient."""
    named = _NAMED_BACKGROUND.search(prompt)
    options = [
        name
        for name in BACKGROUNDS
        if not any(split.background_held_out(shape, name) for shape in shapes)
    ]
    name = named[1] if named else options[rng.integers(len(options))]
    tint = rng.uniform(-0.03, 0.03, 3)
    slope = rng.uniform(-0.06, 0.06, 2)
    r, g, b = (np.asarray(BACKGROUNDS[name]) + tint).tolist()
    return Background(name, (r, g, b), (float(slope[0]), float(slope[1])))


def _sample_layout(
    shapes: list[str],
    named: tuple[str, int, int] | None,
    rng: np.random.Generator,
    limits: tuple[float, float],
    velocities: Float[np.ndarray, "n 2"],
    frames: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Samples radii `[n]`, in pixels between `limits`, and centers `[n, 2]` of the first frame.

    Objects are inside and separate in all frames. In images they are in the named relation or in none that is held out.
    """
    count = len(shapes)
    way = velocities * (frames - 1)
    while True:
        radii = rng.uniform(*limits, (_TRIES, count)) * PIXEL
        edge = MARGIN + radii[..., None]
        room = 1 - 2 * edge - np.abs(way)
        centers = edge + np.maximum(-way, 0) + rng.random((_TRIES, count, 2)) * room
        fits = np.ones(_TRIES, bool)
        for frame in range(frames):
            fits &= _separate(centers + frame * velocities, radii)
        if named:
            relation, i, j = named
            fits &= _is_clearly(relation, centers[:, i] - centers[:, j])
        elif frames == 1 and len(set(shapes)) == 2:
            fits &= ~_held_out_relation(shapes, centers)
        if fits.any():
            first = int(fits.argmax())
            return radii[first], centers[first]


def _separate(
    centers: Float[np.ndarray, "k n 2"], radii: Float[np.ndarray, "k n"]
) -> Bool[np.ndarray, "k"]:
    """Returns whether all pairs of objects in a layout have the required gap."""
    i, j = np.triu_indices(radii.shape[1], 1)
    distance = np.linalg.norm(centers[:, i] - centers[:, j], axis=-1)
    return (distance >= REACH * (radii[:, i] + radii[:, j]) + GAP).all(axis=1)


def _is_clearly(relation: str, offset: Float[np.ndarray, "k 2"]) -> Bool[np.ndarray, "k"]:
    """Returns whether an offset has the relation's direction, at most 24 degrees off: no other relation is valid."""
    axis, sign = _AXIS[relation]
    return np.abs(offset[:, 1 - axis]) <= 0.45 * sign * offset[:, axis]


def _held_out_relation(
    shapes: list[str], centers: Float[np.ndarray, "k n 2"]
) -> Bool[np.ndarray, "k"]:
    """Returns whether two objects are in a held-out relation, in the loosest sense."""
    offset = centers[:, 0] - centers[:, 1]
    shown = np.zeros(len(centers), bool)
    for relation, (axis, sign) in _AXIS.items():
        if split.relation_held_out(shapes[0], relation, shapes[1]):
            shown |= sign * offset[:, axis] > 0.45 * np.linalg.norm(offset, axis=-1)
    return shown
