"""What a judge says of a chunk's images, and which of them leave their process."""

import contextlib
import dataclasses
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from digen_jax.errors import DivergedError
from digen_jax.logging.image_statistics import look
from digen_jax.parallel.sampler import SampleRng
from digen_jax.rewards import alone
from digen_jax.rewards.errors import RewardFailed
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.sampling import ChunkScorer, failed, ready, then
from digen_jax.runtime.steps import HeldOut, Steps
from digen_jax.scheduling.commands import Chunk
from digen_jax.scheduling.settings import Settings

RECORDS = [{"prompt": f"prompt {i}", "serial": i} for i in range(7)]
# Pictures are due of the images of step 6, the seventh one, and of version 7.
SETTINGS = Settings(
    9,
    groups=2,
    images=3,
    chunk_images=6,
    evaluate_every=1,
    evaluation_images=7,
    evaluation_batch=4,
    show_every=7,
    shown_images=2,
)


def level(images, prompts, metadata):
    assert prompts == [record["prompt"] for record in metadata]
    return images.reshape(len(images), -1)[:, 0] / 100


@contextlib.contextmanager
def judging(reward=level, settings=SETTINGS):
    steps = Steps(iter([RECORDS[:2]] * 9), 3, 6, SampleRng(0, None), 0)
    with contextlib.closing(RewardPool(alone("mine", reward), 0)) as pool:
        yield ChunkScorer(pool, (2.0,), steps, HeldOut(RECORDS, settings), settings)


def clips(*levels: int) -> np.ndarray:
    """Clips of three frames, of which each has one grey."""
    greys = np.uint8(levels)[:, None] + np.uint8([0, 1, 2])
    return np.broadcast_to(greys[..., None, None, None], (len(levels), 3, 4, 4, 3))


def test_of_a_step_only_what_may_be_shown_leaves():
    given = clips(30, 10, 50, 50, 20, 40)
    with judging() as judge:
        (shown, other) = (judge.submit(Chunk(step, 0), given).result(30) for step in (6, 7))
    np.testing.assert_allclose(shown.scores.columns[:, 0], [0.3, 0.1, 0.5, 0.5, 0.2, 0.4])
    np.testing.assert_allclose(shown.values, 2 * shown.scores.columns[:, 0])
    # The best two and the worst two, as pictures their middle frames.
    assert shown.previews.places.tolist() == [1, 2, 3, 4]
    assert np.array_equal(shown.previews.images, given[[1, 2, 3, 4], 1])
    assert shown.clips is None and shown.seconds > 0
    assert other.previews.places.size == 0 and other.previews.images.shape == (0, 4, 4, 3)
    for one in (shown, other):
        for found, expected in zip(one.looks.result(), look(given[:, 1]), strict=True):
            assert np.array_equal(found, expected)


def test_of_equal_images_those_of_several_prompts_are_shown():
    with judging() as judge:
        found = judge.submit(Chunk(6, 0), clips(9, 9, 9, 9, 9, 9)).result(30)
    assert found.previews.places.tolist() == [0, 3]


@pytest.mark.parametrize(("version", "frames"), [(7, 3), (2, 1)])
def test_of_an_evaluation_the_first_clips_leave_and_whole_ones_where_they_are_shown(
    version, frames
):
    settings = dataclasses.replace(SETTINGS, shown_images=5)
    with judging(settings=settings) as judge:
        chunks = [Chunk(version, i, evaluation=True) for i in (0, 1)]
        given = clips(1, 2, 3, 4), clips(5, 6, 7)
        found = [judge.submit(*one).result(30) for one in zip(chunks, given, strict=True)]
    cut = slice(None) if frames == 3 else slice(1, 2)
    for one, made, count in zip(found, given, (4, 1), strict=True):
        assert np.array_equal(one.clips, made[:count, cut]) and one.clips.base is None
        assert one.previews is None and len(one.values) == len(made)


def test_images_with_nan_are_no_fault_of_a_reward():
    with judging() as judge, pytest.raises(DivergedError, match="holds NaN"):
        judge.submit(Chunk(0, 0), np.full((6, 1, 4, 4, 3), np.nan, np.float32)).result(30)


def test_a_reward_that_fails_is_named():
    def wrong(*_):
        raise ValueError("a bug")

    with judging(wrong) as judge, pytest.raises(RewardFailed, match="'mine' raised ValueError"):
        judge.submit(Chunk(0, 0), clips(*range(6))).result(30)


def test_one_future_follows_another():
    first = Future()
    found = then(first, lambda one: one + 2)
    assert not found.done()
    first.set_result(1)
    assert found.result(0) == 3
    error = ValueError("wrong")
    assert then(failed(error), str).exception(0) is error
    assert isinstance(then(ready(1), lambda one: 1 / 0).exception(0), ZeroDivisionError)
    never = Future()
    late = then(never, str)
    never.cancel()
    assert isinstance(late.exception(0), CancelledError)
