import numpy as np
import pytest

from examples.shapes import captions, pool
from examples.shapes.pool import cached_pool, render_pool
from examples.shapes.reward import shapes_geneval

SIZE = 32


def assert_equal(a: pool.Pool, b: pool.Pool) -> None:
    np.testing.assert_array_equal(a.images, b.images)
    assert a.captions == b.captions


@pytest.fixture
def serial(monkeypatch):
    """Chunks of four, rendered one after the other in this process."""

    class Serial:
        def __init__(self, processes):
            pass

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

        def starmap(self, function, chunks):
            return [function(*chunk) for chunk in chunks]

    context = type("Context", (), {"Pool": Serial})
    monkeypatch.setattr(pool, "CHUNK", 4)
    monkeypatch.setattr(pool.multiprocessing, "get_context", lambda kind: context)


def test_images_depend_on_the_seed_and_not_on_the_processes(monkeypatch, request):
    monkeypatch.setattr(pool, "CHUNK", 4)
    parallel = render_pool(10, SIZE, seed=5, processes=3)
    request.getfixturevalue("serial")
    assert_equal(parallel, render_pool(10, SIZE, seed=5))
    assert_equal(pool.Pool(parallel.images[:6], parallel.captions[:6]), render_pool(6, SIZE, 5))
    assert not np.array_equal(parallel.images, render_pool(10, SIZE, seed=2).images)


def test_images_show_their_captions_and_none_is_held_out(serial, monkeypatch):
    records = []

    def train_record(rng, tasks):
        records.append(captions.train_record(rng, tasks))
        return records[-1]

    monkeypatch.setattr(pool, "train_record", train_record)
    images, texts = render_pool(40, SIZE, seed=1)
    assert images.shape == (40, SIZE, SIZE, 3) and images.dtype == np.uint8
    prompts = [record["prompt"] for record in records]
    tagged = [text for text, prompt in zip(texts, prompts, strict=True) if text != prompt]
    assert 10 < len(tagged) < 30 and len(set(texts)) > 20
    assert all(text.endswith(" background") and "photo" not in text for text in tagged)
    assert not {record["prompt"] for record in captions.heldout_records()} & set(texts)
    assert shapes_geneval(images, prompts, records).mean() > 0.95


def test_a_file_is_used_for_the_same_pool_only(tmp_path, serial, monkeypatch):
    path, rendered = tmp_path / "workdir" / "pool.npz", []
    monkeypatch.setattr(pool, "render_pool", lambda *key: rendered.append(key) or render_pool(*key))
    for key in ((6, SIZE, 0, 1), (5, SIZE, 0, 1), (6, 48, 0, 1), (6, SIZE, 1, 1), (6, SIZE, 1, 5)):
        for _ in range(2):
            assert_equal(cached_pool(path, *key), render_pool(*key))
        assert rendered.pop() == key and not rendered
    assert [file.name for file in path.parent.iterdir()] == ["pool.npz"]
