"""Renders scenes: signed distances of flat shapes, anti-aliased analytically."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from jaxtyping import Float

from examples.shapes.scene import REACH, Object, Scene
from examples.shapes.vocabulary import COLORS


def render(scene: Scene, size: int = 32) -> Float[np.ndarray, "h w 3"]:
    """Renders an image of `size` pixels per side, float32 in [0, 1]."""
    axis = ((np.arange(size) + 0.5) / size).astype(np.float32)
    slope_x, slope_y = scene.background.slope
    shade = slope_x * (axis[None, :] - 0.5) + slope_y * (axis[:, None] - 0.5)
    image = np.asarray(scene.background.color, np.float32) + shade[..., None]
    for thing in scene.objects:
        _draw(image, thing, axis)
    return np.clip(image, 0.0, 1.0, dtype=np.float32)


def render_batch(scenes: Sequence[Scene], size: int = 32) -> Float[np.ndarray, "b h w 3"]:
    """Renders several scenes at one size."""
    return np.stack([render(scene, size) for scene in scenes])


def coverage(
    shape: str, x: Float[np.ndarray, "*b"], y: Float[np.ndarray, "*b"], radius: float
) -> Float[np.ndarray, "*b"]:
    """Returns the covered share of a pixel, 0 to 1; the pixel's offset and `radius` are in pixels."""
    distance = signed_distance(shape, x / radius, y / radius) * radius
    return np.clip(0.5 - distance, 0.0, 1.0)


def signed_distance(
    shape: str, x: Float[np.ndarray, "*b"], y: Float[np.ndarray, "*b"]
) -> Float[np.ndarray, "*b"]:
    """Returns the distance to the outline of a shape of radius 1, negative inside; y points down."""
    if shape == "circle":
        return np.hypot(x, y) - 0.92
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.72) - 0.25
    return _polygon_distance(_outline(shape), x, y)


def _draw(image: np.ndarray, thing: Object, axis: np.ndarray) -> None:
    """Blends one object into the image, changing only the pixels near it."""
    size = len(axis)
    reach = REACH * thing.radius + 1 / size
    first, last = np.searchsorted(axis, (thing.x - reach, thing.x + reach))
    top, bottom = np.searchsorted(axis, (thing.y - reach, thing.y + reach))
    x, y = np.broadcast_arrays(
        (axis[None, first:last] - thing.x) * size, (axis[top:bottom, None] - thing.y) * size
    )
    alpha = coverage(thing.shape, x, y, thing.radius * size)[..., None]
    patch = image[top:bottom, first:last]
    patch += alpha * (np.asarray(COLORS[thing.color], np.float32) - patch)


@cache
def _outline(shape: str) -> np.ndarray:
    """Returns the corners of a shape of radius 1, `[n, 2]` as (x, y), centered on its bounding box."""
    if shape == "triangle":
        corners = np.array([(0, -0.83), (0.87, 0.67), (-0.87, 0.67)])
    elif shape == "cross":
        corners = _plus(arm=1.0, half_width=0.3)
    elif shape == "star":
        corners = _star(outer=1.06, inner=0.425)
    elif shape == "heart":
        corners = _heart()
    else:
        raise ValueError(f"unknown shape {shape!r}; see examples.shapes.vocabulary.SHAPES")
    middle = (corners.max(axis=0) + corners.min(axis=0)) / 2
    return (corners - middle).astype(np.float32)


def _plus(arm: float, half_width: float) -> np.ndarray:
    """Returns a plus sign, clockwise from the top left corner of its upper arm."""
    quarter = np.array([(-half_width, -arm), (half_width, -arm), (half_width, -half_width)])
    turn = np.array([(0, 1), (-1, 0)])
    return np.concatenate([quarter @ np.linalg.matrix_power(turn, k) for k in range(4)])


def _star(outer: float, inner: float) -> np.ndarray:
    """Returns a star with five points, one of them at the top."""
    angles = np.arange(10) * np.pi / 5
    lengths = np.where(np.arange(10) % 2 == 0, outer, inner)
    return np.stack([lengths * np.sin(angles), -lengths * np.cos(angles)], axis=1)


def _heart() -> np.ndarray:
    """Returns points of the usual heart curve."""
    t = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([x, -y], axis=1) / 16.5


def _polygon_distance(corners: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the distance to a closed polygon, negative inside (even-odd rule)."""
    start = corners.T.reshape(2, -1, *[1] * x.ndim)
    edge_x, edge_y = np.roll(start, -1, axis=1) - start
    from_x, from_y = x - start[0], y - start[1]
    along = (from_x * edge_x + from_y * edge_y) / (edge_x**2 + edge_y**2)
    along = np.clip(along, 0, 1)
    squared = (from_x - along * edge_x) ** 2 + (from_y - along * edge_y) ** 2
    spans = (from_y >= 0) != (from_y >= edge_y)
    crosses = spans & ((edge_x * from_y < edge_y * from_x) == (edge_y > 0))
    inside = np.logical_xor.reduce(crosses, axis=0)
    return np.where(inside, -1, 1) * np.sqrt(squared.min(axis=0))
