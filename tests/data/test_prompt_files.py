import collections
import json
import pathlib

import pytest

from digen_jax.data import prompt_files
from digen_jax.data.prompt_files import first_negative, read_prompt_file

DATA = pathlib.Path(__file__).parents[1] / "data"


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_reads_genevals_own_file():
    path = DATA / "geneval_test_metadata.jsonl"
    records = read_prompt_file(path)
    assert records == [json.loads(line) for line in path.read_text().splitlines()]
    tags = collections.Counter(record["tag"] for record in records)
    assert set(tags) == {
        "single_object",
        "two_object",
        "counting",
        "colors",
        "position",
        "color_attr",
    }


def test_reads_the_text_rendering_prompts():
    path = DATA / "ocr_test.txt"
    records = read_prompt_file(path)
    assert len(records) == 100
    assert records[0]["prompt"].startswith("A high-fashion runway")
    assert [record["prompt"] for record in records] == path.read_text().splitlines()


def test_text_lines_lose_byte_order_mark_carriage_returns_and_outer_space(tmp_path):
    path = write(tmp_path, "p.txt", "\ufeff a cat \r\nein Käfig\u2028mit Umbruch\r\n\n \n")
    assert read_prompt_file(path) == [{"prompt": "a cat"}, {"prompt": "ein Käfig\u2028mit Umbruch"}]
    path = write(tmp_path, "p.jsonl", '\ufeff{"prompt": "a"}\n\ufeff{"prompt": "b"}\n')
    assert read_prompt_file(path) == [{"prompt": "a"}, {"prompt": "b"}]


def test_json_keeps_unknown_fields_and_skips_blank_lines(tmp_path):
    first = {
        "prompt": " a cat ",
        "style": {"ink": [1, None]},
        "include": [{"class": "c", "count": 2}],
    }
    path = write(tmp_path, "p.jsonl", f'{json.dumps(first)}\n\n{{"prompt": "b"}}\n\n')
    assert read_prompt_file(path) == [first, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", "p.txt"),
        ("p.jsonl", "\n \n", "p.jsonl"),
        ("p.txt", "a\n \nb\n", "line 2"),
        ("p.txt", b"a\nb\xff\n", "line 2: byte 2"),
        ("p.jsonl", '{"prompt": "a"}\n' + "[" * 200_000, "line 2: .* nested"),
        ("p.jsonl", f'{{"prompt": "a", "n": {"[" * 101 + "]" * 101}}}', "line 1: .* nested"),
        ("p.jsonl", f'{{"prompt": "a", "n": {"1" * 5000}}}', "line 1: .* 5000 digits"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2: .* column 10"),
        ("p.jsonl", '{"prompt": "a", "n": [NaN]}\n', "line 1: NaN"),
        ("p.jsonl", '"a cat"\n', "line 1"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n\n\n{"prompt": ""}\n',
            'line 4: "prompt"',
        ),  # blank lines count
        ("p.jsonl", '{"tag": "colors"}', 'line 1: "prompt"'),
        ("p.csv", "a\n", "p.csv .*jsonl.*txt"),
    ],
)
def test_refuses_unusable_files(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError, match=message):
        read_prompt_file(path)


CAT = {"class": "cat", "count": 1}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": None}, '"prompt"'),
        ({"prompt": ["a"]}, '"prompt"'),
        ({"prompt": "\ud83d"}, '"prompt"'),
        ({"negative_prompt": None}, '"negative_prompt"'),
        ({"negative_prompt": ["a"]}, r'"negative_prompt" is \["a"\]'),
        ({"negative_prompt": "\ud83d"}, '"negative_prompt"'),
        ({"serial": 3}, '"serial"'),
        ({"prompt_file": "a"}, '"prompt_file"'),
        ({"tag": 3}, '"tag" .* 3'),
        ({"include": CAT}, '"include"'),
        ({"include": ["cat"]}, r"include\[0\] "),
        ({"include": [{"count": 1}]}, r'include\[0\]: "class" .* None'),
        ({"include": [CAT, {"class": "cat"}]}, r'include\[1\]: "count"'),
        ({"include": [CAT | {"count": 0}]}, '"count" .* 0'),
        ({"include": [CAT | {"count": True}]}, '"count" .* True'),
        ({"include": [CAT | {"count": 1.0}]}, '"count" .* 1.0'),
        ({"include": [CAT | {"color": 7}]}, '"color" .* 7'),
        ({"include": [CAT, CAT | {"position": "above"}]}, r'include\[1\]: "position"'),
        ({"include": [CAT, CAT | {"position": ["above"]}]}, r'include\[1\]: "position"'),
        ({"include": [CAT, CAT | {"position": [0, "above"]}]}, r'include\[1\]: "position"'),
        ({"include": [CAT, CAT | {"position": ["above", 1]}]}, r'"position" .* include\[1\]'),
        ({"include": [CAT, CAT | {"position": ["above", -1]}]}, r'"position" .* include\[-1\]'),
        ({"exclude": [{"class": "cat"}]}, r'exclude\[0\]: "count"'),
        ({"exclude": None}, '"exclude" .* None'),
    ],
)
def test_refuses_wrong_metadata_with_its_line(tmp_path, fields, named):
    lines = [{"prompt": "a"}, {"prompt": "b"} | fields]
    path = write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: .*" + named) as raised:
        read_prompt_file(path)
    assert str(raised.value).count("\n") == 0


def test_the_first_negative_prompt_is_found_where_there_is_one(tmp_path):
    lines = [{"prompt": "negative_prompt"}, {"prompt": "b", "negative_prompt": ""}]
    path = write(tmp_path, "p.jsonl", "\n\n".join(map(json.dumps, lines)))
    assert read_prompt_file(path) == lines
    assert first_negative(path) == f"{path}, line 3"
    assert first_negative(write(tmp_path, "q.jsonl", json.dumps(lines[0]))) is None
    assert first_negative(write(tmp_path, "q.txt", "a negative_prompt\n")) is None


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            read_prompt_file(path)


HIDDEN = (
    "\u200b",
    "\ufeff",
    "\xad",
    "\u202e\u2066",
    "\u200d \u200c",
    "\U000e0041",
    "\u180e\x07\u3000",
)


@pytest.mark.parametrize("text", HIDDEN)
def test_a_prompt_of_characters_that_nobody_sees_is_refused(tmp_path, text):
    lines = {
        "p.txt": ["a", text, "b"],
        "p.jsonl": ['{"prompt": "a"}', json.dumps({"prompt": text})],
    }
    for name, given in lines.items():
        with pytest.raises(ValueError, match=f"{name}, line 2: "):
            read_prompt_file(write(tmp_path, name, "\n".join(given)))


def test_emoji_and_joined_letters_are_kept_and_not_hidden(tmp_path):
    texts = ["\u2764\ufe0f", "\U0001f468\u200d\U0001f469", "\u0645\u06cc\u200c\u062e", "\u3042"]
    path = write(tmp_path, "p.txt", "\n".join(texts))
    assert [record["prompt"] for record in read_prompt_file(path)] == texts
    assert not any(map(prompt_files.HIDDEN.search, texts))
    assert all(map(prompt_files.HIDDEN.search, [text for text in HIDDEN if "\u200d" not in text]))


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_line_that_is_too_long_is_refused(tmp_path, name):
    lines = ["a", "b" * 1_000_001]
    if name == "p.jsonl":
        lines = [json.dumps({"prompt": text}) for text in lines]
    with pytest.raises(ValueError, match="line 2: 1,000,0"):
        read_prompt_file(write(tmp_path, name, "\n".join(lines)))


def test_the_path_of_an_image_is_relative_to_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("HOME", "/me")
    images = ["a.png", "../b.png", "/c.png", "s://h/d.png", 3, " ", "~/e.png"]
    lines = "\n".join(json.dumps({"prompt": "x", "image": image}) for image in images)
    path = write(pathlib.Path("own"), "edits.jsonl", lines)
    found = [record["image"] for record in read_prompt_file(path)]
    assert found == ["own/a.png", "own/../b.png", *images[2:-1], "/me/e.png"]
