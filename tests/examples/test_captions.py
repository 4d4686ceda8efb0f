import dataclasses
import functools
import json
import pathlib
import re
import unicodedata

import numpy as np
import pytest
from transformers import CLIPTokenizer, CLIPTokenizerFast

from examples.shapes import captions
from examples.shapes.captions import heldout_records, train_records
from examples.shapes.networks import build_clip_tokenizer
from examples.shapes.scene import Background, Object, Scene, sample_scene
from examples.shapes.vocabulary import SHAPES

COLOR = "red|orange|yellow|green|blue|purple|white|black"
SHAPE = "circle|triangle|cross|star|ring|heart"
THING = rf"an? (?:({COLOR}) )?({SHAPE})"
RELATION = "left of|right of|above|below"
MIRROR = {"left of": "right of", "above": "below"}
PROMPTS = pathlib.Path(__file__).parents[2] / "assets" / "prompts"


def atoms_in(prompt):
    """All atoms of all tasks that the prompt names, as hashable tuples that start with the task."""
    if match := re.fullmatch(rf"a photo of an? ({SHAPE}) on an? (\w+) background", prompt):
        return {("single_object", match[1], match[2])}
    if match := re.fullmatch(rf"a photo of (two|three|four) ({SHAPE})e?s", prompt):
        return {("counting", match[1], match[2])}
    if match := re.fullmatch(rf"a photo of {THING}", prompt):
        return {("colors", match[1], match[2])}
    if match := re.fullmatch(rf"a photo of {THING} (left of|right of|above|below) {THING}", prompt):
        _, a, relation, _, b = match.groups()
        if relation in MIRROR:
            a, relation, b = b, MIRROR[relation], a
        return {("position", a, relation, b), ("two_object", frozenset((a, b)))}
    match = re.fullmatch(rf"a photo of {THING} and {THING}", prompt)
    color_a, a, color_b, b = match.groups()
    atoms = {("two_object", frozenset((a, b)))}
    if color_a:
        pair = frozenset(((color_a, a), (color_b, b)))
        atoms |= {("color_attr", pair), ("colors", color_a, a), ("colors", color_b, b)}
    return atoms


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
    written = sorted(tmp_path.iterdir())
    assert len(written) == 4
    for path in written:
        assert path.read_text() == (PROMPTS / path.name).read_text()


def test_no_training_prompt_contains_a_heldout_combination(heldout_atoms):
    rng = np.random.default_rng(0)
    pretraining = [captions.train_record(rng) for _ in range(20_000)]
    for record in read("shapes_train.jsonl") + pretraining:
        assert not atoms_in(record["prompt"]) & heldout_atoms, record["prompt"]


def test_a_heldout_prompt_contains_one_heldout_combination(heldout_atoms):
    for record in read("shapes_heldout.jsonl"):
        assert atoms_in(record["prompt"]) & heldout_atoms == {own_atom(record)}


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


# ---------------------------------------------------------------------------------------- tokenizer

LENGTH = 16


@functools.cache
def tokenizer() -> CLIPTokenizer:
    return build_clip_tokenizer([record["prompt"] for record in train_records()], LENGTH)


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False, truncation=True, max_length=999)["input_ids"]


def test_every_word_of_the_shapes_world_is_one_token():
    words = {word for r in train_records() + heldout_records() for word in r["prompt"].split()}
    assert len(words) > 30
    assert {word: len(ids(word)) for word in words} == dict.fromkeys(words, 1)


def test_every_caption_fits():
    longest = max(len(ids(r["prompt"])) for r in train_records() + heldout_records())
    assert longest <= LENGTH - 2


@pytest.mark.parametrize(
    "text", ["Red circle, left-of a BLUE square!", "Ünïcödé 🙂 xyz", "zebra's\t1a2", "日本 語", ""]
)
def test_any_text_comes_back_from_its_bytes(text):
    """But for case and spaces, which CLIP's tokenizer does not keep."""
    plain = unicodedata.normalize("NFC", text).lower()
    assert tokenizer().decode(ids(text)).replace(" ", "") == "".join(plain.split())


def test_transformers_loads_what_is_saved(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    for loader in (CLIPTokenizer, CLIPTokenizerFast):
        loaded = loader.from_pretrained(tmp_path)
        assert loaded.model_max_length == LENGTH
        assert {"red", "stars", "above"} <= {*loaded.init_kwargs["words"]}
        for text in ("a photo of two Blue stars", "Ünïcödé 🙂"):
            assert loaded(text)["input_ids"] == tokenizer()(text)["input_ids"]
