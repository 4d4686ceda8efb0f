import collections
import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from examples.shapes import captions
from examples.shapes.scene import Background, Object, Scene, sample_scene
from examples.shapes.vocabulary import BACKGROUNDS, COLORS, RELATIONS, SHAPES, TASKS
from tests.examples.atoms import COLOR, SHAPE, all_atoms, atoms_in

RELATION = "left of|right of|above|below"
PROMPTS = pathlib.Path(__file__).parents[2] / "assets" / "prompts"


def read(name):
    return [json.loads(line) for line in (PROMPTS / name).read_text().splitlines()]


def own_atom(record):
    (atom,) = [atom for atom in atoms_in(record["prompt"]) if atom[0] == record["tag"]]
    return atom


@pytest.fixture(scope="module")
def heldout_atoms():
    return {own_atom(record) for record in read("shapes_heldout.jsonl")}


def test_the_prompt_files_are_those_that_the_tool_writes(tmp_path):
    captions.write_prompt_files(tmp_path)
    for name in ("shapes_train.jsonl", "shapes_heldout.jsonl"):
        assert (tmp_path / name).read_text() == (PROMPTS / name).read_text()


@pytest.mark.parametrize(
    ("name", "lines"), [("shapes_train.jsonl", 1800), ("shapes_heldout.jsonl", 540)]
)
def test_the_prompt_files_go_through_the_tasks_in_turn(name, lines):
    assert [record["tag"] for record in read(name)] == list(TASKS) * (lines // 6)


def test_no_training_prompt_contains_a_heldout_combination(heldout_atoms):
    rng = np.random.default_rng(0)
    pretraining = [captions.train_record(rng) for _ in range(20_000)]
    for record in read("shapes_train.jsonl") + pretraining:
        assert not atoms_in(record["prompt"]) & heldout_atoms, record["prompt"]


def test_a_heldout_prompt_contains_one_heldout_combination(heldout_atoms):
    for record in read("shapes_heldout.jsonl"):
        assert atoms_in(record["prompt"]) & heldout_atoms == {own_atom(record)}


def test_a_fair_share_of_each_task_is_held_out(heldout_atoms):
    rng = np.random.default_rng(1)
    train = {own_atom(captions.train_record(rng)) for _ in range(20_000)}
    for task, total in all_atoms().items():
        held = sum(atom[0] == task for atom in heldout_atoms)
        trained = sum(atom[0] == task for atom in train)
        assert held >= 5 or task == "two_object"
        assert 0.1 <= held / (held + trained) <= 0.3, (task, held, trained)
        if task in ("single_object", "two_object", "counting", "colors"):
            assert held + trained == total


def test_heldout_combinations_are_asked_equally_often():
    records = read("shapes_heldout.jsonl")
    for task in TASKS:
        counts = collections.Counter(own_atom(r) for r in records if r["tag"] == task)
        if task != "color_attr":  # more combinations than lines
            assert max(counts.values()) - min(counts.values()) <= 2, (task, counts)
        else:
            assert max(counts.values()) <= 2


def test_every_word_keeps_its_share_of_training():
    prompts = [record["prompt"] for record in read("shapes_train.jsonl")]
    words = collections.Counter(word for prompt in prompts for word in prompt.split())
    shapes = [sum(shape in prompt for prompt in prompts) for shape in SHAPES]
    assert max(shapes) < 2 * min(shapes)
    for group in (COLORS, BACKGROUNDS, ("two", "three", "four")):
        counts = [words[word] for word in group]
        assert max(counts) <= 2.5 * min(counts), dict(zip(group, counts, strict=True))
    relations = [sum(relation in prompt for prompt in prompts) for relation in RELATIONS]
    assert max(relations) < 1.5 * min(relations)


def test_records_have_genevals_fields_and_words():
    for record in read("shapes_train.jsonl")[:600]:
        assert list(record) == ["tag", "include", "exclude", "prompt"]
        for entry in record["include"]:
            article = "an" if entry.get("color") == "orange" else "a"
            color = f"{entry['color']} " if "color" in entry else ""
            if entry["count"] == 1:
                assert f"{article} {color}{entry['class']}" in record["prompt"]
        if record["tag"] == "position":
            target, thing = record["include"]
            relation, index = thing["position"]
            assert index == 0
            expected = f"a photo of a {thing['class']} {relation} a {target['class']}"
            assert record["prompt"] == expected


def test_tags_name_all_that_is_to_be_seen():
    red, blue = Object("star", "red", 0.2, 0.5, 0.1), Object("ring", "blue", 0.7, 0.6, 0.1)
    gray = Background("gray", (0.5, 0.5, 0.5))
    assert captions.tags(Scene((red,), gray)) == "red star gray background"
    assert captions.tags(Scene((red, blue), gray)) == "red star left of blue ring gray background"
    assert captions.tags(Scene((blue, red), gray)) == "blue ring right of red star gray background"
    askew = dataclasses.replace(blue, y=0.95)
    assert captions.tags(Scene((red, askew), gray)) == "red star blue ring gray background"
    assert captions.tags(Scene((red, red), gray)) == "red star red star gray background"


def test_tags_of_training_pictures_name_no_heldout_combination(heldout_atoms):
    rng = np.random.default_rng(0)
    related = 0
    for _ in range(1000):
        text = captions.tags(sample_scene(captions.train_record(rng), rng))
        words = re.fullmatch(rf"({COLOR}) ({SHAPE}) ({RELATION}) ({COLOR}) ({SHAPE}) .*", text)
        if words:
            color_a, a, relation, color_b, b = words.groups()
            first, second = f"a {color_a} {a}", f"a {color_b} {b}"
            prompts = [f"{first} {relation} {second}", f"{first} and {second}", first, second]
            for prompt in prompts:
                assert not atoms_in(f"a photo of {prompt}") & heldout_atoms, text
            related += 1
    assert related > 150


def test_exclude_forbids_everything_else():
    include = [{"class": "star", "count": 3}]
    record = captions.make_record("counting", include, "a photo of three stars")
    limits = {entry["class"]: entry["count"] for entry in record["exclude"]}
    assert limits == {shape: 4 if shape == "star" else 1 for shape in SHAPES}
