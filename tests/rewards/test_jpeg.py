"""The JPEG rewards against OpenCV's encoder, on a photograph in the public domain."""

import pickle

import cv2
import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageFilter

from digen_jax.rewards import jpeg

# Rear Admiral Grace M. Hopper, by James S. Davis, US Navy: in the public domain.
PHOTOGRAPH = matplotlib.get_data_path() + "/sample_data/grace_hopper.jpg"


@pytest.fixture(scope="module")
def images():
    """A photograph, more and more blurred."""
    photograph = Image.open(PHOTOGRAPH).convert("RGB").crop((100, 0, 356, 256))
    blurred = [photograph.filter(ImageFilter.GaussianBlur(radius)) for radius in (1, 3, 9)]
    return np.stack([np.asarray(image) for image in (photograph, *blurred)])


def score(reward, images):
    count = len(images)
    return pickle.loads(pickle.dumps(reward))(images, [""] * count, [{}] * count)


def test_the_size_is_that_of_another_encoder(images):
    options = [cv2.IMWRITE_JPEG_QUALITY, 95]
    sizes = [len(cv2.imencode(".jpg", x[..., ::-1], options)[1]) / 1000 for x in images]
    large, small = jpeg.jpeg_incompressibility(), jpeg.jpeg_compressibility()
    assert score(large, images) == pytest.approx(sizes, rel=0.01)
    assert score(small, images) == pytest.approx(-np.array(sizes) / 500, rel=0.01)
    assert score(small, images).dtype == np.float32
    assert (np.diff(score(small, images)) > 0).all()


def test_a_clip_has_the_mean_of_its_frames(images):
    reward = jpeg.jpeg_incompressibility()
    frames = score(reward, images)
    clips = score(reward, images.reshape(2, 2, *images.shape[1:]))
    assert clips == pytest.approx(frames.reshape(2, 2).mean(axis=1), rel=1e-6)
