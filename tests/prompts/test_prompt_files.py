import collections
import json
import pathlib

import pytest
from PIL import Image

from digen_jax.data import prompt_files
from digen_jax.data.prompt_files import check_pictures, first_negative, read_prompt_file

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
    assert read_prompt_file(path) == [
        {"prompt": "a cat"},
        {"prompt": "ein Käfig\u2028mit Umbruch"},
    ]
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


def test_line_numbers_count_blank_lines(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"prompt": "a"}\n\n\n{"prompt": ""}\n')
    with pytest.raises(ValueError, match=r'p\.jsonl, line 4: "prompt" is ""; write'):
        read_prompt_file(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", "p.txt holds no prompt: write at least one line"),
        ("p.jsonl", "\n \n", "p.jsonl holds no prompt: write at least one line"),
        ("p.txt", "a\n \nb\n", "line 2: the prompt is blank; write one or delete the line"),
        ("p.txt", b"a\nb\xff\n", "line 2: byte 2 is not UTF-8; save the file in that encoding"),
        ("p.jsonl", '{"prompt": "a"}\n' + "[" * 200_000, "line 2: .* nested"),
        ("p.jsonl", f'{{"prompt": "a", "n": {"[" * 101 + "]" * 101}}}', "line 1: .* nested"),
        ("p.jsonl", f'{{"prompt": "a", "n": {"1" * 5000}}}', "line 1: .* 5000 digits"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2: this is not JSON .* at column 10"),
        ("p.jsonl", '{"prompt": "a", "n": [NaN]}\n', "line 1: NaN is no JSON number; write null"),
        ("p.jsonl", '"a cat"\n', "line 1: write an object, such as"),
        ("p.csv", "a\n", "p.csv ends in '.csv': a prompt file is .jsonl .* or .txt"),
    ],
)
def test_refuses_unusable_files(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError, match=message):
        read_prompt_file(path)


CAT = {"class": "cat", "count": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, '"prompt" is null; write a text'),
        ({"prompt": ["a"]}, '"prompt" is .*; write a text'),
        ({"prompt": "\ud83d"}, '"prompt" holds half of a surrogate pair'),
        ({"negative_prompt": None}, '"negative_prompt" is null; write a text, or ""'),
        ({"negative_prompt": ["a"]}, r'"negative_prompt" is \["a"\]; write a text'),
        ({"negative_prompt": "\ud83d"}, '"negative_prompt" holds half of a surrogate pair'),
        ({"serial": 3}, '"serial" will hold the number of the group; rename'),
        ({"prompt_file": "a"}, '"prompt_file" will hold the file of the prompt; rename'),
        ({"tag": 3}, '"tag" must be a text, not 3'),
        ({"include": CAT}, '"include" must be a list of objects'),
        ({"include": ["cat"]}, r'include\[0\] must be an object with "class" and "count"'),
        ({"include": [{"count": 1}]}, r'include\[0\]: "class" must be a text, not None'),
        ({"include": [CAT, {"class": "cat"}]}, r'include\[1\]: "count" must be an integer'),
        ({"include": [CAT | {"count": 0}]}, '"count" must be an integer of at least 1, not 0'),
        ({"include": [CAT | {"count": True}]}, '"count" must be an integer .* not True'),
        ({"include": [CAT | {"count": 1.0}]}, '"count" must be an integer .* not 1.0'),
        ({"include": [CAT | {"color": 7}]}, '"color" must be a text, not 7'),
        ({"include": [CAT, CAT | {"position": "above"}]}, r'"position" must be \[relation, index'),
        ({"include": [CAT, CAT | {"position": ["above"]}]}, r'"position" must be \[relation'),
        ({"include": [CAT, CAT | {"position": [0, "above"]}]}, r'"position" must be \[relation'),
        ({"include": [CAT, CAT | {"position": ["above", 1]}]}, r"names include\[1\], which is not"),
        ({"include": [CAT, CAT | {"position": ["above", -1]}]}, r"names include\[-1\]"),
        ({"exclude": [{"class": "cat"}]}, r'exclude\[0\]: "count" must be an integer'),
        ({"exclude": None}, '"exclude" must be a list of objects, not None'),
    ],
)
def test_refuses_wrong_metadata_with_its_line(tmp_path, fields, message):
    lines = [{"prompt": "a"}, {"prompt": "b"} | fields]
    path = write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: .*" + message) as raised:
        read_prompt_file(path)
    assert str(raised.value).count("\n") == 0


def test_the_first_negative_prompt_is_found_where_there_is_one(tmp_path):
    lines = [{"prompt": "negative_prompt"}, {"prompt": "b", "negative_prompt": ""}]
    path = write(tmp_path, "p.jsonl", "\n\n".join(map(json.dumps, lines)))
    assert read_prompt_file(path) == lines
    assert first_negative(path) == f"{path}, line 3"
    assert first_negative(write(tmp_path, "q.jsonl", json.dumps(lines[0]))) is None
    assert first_negative(write(tmp_path, "q.txt", "a negative_prompt\n")) is None


def test_prompt_must_be_there(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"tag": "colors"}')
    with pytest.raises(ValueError, match='line 1: "prompt" is missing; give'):
        read_prompt_file(path)


def test_names_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"no prompt file at {path}: give the path"):
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


# --------------------------------------------------------------------------------------- pictures


def edits(folder, *images):
    """A prompt file with these values of "image"; None: there is none."""
    lines = [{"prompt": "x"} | ({} if i is None else {"image": i}) for i in images]
    return write(folder, "edits.jsonl", "\n".join(map(json.dumps, lines)))


def test_a_picture_lies_relative_to_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("HOME", "/me")
    images = ["a.png", "../b.png", "/c.png", "s://h/d.png", None, 3, " ", "~/e.png"]
    path = edits(pathlib.Path("own"), *images)
    found = [record.get("image") for record in read_prompt_file(path)]
    assert found == ["own/a.png", "own/../b.png", *images[2:-1], "/me/e.png"]


def test_all_pictures_of_a_file_are_read(tmp_path):
    for name in ("a.png", "b.jpg", "c.webp"):
        Image.new("RGB", (30, 20), "red").save(tmp_path / name)
    check_pictures(edits(tmp_path, "a.png", "b.jpg", "c.webp", "a.png"))


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (["a.png", None], r'edits.jsonl, line 2: "image" is missing; give the path of the picture'),
        (["a.png", 3], r'edits.jsonl, line 2: "image" is missing'),
        (
            ["b.png", "a.png"],
            r"edits.jsonl, line 1: there is no picture at \S+b.png; give the path",
        ),
        (["a.png", "a.png", "half.png", "b.png"], r"line 3: \S+half.png cannot be read as a pict"),
        (
            ["a.png", "text.png"],
            r"line 2: \S+text.png cannot be read as a picture: cannot identify",
        ),
        ([""], r'line 1: "image" is missing'),
        (["."], r"line 1: \S+ cannot be read as a picture: .*directory"),
    ],
)
def test_the_first_line_without_a_whole_picture_is_named(tmp_path, images, sentence):
    Image.effect_noise((30, 20), 90).save(tmp_path / "a.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "a.png").read_bytes()[:300])
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ValueError, match=sentence):
        check_pictures(edits(tmp_path, *images))


def test_a_picture_that_has_changed_is_read_again(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    path = edits(tmp_path, "a.png")
    check_pictures(path)
    (tmp_path / "a.png").write_text("broken")
    with pytest.raises(ValueError, match="cannot be read"):
        check_pictures(path)
