"""Data sets of the hub, in a cache of huggingface_hub without a network: what is read, and what is said."""

import datetime
import itertools
import json
import math

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from digen_jax.data import hub
from digen_jax.data.prompt_files import read_prompt_file
from digen_jax.data.prompt_order import prompt_batches

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [
    {"prompt": "a red star", "text": "eins", "tag": "colors", "n": [1, 2]},
    {"prompt": "a “blue” star", "text": None, "tag": None, "n": []},
    {"prompt": "two\nlines", "text": " ", "tag": None, "n": None},
    {"prompt": "a ring", "text": "vier", "tag": "shape", "n": [3]},
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache with one data set, as huggingface_hub leaves it: two subsets, one in two files."""
    folder = tmp_path / "hub" / "datasets--someone--texts.v1"
    (folder / "refs" / "refs" / "convert").mkdir(parents=True)
    (folder / "refs" / "refs" / "convert" / "parquet").write_text(COMMIT)
    when = datetime.datetime(2024, 5, 1)
    extra = {
        "image": {"bytes": b"\x89PNG", "path": "x.png"},
        "raw": b"\0",
        "when": when,
        "weight": math.nan,
    }
    rows = [row | extra for row in ROWS]
    for place, part in {
        "default/train/0000": rows[:3],
        "default/train/0001": rows[3:],
        "small/test/0000": rows[:1],
    }.items():
        file = folder / "snapshots" / COMMIT / f"{place}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), file)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub.read_rows.cache_clear()
    yield folder
    hub.read_rows.cache_clear()


@pytest.fixture(autouse=True)
def offline():
    assert constants.HF_HUB_OFFLINE


def test_a_split_is_a_prompt_file_with_the_other_columns_as_metadata(cache):
    given = [{name: value for name, value in row.items() if value is not None} for row in ROWS]
    found = read_prompt_file("hf:someone/texts.v1")
    assert found == [row | {"when": "2024-05-01 00:00:00"} for row in given]
    (small,) = read_prompt_file("hf:someone/texts.v1/small:test")
    assert small["prompt"] == "a red star" and small["n"] == [1, 2]


def test_another_column_may_be_the_prompt_and_rows_without_it_are_named(cache, capsys):
    name = "hf:someone/texts.v1:train:text"
    assert [record["prompt"] for record in read_prompt_file(name)] == ["eins", "vier"]
    read_prompt_file(name)
    assert capsys.readouterr().err == (
        f"{name}: 2 of 4 rows hold no text in the column 'text' and are left out: 2, 3\n"
    )


def test_it_becomes_a_data_set_as_a_file_does(cache, tmp_path):
    name, file = "hf:someone/texts.v1", tmp_path / "same.jsonl"
    file.write_text("\n".join(map(json.dumps, read_prompt_file(name))))
    steps, same = (
        [*itertools.islice(prompt_batches(path, 3, 5, tmp_path / "cache"), 4)]
        for path in (name, file)
    )
    assert steps == same
    mixed = next(prompt_batches([file, name], 4, 5, tmp_path / "cache"))
    assert {record["prompt_file"] for record in mixed} == {name, str(file)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "hf:someone",
            "hf:someone names no data set of the hub: write hf:owner/name, hf:owner/name/subset, or",
        ),
        ("hf:someone/texts.v1/a/b", "names no data set of the hub"),
        (
            "hf:someone/texts.v1:test",
            "no rows in the subset 'default' and the split 'test': write hf:someone/texts",
        ),
        ("hf:someone/texts.v1/small", "no rows in the subset 'small' and the split 'train'"),
        (
            "hf:someone/texts.v1:train:caption",
            "has no column 'caption', but 'prompt', 'text', 'tag', 'n', 'image'",
        ),
        ("hf:someone/texts.v1:train:raw", "holds no prompt"),
        (
            "hf:someone/else",
            r"hf:someone/else cannot be downloaded \(check the name, the network, and whether",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(cache, name, message):
    with pytest.raises(ValueError, match=message) as error:
        read_prompt_file(name)
    assert "\n" not in str(error.value)
