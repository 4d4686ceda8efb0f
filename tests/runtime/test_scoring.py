"""Steps and scores: what each process knows of a step, and which images leave the worker that decoded them."""

import contextlib
import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.diffusion.schedule import Window
from digen_jax.errors import DivergedError
from digen_jax.images import find_shared, reward_input
from digen_jax.logging.evaluation import compute_image_stats, submit_image_stats
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.sampler import Decoded, SampleRng, fetch_clips
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.array_transfer import ArrayTransfer
from digen_jax.runtime.sampling import SamplingExecutor, best_and_worst
from digen_jax.runtime.steps import ScoredChunk, StepImages, Steps, StepScores
from digen_jax.scheduling.commands import Chunk, WeightsVersion
from digen_jax.scheduling.settings import Settings
from tests.parallel import toy

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
    """Scores clips as the worker that has decoded them."""
    steps = Steps(settings, iter([RECORDS[:2]] * 9), SampleRng(0, None), 0, held_out=RECORDS)
    group = types.SimpleNamespace(mesh=make_mesh(jax.devices()[:1]))
    mesh = types.SimpleNamespace(group=group, base=0, frozen=0)
    executor = SamplingExecutor("a", mesh, steps, ArrayTransfer(), reward_weights=(2.0,))

    def submit(chunk, given):
        executor.images[chunk] = given
        return executor.score(chunk, pool)

    with contextlib.closing(RewardPool(alone("mine", reward), 0)) as pool:
        yield submit


def clips(*levels: int) -> np.ndarray:
    """Clips of three frames, of which each has one grey."""
    greys = np.uint8(levels)[:, None] + np.uint8([0, 1, 2])
    return np.broadcast_to(greys[..., None, None, None], (len(levels), 3, 4, 4, 3))


def test_only_previews_of_a_step_leave_the_worker():
    given = clips(30, 10, 50, 50, 20, 40)
    with judging() as judge:
        (shown, other) = (judge(Chunk(step, 0), given).result(30) for step in (6, 7))
    np.testing.assert_allclose(shown.scores.columns[:, 0], [0.3, 0.1, 0.5, 0.5, 0.2, 0.4])
    np.testing.assert_allclose(shown.values, 2 * shown.scores.columns[:, 0])
    # The best two and the worst two, as pictures their middle frames.
    assert [*shown.previews] == [1, 2, 3, 4]
    assert np.array_equal([*shown.previews.values()], given[[1, 2, 3, 4], 1])
    assert shown.clips is None and shown.seconds > 0
    assert other.previews == {}
    for one in (shown, other):
        for found, expected in zip(
            one.image_stats.result(), compute_image_stats(given[:, 1]), strict=True
        ):
            assert np.array_equal(found, expected)


def test_of_equal_images_those_of_several_prompts_are_shown():
    with judging() as judge:
        found = judge(Chunk(6, 0), clips(9, 9, 9, 9, 9, 9)).result(30)
    assert [*found.previews] == [0, 3]


@pytest.mark.parametrize(("version", "frames"), [(7, 3), (2, 1)])
def test_of_an_evaluation_the_first_clips_leave_the_worker(version, frames):
    settings = dataclasses.replace(SETTINGS, shown_images=5)
    with judging(settings=settings) as judge:
        chunks = [Chunk(version, i, evaluation=True) for i in (0, 1)]
        given = clips(1, 2, 3, 4), clips(5, 6, 7)
        found = [judge(*one).result(30) for one in zip(chunks, given, strict=True)]
    cut = slice(None) if frames == 3 else slice(1, 2)
    for one, made, count in zip(found, given, (4, 1), strict=True):
        assert np.array_equal(one.clips, made[:count, cut]) and one.clips.base is None
        assert one.previews is None and len(one.values) == len(made)


@pytest.mark.parametrize("least", [0, 2**25])
def test_large_chunks_are_in_shared_memory(monkeypatch, least):
    monkeypatch.setattr("digen_jax.parallel.sampler.SHARED", least)
    given = clips(30, 10)[:, :1]
    found = fetch_clips(Decoded(jnp.asarray(given), jnp.zeros(2, bool)))
    assert (find_shared(reward_input(found[1:])) is not None) == (least == 0)
    np.testing.assert_array_equal(found, given)


@pytest.mark.parametrize("where", ["weights", "frame"])
def test_images_with_nan_are_no_error_of_a_reward(where, monkeypatch):
    def one_frame(family, params, latents, decode=toy.ToyFamily.decode):
        clips = decode(family, params, latents)
        return jnp.concatenate([clips, clips.at[..., 0, 0, 0].set(jnp.nan), clips], axis=1)

    if where == "frame":
        monkeypatch.setattr(toy.ToyFamily, "decode", one_frame)
    config = toy.config(**toy.meshes((1, 1), (1, 1)))
    system, chunk, version = toy.system(config), Chunk(0, 0), WeightsVersion(0)
    steps = Steps(SETTINGS, iter([toy.records(2)]), system.rng, 0)
    executor = SamplingExecutor("rollout-0", system.rollouts[0], steps, ArrayTransfer())
    factor = np.nan if where == "weights" else 1.0
    executor.hold(version, jax.tree.map(lambda leaf: leaf * factor, system.start))
    executor.encode(0)
    executor.generate(chunk, version)
    executor.decode(chunk)
    with pytest.raises(DivergedError):
        executor.score(chunk, None).result(30)


def step(rows: list[int], size: int) -> StepScores:
    """Scores of a step whose records are named after their groups, in chunks of `size` images."""
    groups = max(rows) + 1
    records = [{"prompt": f"group {row}", "serial": row} for row in range(groups)]
    images = StepImages.create(0, records, len(rows) // groups, size, SampleRng(0, None))
    return StepScores(images, AdvantageSettings(reward_weights=(1.0,), reward_clips=()))


def grey(levels: list[int]) -> np.ndarray:
    """One 4 x 4 picture a level."""
    return np.broadcast_to(np.uint8(levels)[:, None, None, None], (len(levels), 4, 4, 3))


def scored(known: StepScores, index: int, values: list[float], keep: int) -> None:
    """A chunk whose pictures have their places as levels."""
    scores, cut = rewards.Scores(np.float32(values)[:, None], {}), known.images.slice_of(index)
    pictures = grey(list(range(cut.start, cut.stop)))
    places = best_and_worst(np.float32(values), known.images.rows[cut], keep)
    previews, stats = {place: pictures[place] for place in places}, submit_image_stats(pictures)
    known.add(index, ScoredChunk(scores, image_stats=stats, previews=previews))


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


def steps(drawn=None, first=0):
    given = itertools.islice(toy.batches(2), first, None)
    noted = given if drawn is None else (drawn.append(1) or batch for batch in given)
    rng = SampleRng(3, Window(length=2))
    return Steps(Settings(9, 2, 2, 2), noted, rng, first, set_steps=4)


def test_a_worker_that_joins_late_draws_earlier_steps_and_does_not_store_them():
    drawn, whole = [], steps()
    late = steps(drawn)
    late.forget(5)
    assert late[6].records == whole[6].records and len(drawn) == 7
    assert sorted(late._steps) == [5, 6] and late.first == 5
    for found, expected in ((late[5], whole[5]), (late[6], whole[6])):
        for keys, others in (
            (found.draws.keys, expected.draws.keys),
            (found.training_keys, expected.training_keys),
        ):
            assert np.array_equal(jax.random.key_data(keys), jax.random.key_data(others))
    with pytest.raises(KeyError):
        late[4]


def test_steps_are_freed_once_and_in_any_order():
    found = steps(first=2)
    found[4]
    found.forget(3)
    assert found.first == 3 and sorted(found._steps) == [3, 4]
    found.forget(5)
    found.forget(4)
    found.forget(0)
    assert found.first == 5 and not found._steps
    assert found.find(Chunk(4, 0)) is None and found[5].size == 2
