"""Data sets of the hub, in a cache of huggingface_hub without a network, and of TFDS."""

import datetime
import itertools
import json
import math
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds
from huggingface_hub import constants

from digen_jax.data import datasets
from digen_jax.data.prompt_files import prompt_batches, read_prompt_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [
    {"prompt": "a red star", "text": "eins", "tag": "colors", "n": [1, 2]},
    {"prompt": "a “blue” star", "text": None, "tag": None, "n": []},
    {"prompt": "two\nlines", "text": " ", "tag": None, "n": None},
    {"prompt": "a ring", "text": "vier", "tag": "shape", "n": [3]},
]


@pytest.fixture(autouse=True)
def fresh():
    assert constants.HF_HUB_OFFLINE
    datasets.read_rows.cache_clear()
    yield
    datasets.read_rows.cache_clear()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache with one data set, as huggingface_hub leaves it: two subsets, one in two files."""
    folder = tmp_path / "hub" / "datasets--someone--texts.v1"
    (folder / "refs" / "refs" / "convert").mkdir(parents=True)
    (folder / "refs" / "refs" / "convert" / "parquet").write_text(COMMIT)
    extra = {
        "image": {"bytes": b"\x89PNG", "path": "x.png"},
        "raw": b"\0",
        "when": datetime.datetime(2024, 5, 1),
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


def test_a_split_of_the_hub_is_a_prompt_file_with_metadata(hub):
    given = [{name: value for name, value in row.items() if value is not None} for row in ROWS]
    found = read_prompt_file("hf:someone/texts.v1")
    assert found == [row | {"when": "2024-05-01 00:00:00"} for row in given]
    (small,) = read_prompt_file("hf:someone/texts.v1/small:test")
    assert small["prompt"] == "a red star" and small["n"] == [1, 2]


def test_rows_without_the_column_of_prompts_are_counted(hub, capsys):
    name = "hf:someone/texts.v1:train:text"
    for _ in range(2):
        assert [record["prompt"] for record in read_prompt_file(name)] == ["eins", "vier"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 of 4 rows" in line and line.endswith(": 2, 3")


def test_its_order_is_that_of_a_file_with_the_same_records(hub, tmp_path):
    name, file = "hf:someone/texts.v1", tmp_path / "same.jsonl"
    file.write_text("\n".join(map(json.dumps, read_prompt_file(name))))
    steps, same = (
        [*itertools.islice(prompt_batches(path, 3, 5).since(0), 4)] for path in (name, file)
    )
    assert steps == same
    mixed = prompt_batches([file, name], 4, 5).steps[0]
    assert {record["prompt_file"] for record in mixed} == {name, str(file)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:someone", "hf:someone "),
        ("hf:someone/texts.v1/a/b", "hf:someone/texts.v1/a/b "),
        ("hf:someone/texts.v1:test", "'default' .* 'test'"),
        ("hf:someone/texts.v1/small", "'small' .* 'train'"),
        ("hf:someone/texts.v1:train:caption", "'caption', but 'prompt', 'text', 'tag', 'n'"),
        ("hf:someone/texts.v1:train:raw", "hf:someone/texts.v1:train:raw "),
        ("hf:someone/else", "hf:someone/else "),
        ("tfds:", "tfds: "),
        ("tfds:/no/where", "/no/where"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(hub, name, message):
    with pytest.raises(ValueError, match=message) as error:
        read_prompt_file(name)
    assert "\n" not in str(error.value)


class Texts(tfds.core.GeneratorBasedBuilder):
    """Prompts with scalars, and with an array, which is left out."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "prompt": tfds.features.Text(),
            "n": np.int64,
            "x": np.float32,
            "kind": tfds.features.ClassLabel(names=["a", "b"]),
            "raw": tfds.features.Tensor(shape=(2,), dtype=np.uint8),
        }
        features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(400), "test": self._generate_examples(1)}

    def _generate_examples(self, count):
        for n in range(count):
            raw = np.zeros(2, np.uint8)
            yield n, {"prompt": f"ein Käfig {n}", "n": n, "x": n / 2, "kind": n % 2, "raw": raw}


def test_a_folder_of_tfds_is_a_prompt_file_and_damage_is_an_error(tmp_path):
    builder = Texts(data_dir=tmp_path)
    builder.download_and_prepare(file_format="array_record")
    name = f"tfds:{builder.data_path}"
    expected = [{"n": n, "x": n / 2, "kind": n % 2, "prompt": f"ein Käfig {n}"} for n in (0, 399)]
    assert read_prompt_file(name)[::399] == expected
    assert read_prompt_file(f"{name}:test") == expected[:1]
    assert "tensorflow" not in sys.modules
    for end in (":val", ":train:text", ":train:raw"):
        with pytest.raises(ValueError, match=end.rpartition(":")[2]):
            read_prompt_file(name + end)
    datasets.read_rows.cache_clear()
    (file,) = tmp_path.rglob("*train.array_record*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=name):
        read_prompt_file(name)
