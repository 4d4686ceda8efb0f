"""Oddities of prompt files: each kind is one sentence with its number and its first lines."""

import json
import pathlib

import pytest

from digen_jax.data import notes, prompt_files
from digen_jax.families import load_family
from digen_jax.models.text.tokenizers import known_words
from tests.cases import said
from tests.tiny_runs import pipeline


def long(prompts):
    return [len(prompt.split()) > 3 for prompt in prompts]


def test_what_is_odd_is_counted_and_named_by_its_lines(tmp_path):
    file = tmp_path / "p.jsonl"
    prompts = ["a b", "a b c d", "x\ty", "a b", "a b c d", "a b", "a b c d", "\x07 e"]
    file.write_text("\n\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    assert notes.notes(file, long) == [
        f"{file}: 3 of 8 prompts are cut off by the text encoders: lines 3, 9, 13",
        f"{file}: 4 of 8 prompts are repeats (line 7 repeats line 1)",
        f"{file}: 2 of 8 prompts have hidden characters: lines 5, 15",
    ]


def test_words_that_the_embedded_model_cannot_read_are_named(tmp_path):
    words = known_words(load_family(pathlib.Path("assets/shapes-sd3")))
    assert {"circle", "two", "above", "background"} <= {*words} and "square" not in words
    file = tmp_path / "p.txt"
    file.write_text("a photo of two green squares\nA Red circle.\na cat, and a dog\n")
    (found,) = notes.notes(file, lambda prompts: [len(p) > 20 for p in prompts], words)
    head, _, known = found.partition("; ")
    assert found.startswith(f"{file}: 2 of 3 prompts") and "lines 1, 3" in head
    assert head.endswith("'squares', 'cat', 'dog'") and all(word in known for word in words)
    for shipped in ("assets/prompts/shapes_train.jsonl", "examples/my_prompts.txt"):
        assert notes.notes(shipped, lambda prompts: [False] * len(prompts), words) == []


def test_a_negative_prompt_is_read_too_and_makes_another_prompt(tmp_path):
    file = tmp_path / "p.jsonl"
    negatives = [None, "c", "c", "a b c d", "x\ty", "a b", "a b"]
    given = ({} if one is None else {"negative_prompt": one} for one in negatives)
    file.write_text("\n".join(json.dumps({"prompt": "a b"} | more) for more in given))
    assert notes.notes(file, long) == [
        f"{file}: 1 of 7 prompts are cut off by the text encoders: line 4",
        f"{file}: 2 of 7 prompts are repeats (line 3 repeats line 2)",
        f"{file}: 1 of 7 prompts have hidden characters: line 5",
    ]


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_of_the_shipped_files_nothing_is_said(name):
    file = f"assets/prompts/shapes_{name}.jsonl"
    assert notes.notes(file, lambda prompts: [False] * len(prompts)) == []
    (found,) = notes.notes(file, lambda prompts: [True] * len(prompts))
    assert len(found) <= 120


def test_of_a_good_file_nothing_is_said(tmp_path, capsys):
    (tmp_path / "p.txt").write_text("a b\nc d\n")
    notes.tell([tmp_path / "p.txt"], long)
    assert capsys.readouterr() == ("", "")


def test_every_prompt_of_a_large_file_is_looked_at_and_that_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notes, "CHUNK", 2)
    monkeypatch.setattr(notes, "SPOKEN", 4)
    (tmp_path / "p.txt").write_text("".join(f"a {'b ' * (i % 5)}{i}\n" for i in range(9)))
    found = notes.notes(tmp_path / "p.txt", long)
    assert [note.partition("encoders: ")[2] for note in found] == ["lines 3, 4, 5 and 2 more"]
    assert capsys.readouterr().err == "tokenized 4 of 9 prompts\ntokenized 8 of 9 prompts\n"


def test_a_prompt_is_cut_where_its_ids_are_those_of_its_beginning(base):
    """The oracle: the text that is cut off changes nothing."""
    family = load_family(pipeline(base))
    words = [
        "a",
        "photo",
        "of",
        "a",
        "red",
        "circle",
        "and",
        "a",
        "blue",
        "star",
        "and",
        "a",
        "green",
        "square",
    ]
    for count in range(1, len(words)):
        shorter, longer = (" ".join(words[:n]) for n in (count, count + 1))
        same = (family.tokenize(said(shorter)).first == family.tokenize(said(longer)).first).all()
        assert family.cut([longer]).tolist() == [same]
    assert family.cut(["a", " ".join(words)]).tolist() == [False, True]


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_lines_that_cannot_be_prompts_are_refused_by_number(tmp_path, name):
    file = tmp_path / name

    def line(text):
        return json.dumps({"prompt": text}) if name == "p.jsonl" else text

    file.write_text(f"{line('a')}\n{line('b' * 1_000_001)}\n")
    with pytest.raises(
        ValueError, match=r"line 2: 1,000,0\d\d bytes are more than a prompt can have"
    ):
        prompt_files.read_prompt_file(file)
    file.write_text(f"{line('a')}\n{line('x' + chr(7))}\n{line(chr(7) + chr(0))}\n")
    with pytest.raises(ValueError, match=r"line 3: .*nothing but hidden characters; write a text"):
        prompt_files.read_prompt_file(file)


def test_the_same_text_with_another_picture_is_no_repetition(tmp_path):
    file = tmp_path / "p.jsonl"
    lines = [{"prompt": "a", "image": image} for image in ("x.png", "y.png", "x.png")]
    file.write_text("\n".join(map(json.dumps, lines)))
    (found,) = notes.notes(file, lambda prompts: [False] * len(prompts))
    assert found == f"{file}: 1 of 3 prompts are repeats (line 3 repeats line 1)"


def test_prompts_of_several_files_are_named_with_their_lines_in_both(tmp_path, capsys):
    one, two, three = (tmp_path / f"{name}.txt" for name in ("one", "two", "three"))
    one.write_text("a\nb\nc\nb\n")
    two.write_text("x\nb\ny\na\nb\n")
    three.write_text("z\n")
    assert notes.shared([one, two, three]) == [
        f"{two}: 2 of 4 different prompts are in {one}, too (line 2 is line 2 there)"
    ]
    notes.tell([one, two, one], long)
    assert capsys.readouterr().err.splitlines() == [
        f"{one}: 1 of 4 prompts are repeats (line 4 repeats line 2)",
        f"{two}: 1 of 5 prompts are repeats (line 5 repeats line 2)",
        f"{two}: 2 of 4 different prompts are in {one}, too (line 2 is line 2 there)",
    ]
