import dataclasses
import json

import pytest
from ml_collections import ConfigDict

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.config.door import open_recipe, place, reopen_recipe
from digen_jax.errors import ConfigError
from digen_jax.flow.windows import Window
from tests.config import test_recipe
from tests.config.test_recipe import EARLY, FORWARD, TWO, changed, of_method

given, prompts = test_recipe.given, test_recipe.prompts


def test_trackers_are_off_until_a_project_is_named(given):
    assert open_recipe(given).trackers == {}
    full = open_recipe(changed(given, wandb__project="shapes", wandb__tags=["a"]))
    assert full.trackers == {"wandb": {"project": "shapes", "tags": ("a",)}}, "WANDB_MODE counts"
    both = open_recipe(changed(given, trackio__project="shapes", trackio__space_id="me/here"))
    assert both.trackers == {
        **full.trackers,
        "trackio": {"project": "shapes", "space_id": "me/here"},
    }


def test_what_trainer_and_algorithm_are_made_of(given):
    full = open_recipe(changed(given, trainer__ema=0.9, algorithm__kl_coefficient=0.5))
    settings, algorithm = (
        full.trainer.settings,
        full.algorithm,
    )
    assert (settings.ema, settings.micro_batch) == (0.9, full.trainer.micro_batch)
    assert (algorithm.kl_coefficient, algorithm.clip_range) == (0.5, full.algorithm.clip_range)


def test_a_moving_window_is_drawn_by_the_runs_own_seed(given):
    fields = dict(mode="random", first=1, length=2, end=7, interval=3, stride=2, roll_back=False)
    fields = {f"sampler__window__{name}": value for name, value in fields.items()}
    full = open_recipe(changed(given, seed=5, **fields))
    assert full.window == Window("random", 2, 1, 7, 3, 2, False, seed=5)
    assert open_recipe(ConfigDict()).window == Window(length=4)


def test_what_advantages_are_made_of(given):
    full = open_recipe(changed(given, advantages__std="none", advantages__drop_zero_std=True))
    expected = AdvantageSettings(std="none", drop_zero_std=True)
    assert full.advantages == expected
    full = open_recipe(changed(given, **TWO))
    assert full.advantages.reward_weights == (1.0, 1.0)
    given.rewards = [
        {"name": "a:b", "weight": 2},
        {"name": "c:d", "weight": {"x": 1, "y": -0.5}, "clip": 5},
    ]
    full = open_recipe(changed(given, advantages__combine="advantages"))  # as read from JSON
    assert full.advantages.reward_weights == (2.0, 1.0, -0.5)
    assert full.advantages.reward_clips == (0.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("fields", "readiness"),
    [
        (dict(), "group"),
        (dict(advantages__std="none"), "group"),
        (dict(advantages__std="global"), "step"),
        (TWO | dict(advantages__combine="advantages"), "group"),
        (TWO | dict(advantages__combine="gdpo"), "step"),
    ],
)
def test_the_scheduler_waits_for_what_advantages_need(given, fields, readiness):
    full = open_recipe(changed(given, **fields))
    assert full.scheduler.readiness == readiness


@pytest.mark.parametrize("updates", [1, 2])
def test_of_one_dtype_old_log_probabilities_are_the_rollouts(given, updates):
    given = changed(given, trainer__updates=updates, sampler__chunk=72)
    assert reopen_recipe(given).algorithm.old_log_probs == "rollout"


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        (dict(precision__arithmetic="bfloat16"), "current"),
        (dict(precision__published="bfloat16"), "current"),
        (dict(precision__arithmetic="bfloat16", precision__published="float32"), "current"),
        (dict(precision__published="float32"), "rollout"),
        (
            dict(precision__arithmetic="bfloat16", trainer__updates=2, sampler__chunk=72),
            "recomputed",
        ),
        (
            dict(precision__arithmetic="bfloat16", runtime__max_policy_lag=1, sampler__chunk=72),
            "recomputed",
        ),
    ],
)
def test_with_bfloat16_old_log_probabilities_are_the_trainers_own(given, fields, chosen):
    assert reopen_recipe(changed(given, **fields)).algorithm.old_log_probs == chosen


@pytest.mark.parametrize("name", FORWARD)
def test_the_algorithms_section_has_the_fields_of_its_settings(given, name):
    full = place(open_recipe(of_method(given, name)), 8)
    settings = full.algorithm
    own = {field.name for field in dataclasses.fields(settings)}
    assert set(full.asked) == own | {"name"} and "times" in own
    again = reopen_recipe(json.loads(json.dumps(full.as_json())))
    assert again == full
    count = {"diffusion_nft": 7, "awm": 6, "diffusion_dpo": 1}[name]
    assert full.trained_steps == settings.times.count == count


@pytest.mark.parametrize(
    ("fields", "readiness"),
    [
        (dict(), "group"),
        (dict(advantages__combine="gdpo"), "group"),
        (dict(advantages__combine="advantages", advantages__std="none"), "group"),
        (dict(advantages__combine="advantages", advantages__std="global"), "step"),
    ],
)
def test_pairs_wait_for_what_orders_a_group(given, fields, readiness):
    full = open_recipe(of_method(given, "diffusion_dpo", **TWO, **fields))
    assert full.scheduler.readiness == readiness


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (dict(), (1.0, 1.0)),
        (dict(algorithm__guidance=0.0), (4.5, 4.5)),
        (dict(algorithm__guidance=2.0), (2.0, 2.0)),
        (dict(algorithm__guidance=0.0, algorithm__reference_guidance=1.0), (4.5, 1.0)),
    ],
)
def test_training_has_a_guidance_of_its_own(given, name, fields, expected):
    full = open_recipe(of_method(given, name, sampler__guidance=4.5, **fields))
    settings = full.algorithm
    assert (settings.guidance, settings.reference_guidance) == expected


def test_awms_ratios_are_recomputed_where_they_are_not_1(given):
    given = of_method(given, "awm")
    assert open_recipe(given).algorithm.old_log_probs == "current"
    stale = reopen_recipe(changed(given, runtime__max_policy_lag=1))
    assert stale.algorithm.old_log_probs == "recomputed"


def test_with_dynamic_sampling_a_step_draws_prompts_for_all_its_candidates(given):
    assert open_recipe(given).drawn_groups == 12
    sizes = dict(sampler__chunk=12, trainer__micro_batch=12)
    fields = dict(runtime__max_candidates=20, runtime__redundant_groups=3)
    full = open_recipe(changed(given, **sizes, **fields))
    settings = full.scheduler
    assert (settings.groups, settings.max_candidates, settings.redundant_groups) == (12, 20, 3)
    assert settings.ordered and full.drawn_groups == 20


def test_whether_chunks_are_trained_in_their_order_may_be_said(given):
    for fields, ordered in (
        (dict(), True),
        (dict(runtime__ordered="no"), False),
        (dict(runtime__max_policy_lag=1), False),
        (dict(runtime__max_policy_lag=1, runtime__ordered="yes"), True),
    ):
        full = reopen_recipe(changed(given, **fields))
        assert full.scheduler.ordered == ordered
    with pytest.raises(
        ConfigError, match=r"config\.runtime\.ordered is 'maybe'; it must be one of"
    ):
        open_recipe(changed(given, runtime__ordered="maybe"))


@pytest.mark.parametrize(
    ("fields", "readiness"),
    [
        ({}, "group"),
        (dict(advantages__std="global", algorithm__adv_clip=12.0), "step"),
    ],
)
def test_training_early_is_for_the_scheduler_what_the_algorithm_needs(given, fields, readiness):
    full = open_recipe(changed(given, **EARLY | fields))
    settings = full.scheduler
    assert settings.readiness == readiness
    assert settings.max_incomplete_groups == 2 and not settings.ordered


def test_where_what_sampled_is_corrected_for_it_is_what_was_stored(given):
    given = changed(given, precision__published="bfloat16", algorithm__importance_cap=2.0)
    assert open_recipe(given).algorithm.old_log_probs == "rollout"
