import itertools

import numpy as np
import pytest

from examples.shapes import captions
from examples.shapes.render import coverage
from examples.shapes.scene import sample_scene


def scenes_of(records, seed=0):
    rng = np.random.default_rng(seed)
    return [(record, sample_scene(record, rng)) for record in records]


@pytest.fixture(scope="module")
def train_scenes():
    return scenes_of(captions.train_records()[:900])


@pytest.fixture(scope="module")
def heldout_scenes():
    return scenes_of(captions.heldout_records()[:300])


def holds(relation, a, b):
    """The relation by the larger of the two offsets, y down."""
    x, y = a.x - b.x, a.y - b.y
    if abs(x) > abs(y):
        return relation == ("left of" if x < 0 else "right of")
    return relation == ("above" if y < 0 else "below")


def test_scenes_show_what_their_prompts_name_and_nothing_else(train_scenes, heldout_scenes):
    for record, scene in train_scenes + heldout_scenes:
        objects = list(scene.objects)
        for entry in record["include"]:
            things = [thing for thing in objects if thing.shape == entry["class"]]
            assert len(things) == entry["count"]
            assert all(thing.color == entry.get("color", thing.color) for thing in things)
        assert len(objects) == sum(entry["count"] for entry in record["include"])
        if record["tag"] == "single_object":
            assert record["prompt"].endswith(f" {scene.background.name} background")
        if record["tag"] == "position":
            assert holds(record["include"][1]["position"][0], objects[1], objects[0])


def test_objects_stay_inside_and_two_pixels_apart(train_scenes):
    axis = (np.arange(128) + 0.5) / 4  # a picture of 32 pixels, four samples each
    x, y = np.meshgrid(axis, axis)
    for _, scene in train_scenes[:150]:
        masks = [
            coverage(thing.shape, x - 32 * thing.x, y - 32 * thing.y, 32 * thing.radius) > 0.5
            for thing in scene.objects
        ]
        points = [np.argwhere(mask) / 4 for mask in masks]
        for mine in points:
            assert mine.min() >= 0.5 and mine.max() <= 31.25
        for mine, other in itertools.combinations(points, 2):
            nearest = np.linalg.norm(mine[::3, None] - other[None, ::3], axis=-1).min()
            assert nearest >= 2.0


def test_what_a_prompt_leaves_open_is_varied(train_scenes):
    things = [thing for _, scene in train_scenes for thing in scene.objects]
    for values in ([t.x for t in things], [t.y for t in things]):
        assert min(values) < 0.2 and max(values) > 0.8
    assert max(t.radius for t in things) > 1.6 * min(t.radius for t in things)
    assert len({t.color for t in things}) == 8
    assert len({scene.background.name for _, scene in train_scenes}) == 6
    assert len({t.x for t in things}) == len(things)


def test_what_cannot_be_drawn_is_refused():
    rng = np.random.default_rng(0)
    five = {"include": [{"class": "star", "count": 5}], "prompt": "a photo of five stars"}
    with pytest.raises(ValueError, match="asks for 5 objects"):
        sample_scene(five, rng)
    pink = {"include": [{"class": "star", "count": 1, "color": "pink"}], "prompt": "a pink star"}
    with pytest.raises(ValueError, match="'pink' is not one of red, orange"):
        sample_scene(pink, rng)
