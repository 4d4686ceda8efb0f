"""Image statistics, compared with scipy and with sums over pairs."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import ndimage

from digen_jax.logging import evaluation
from digen_jax.logging.evaluation import (
    ImageStats,
    compute_image_stats,
    diversity,
    group_diversity,
    submit_image_stats,
)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    smooth = ndimage.gaussian_filter(rng.uniform(0, 255, (5, 37, 50, 3)), (0, 0.9, 0.9, 0))
    stretched = (smooth - smooth.min()) / np.ptp(smooth) * 255
    return np.round(stretched).astype(np.uint8)


def assert_equal(found: ImageStats, expected: ImageStats) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sharpness_and_edges_are_those_of_scipys_filters(images):
    found = compute_image_stats(images)
    for number, image in enumerate(images):
        luma = image.astype(np.float64) @ [0.299, 0.587, 0.114]
        inner = ndimage.laplace(luma)[1:-1, 1:-1]
        assert found.sharpness[number] == pytest.approx(inner.var(), rel=1e-4)
        gradient = np.hypot(ndimage.sobel(luma, 0), ndimage.sobel(luma, 1))[1:-1, 1:-1] / 8
        share = (gradient >= evaluation.EDGE).mean()
        assert 0.01 < share < 0.9
        assert found.edge_density[number] == pytest.approx(share, abs=2 / gradient.size)
    tiny = compute_image_stats(np.full((2, 2, 1, 3), 9, np.uint8))
    assert tiny.sharpness.tolist() == tiny.edge_density.tolist() == [0, 0]


def test_colourfulness_is_hasler_and_suesstrunks(images):
    found = compute_image_stats(images).colourfulness
    for number, image in enumerate(images):
        red, green, blue = image.reshape(-1, 3).astype(np.float64).T
        rg, yb = red - green, 0.5 * (red + green) - blue
        expected = np.hypot(rg.std(), yb.std()) + 0.3 * np.hypot(rg.mean(), yb.mean())
        assert found[number] == pytest.approx(expected, rel=1e-5)
    grey = np.repeat(images[..., :1], 3, axis=-1)
    assert compute_image_stats(grey).colourfulness.max() < 1e-3
    red = np.zeros((1, 4, 4, 3), np.uint8)
    red[..., 0] = 255
    expected = 0.3 * np.hypot(255, 127.5)
    assert compute_image_stats(red).colourfulness[0] == pytest.approx(expected, rel=1e-6)


def test_thumbnails_are_means_of_blocks(images):
    small = compute_image_stats(images).thumbnails
    assert small.shape == (5, 16, 16, 3)
    rows, columns = (np.linspace(0, size, 17).astype(int) for size in (37, 50))
    block = images[3, rows[2] : rows[3], columns[9] : columns[10]]
    np.testing.assert_allclose(small[3, 2, 9], block.mean((0, 1)) / 255, rtol=1e-5)
    smaller = images[:, :8, :4]
    np.testing.assert_allclose(compute_image_stats(smaller).thumbnails, smaller / 255, rtol=1e-5)


def test_diversity_is_the_rms_distance_of_all_pairs(images):
    small = compute_image_stats(images).thumbnails
    pairs = itertools.combinations(small.astype(np.float64), 2)
    expected = np.mean([((a - b) ** 2).mean() for a, b in pairs]) ** 0.5
    assert diversity(small) == pytest.approx(expected, rel=1e-9)
    assert diversity(np.stack([small[0]] * 3)) == pytest.approx(0, abs=1e-12)
    black_and_white = np.stack([np.zeros((16, 16, 3)), np.ones((16, 16, 3))]).astype(np.float32)
    assert diversity(black_and_white) == pytest.approx(1)
    groups = np.array([7, 7, 2, 7, 9])
    assert group_diversity(small, groups) == pytest.approx(diversity(small[[0, 1, 3]]))
    assert group_diversity(small, np.arange(5)) is None


def test_statistics_do_not_depend_on_batches_and_chunks(images, monkeypatch):
    expected = compute_image_stats(images)
    monkeypatch.setattr(evaluation, "CHUNK", 37 * 50 * 2)
    assert_equal(compute_image_stats(images), expected)
    assert expected.means()["sharpness"] == pytest.approx(expected.sharpness.mean())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_statistics_in_other_threads_are_the_same(monkeypatch, threads, count):
    monkeypatch.setattr(evaluation, "THREADS", threads)
    monkeypatch.setattr(evaluation, "_pool", ThreadPoolExecutor(threads))
    images = np.random.default_rng(0).integers(0, 256, (count, 9, 7, 3), dtype=np.uint8)
    assert_equal(submit_image_stats(images).result(30), compute_image_stats(images))
