import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.logging.image_statistics import look_beside
from digen_jax.parallel.sampler import SampleRng
from digen_jax.runtime.sampling import best_and_worst
from digen_jax.runtime.steps import Previews, StepImages, StepScores


def step(rows: list[int], size: int) -> StepScores:
    """Scores of a step whose records are named after their groups, in chunks of `size` images."""
    groups = max(rows) + 1
    records = [{"prompt": f"group {row}", "serial": row} for row in range(groups)]
    images = StepImages.create(0, records, len(rows) // groups, size, SampleRng(0, None))
    return StepScores.create(images, AdvantageSettings(reward_weights=(1.0,), reward_clips=()))


def grey(levels: list[int]) -> np.ndarray:
    """One 4 x 4 picture a level."""
    return np.broadcast_to(np.uint8(levels)[:, None, None, None], (len(levels), 4, 4, 3))


def scored(known: StepScores, index: int, values: list[float], keep: int) -> None:
    """A chunk whose pictures have their places as levels."""
    known.add(index, rewards.Scores(np.float32(values)[:, None], {}))
    cut = known.images.slice_of(index)
    pictures = grey(list(range(cut.start, cut.stop)))
    places = best_and_worst(np.float32(values), known.images.rows[cut], keep)
    known.add_previews(index, look_beside(pictures), Previews(places, pictures[places]))


def test_the_best_and_worst_images_of_a_step_have_their_prompts_and_values():
    known = step([0, 0, 0, 0, 1, 1, 1, 1], 4)
    scored(known, 1, [0.5, 1.0, 0.0, 0.0], keep=2)
    scored(known, 0, [1.0, 1.0, 0.25, 0.0], keep=2)
    best, worst = known.extremes(2)
    # Of equal values one of each group comes first.
    assert best.images[:, 0, 0, 0].tolist() == [0, 5] and best.values.tolist() == [1, 1]
    assert [record["prompt"] for record in best.records] == ["group 0", "group 1"]
    assert worst.images[:, 0, 0, 0].tolist() == [3, 6] and worst.values.tolist() == [0, 0]
    best, worst = known.extremes(100)
    seen = [*best.images[:, 0, 0, 0], *worst.images[:, 0, 0, 0]]
    assert sorted(seen) == list(range(8)) and best.values.min() >= worst.values.max()


def test_dropped_candidates_are_in_no_picture_and_no_statistic():
    known = step([0, 0, 1, 1], 2)
    scored(known, 0, [1.0, 0.5], keep=1)
    scored(known, 1, [9.0, -9.0], keep=1)
    known.images.dropped.add(1)
    best, worst = known.extremes(5)
    assert (best.values.tolist(), worst.values.tolist()) == ([1.0], [0.5])
    found = known.image_metrics()
    assert found["images/diversity"] == pytest.approx(1 / 255) and found["images/sharpness"] == 0
    assert step([0, 0], 2).image_metrics() == {} and step([0, 0], 2).extremes(1) is None


def test_without_pictures_to_show_only_the_statistics_are_kept():
    known = step([0, 0], 2)
    scored(known, 0, [1.0, 0.0], keep=0)
    assert known.extremes(4) is None and known.image_metrics()
