"""Reads an image of flat shapes from its pixels: background, colors, components, classes; in clips also motions.

Every pixel is read as a mixture of the background and one color of the vocabulary. Connected pixels that are at
least half one color form an object; touching objects of nearly the same color are merged. The share of each pixel
that an object covers is its silhouette, which is scaled to a fixed area and compared with the silhouettes of all
classes. This works at any image size.

Measured on 200 images of the embedded model (half of them trained), labeled by eye with their prompts:
the reader rejects 12 of 96 right ones and accepts 9 of 104 wrong ones; where the labeler was sure, 4 of 76 and 1 of
84 (`tests/examples/test_judged_pictures.py`). It still misses stars and rings that are small, blurred or tilted, which
it reads as no shape or as another one, and flattened circles. It still accepts lumpy circles, triangles and hearts
that a labeler would reject, and a shape with a small piece broken off.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import ndimage, optimize

from digen_jax.rewards.geneval import Detection
from examples.shapes.render import coverage
from examples.shapes.scene import PIXEL
from examples.shapes.vocabulary import COLORS, MOTIONS, SHAPES

MIN_AREA = 8 / 1024  # minimum share of the image; smaller components are noise
# Maximum relative distance of an object to the nearest silhouette of its class. Any lump is near a circle, and any
# lump that narrows downwards near a heart, so these two must fit better.
MAX_MISMATCH = dict(circle=0.16, triangle=0.33, cross=0.33, star=0.33, ring=0.33, heart=0.22)
MAX_DETOUR = 0.05  # distance beyond the nearest class's, for another class that is within its limit
MAX_COLOR_DISTANCE = 0.35  # in RGB; farther colors have no name
MIN_CONTRAST = 0.3  # in RGB, of touching objects; the vocabulary's nearest colors are 0.41 apart
# Limits of motions, in fractions of the image's side. Boxes of sharp objects are exact to half a pixel.
MIN_WAY = 4 * PIXEL  # minimum way in the motion's direction
MAX_ACROSS = 0.5  # maximum way across it, relative to the way in its direction
MIN_STEP = 0.5 * PIXEL  # minimum way in two frames
MAX_DRIFT = 1.5 * PIXEL  # maximum distance of a still object from its first place
_FAINT = 0.1  # RGB distance from the background below which a pixel belongs to it
_GRID = 20  # samples per side of a scaled silhouette
_EXTENT = 1.0  # half the side of that grid, relative to the square root of the area
_NAMES = tuple(COLORS)
_PALETTE = np.array(list(COLORS.values()), np.float32)
_LIMITS = np.array([MAX_MISMATCH[shape] for shape in SHAPES])


def find_objects(image: Float[np.ndarray, "h w 3"]) -> list[Detection]:
    """Returns the objects in a square image (RGB in [0, 1]); boxes are fractions of its sides.

    `label` is None if the object resembles no shape, `color` if it resembles no color.
    """
    image = np.asarray(image, np.float32)
    background = estimate_background(image)
    labels, palette_index = _segment(image, background)
    labels = _merge(image, background, labels)
    boxes = ndimage.find_objects(labels)
    large = [
        number
        for number, box in enumerate(boxes, start=1)
        if (labels[box] == number).sum() >= MIN_AREA * labels.size
    ]
    if not large:
        return []
    painted = [
        _silhouette(image, background, labels, number, boxes[number - 1]) for number in large
    ]
    mismatches = _mismatches(np.stack([scaled for _, scaled in painted]))
    return [
        _detection(boxes[number - 1], labels.shape, palette_index[number], color, mismatch)
        for number, (color, _), mismatch in zip(large, painted, mismatches, strict=True)
    ]


def find_motions(frames: Sequence[Sequence[Detection]]) -> list[str | None]:
    """Returns the motion of each object of one class in a clip, or one None if their number changes.

    Objects are followed by the smallest total distance from frame to frame. A motion is None if it is none of the
    vocabulary: curved, back and forth, or too short.
    """
    if len({len(found) for found in frames}) > 1:
        return [None]
    places = [_centers(found) for found in frames]
    for i in range(1, len(places)):
        distance = np.linalg.norm(places[i - 1][:, None] - places[i], axis=-1)
        places[i] = places[i][optimize.linear_sum_assignment(distance)[1]]
    return [_motion(path) for path in np.stack(places, axis=1)]


def _motion(path: Float[np.ndarray, "t 2"]) -> str | None:
    """Returns the motion of an object with these centers."""
    if (np.linalg.norm(path - path[0], axis=-1) <= MAX_DRIFT).all():
        return next(name for name, direction in MOTIONS.items() if direction == (0, 0))
    way = path[-1] - path[0]
    for name, direction in MOTIONS.items():
        along, steps = way @ direction, (path[2:] - path[:-2]) @ direction
        across = np.abs(way - along * np.asarray(direction)).max()
        if along >= MIN_WAY and across <= MAX_ACROSS * along and (steps >= MIN_STEP).all():
            return name
    return None


def _centers(found: Sequence[Detection]) -> Float[np.ndarray, "n 2"]:
    """Returns the centers of objects' boxes."""
    return np.asarray([thing.box for thing in found]).reshape(-1, 2, 2).mean(axis=1)


def estimate_background(image: Float[np.ndarray, "h w 3"]) -> Float[np.ndarray, "h w 3"]:
    """Fits a plane to the colors of the background: first of the rim, then of all similar pixels."""
    design, rim = _plane(*image.shape[:2])
    pixels = image.reshape(-1, 3)
    fitted = np.median(pixels[rim], axis=0)[None]
    for inlier, among in ((0.25, rim), (0.15, True), (0.1, True)):
        kept = among & (((pixels - fitted) ** 2).sum(-1) < inlier**2)
        rows = design[kept]
        # A small ridge keeps the system nonsingular for an image without background.
        plane = np.linalg.solve(rows.T @ rows + 1e-3 * np.eye(3), rows.T @ pixels[kept])
        fitted = design @ plane
    return fitted.reshape(image.shape).astype(np.float32)


def _segment(
    image: Float[np.ndarray, "h w 3"], background: Float[np.ndarray, "h w 3"]
) -> tuple[Int[np.ndarray, "h w"], dict[int, int]]:
    """Returns components of one color, numbered from 1, and the color index of each."""
    delta = image - background
    seen = (delta**2).sum(-1) > _FAINT**2
    towards = _PALETTE[:, None] - background[seen]
    # A background in a color of the vocabulary hides that color: the minimum avoids 0 / 0.
    length = np.maximum((towards**2).sum(-1), 1e-6)
    share = np.clip(np.einsum("npc,pc->np", towards, delta[seen]) / length, 0, 1)
    residual = ((delta[seen] - share[..., None] * towards) ** 2).sum(-1)
    nearest = residual.argmin(axis=0)
    # By length, not by share: an object in an unnamed color is also an object.
    opaque = (delta[seen] ** 2).sum(-1) >= 0.25 * np.take_along_axis(length, nearest[None], 0)[0]
    color_map = np.full(seen.shape, -1)
    color_map[seen] = np.where(opaque, nearest, -1)
    labels, count, palette_index = np.zeros(seen.shape, int), 0, dict[int, int]()
    for index in np.unique(nearest[opaque]):
        parts, more = ndimage.label(color_map == index)
        labels += np.where(parts > 0, parts + count, 0)
        palette_index |= dict.fromkeys(range(count + 1, count + more + 1), int(index))
        count += more
    return labels, palette_index


def _merge(
    image: Float[np.ndarray, "h w 3"],
    background: Float[np.ndarray, "h w 3"],
    labels: Int[np.ndarray, "h w"],
) -> Int[np.ndarray, "h w"]:
    """Merges touching components of nearly one color: an object of uneven color.

    The largest one keeps its number, and its color decides which others join, so that the blurred rim
    between two objects does not merge them.
    """
    pairs = _touching(labels)
    color = {
        number: _color(image, background, labels == number)
        for number in {i for p in pairs for i in p}
    }
    area = np.bincount(labels.ravel())
    part_of = np.arange(len(area))
    for pair in sorted(pairs, key=lambda p: np.linalg.norm(color[p[0]] - color[p[1]])):
        smaller, larger = sorted((int(part_of[i]) for i in pair), key=lambda i: area[i])
        if np.linalg.norm(color[smaller] - color[larger]) < MIN_CONTRAST:
            part_of[part_of == smaller] = larger
    return part_of[labels]


def _touching(labels: Int[np.ndarray, "h w"]) -> list[tuple[int, int]]:
    """Returns the pairs of components with neighboring pixels, including diagonal ones."""
    pairs = set()
    for one, other in (
        (labels[:, 1:], labels[:, :-1]),
        (labels[1:], labels[:-1]),
        (labels[1:, 1:], labels[:-1, :-1]),
        (labels[1:, :-1], labels[:-1, 1:]),
    ):
        meet = (one != other) & (one > 0) & (other > 0)
        pairs |= {
            (min(a, b), max(a, b))
            for a, b in zip(one[meet].tolist(), other[meet].tolist(), strict=True)
        }
    return sorted(pairs)


def _color(
    image: Float[np.ndarray, "h w 3"],
    background: Float[np.ndarray, "h w 3"],
    inside: Bool[np.ndarray, "h w"],
) -> Float[np.ndarray, "3"]:
    """Returns the mean color of the half of a component with the highest contrast to the background."""
    strength = ((image[inside] - background[inside]) ** 2).sum(-1)
    return image[inside][strength >= np.median(strength)].mean(axis=0)


def _silhouette(
    image: np.ndarray, background: np.ndarray, labels: np.ndarray, number: int, box: tuple
) -> tuple[Float[np.ndarray, "3"], Float[np.ndarray, "g g"]]:
    """Returns a component's color, and the share of each point that it covers, scaled to the grid."""
    reach = max(1, labels.shape[0] // 32)  # pixels of the edge, which are less than half covered
    near = tuple(slice(max(side.start - reach, 0), side.stop + reach) for side in box)
    inside = labels[near] == number
    behind = background[near]
    color = _color(image[near], behind, inside)
    towards = color - behind
    share = np.clip(((image[near] - behind) * towards).sum(-1) / (towards**2).sum(-1), 0, 1)
    edge = ndimage.binary_dilation(inside, np.ones((3, 3)), iterations=reach) & (labels[near] == 0)
    return color, _scaled(np.where(inside | edge, share, 0))


def _scaled(share: Float[np.ndarray, "h w"]) -> Float[np.ndarray, "g g"]:
    """Resamples a silhouette so that its centroid is the grid's center and its area is one."""
    area = share.sum()
    steps = (np.arange(_GRID) + 0.5) * (2 / _GRID) - 1
    weights = []
    for axis in (0, 1):
        place = np.arange(share.shape[axis])
        centroid = (share.sum(axis=1 - axis) * place).sum() / area
        samples = centroid + steps * _EXTENT * np.sqrt(area)
        weights.append(np.clip(1 - np.abs(samples[:, None] - place), 0, 1))
    return weights[0] @ share @ weights[1].T


def _mismatches(scaled: Float[np.ndarray, "n g g"]) -> Float[np.ndarray, "n s"]:
    """Returns each silhouette's distance to each class's nearest template, relative to the template."""
    templates = _templates()
    size = (templates**2).sum(-1)
    flat = scaled.reshape(len(scaled), 1, 1, -1)
    squared = ((flat - templates) ** 2).sum(-1)
    return np.sqrt(squared / size).min(axis=-1)


@cache
def _templates() -> Float[np.ndarray, "s t p"]:
    """Returns each class's silhouettes at several sharpnesses, each averaged over positions within a pixel."""
    pixels = np.arange(-32, 33, dtype=np.float32)
    x, y = np.meshgrid(pixels, pixels)
    rows = []
    for shape in SHAPES:
        for radius, blur in ((4.6, 0), (4.6, 0.7), (6, 0), (6, 0.9), (9, 0), (24, 0)):
            places = [
                _scaled(ndimage.gaussian_filter(coverage(shape, x - dx, y - dy, radius), blur))
                for dx in (0.0, 0.25, 0.5, 0.75)
                for dy in (0.0, 0.25, 0.5, 0.75)
            ]
            rows.append(np.mean(places, axis=0).ravel())
    return np.stack(rows).reshape(len(SHAPES), -1, _GRID**2)


def _detection(
    box: tuple, size: tuple[int, int], palette_index: int, color: np.ndarray, mismatch: np.ndarray
) -> Detection:
    """Returns a component's class, if it resembles one, and its color, if the color has a name."""
    fits = (mismatch <= _LIMITS) & (mismatch <= mismatch.min() + MAX_DETOUR)
    nearest = int(np.where(fits, mismatch, np.inf).argmin())
    named = np.linalg.norm(color - _PALETTE[palette_index]) <= MAX_COLOR_DISTANCE
    rows, columns = box
    height, width = size
    return Detection(
        label=SHAPES[nearest] if fits.any() else None,
        color=_NAMES[palette_index] if named else None,
        box=(columns.start / width, rows.start / height, columns.stop / width, rows.stop / height),
        confidence=float(max(0.0, 1 - mismatch[nearest if fits.any() else mismatch.argmin()])),
    )


@cache
def _plane(height: int, width: int) -> tuple[Float[np.ndarray, "n 3"], Bool[np.ndarray, "n"]]:
    """Returns a row (1, x, y) per pixel, and whether the pixel is on the image's rim."""
    y, x = np.mgrid[0:height, 0:width]
    rim = (x == 0) | (x == width - 1) | (y == 0) | (y == height - 1)
    rows = np.stack([np.ones(x.size), x.ravel() / width, y.ravel() / height], axis=1)
    return rows.astype(np.float32), rim.ravel()
