import numpy as np
import pytest
from scipy import ndimage

from examples.shapes import captions
from examples.shapes.read import estimate_background, find_objects
from examples.shapes.render import render
from examples.shapes.scene import Background, Object, Scene, sample_scene
from examples.shapes.vocabulary import BACKGROUNDS, COLORS, SHAPES

GRAY = Background("gray", (0.5, 0.5, 0.5))


def draw_mask(inside, size=32):
    """A blue area on gray: `inside(x, y)` in pixels, anti-aliased by sampling."""
    axis = np.arange(8 * size) / 8 + 1 / 16
    x, y = np.meshgrid(axis, axis)
    share = inside(x, y).reshape(size, 8, size, 8).mean(axis=(1, 3))[..., None]
    return (0.5 + share * (np.array(COLORS["blue"]) - 0.5)).astype(np.float32)


def agreement(size, blur, noise, count=120):
    """The fraction of pictures in which every object's class, colour and place are read."""
    rng = np.random.default_rng(size)
    right = 0
    for _ in range(count):
        scene = sample_scene(captions.train_record(rng), rng)
        image = ndimage.gaussian_filter(render(scene, size), (blur, blur, 0))
        image = np.clip(image + noise * rng.standard_normal(image.shape), 0, 1)
        found = find_objects(image.astype(np.float32))
        right += same(found, scene.objects)
    return right / count


def same(found, objects):
    if len(found) != len(objects):
        return False
    for thing in objects:
        centres = [((d.box[0] + d.box[2]) / 2, (d.box[1] + d.box[3]) / 2) for d in found]
        distance = [np.hypot(x - thing.x, y - thing.y) for x, y in centres]
        nearest = found[int(np.argmin(distance))]
        if (nearest.label, nearest.color) != (thing.shape, thing.color) or min(distance) > 1 / 32:
            return False
    return True


@pytest.mark.parametrize("size", [32, 64])
def test_clean_pictures_are_read(size):
    assert agreement(size, blur=0, noise=0) >= 0.995


@pytest.mark.parametrize(("blur", "noise"), [(0.5, 0.03), (0.7, 0.0), (0.0, 0.06)])
def test_blurred_and_noisy_pictures_are_read(blur, noise):
    assert agreement(32, blur, noise) >= 0.97


@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("background", BACKGROUNDS)
def test_every_shape_is_read_in_every_color_on_every_background(color, background):
    behind = Background(background, BACKGROUNDS[background], (0.05, -0.05))
    for shape in SHAPES:
        scene = Scene((Object(shape, color, 0.41, 0.57, 0.16),), behind)
        (found,) = find_objects(render(scene))
        assert (found.label, found.color) == (shape, color)


def test_a_box_encloses_its_object():
    scene = Scene((Object("cross", "red", 0.4, 0.6, 0.25),), GRAY)
    (found,) = find_objects(render(scene, 64))
    np.testing.assert_allclose(found.box, (0.15, 0.35, 0.65, 0.85), atol=1 / 64)
    assert 0.8 < found.confidence <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_touches_the_border_is_read(shape):
    scene = Scene((Object(shape, "green", 0.17, 0.5, 0.18),), GRAY)
    (found,) = find_objects(render(scene))
    assert (found.label, found.color) == (shape, "green")


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param(lambda x, y: (abs(x - 16) < 8) & (abs(y - 16) < 1.5), id="bar"),
        pytest.param(lambda x, y: (abs(x - 16) < 7) & (abs(y - 16) < 3.5), id="brick"),
        pytest.param(lambda x, y: (np.hypot(x - 16, y - 16) < 6) & (y > 16), id="half a circle"),
        pytest.param(
            lambda x, y: (np.hypot(x - 12, y - 16) < 4.5) | (np.hypot(x - 20, y - 16) < 4.5),
            id="two circles grown together",
        ),
        pytest.param(
            lambda x, y: (abs(np.hypot(x - 16, y - 16) - 5) < 1.5) & (y < 18), id="broken ring"
        ),
        pytest.param(lambda x, y: (abs(x - 16) < 4.4) & (abs(y - 16) < 3.4), id="oblong"),
        pytest.param(lambda x, y: np.hypot((x - 16) / 1.35, y - 16) < 5, id="ellipse"),
        pytest.param(lambda x, y: abs(x - 16) + abs(y - 16) < 6, id="diamond"),
    ],
)
def test_what_is_no_shape_has_no_label(inside):
    (found,) = find_objects(draw_mask(inside))
    assert (found.label, found.color) == (None, "blue")


def test_a_color_that_has_no_name_is_none():
    image = render(Scene((Object("circle", "blue", 0.5, 0.5, 0.25),), GRAY))
    image[image[..., 2] > 0.9] = (0.1, 0.75, 0.75)
    (found,) = find_objects(image)
    assert found.color is None


def test_dirt_and_ghosts_are_no_objects():
    image = render(Scene((Object("heart", "red", 0.3, 0.5, 0.2),), GRAY))
    image[4:6, 26:28] = COLORS["blue"]
    image[20:28, 22:30] += 0.3 * (np.array(COLORS["white"], np.float32) - 0.5)
    (found,) = find_objects(image)
    assert found.label == "heart"


def test_touching_objects_of_different_colors_are_two():
    image = draw_mask(lambda x, y: np.hypot(x - 10, y - 16) < 5)
    disc = draw_mask(lambda x, y: np.hypot(x - 20.1, y - 16) < 5)
    share = ((disc - 0.5) / (np.array(COLORS["blue"], np.float32) - 0.5)).mean(-1, keepdims=True)
    image = image + share * (np.array(COLORS["yellow"], np.float32) - image)
    found = sorted((d.label, d.color) for d in find_objects(image))
    assert found == [("circle", "blue"), ("circle", "yellow")]


def test_an_object_of_an_uneven_color_is_one():
    """Its colour goes from red to orange: each half is nearer to another word."""
    image = render(Scene((Object("triangle", "red", 0.5, 0.5, 0.2),), GRAY))
    share = (image[..., 0] - 0.5)[..., None] / (COLORS["red"][0] - 0.5)
    along = np.linspace(0.15, 0.75, 32, dtype=np.float32)[:, None, None]
    color = (1 - along) * np.array(COLORS["red"]) + along * np.array(COLORS["orange"])
    (found,) = find_objects((0.5 + share * (color - 0.5)).astype(np.float32))
    assert found.label == "triangle"


@pytest.mark.parametrize("blur", [0.0, 0.5, 0.8])
def test_touching_objects_of_near_colors_are_two(blur):
    """Red and yellow, with a rim between them that is orange where it is blurred."""
    image = draw_mask(lambda x, y: np.hypot(x - 10, y - 16) < 5)
    mask = ((image - 0.5) / (np.array(COLORS["blue"], np.float32) - 0.5)).mean(-1, keepdims=True)
    image = 0.5 + mask * (np.array(COLORS["red"], np.float32) - 0.5)
    image += mask[:, ::-1] * (np.array(COLORS["yellow"], np.float32) - image)
    found = find_objects(ndimage.gaussian_filter(image, (blur, blur, 0)))
    assert {"red", "yellow"} <= {thing.color for thing in found}


@pytest.mark.parametrize("color", [(0.5, 0.5, 0.5), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)])
def test_an_empty_picture_has_no_objects(color):
    assert find_objects(np.full((32, 32, 3), color, np.float32)) == []


def test_pure_noise_is_read_without_error():
    noise = np.random.default_rng(0).random((32, 32, 3), np.float32)
    assert all(thing.label is None for thing in find_objects(noise))


def test_the_background_is_seen_through_the_objects():
    scene = Scene(
        (Object("circle", "black", 0.3, 0.3, 0.22), Object("circle", "white", 0.7, 0.7, 0.22)),
        Background("x", (0.6, 0.5, 0.45), (0.06, -0.04)),
    )
    empty = Scene((), scene.background)
    np.testing.assert_allclose(estimate_background(render(scene)), render(empty), atol=0.01)
