import numpy as np
import pytest
from scipy import ndimage

from examples.shapes.render import render, render_batch, signed_distance
from examples.shapes.scene import REACH, Background, Object, Scene
from examples.shapes.vocabulary import SHAPES

GRAY = Background("gray", (0.5, 0.5, 0.5))


def one(shape, color="black", x=0.5, y=0.5, radius=0.2, background=GRAY):
    return Scene((Object(shape, color, x, y, radius),), background)


def covered_area(image):
    """How many pixels a black object on the gray background covers."""
    return float((0.5 - image[..., 0]).sum() / 0.5)


@pytest.mark.parametrize(
    ("shape", "unit_area"),
    [
        ("circle", np.pi * 0.92**2),
        ("ring", np.pi * (0.97**2 - 0.47**2)),
        ("triangle", 0.87 * 1.5),
        ("cross", 2 * 2.0 * 0.6 - 0.6**2),
        ("star", 5 * 1.06 * 0.425 * np.sin(np.pi / 5)),
    ],
)
@pytest.mark.parametrize("size", [32, 64])
def test_a_shape_covers_its_area_with_soft_edges(shape, unit_area, size):
    image = render(one(shape, radius=0.2), size)
    assert covered_area(image) == pytest.approx(unit_area * (0.2 * size) ** 2, rel=0.03)
    edge = (image[..., 0] > 0.02) & (image[..., 0] < 0.48)
    assert edge.sum() > 8


@pytest.mark.parametrize("shape", SHAPES)
def test_signed_distance_is_the_distance_to_the_outline(shape):
    axis = np.linspace(-1.3, 1.3, 521)
    x, y = np.meshgrid(axis, axis)
    distance = signed_distance(shape, x, y)
    inside = distance < 0
    counted = ndimage.distance_transform_edt(~inside) - ndimage.distance_transform_edt(inside)
    np.testing.assert_allclose(distance, counted * (axis[1] - axis[0]), atol=0.03)
    assert np.hypot(x[inside], y[inside]).max() <= REACH
    for places in np.nonzero(inside):  # centred on the bounding box
        assert abs(places.max() + places.min() - 520) <= 4


def test_background_is_a_tint_with_a_gradient():
    image = render(one("circle", background=Background("x", (0.4, 0.5, 0.6), (0.1, -0.2))), 10)
    np.testing.assert_allclose(image[0, 0], np.array([0.4, 0.5, 0.6]) - 0.045 + 0.09, atol=1e-6)
    np.testing.assert_allclose(image[9, 9], np.array([0.4, 0.5, 0.6]) + 0.045 - 0.09, atol=1e-6)


def test_batch_is_the_single_pictures_in_float32_from_0_to_1():
    scenes = [one("ring", "white", background=Background("x", (0.98, 0.5, 0.0), (0.1, 0.1)))] * 2
    images = render_batch(scenes, 24)
    assert images.shape == (2, 24, 24, 3)
    assert images.dtype == np.float32
    assert images.min() == 0.0 and images.max() == 1.0
    np.testing.assert_array_equal(images[1], render(scenes[1], 24))


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="unknown shape 'blob'"):
        render(one("blob"))
