"""The reward accepts what a prompt asks for, and rejects it after exactly one change."""

import dataclasses

import numpy as np
import pytest

from digen_jax.images import to_uint8
from examples.shapes import captions
from examples.shapes.render import render_batch
from examples.shapes.reward import shapes_geneval
from examples.shapes.scene import Object, sample_scene
from examples.shapes.vocabulary import COLORS, SHAPES, TASKS

COUNT = 100


def records_of(task):
    """Training and held-out prompts of a task, half of each."""
    mixed = captions.train_records()[:300] + captions.heldout_records()[:300]
    return [record for record in mixed if record["tag"] == task][-COUNT:]


def score(scenes, records, size=32):
    prompts = [record["prompt"] for record in records]
    return shapes_geneval(to_uint8(render_batch(scenes, size)), prompts, records)


def rejected(task, change, seed=0):
    """The fraction of changed scenes that get no reward."""
    rng = np.random.default_rng(seed)
    records, scenes = records_of(task), []
    for record in records:
        changed = None
        while changed is None:  # if there is no room for one more, another scene is drawn
            scene = sample_scene(record, rng)
            objects = change(list(scene.objects), rng)
            changed = objects and dataclasses.replace(scene, objects=tuple(objects))
        scenes.append(changed)
    return 1 - score(scenes, records).mean()


def one_more(objects, rng):
    """Another object of the last one's class, at a free place; None if nothing is free."""
    radius = 0.125
    places = rng.uniform(0.16, 0.84, (500, 2))
    free = np.ones(len(places), bool)
    for thing in objects:
        distance = np.hypot(places[:, 0] - thing.x, places[:, 1] - thing.y)
        free &= distance > 1.1 * (thing.radius + radius) + 1.5 / 32
    if not free.any():
        return None
    x, y = places[free.argmax()]
    return [*objects, Object(objects[-1].shape, objects[-1].color, float(x), float(y), radius)]


def one_less(objects, rng):
    objects.pop(rng.integers(len(objects)))
    return objects


def other_class(objects, rng):
    present = {thing.shape for thing in objects}
    shape = rng.choice([shape for shape in SHAPES if shape not in present])
    return replace_one(objects, rng, shape=str(shape))


def other_color(objects, rng):
    i = rng.integers(len(objects))
    color = rng.choice([color for color in COLORS if color != objects[i].color])
    objects[i] = dataclasses.replace(objects[i], color=str(color))
    return objects


def colors_swapped(objects, rng):
    a, b = objects
    return [dataclasses.replace(a, color=b.color), dataclasses.replace(b, color=a.color)]


def relation_mirrored(objects, rng):
    a, b = objects
    return [dataclasses.replace(a, x=b.x, y=b.y), dataclasses.replace(b, x=a.x, y=a.y)]


def replace_one(objects, rng, **fields):
    i = rng.integers(len(objects))
    objects[i] = dataclasses.replace(objects[i], **fields)
    return objects


@pytest.mark.parametrize("task", TASKS)
def test_pictures_of_the_prompt_are_accepted(task):
    rng = np.random.default_rng(32)
    records = records_of(task)
    scenes = [sample_scene(record, rng) for record in records]
    assert len(records) == COUNT
    assert score(scenes, records, 32).mean() >= 0.99


CHANGES = [
    ("single_object", one_more),
    ("two_object", other_class),
    ("two_object", one_less),
    ("counting", one_less),
    ("colors", other_color),
    ("color_attr", colors_swapped),
    ("position", relation_mirrored),
]


@pytest.mark.parametrize(("task", "change"), CHANGES)
def test_pictures_with_one_change_are_rejected(task, change):
    assert rejected(task, change) >= 0.99


def test_changes_that_no_prompt_forbids_are_accepted():
    assert rejected("counting", other_color) <= 0.01
    assert rejected("two_object", relation_mirrored) <= 0.01


def test_a_picture_with_something_that_is_no_shape_is_rejected():
    records = records_of("single_object")[:8]
    scenes = [sample_scene(record, np.random.default_rng(1)) for record in records]
    images = render_batch(scenes, 32)
    prompts = [record["prompt"] for record in records]
    assert shapes_geneval(to_uint8(images), prompts, records).all()
    images[:, -2:, 1:-1] = COLORS["red"]  # a bar along the lower rim
    images[:, -5:-2, 1:3] = COLORS["red"]
    assert not shapes_geneval(to_uint8(images), prompts, records).any()


def test_the_scores_are_0_or_1_in_float32():
    records = records_of("colors")[:4]
    scenes = [sample_scene(record, np.random.default_rng(0)) for record in records]
    scores = score([scenes[0], scenes[1], scenes[0], scenes[1]], [*records[:2], *records[1::-1]])
    assert scores.dtype == np.float32
    assert scores.tolist() == [1, 1, 0, 0]


def test_a_plain_text_prompt_cannot_be_scored():
    image = np.zeros((1, 32, 32, 3), np.uint8)
    with pytest.raises(ValueError, match="cannot score 'a nice star': its record has no `include`"):
        shapes_geneval(image, ["a nice star"], [{"prompt": "a nice star"}])
