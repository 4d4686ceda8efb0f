import json
import pathlib
import re

import pytest
from PIL import Image

from digen_jax.data import prompt_checks
from digen_jax.data.prompt_checks import (
    check_images,
    check_needs,
    odd_prompts,
    repeats_between,
    report_odd_prompts,
)
from digen_jax.errors import ConfigError
from digen_jax.families import load_family
from digen_jax.models.text.tokenizers import known_words
from digen_jax.rewards import ocr
from tests.cases import said
from tests.pipelines import ROOT
from tests.tiny_runs import pipeline


def write(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def long(prompts):
    return [len(prompt.split()) > 3 for prompt in prompts]


def never(prompts):
    return [False] * len(prompts)


def numbers(line):
    """The numbers in a message about a prompt file, without those in its path."""
    return [int(number) for number in re.findall(r"\b\d+\b", line.partition(": ")[2])]


# ---------------------------------------------------------------------------------- odd prompts


def test_cut_repeated_and_hidden_are_counted_with_their_first_lines(tmp_path):
    prompts = ["a b", "a b c d", "x\ty", "a b", "a b c d", "a b", "a b c d", "\x07 e"]
    file = tmp_path / "p.jsonl"
    file.write_text("\n\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    cut, repeated, hidden = odd_prompts(file, long)
    assert all(line.startswith(f"{file}: ") for line in (cut, repeated, hidden))
    assert numbers(cut) == [3, 8, 3, 9, 13]
    assert numbers(repeated) == [4, 8, 7, 1]
    assert numbers(hidden) == [2, 8, 5, 15]


def test_negative_prompts_are_checked_and_make_other_prompts(tmp_path):
    negatives = [None, "c", "c", "a b c d", "x\ty", "a b", "a b"]
    given = ({} if one is None else {"negative_prompt": one} for one in negatives)
    file = write(tmp_path / "p.jsonl", [{"prompt": "a b"} | more for more in given])
    assert [numbers(line) for line in odd_prompts(file, long)] == [
        [1, 7, 4],
        [2, 7, 3, 2],
        [1, 7, 5],
    ]


def test_another_image_makes_another_prompt(tmp_path):
    lines = [{"prompt": "a", "image": image} for image in ("x.png", "y.png", "x.png")]
    (repeated,) = odd_prompts(write(tmp_path / "p.jsonl", lines), never)
    assert numbers(repeated) == [1, 3, 3, 1]


def test_words_that_the_embedded_model_does_not_know_are_listed(tmp_path):
    words = known_words(load_family(pathlib.Path("assets/shapes-sd3")))
    assert {"circle", "two", "above", "background"} <= {*words} and "square" not in words
    file = tmp_path / "p.txt"
    file.write_text("a photo of two green squares\nA Red circle.\na cat, and a dog\n")
    (found,) = odd_prompts(file, lambda prompts: [len(p) > 20 for p in prompts], words)
    head, _, known = found.partition("; ")
    assert numbers(head) == [2, 3, 1, 3]
    assert head.endswith("'squares', 'cat', 'dog'") and all(word in known for word in words)


@pytest.mark.parametrize("name", ["assets/prompts/shapes_train.jsonl", "examples/my_prompts.txt"])
def test_shipped_files_have_no_odd_prompts(name, capsys):
    words = known_words(load_family(pathlib.Path("assets/shapes-sd3")))
    report_odd_prompts([name], never, words)
    assert capsys.readouterr() == ("", "")


def test_a_large_file_is_tokenized_in_chunks_with_progress(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prompt_checks, "CHUNK", 2)
    monkeypatch.setattr(prompt_checks, "REPORTED", 4)
    (tmp_path / "p.txt").write_text("".join(f"a {'b ' * (i % 5)}{i}\n" for i in range(9)))
    (cut,) = odd_prompts(tmp_path / "p.txt", long)
    assert numbers(cut) == [5, 9, 3, 4, 5, 2]  # the last number is of the lines that are not listed
    assert len(capsys.readouterr().err.splitlines()) == 2


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
        assert family.is_truncated([longer]).tolist() == [same]
    assert family.is_truncated(["a", " ".join(words)]).tolist() == [False, True]


def test_repeats_between_files_are_reported_with_both_lines(tmp_path, capsys):
    one, two, three = (tmp_path / f"{name}.txt" for name in ("one", "two", "three"))
    one.write_text("a\nb\nc\nb\n")
    two.write_text("x\nb\ny\na\nb\n")
    three.write_text("z\n")
    (line,) = repeats_between([one, two, three])
    assert line.startswith(f"{two}: ") and str(one) in line
    assert numbers(line.replace(str(one), "")) == [2, 4, 2, 2]
    report_odd_prompts([one, two, one], long)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [str(one), str(two), str(two)]


# ---------------------------------------------------------------------------------------- needs


def box(record):
    return None if "box" in record else "has no box" if record.get("tag") else "has no box or tag"


def test_each_file_reward_and_lack_is_an_error_with_its_first_lines(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.jsonl"
    first.write_text("".join(f"a wall\na 'wall' {i}\n" for i in range(3)) + 'a "wall"\n')
    lines = [
        {"prompt": "a “wall”", "tag": "t"},
        {"prompt": "a wall", "box": 1},
        {"prompt": '"x"', "tag": "u"},
    ]
    second.write_text("\n\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError) as error:
        check_needs([first, second, first], {"ocr": ocr.needs, "mine:box": box})
    found = [
        re.fullmatch(r"(.*), lines? (.*): (\d) of (\d) .* '(.*)', .*", e) for e in error.value.args
    ]
    assert [match.groups() for match in found] == [
        (str(first), "1, 2, 3 and 3 more", "6", "7", "ocr"),
        (str(first), "1, 2, 3 and 4 more", "7", "7", "mine:box"),
        (str(second), "1, 5", "2", "3", "mine:box"),
        (str(second), "3", "1", "3", "ocr"),
    ]
    check_needs([first, second], {})
    check_needs([ROOT / "tests" / "data" / "ocr_test.txt"], {"ocr": ocr.needs})
    with pytest.raises(FileNotFoundError):
        check_needs([tmp_path / "none.txt"], {"ocr": ocr.needs})


# --------------------------------------------------------------------------------------- images


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (["a.png", None], 'line 2: "image"'),
        (["a.png", 3], 'line 2: "image"'),
        (["b.png", "a.png"], r"line 1: .*b\.png"),
        (["a.png", "a.png", "half.png", "b.png"], r"line 3: .*half\.png"),
        (["a.png", "text.png"], r"line 2: .*text\.png"),
        ([""], 'line 1: "image"'),
        (["."], "line 1: "),
    ],
)
def test_the_first_line_without_a_readable_image_is_named(tmp_path, images, named):
    Image.effect_noise((30, 20), 90).save(tmp_path / "a.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "a.png").read_bytes()[:300])
    (tmp_path / "text.png").write_text("no image")
    records = [{"prompt": "x"} | ({} if i is None else {"image": i}) for i in images]
    with pytest.raises(ValueError, match=named):
        check_images(write(tmp_path / "edits.jsonl", records))


def test_all_images_of_a_file_are_read_and_a_changed_one_again(tmp_path):
    names = ["a.png", "b.jpg", "c.webp"]
    for name in names:
        Image.new("RGB", (30, 20), "red").save(tmp_path / name)
    path = write(tmp_path / "edits.jsonl", [{"prompt": "x", "image": n} for n in [*names, *names]])
    check_images(path)
    (tmp_path / "b.jpg").write_text("broken")
    with pytest.raises(ValueError, match=r"line 2: .*b\.jpg"):
        check_images(path)
