import numpy as np
import pytest

from digen_jax.images import find_shared, share, to_uint8, writable_copy
from digen_jax.rewards.dry_run import Watched


def test_to_uint8_rounds_and_clips():
    images = np.float32([-1, 0, 0.5, 1, 2, 0.3 / 255]).reshape(1, 2, 1, 3)
    assert to_uint8(images).ravel().tolist() == [0, 0, 128, 255, 255, 0]
    assert to_uint8(images).dtype == np.uint8
    grey = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    np.testing.assert_array_equal(to_uint8(grey), grey)
    np.testing.assert_array_equal(to_uint8(grey / np.float32(255)), grey)


@pytest.mark.parametrize("memfd", [True, False])  # whether there are files in memory, as on Linux
def test_shared_images_are_copied_only_where_they_are_modified(monkeypatch, memfd):
    if not memfd:
        monkeypatch.delattr("os.memfd_create", raising=False)
    images = np.arange(5 * 2 * 4 * 6 * 3, dtype=np.uint8).reshape(5, 2, 4, 6, 3).view(Watched)
    shared = share(images)
    assert type(shared) is Watched and share(shared) is shared
    for cut in (slice(None), slice(1, 3), (slice(1, 4), 0), (slice(None), slice(0, 2, 2)), 2):
        part, copy = shared[cut], writable_copy(shared[cut])
        assert (find_shared(part) is None) == (not part.flags.c_contiguous)
        assert type(copy) is Watched and find_shared(copy) is None
        np.testing.assert_array_equal(copy, images[cut])
        copy[:] = 0
        np.testing.assert_array_equal(shared, images)
    assert find_shared(images) is None and len(share(images[:0])) == 0


def test_an_image_with_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(np.full((1, 2, 2, 3), np.nan, np.float32))
