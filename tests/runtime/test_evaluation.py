import jax
import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.images import to_uint8
from digen_jax.runtime.evaluation import SEED, evaluate, sample_clips
from tests.engine import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

RECORDS = toy.records(6)


@pytest.fixture(scope="module")
def parts(exact_and_split):
    """(evaluator on a mesh of 4, published weights)"""
    system = toy.system(toy.config(**toy.meshes((4, 1), (2, 2)), evaluation__guidance=2.0))
    return system.evaluator, system.publish(system.start)


def scored(parts, records, batch, **options):
    """(evaluation, all images as the reward saw them)"""
    seen = []

    def reward(images, prompts, metadata):
        assert prompts == [record["prompt"] for record in metadata]
        seen.append(images)
        return toy.brightness(images, prompts, metadata)

    return evaluate(*parts, records, reward, ("mine",), batch, **options), np.concatenate(seen)


@pytest.fixture(scope="module")
def at_once(parts):
    return scored(parts, RECORDS, 8)


def test_images_do_not_depend_on_the_batch_or_its_padding(parts, at_once):
    found, seen = scored(parts, RECORDS, 4)
    np.testing.assert_allclose(seen, at_once[1], atol=1e-5)
    np.testing.assert_allclose(found.scores, at_once[0].scores, atol=1e-6)
    assert seen.shape == (6, 4, 4, 3)


def test_an_image_depends_on_its_number_and_prompt_only(parts, at_once):
    _, seen = scored(parts, RECORDS[:3], 8)
    np.testing.assert_allclose(seen, at_once[1][:3], atol=1e-5)
    same = sample_clips(*parts, [{"prompt": "red"}] * 3, first=2, batch=8)
    again = sample_clips(*parts, [{"prompt": "red"}], first=3, batch=8)
    np.testing.assert_allclose(same[1], again[0], atol=1e-5)
    assert np.abs(same[0] - same[1]).max() > 0.01
    other = sample_clips(*parts, [{"prompt": "a blue"}], first=3, batch=8)
    assert np.abs(other - again).max() > 0.01


def test_another_seed_gives_other_images(parts, at_once):
    _, seen = scored(parts, RECORDS, 8, seed=SEED + 1)
    assert np.abs(seen - at_once[1]).max((1, 2, 3)).min() > 0.01


def test_images_and_scores_are_kept_in_the_records_order(at_once):
    found, seen = at_once
    assert found.records == RECORDS
    np.testing.assert_array_equal(found.clips[:, 0], to_uint8(seen))
    np.testing.assert_allclose(found.scores, toy.brightness(seen, None, None), rtol=1e-6)


def test_metrics_are_means_over_all_and_for_each_task(at_once):
    scores = at_once[0].scores.astype(np.float64)
    assert at_once[0].metrics() == {
        "evaluation/reward": pytest.approx(scores.mean()),
        "evaluation/one": pytest.approx(scores[0::2].mean()),
        "evaluation/two": pytest.approx(scores[1::2].mean()),
    }


def test_progress_goes_through_the_batches(parts):
    passed = []

    def progress(batches):
        for batch in batches:
            yield batch
            passed.append(batch)

    scored(parts, RECORDS, 4, progress=progress)
    assert len(passed) == 2


def test_a_wrong_reward_is_named(parts):
    with pytest.raises(ConfigError, match="reward 'mine' returned nan for image 0"):
        evaluate(*parts, RECORDS, lambda images, *_: np.full(len(images), np.nan), ("mine",), 8)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(parts[1]))
