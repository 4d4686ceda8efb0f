"""Clips of moving shapes: prompts, scenes, and a reward that accepts them and rejects them after one change."""

import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.images import to_uint8
from examples.shapes import captions
from examples.shapes.networks import build_t5_tokenizer
from examples.shapes.pool import render_pool
from examples.shapes.render import render_batch
from examples.shapes.reward import shapes_motion
from examples.shapes.scene import REACH, Scene, sample_scene
from examples.shapes.vocabulary import COLORS, MOTION_TASKS, MOTIONS, SHAPES
from tests.pipelines import ROOT

FRAMES, SIDE = 9, 32


def read(part: str) -> list[dict]:
    path = ROOT / "assets" / "prompts" / f"moving_shapes_{part}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def held_out(record: dict) -> list[tuple]:
    """The held-out combinations of a record, by the rule written out."""
    atoms = [(entry["color"], entry["class"], entry["motion"]) for entry in record["include"]]
    places = [
        [
            list(names).index(word)
            for names, word in zip((COLORS, SHAPES, MOTIONS), atom, strict=True)
        ]
        for atom in atoms
    ]
    pairs = zip(atoms, places, strict=True)
    return [atom for atom, (color, shape, motion) in pairs if (color + shape + 3 * motion) % 8 == 0]


def test_heldout_prompts_contain_one_heldout_combination_and_training_prompts_none():
    rng = np.random.default_rng(0)
    pretraining = [captions.train_record(rng, MOTION_TASKS) for _ in range(2000)]
    train, heldout = read("train"), read("heldout")
    assert not any(map(held_out, [*train, *pretraining]))
    assert {len(held_out(record)) for record in heldout} == {1}
    assert len(heldout) == 360 and len({record["prompt"] for record in heldout}) == 180
    words = {word for record in train for word in record["prompt"].split()}
    assert {word for record in heldout for word in record["prompt"].split()} <= words


def test_every_word_is_one_token():
    prompts = [record["prompt"] for record in read("train") + read("heldout")]
    tokenizer = build_t5_tokenizer(prompts, 16)
    for prompt in prompts:
        ids = tokenizer(prompt).input_ids
        assert len(ids) == len(prompt.split()) + 1 <= 16
        assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
    assert tokenizer("zebra").input_ids[-2:] == [tokenizer.unk_token_id, tokenizer.eos_token_id]


@functools.cache
def scenes() -> list[tuple[dict, Scene]]:
    rng = np.random.default_rng(7)
    return [(record, sample_scene(record, rng, FRAMES)) for record in read("heldout")[::9]]


def test_objects_move_as_their_prompt_says_inside_and_separate():
    for record, scene in scenes():
        named = [entry for entry in record["include"] for _ in range(entry["count"])]
        for entry, thing in zip(named, scene.objects, strict=True):
            assert (entry["class"], entry["color"]) == (thing.shape, thing.color)
            direction = np.asarray(MOTIONS[entry["motion"]])
            speed = np.linalg.norm(thing.velocity) * SIDE
            np.testing.assert_allclose(thing.velocity, direction * speed / SIDE, atol=1e-9)
            assert 1 <= speed <= 1.75 if direction.any() else speed == 0
        for frame in scene.clip(FRAMES):
            for thing in frame.objects:
                assert thing.radius <= min(thing.x, thing.y, 1 - thing.x, 1 - thing.y)
            for a, b in itertools.combinations(frame.objects, 2):
                apart = np.hypot(a.x - b.x, a.y - b.y) - REACH * (a.radius + b.radius)
                assert apart > 2 / SIDE


def render(scene: Scene) -> np.ndarray:
    return to_uint8(render_batch(scene.clip(FRAMES)))


def replaced(scene: Scene, rng, **fields) -> Scene:
    objects = list(scene.objects)
    place = rng.integers(len(objects))
    objects[place] = dataclasses.replace(objects[place], **fields)
    return dataclasses.replace(scene, objects=tuple(objects))


def other_class(scene, rng):
    names = [name for name in SHAPES if name not in {thing.shape for thing in scene.objects}]
    return render(replaced(scene, rng, shape=str(rng.choice(names))))


def other_color(scene, rng):
    names = [name for name in COLORS if name not in {thing.color for thing in scene.objects}]
    return render(replaced(scene, rng, color=str(rng.choice(names))))


def gone_in_one_frame(scene, rng):
    clip, frame = render(scene), rng.integers(FRAMES)
    objects = list(scene.clip(FRAMES)[frame].objects)
    objects.pop(rng.integers(len(objects)))
    clip[frame] = to_uint8(render_batch([Scene(tuple(objects), scene.background)]))[0]
    return clip


def one_stops(scene, rng):
    """One moving object stands still instead."""
    objects = list(scene.objects)
    moving = [i for i, thing in enumerate(objects) if any(thing.velocity)]
    place = rng.choice(moving)
    objects[place] = dataclasses.replace(objects[place].moved(4), velocity=(0.0, 0.0))
    return render(Scene(tuple(objects), scene.background))


def shuffled(scene, rng):
    order = np.arange(FRAMES)
    while (np.diff(order) > 0).all():
        order = rng.permutation(FRAMES)
    return render(scene)[order]


def score(clips, records):
    return shapes_motion(np.stack(clips), [record["prompt"] for record in records], records)


def test_rendered_clips_are_accepted():
    records, found = zip(*scenes(), strict=True)
    assert score(list(map(render, found)), records).mean() >= 0.99


def backwards(scene, rng):
    return render(scene)[::-1]


CHANGES = {
    change.__name__: change
    for change in (other_class, other_color, gone_in_one_frame, one_stops, shuffled, backwards)
}


def moving_scenes() -> list[tuple[dict, Scene]]:
    """The scenes in which at least one object moves."""
    found = [pair for pair in scenes() if any(any(thing.velocity) for thing in pair[1].objects)]
    assert len(found) > 25
    return found


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_clips_with_one_change_are_rejected(change):
    rng = np.random.default_rng(3)
    records, found = zip(*moving_scenes(), strict=True)
    assert score([change(scene, rng) for scene in found], records).mean() <= 0.01


def test_images_and_records_without_motion_are_refused():
    record = read("train")[0]
    with pytest.raises(ConfigError, match=r"config\.model\.frames"):
        shapes_motion(np.zeros((1, 32, 32, 3), np.uint8), [record["prompt"]], [record])
    del record["include"][0]["motion"]
    with pytest.raises(ConfigError, match="no `motion`"):
        shapes_motion(np.zeros((1, 9, 32, 32, 3), np.uint8), [record["prompt"]], [record])


def test_clips_of_a_pool_show_their_captions():
    pool = render_pool(12, 32, seed=1, frames=FRAMES, processes=1)
    assert pool.images.shape == (12, FRAMES, 32, 32, 3)
    by_prompt = {
        record["prompt"]: record for task in MOTION_TASKS for record in captions._prompts(task)[0]
    }
    assert score(list(pool.images), [by_prompt[caption] for caption in pool.captions]).all()
