import json
import os
import pathlib
import time

import ml_dtypes
import numpy as np
import pytest

from digen_jax.data import embedding_cache
from digen_jax.data.embedding_cache import HEADER, EmbeddingCache, models

MODEL = {"weights": "abc", "states": [-2], "length": 512}
OTHER = {**MODEL, "states": [9, 18, 27]}
PLENTY = 10**9
DAY = 86_400


def rows(text: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of a text, with a row for each letter."""
    rng = np.random.default_rng([seed, *text.encode()])
    return {
        "states": rng.normal(size=(len(text), 2, 3)).astype(ml_dtypes.bfloat16),
        "pooled": rng.normal(size=5).astype(np.float32),
        "valid": rng.random(len(text)) < 0.5,
        "ids": rng.integers(0, 9, len(text), dtype=np.int32),
    }


def of(*texts: str, seed: int = 0) -> dict:
    return {text: rows(text, seed) for text in texts}


def assert_stored(cache: EmbeddingCache, *texts: str, seed: int = 0) -> None:
    for text, actual in zip(texts, cache.read(texts), strict=True):
        expected = rows(text, seed)
        assert actual.keys() == expected.keys()
        for name, array in expected.items():
            assert actual[name].dtype == array.dtype and actual[name].shape == array.shape
            np.testing.assert_array_equal(actual[name], array)


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture
def cache(tmp_path) -> EmbeddingCache:
    return EmbeddingCache(tmp_path, MODEL, PLENTY)


def reopened(folder, model=MODEL, limit=PLENTY) -> EmbeddingCache:
    return EmbeddingCache(folder, model, limit)


def test_embeddings_are_read_bit_by_bit_in_any_order_and_by_a_later_run(cache, tmp_path):
    texts = ["a cube", "", 'ein "Käfig"\u2028\n😀', "two spheres"]
    assert cache.missing([*texts, "a cube"]) == texts
    cache.add(of(*texts[:2]))
    assert cache.missing(texts) == texts[2:]
    cache.add(of(*texts[2:]))
    assert_stored(cache, texts[3], texts[0], texts[1], texts[2], texts[0])
    assert len(files(tmp_path)) == 2
    assert cache.size() == sum(file.stat().st_size for file in files(tmp_path))

    later = reopened(tmp_path, dict(reversed(MODEL.items())))
    assert later.missing([*texts, "x"]) == ["x"]
    assert_stored(later, *texts)


def test_models_do_not_share_embeddings(cache, tmp_path):
    other = reopened(tmp_path, OTHER)
    assert models(tmp_path) == []
    cache.add(of("a", "b"))
    assert other.missing(["a"]) == ["a"]
    other.add(of("a", seed=1))
    assert_stored(cache, "a", "b")
    assert_stored(other, "a", seed=1)
    assert sorted(map(str, models(tmp_path))) == sorted(map(str, [MODEL, OTHER]))


def test_an_open_cache_reads_what_another_adds(cache, tmp_path):
    other = reopened(tmp_path)
    with pytest.raises(ValueError, match="'a'"):
        other.read(["a"])
    cache.add(of("a", "b"))
    assert_stored(other, "b")


def aged(folder: pathlib.Path, text: str, days: float, model=MODEL) -> pathlib.Path:
    """The file of a text, with its last use some days ago."""
    cache = reopened(folder, model)
    assert not cache.missing([text])
    path = cache._index[embedding_cache._hash(text)].path
    then = time.time() - days * DAY
    os.utime(path, (then, then))
    return path


def test_the_limit_removes_the_least_recently_used_files(cache, tmp_path):
    for text in "abcd":
        reopened(tmp_path, OTHER if text == "b" else MODEL).add(of(text * 2000))
    for text, days in (("a", 2), ("b", 4), ("c", 3), ("d", 1.5)):
        aged(tmp_path, text * 2000, days, OTHER if text == "b" else MODEL)
    assert_stored(reopened(tmp_path), "c" * 2000)  # which is a use
    limit = 3 * (cache.size() // 4) + HEADER
    limited = reopened(tmp_path, limit=limit)
    limited.add(of("e" * 2000))
    assert limited.missing(letter * 2000 for letter in "acde") == ["a" * 2000]
    assert reopened(tmp_path, OTHER).missing(["b" * 2000])
    assert limited.size() <= limit
    assert_stored(limited, *(letter * 2000 for letter in "cde"))


def test_files_in_use_are_not_removed(cache, tmp_path):
    cache.add(of("a" * 2000, "b"))
    path = aged(tmp_path, "b", 2)
    assert cache.excess(10) == 0 and reopened(tmp_path, limit=1).excess(10) == 9
    assert cache.missing(["b", "x"]) == ["x"]  # which is a use
    size = cache.size()
    with pytest.raises(ValueError, match=r"raise the limit"):
        reopened(tmp_path, OTHER, size + 10).add(of("c"))
    assert reopened(tmp_path, limit=1).excess(10) == size + 9
    assert path.exists() and cache.size() == size
    assert_stored(cache, "a" * 2000)


def test_a_removed_file_stays_readable_while_it_is_open(cache, tmp_path):
    cache.add(of("a"))
    opened = reopened(tmp_path)
    assert not opened.missing(["a"])
    path = aged(tmp_path, "a", 2)
    reopened(tmp_path, limit=cache.size() + HEADER).add(of("b"))
    assert not path.exists()
    assert_stored(opened, "a")
    assert opened.missing(["a", "b"]) == ["a"]


def test_partial_files_of_killed_processes_are_removed_after_a_day(cache, tmp_path):
    cache.add(of("a"))
    folder = tmp_path / embedding_cache.FOLDER
    for name, days in (("x.partial", 2), ("y.partial", 0)):
        (folder / name).write_bytes(b"0" * 100)
        then = time.time() - days * DAY
        os.utime(folder / name, (then, then))
    cache.add(of("b"))
    assert [path.name for path in folder.glob("*.partial")] == ["y.partial"]
    assert_stored(cache, "a", "b")


def test_a_failed_write_leaves_nothing(cache, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"part")
        raise OSError("no space left on device")

    monkeypatch.setattr(embedding_cache, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        cache.add(of("a"))
    assert cache.size() == 0 and cache.missing(["a"]) == ["a"]


@pytest.mark.parametrize("percent", [None, *range(0, 100, 7)])
def test_a_damaged_file_is_named_and_never_read(cache, tmp_path, percent):
    """Cut in half, or with eight bytes changed; 0 percent is the header."""
    texts = [letter * 400 for letter in "abc"]
    cache.add(of(*texts))
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    if percent is None:
        del data[len(data) // 2 :]
    else:
        place = percent * len(data) // 100
        data[place : place + 8] = bytes(255 - byte for byte in data[place : place + 8])
    file.write_bytes(data)
    later, read = reopened(tmp_path), []
    with pytest.raises(ValueError, match=str(file)):
        for text in texts:
            read += later.read([text])
    for text, actual in zip(texts, read, strict=False):
        np.testing.assert_array_equal(actual["states"], rows(text)["states"])


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"model": "3", "checksums": "{}"},
        {"model": "{", "checksums": "{}"},
        {"model": json.dumps(OTHER), "checksums": "{}"},
    ],
    ids=str,
)
def test_a_damaged_description_is_named(cache, tmp_path, metadata):
    cache.add(of("a"))
    (path,) = files(tmp_path)
    embedding_cache.save_file({"x": np.zeros(2)}, path, metadata=metadata)
    for use in (lambda: reopened(tmp_path).missing(["a"]), lambda: models(tmp_path)):
        with pytest.raises(ValueError, match=str(path)):
            use()
