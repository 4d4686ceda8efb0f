import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
import tensorflow_datasets as tfds

from digen_jax.data import embedding_cache
from digen_jax.data.embedding_cache import PromptStore, models

ROOT = pathlib.Path(__file__).parents[2]
MODEL = {"weights": "abc", "states": [-2], "length": 512}
OTHER = {**MODEL, "states": [9, 18, 27]}
PLENTY = 10**9
DAY = 86_400


def rows(text: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of a text, with as many rows as it has letters."""
    rng = np.random.default_rng([seed, *text.encode()])
    return {
        "states": rng.normal(size=(len(text), 2, 3)).astype(ml_dtypes.bfloat16),
        "pooled": rng.normal(size=5).astype(np.float32),
        "valid": rng.random(len(text)) < 0.5,
        "ids": rng.integers(0, 9, len(text), dtype=np.int32),
    }


def of(*texts: str, seed: int = 0) -> dict:
    return {text: rows(text, seed) for text in texts}


def assert_stored(store: PromptStore, *texts: str, seed: int = 0) -> None:
    for text, actual in zip(texts, store.read(texts), strict=True):
        expected = rows(text, seed)
        assert actual.keys() == expected.keys()
        for name, array in expected.items():
            assert actual[name].dtype == array.dtype and actual[name].shape == array.shape
            np.testing.assert_array_equal(actual[name], array)


def files(folder: pathlib.Path, pattern: str = "*.array_record*") -> list[pathlib.Path]:
    return sorted(folder.rglob(pattern))


@pytest.fixture
def store(tmp_path) -> PromptStore:
    return PromptStore(tmp_path / "store", MODEL, PLENTY)


def test_rows_come_back_bit_by_bit_in_any_order_and_in_a_later_run(store, tmp_path):
    texts = ["a cube", "", 'ein "Käfig"\u2028\n😀', "two spheres"]
    assert store.missing([*texts, "a cube"]) == texts
    store.add(of(*texts[:2]))
    assert store.missing(texts) == texts[2:]
    store.add(of(*texts[2:]))
    assert_stored(store, texts[3], texts[0], texts[1], texts[2], texts[0])
    assert len(files(tmp_path)) == 2

    later = PromptStore(tmp_path / "store", dict(reversed(MODEL.items())), PLENTY)
    assert later.missing([*texts, "x"]) == ["x"]
    assert_stored(later, *texts)


def test_what_other_threads_print_while_prompts_are_read_is_shown(store, monkeypatch, capsys):
    store.add(of("a"))
    assert capsys.readouterr().out == ""  # TFDS prints while it builds
    opened = tfds.builder_from_directory

    def printing(folder):
        print("step 1")
        return opened(folder)

    monkeypatch.setattr(embedding_cache.tfds, "builder_from_directory", printing)
    assert_stored(store, "a")
    assert capsys.readouterr().out == "step 1\n"


def test_models_do_not_share_rows(store, tmp_path):
    other = PromptStore(tmp_path / "store", OTHER, PLENTY)
    assert models(tmp_path / "store") == []
    store.add(of("a", "b"))
    assert other.missing(["a"]) == ["a"]
    other.add(of("a", seed=1))
    assert_stored(store, "a", "b")
    assert_stored(other, "a", seed=1)
    assert sorted(map(str, models(tmp_path / "store"))) == sorted(map(str, [MODEL, OTHER]))


def test_it_is_an_ordinary_tfds_dataset(store, tmp_path):
    store.add(of("a", "bc"))
    (file,) = files(tmp_path)
    source = tfds.builder_from_directory(file.parent).as_data_source(split="train")
    assert [example["text"] for example in source] == [b"a", b"bc"]
    np.testing.assert_array_equal(source[1]["rows"]["states"], rows("bc")["states"])


def test_another_store_sees_what_was_added_and_reads_it_while_it_lives(store, tmp_path):
    other = PromptStore(tmp_path / "store", MODEL, PLENTY)
    with pytest.raises(ValueError, match="does not hold 'a' encoded: encode it first"):
        other.read(["a"])
    store.add(of("a", "b"))
    assert_stored(other, "b")


def test_the_size_is_that_of_the_files(store, tmp_path):
    assert store.size() == 0
    store.add(of("a" * 1000))
    assert store.size() == sum(p.stat().st_size for p in files(tmp_path, "*") if p.is_file())
    assert store.size() > 12_000


def aged(folder: pathlib.Path, text: str, days: float, model=MODEL) -> pathlib.Path:
    """The dataset of a text, which now was read some days ago."""
    store = PromptStore(folder, model, PLENTY)
    assert not store.missing([text])
    block, _ = store._index[embedding_cache._hash(text)]
    then = time.time() - days * DAY
    os.utime(block, (then, then))
    return block


def test_the_limit_removes_what_was_not_used_for_the_longest_time(store, tmp_path):
    folder = tmp_path / "store"
    for text in "abcd":
        PromptStore(folder, OTHER if text == "b" else MODEL, PLENTY).add(of(text * 2000))
    for text, days in (("a", 2), ("b", 4), ("c", 3), ("d", 1.5)):
        aged(folder, text * 2000, days, OTHER if text == "b" else MODEL)
    # c is read, which makes it the last one.
    assert_stored(PromptStore(folder, MODEL, PLENTY), "c" * 2000)
    one = store.size() // 4
    limit = 3 * one + embedding_cache.OVERHEAD
    limited = PromptStore(folder, MODEL, limit)
    limited.add(of("e" * 2000))
    assert limited.missing(letter * 2000 for letter in "acde") == ["a" * 2000]
    assert PromptStore(folder, OTHER, PLENTY).missing(["b" * 2000])
    assert limited.size() <= limit
    assert_stored(limited, *(letter * 2000 for letter in "cde"))
    assert sorted(path.name for path in folder.iterdir()) == ["encoded_prompts"]


def test_what_is_in_use_is_not_removed(store, tmp_path):
    store.add(of("a" * 2000))
    size = store.size()
    limited = PromptStore(tmp_path / "store", MODEL, size + 10)
    with pytest.raises(ValueError, match=r"bytes of encoded prompts do not fit .* raise the limit"):
        limited.add(of("b" * 2000))
    assert_stored(limited, "a" * 2000)
    assert store.size() == size


def test_what_a_run_found_stored_is_not_removed(store, tmp_path):
    store.add(of("a", "b"))
    block = aged(tmp_path / "store", "a", 2)
    assert store.missing(["b", "x"]) == ["x"]
    with pytest.raises(ValueError, match="in use"):
        PromptStore(tmp_path / "store", OTHER, store.size()).add(of("c"))
    assert block.exists()


def test_a_removed_dataset_says_so_unless_it_is_open(store, tmp_path):
    store.add(of("a"))
    opened = PromptStore(tmp_path / "store", MODEL, PLENTY)
    assert_stored(opened, "a")
    late = PromptStore(tmp_path / "store", MODEL, PLENTY)
    assert not late.missing(["a"])
    block = aged(tmp_path / "store", "a", 2)
    PromptStore(tmp_path / "store", MODEL, store.size() + embedding_cache.OVERHEAD).add(of("b"))
    assert not block.exists()
    assert_stored(opened, "a")
    with pytest.raises(ValueError, match=r"has been removed to make room .* encode its prompts"):
        late.read(["a"])
    assert late.missing(["a", "b"]) == ["a"]


def test_what_a_killed_process_left_is_deleted_a_day_later(store, tmp_path):
    store.add(of("a"))
    for name, days in (("building.x", 2), ("removed.y", 2), ("building.z", 0)):
        path = tmp_path / "store" / name
        path.mkdir()
        (path / "part").write_bytes(b"0" * 100)
        then = time.time() - days * DAY
        os.utime(path, (then, then))
    store.add(of("b"))
    names = sorted(path.name for path in (tmp_path / "store").iterdir())
    assert names == ["building.z", "encoded_prompts"]
    assert_stored(store, "a", "b")


def test_a_build_that_another_process_overtakes_uses_the_others(store, tmp_path, monkeypatch):
    prepare = embedding_cache.EncodedPrompts.download_and_prepare
    nested = []

    def overtake(builder, **arguments):
        prepare(builder, **arguments)
        if not nested:
            nested.append(True)
            PromptStore(tmp_path / "store", MODEL, PLENTY).add(of("a", "b"))

    monkeypatch.setattr(embedding_cache.EncodedPrompts, "download_and_prepare", overtake)
    store.add(of("b", "a"))
    assert len(files(tmp_path)) == 1
    assert_stored(store, "a", "b")


def test_a_failed_write_leaves_nothing(store, tmp_path, monkeypatch):
    def full(builder, **arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(embedding_cache.EncodedPrompts, "download_and_prepare", full)
    with pytest.raises(OSError, match="no space"):
        store.add(of("a"))
    assert store.size() == 0 and store.missing(["a"]) == ["a"]


def damage(file: pathlib.Path, kind: str) -> None:
    data = bytearray(file.read_bytes())
    if kind == "cut":
        data = data[: len(data) // 2]
    elif kind == "empty":
        data = b""
    else:
        place = int(kind) * len(data) // 100
        data[place : place + 8] = bytes(255 - byte for byte in data[place : place + 8])
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["cut", "empty", "1", "20", "40", "60"])
def test_a_damaged_file_is_named_and_never_read(store, tmp_path, kind):
    store.add(of(*(letter * 4000 for letter in "abc")))
    (file,) = files(tmp_path)
    damage(file, kind)
    later = PromptStore(tmp_path / "store", MODEL, PLENTY)
    read = []
    with pytest.raises(ValueError, match=r"encoded_prompts/.*/1\.0\.0 is damaged .*delete that"):
        for letter in "abc":
            read += later.read([letter * 4000])
    for letter, actual in zip("abc", read, strict=False):
        np.testing.assert_array_equal(actual["states"], rows(letter * 4000)["states"])


@pytest.mark.slow
def test_a_damage_anywhere_is_named_or_changes_nothing(store, tmp_path):
    """Signatures, and the zeros behind the last record, are not read."""
    texts = [letter * 4000 for letter in "abc"]
    store.add(of(*texts))
    (file,) = files(tmp_path)
    whole, named = file.read_bytes(), 0
    for percent in range(0, 100, 4):
        file.write_bytes(whole)
        damage(file, str(percent))
        try:
            assert_stored(PromptStore(tmp_path / "store", MODEL, PLENTY), *texts)
        except ValueError as error:
            assert "is damaged" in str(error)
            named += 1
    assert 12 < named < 25


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("about.json", None, r"about\.json is missing"),
        ("about.json", "{", r"about\.json is broken"),
        ("about.json", "{}", r"about\.json is broken"),
        ("about.json", '{"model": 3, "texts": []}', r"about\.json is broken"),
        ("about.json", "[" * 10**5, r"about\.json is broken"),
    ],
)
def test_a_damaged_description_is_named(store, tmp_path, name, content, reason):
    store.add(of("a"))
    (path,) = files(tmp_path, name)
    path.unlink()
    if content is not None:
        path.write_text(content)
    for use in (lambda: store.missing(["a"]), lambda: models(tmp_path / "store")):
        with pytest.raises(ValueError, match=rf"is damaged \({reason}\): delete that folder"):
            use()


@pytest.mark.parametrize("name", ["features.json", "dataset_info.json"])
def test_a_missing_file_of_tfds_is_damage(store, tmp_path, name):
    store.add(of("a"))
    (path,) = files(tmp_path, name)
    path.unlink()
    with pytest.raises(ValueError, match=r"is damaged .*delete that folder"):
        PromptStore(tmp_path / "store", MODEL, PLENTY).read(["a"])


def test_prompts_in_another_order_than_described_are_damage(store, tmp_path):
    store.add(of("a", "b"))
    (path,) = files(tmp_path, "about.json")
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"texts": about["texts"][::-1]}))
    with pytest.raises(ValueError, match="a prompt is not in its place"):
        PromptStore(tmp_path / "store", MODEL, PLENTY).read(["a"])


@pytest.mark.parametrize(
    "other",
    [
        {"states": np.zeros((2, 3), np.float32)},
        {"states": np.zeros((2, 4), np.float16)},
        {"tokens": np.zeros((2, 4), np.float32)},
        {},
    ],
    ids=str,
)
def test_arrays_that_differ_are_refused(store, other):
    with pytest.raises(ValueError, match=r"same names, dtypes and shapes .* there are 2 kinds"):
        store.add({"a": {"states": np.zeros((1, 4), np.float32)}, "b": other})
    assert store.size() == 0


WRITE = """
import sys
from digen_jax.data.embedding_cache import PromptStore
from tests.prompts.test_embedding_cache import MODEL, PLENTY, of
folder, first, last = sys.argv[1:]
store = PromptStore(folder, MODEL, PLENTY)
print("ready", flush=True)
for block in range(int(first), int(last)):
    texts = [f"prompt {block} {number}" * 100 for number in range(8)]
    store.add(of(*store.missing(texts)) or of("nothing is missing"))
foreign = {"torch", "tensorflow", "jax"} & {name.split(".")[0] for name in sys.modules}
print(*foreign, flush=True)
"""


def writer(folder: pathlib.Path, first: int, last: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITE, str(folder), str(first), str(last)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_writers_at_once_and_a_killed_one_leave_whole_datasets(tmp_path):
    """Three are killed at other moments while one writes the same prompts and reaches its end."""
    folder = tmp_path / "store"
    survivor = writer(folder, 0, 12)
    for attempt in range(3):
        victim = writer(folder, 0, 1000)
        assert victim.stdout.readline() == "ready\n"
        time.sleep(0.1 + 0.2 * attempt)
        victim.send_signal(signal.SIGKILL)
        victim.wait(timeout=60)
    out, _ = survivor.communicate(timeout=300)
    assert survivor.returncode == 0 and out.split() == ["ready"]
    store = PromptStore(folder, MODEL, PLENTY)
    for block in range(12):
        texts = [f"prompt {block} {number}" * 100 for number in range(8)]
        assert store.missing(texts) == []
        assert_stored(store, *texts)
    stored = [
        text for b in embedding_cache._blocks(folder) for text in embedding_cache._about(b)["texts"]
    ]
    assert len(stored) >= 96
