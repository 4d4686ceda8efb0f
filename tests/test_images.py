import numpy as np
import pytest

from digen_jax.images import to_uint8


def test_to_uint8_rounds_and_clips():
    images = np.float32([-1, 0, 0.5, 1, 2, 0.3 / 255]).reshape(1, 2, 1, 3)
    assert to_uint8(images).ravel().tolist() == [0, 0, 128, 255, 255, 0]
    assert to_uint8(images).dtype == np.uint8
    grey = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    np.testing.assert_array_equal(to_uint8(grey), grey)
    np.testing.assert_array_equal(to_uint8(grey / np.float32(255)), grey)


def test_an_image_with_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(np.full((1, 2, 2, 3), np.nan, np.float32))
