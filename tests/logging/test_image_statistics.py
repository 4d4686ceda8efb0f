"""The statistics of pictures, against scipy and sums over pairs."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import ndimage

from digen_jax.logging import image_statistics
from digen_jax.logging.image_statistics import (
    diversity,
    group_diversity,
    joined,
    look,
    look_beside,
)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    smooth = ndimage.gaussian_filter(rng.uniform(0, 255, (5, 37, 50, 3)), (0, 0.9, 0.9, 0))
    stretched = (smooth - smooth.min()) / np.ptp(smooth) * 255
    return np.round(stretched).astype(np.uint8)


def luma(image: np.ndarray) -> np.ndarray:
    return image.astype(np.float64) @ [0.299, 0.587, 0.114]


def test_sharpness_and_edges_are_those_of_scipys_filters(images):
    found = look(images)
    for number, image in enumerate(images):
        grey = luma(image)
        inner = ndimage.laplace(grey)[1:-1, 1:-1]
        assert found.sharpness[number] == pytest.approx(inner.var(), rel=1e-4)
        gradient = np.hypot(ndimage.sobel(grey, 0), ndimage.sobel(grey, 1))[1:-1, 1:-1] / 8
        share = (gradient >= image_statistics.EDGE).mean()
        assert 0.01 < share < 0.9
        assert found.edge_density[number] == pytest.approx(share, abs=2 / gradient.size)


def test_colourfulness_is_hasler_and_suesstrunks(images):
    found = look(images).colourfulness
    for number, image in enumerate(images):
        red, green, blue = image.reshape(-1, 3).astype(np.float64).T
        rg, yb = red - green, 0.5 * (red + green) - blue
        expected = np.hypot(rg.std(), yb.std()) + 0.3 * np.hypot(rg.mean(), yb.mean())
        assert found[number] == pytest.approx(expected, rel=1e-5)
    grey = np.repeat(images[..., :1], 3, axis=-1)
    assert look(grey).colourfulness.max() < 1e-3
    pure = np.zeros((1, 4, 4, 3), np.uint8)
    pure[..., 0] = 255
    assert look(pure).colourfulness[0] == pytest.approx(0.3 * np.hypot(255, 127.5), rel=1e-6)


def test_thumbnails_are_means_of_blocks(images):
    small = look(images).thumbnails
    assert small.shape == (5, 16, 16, 3)
    rows = np.linspace(0, 37, 17).astype(int)
    columns = np.linspace(0, 50, 17).astype(int)
    block = images[3, rows[2] : rows[3], columns[9] : columns[10]]
    np.testing.assert_allclose(small[3, 2, 9], block.mean((0, 1)) / 255, rtol=1e-5)
    np.testing.assert_allclose(
        look(images[:, :8, :4]).thumbnails, images[:, :8, :4] / 255, rtol=1e-5
    )


def test_diversity_is_the_root_of_the_mean_squared_distance_of_all_pairs(images):
    small = look(images).thumbnails
    pairs = itertools.combinations(small.astype(np.float64), 2)
    expected = np.mean([((a - b) ** 2).mean() for a, b in pairs]) ** 0.5
    assert diversity(small) == pytest.approx(expected, rel=1e-9)
    assert diversity(np.stack([small[0]] * 3)) == pytest.approx(0, abs=1e-12)
    black_and_white = np.stack([np.zeros((16, 16, 3)), np.ones((16, 16, 3))]).astype(np.float32)
    assert diversity(black_and_white) == pytest.approx(1)
    groups = np.array([7, 7, 2, 7, 9])
    assert group_diversity(small, groups) == pytest.approx(diversity(small[[0, 1, 3]]))
    assert group_diversity(small, np.arange(5)) is None


def test_noise_is_sharp_and_hardly_diverse():
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 256, (4, 256, 256, 3), dtype=np.uint8)
    found = look(noise)
    assert found.sharpness.min() > 1000 and found.edge_density.min() > 0.3
    assert diversity(found.thumbnails) < 0.05


def test_no_picture_depends_on_its_batch(images, monkeypatch):
    whole = look(images)
    monkeypatch.setattr(image_statistics, "CHUNK", 37 * 50 * 2)
    for one, other in zip(look(images), whole, strict=True):
        np.testing.assert_array_equal(one, other)
    parts = joined([look(images[:2]), look(images[2:])])
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(one, other)
    assert whole.means()["sharpness"] == pytest.approx(whole.sharpness.mean())


def test_pictures_too_small_for_a_filter_have_no_edges():
    found = look(np.full((2, 2, 1, 3), 9, np.uint8))
    assert found.sharpness.tolist() == found.edge_density.tolist() == [0, 0]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_in_other_threads_they_are_the_same(monkeypatch, threads, count):
    monkeypatch.setattr(image_statistics, "THREADS", threads)
    monkeypatch.setattr(image_statistics, "_beside", ThreadPoolExecutor(threads))
    images = np.random.default_rng(0).integers(0, 256, (count, 9, 7, 3), dtype=np.uint8)
    for found, expected in zip(look_beside(images).result(30), look(images), strict=True):
        assert np.array_equal(found, expected)
