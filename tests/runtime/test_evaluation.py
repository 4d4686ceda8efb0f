import jax
import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.images import to_uint8
from digen_jax.inference.sampling import evaluate, sample_clips
from digen_jax.parallel.sampler import SEED
from digen_jax.scheduling.commands import Generate
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

RECORDS = toy.records(6)

ROUNDED = 1.01 / 255  # a pixel beside the middle of two bytes may become either


@pytest.fixture(scope="module")
def parts(exact_and_split):
    """(evaluator on a mesh of 4, published weights)"""
    system = toy.system(toy.config(**toy.meshes((4, 1), (2, 2)), evaluation__guidance=2.0))
    return system.evaluator, system.rollout_weights(system.start)


def scored(parts, records, batch, **options):
    """(evaluation, all images that the reward got, as numbers in [0, 1])"""
    seen = []

    def reward(images, prompts, metadata):
        assert prompts == [record["prompt"] for record in metadata]
        assert images.dtype == np.uint8
        seen.append(images / np.float32(255))
        return toy.brightness(images, prompts, metadata)

    return evaluate(
        *parts, records, rewards.alone("mine", reward), batch, **options
    ), np.concatenate(seen)


@pytest.fixture(scope="module")
def at_once(parts):
    return scored(parts, RECORDS, 8)


def test_images_do_not_depend_on_the_batch_or_its_padding(parts, at_once):
    found, seen = scored(parts, RECORDS, 4)
    np.testing.assert_allclose(seen, at_once[1], atol=ROUNDED)
    np.testing.assert_allclose(found.scores, at_once[0].scores, atol=ROUNDED / 4)
    assert seen.shape == (6, 4, 4, 3)


def test_an_image_depends_on_its_number_and_prompt_only(parts, at_once):
    _, seen = scored(parts, RECORDS[:3], 8)
    np.testing.assert_allclose(seen, at_once[1][:3], atol=ROUNDED)
    same = sample_clips(*parts, [{"prompt": "red"}] * 3, first=2, batch=8)
    again = sample_clips(*parts, [{"prompt": "red"}], first=3, batch=8)
    same, again = np.float32(same) / 255, np.float32(again) / 255
    np.testing.assert_allclose(same[1], again[0], atol=ROUNDED)
    assert np.abs(same[0] - same[1]).max() > 0.01
    other = sample_clips(*parts, [{"prompt": "a blue"}], first=3, batch=8)
    assert np.abs(np.float32(other) / 255 - again).max() > 0.01


def test_another_seed_gives_other_images(parts, at_once):
    _, seen = scored(parts, RECORDS, 8, seed=SEED + 1)
    assert np.abs(seen - at_once[1]).max((1, 2, 3)).min() > 0.01


def test_images_and_scores_are_kept_in_the_records_order(at_once):
    found, seen = at_once
    assert found.records == RECORDS
    np.testing.assert_array_equal(found.clips[:, 0], to_uint8(seen))
    np.testing.assert_allclose(
        found.scores, toy.brightness(found.clips[:, 0], None, None), rtol=1e-6
    )


def test_metrics_are_means_over_all_and_for_each_task(at_once):
    scores = at_once[0].scores.astype(np.float64)
    assert at_once[0].metrics() == {
        "evaluation/reward": pytest.approx(scores.mean()),
        "evaluation/one": pytest.approx(scores[0::2].mean()),
        "evaluation/two": pytest.approx(scores[1::2].mean()),
    }


# ------------------------------------------------------------------------------ through the driver

OF_RUN = {
    "two meshes": toy.meshes((1, 1), (1, 1), workers=2),
    "two meshes, two updates, stale": toy.meshes((1, 1), (1, 1), workers=2)
    | dict(trainer__updates=2, trainer__micro_batch=2, sampler__chunk=4, runtime__max_policy_lag=1),
    "colocated": dict(placement__rollout=dict(data=0), placement__trainer=dict(data=1)),
}


@pytest.mark.parametrize(("layout", "ema"), zip(OF_RUN, (0.5, 0.0, 0.5), strict=True))
def test_a_run_evaluates_each_version_as_that_versions_weights_alone(layout, ema):
    """In chunks, on all meshes, during training; with the average's weights, if there is one."""
    config = toy.config(
        **OF_RUN[layout],
        trainer__ema=ema,
        trainer__learning_rate=0.05,
        evaluation__every=1,
        evaluation__batch=4,
        images__count=6,
    )
    system, records = toy.system(config, 3), toy.records(10)
    found, log = {}, []
    states = [system.start]
    with toy.driver(
        system, config, log=log, held_out=records, evaluated=found.__setitem__
    ) as driver:
        for _ in range(2):
            driver.step()
            states.append(jax.device_get(driver.executor.state.evaluated))
    assert set(found) == {0, 1}  # that of a step's version is over before the next one's end
    assert toy.difference(states[1], jax.device_get(states[0])) > 1e-3
    for version, one in found.items():
        alone = evaluate(
            system.evaluator,
            system.rollout_weights(states[version]),
            records,
            rewards.alone("mine", toy.brightness),
            4,
        )
        assert one.records == records
        np.testing.assert_allclose(one.scores, alone.scores, atol=ROUNDED / 4)
        shown = alone.clips[:6]  # a chunk and a half
        assert one.clips.shape == shown.shape
        assert np.abs(one.clips.astype(int) - shown).max() <= 1
    makers = {c.worker for c in log if isinstance(c, Generate) and c.chunk.evaluation}
    assert makers and makers <= (
        {"trainer"} if layout == "colocated" else {"rollout 0", "rollout 1"}
    )
