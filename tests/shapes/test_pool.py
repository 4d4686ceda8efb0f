import numpy as np
import pytest

from examples.shapes import captions, pool
from examples.shapes.pool import cached_pool, render_pool
from examples.shapes.reward import shapes_geneval

COUNT, SIZE = 10, 32


@pytest.fixture
def in_this_process(monkeypatch):
    """Chunks of four, rendered one after the other; gives the number of times a pool was rendered."""
    rendered = []

    class Here:
        def __init__(self, processes):
            rendered.append(processes)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def starmap(self, function, chunks):
            return [function(*chunk) for chunk in chunks]

    class Context:
        Pool = Here

    monkeypatch.setattr(pool, "CHUNK", 4)
    monkeypatch.setattr(pool.multiprocessing, "get_context", lambda kind: Context)
    return rendered


def assert_equal(a: pool.Pool, b: pool.Pool) -> None:
    np.testing.assert_array_equal(a.images, b.images)
    assert a.captions == b.captions


def test_the_number_of_processes_does_not_matter(monkeypatch, request):
    monkeypatch.setattr(pool, "CHUNK", 4)
    parallel = render_pool(COUNT, SIZE, seed=5, processes=3)
    request.getfixturevalue("in_this_process")
    assert_equal(parallel, render_pool(COUNT, SIZE, seed=5, processes=1))


def test_images_show_their_captions_and_none_is_held_out(in_this_process, monkeypatch):
    drawn = []

    def train_record(rng):
        drawn.append(captions.train_record(rng))
        return drawn[-1]

    monkeypatch.setattr(pool, "train_record", train_record)
    images, texts = render_pool(40, SIZE, seed=1)
    assert images.shape == (40, SIZE, SIZE, 3) and images.dtype == np.uint8
    prompts = [record["prompt"] for record in drawn]
    tagged = [text for text, prompt in zip(texts, prompts, strict=True) if text != prompt]
    assert 10 < len(tagged) < 30 and len(set(texts)) > 20
    assert all(text.endswith(" background") and "photo" not in text for text in tagged)
    assert not {record["prompt"] for record in captions.heldout_records()} & set(texts)
    assert shapes_geneval(images, prompts, drawn).mean() > 0.95


def test_the_seed_decides_and_a_larger_pool_begins_with_the_smaller(in_this_process):
    ten = render_pool(COUNT, SIZE, seed=1)
    assert_equal(pool.Pool(ten.images[:6], ten.captions[:6]), render_pool(6, SIZE, seed=1))
    assert not np.array_equal(ten.images, render_pool(COUNT, SIZE, seed=2).images)


def test_the_file_is_used_again_for_the_same_pool_only(tmp_path, in_this_process):
    path = tmp_path / "workdir" / "pool.npz"
    first = cached_pool(path, 6, SIZE, 0)
    assert_equal(first, cached_pool(path, 6, SIZE, 0))
    assert len(in_this_process) == 1
    for other in ((5, SIZE, 0), (6, 48, 0), (6, SIZE, 1)):
        found = cached_pool(path, *other)
        assert_equal(found, render_pool(*other))
        assert_equal(found, cached_pool(path, *other))
    assert len(in_this_process) == 1 + 2 * 3
    assert [file.name for file in path.parent.iterdir()] == ["pool.npz"]
