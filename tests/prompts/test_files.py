import collections
import json
import pathlib

import pytest

from digen_jax.prompts.files import read_prompt_file

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
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2: this is not JSON .* at column 10"),
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
        ({"serial": 3}, '"serial" will hold the number of the group; rename'),
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


def test_prompt_must_be_there(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"tag": "colors"}')
    with pytest.raises(ValueError, match='line 1: "prompt" is missing; give'):
        read_prompt_file(path)


def test_names_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"no prompt file at {path}: give the path"):
            read_prompt_file(path)
