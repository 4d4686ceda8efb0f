"""Loading a config: defaults, types, the command line, and the values that other sections decide."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.config.command_line import check_overrides
from digen_jax.config.load import (
    complete,
    default_config,
    fit_config,
    load_config,
    read_config,
    replaced,
)
from digen_jax.diffusion.schedule import Window
from digen_jax.errors import ConfigError
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.parallel.sampler import SampleRng
from digen_jax.policies import place_here
from digen_jax.rewards import RewardSettings
from tests.config.cases import EARLY, FORWARD, TWO, changed
from tests.pipelines import ROOT, environment, shipped_config


def as_written(config: ConfigDict) -> dict:
    """A complete config in the words of JSON."""
    return json.loads(complete(config).to_json())


def test_fields_that_are_left_out_have_their_defaults(given):
    full = complete(given)
    defaults = default_config()
    defaults.prompts.file = defaults.evaluation.prompts = given.prompts.file
    assert full.to_dict() == defaults.to_dict()
    fit_config(load_config(full), 8)


def test_a_config_overrides_single_fields_of_a_section(given):
    full = complete(changed(given, sampler__kind="flow", seed=7))
    assert (full.seed, full.sampler.kind) == (7, "flow")
    assert full.sampler.steps == default_config().sampler.steps
    assert given.sampler.to_dict() == {"kind": "flow"}  # the given config is unchanged


def test_integers_become_floats_where_floats_belong(given):
    full = complete(changed(given, sampler__guidance=3, trainer__clip_norm=1, lora__alpha=8))
    for value in (full.sampler.guidance, full.trainer.clip_norm, full.lora.alpha):
        assert type(value) is float
    assert full.sampler.guidance == 3.0 and type(full.sampler.steps) is int


def test_a_tilde_in_a_path_is_the_home_folder(given, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    reward = dict(name="clip_score", settings=dict(folder="~/clip", threads=2))
    fields = dict(model__folder="~/sd3", prompts__files=("~/a.txt", "b~.txt"), rewards=(reward,))
    full = complete(changed(given, **fields, prompts__cache="~", lora__path="~x"))
    assert full.model.folder == "/home/me/sd3"
    assert tuple(full.prompts.files) == ("/home/me/a.txt", "b~.txt")
    assert (full.prompts.cache, full.lora.path) == ("/home/me", "~x")
    assert full.rewards[0].settings.to_dict() == {"folder": "/home/me/clip", "threads": 2}
    with pytest.raises(ConfigError):
        complete(changed(given, model__folder="~no-user/sd3"))


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_placement_may_be_given_in_a_word(given, is_complete):
    given = complete(given) if is_complete else given
    full = complete(replaced(given, placement="auto"))
    assert full.placement.mode == "auto" != complete(given).placement.mode
    assert full.placement.rules == default_config().placement.rules
    placed = load_config(full).with_meshes(MeshSizes(RolloutAxes(2), TrainerAxes(1, time=3)))
    assert placed.placement.mode == "given"
    assert (placed.placement.rollout.data, placed.placement.trainer.time) == (2, 3)


@pytest.mark.parametrize("name", ["shapes_demo", "shapes_flow_grpo", "sd35_medium"])
def test_a_runs_files_hold_the_config_as_it_was_asked_for(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = shipped_config(name)
    assert read_config(config).as_json() == as_written(config)


@pytest.mark.parametrize("name", FORWARD)
def test_what_an_algorithm_leaves_to_others_is_written_as_it_was_asked_for(given, name):
    given = changed(given, **FORWARD[name], algorithm__guidance=0.0, sampler__guidance=4.5)
    opened = load_config(given)
    assert opened.algorithm.guidance == opened.algorithm.reference_guidance == 4.5
    assert opened.as_json() == as_written(given)
    assert opened.as_json()["algorithm"]["guidance"] == 0.0
    assert read_config(opened.as_json()) == opened


def test_a_loaded_config_is_immutable(given):
    opened = read_config(changed(given, rewards=["a:b"], placement__rules=[["a", "fsdp"]]))
    assert (len(opened.rewards), opened.placement.rules) == (1, (("a", "fsdp"),))
    for holder in (
        opened,
        opened.rewards[0],
        opened.sampler,
        opened.sampler.window,
        opened.placement.trainer,
    ):
        field = dataclasses.fields(holder)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(holder, field, 1)


def test_rewards_are_sections_of_which_a_name_may_stand_for_one(given):
    opened = read_config(changed(given, rewards=["a:b", dict(name="shapes_geneval", weight=2)]))
    assert opened.rewards == (RewardSettings("a:b"), RewardSettings("shapes_geneval", weight=2.0))
    assert opened.advantages.reward_weights == (1.0, 2.0)
    assert [one["name"] for one in opened.as_json()["rewards"]] == ["a:b", "shapes_geneval"]
    assert read_config(opened.as_json()) == opened
    for alone in ("a:b", dict(name="a:b"), ConfigDict(dict(name="a:b"))):
        assert read_config(changed(given, rewards=alone)).rewards == (RewardSettings("a:b"),)


@pytest.mark.parametrize("name", ["a:b ,shapes_geneval", ["a:b ,shapes_geneval"]])
def test_names_in_one_text_are_not_parsed(given, name):
    with pytest.raises(ConfigError) as caught:
        read_config(changed(given, rewards=name))
    assert str(caught.value) == (
        "config.rewards = 'a:b ,shapes_geneval' is one text with several names: write ('a:b', 'shapes_geneval'), "
        'in a config.json ["a:b", "shapes_geneval"], and on the command line --config.rewards=... for each'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "({'name': 'a:b', 'settings': {'x': ((1, 2), 3)}}, 'c:d')",
            {"a:b": ((1, 2), 3), "c:d": None},
        ),
        ("[{'name': 'a:b', 'settings': {'x': 'f(1, 2)'}}]", {"a:b": "f(1, 2)"}),
        ("{'name': 'a:b'}", {"a:b": None}),
    ],
)
def test_a_list_in_one_text_is_read_with_all_its_parentheses(given, text, expected):
    found = read_config(changed(given, rewards=text)).rewards
    assert {one.name: one.settings.get("x") for one in found} == expected


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("(a:b, shapes_geneval)", "('a:b', 'shapes_geneval')"),
        ("((a:b, 0.5), (c:d, 0.5))", "'my_rewards:redness'"),
        ("(('a:b', 0.5), ('c:d'", "'my_rewards:redness'"),
    ],
)
def test_of_a_text_that_is_no_list_nothing_is_cut_out(given, text, suggested):
    for rewards in (text, (text,)):
        with pytest.raises(ConfigError) as caught:
            read_config(changed(given.copy_and_resolve_references(), rewards=rewards))
        assert suggested in str(caught.value) and repr(text) in str(caught.value)
        assert "'(a" not in str(caught.value).replace(repr(text), "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [("shapes_geneval", 1.0)]),
        (["=a:b"], [("a:b", 1.0)]),
        (["=a:b", "=shapes_geneval"], [("a:b", 1.0), ("shapes_geneval", 1.0)]),
        (["[0].name=a:b"], [("a:b", 1.0)]),
        (["[0].weight=2", "[0].name=a:b"], [("a:b", 2.0)]),
        (["=({'name': 'a:b', 'weight': 0.5}, 'c:d')"], [("a:b", 0.5), ("c:d", 1.0)]),
        (["=({'name': 'a:b', 'weight': {'x': 2}},)"], [("a:b", {"x": 2.0})]),
    ],
)
def test_the_command_line_sets_rewards(options, expected):
    found = parsed(*(f"--config.rewards{option}" for option in options))
    assert [(one.name, one.weight) for one in found.rewards] == expected


def test_the_command_line_sets_a_rewards_own_settings():
    (found,) = parsed("--config.rewards[0].settings={'quality': 90}").rewards
    assert found.settings == {"quality": 90}


def parsed(*options):
    """The recipe of a command line."""
    values = flags.FlagValues()
    values.mark_as_parsed()
    flag = config_flags.DEFINE_config_file("config", flag_values=values)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        argv = ["launch/train.py", "--config=configs/shapes_demo.py", *options]
        patch.setattr(sys, "argv", argv)
        check_overrides(argv)
        values(argv)
    return read_config(flag.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["[0].wieght=2"],
            "config.rewards[0].wieght is not a field; did you mean config.rewards[0].we",
        ),
        (
            ["[1].name=a:b"],
            "config.rewards[1] is not a field; the config file has 1 of config.rewards: ",
        ),
        (["[-1].name=a:b"], "config.rewards[-1] is not a field; the config file has 1 of"),
        (
            ["[0].settings.q=3"],
            "config.rewards[0].settings.q is not a field; config.rewards[0].settings is empty: set its "
            "fields in the config file, or all as --config.rewards[0].settings=\"{'q': ...}\"",
        ),
        (
            ["=a:b", "[0].weight=2"],
            "--config.rewards=a:b replaces the list that --config.rewards[0].weight is about: give the "
            "complete list in one option, such as --config.rewards=\"({'name'",
        ),
        (
            ["={'name': 'a:b'}"],
            "--config.rewards={'name': 'a:b'} must be a list: give the complete list in",
        ),
        ([".name=a:b"], "config.rewards is one value and has no fields"),
    ],
)
def test_overrides_of_rewards_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(ConfigError) as caught:
        parsed(*(f"--config.rewards{option}" for option in options))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("option", "now"),
    [
        ("name=a:b", "config.rewards, of which the command line has one option for each reward,"),
        ("weights=(1.0,)", "config.rewards[0].weight, of the first reward,"),
        ("processes=2", "config.reward_pool.processes"),
        ("retries=2", "config.reward_pool.retries"),
    ],
)
def test_older_options_are_answered_with_their_new_names(option, now):
    field = option.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        parsed(f"--config.reward.{option}")
    assert str(caught.value) == f"config.reward.{field} is not a field; it is {now} now"


def test_meshes_are_fitted_to_the_devices_that_are_named(given):
    given = changed(given, placement__mode="fitted")
    assert load_config(given).placement.mode == "fitted"
    opened = fit_config(load_config(given), 2)
    assert opened.placement.meshes == MeshSizes(RolloutAxes(1), TrainerAxes(1))
    expected = as_written(given)
    expected["placement"] |= opened.placement.meshes.as_dict() | {"mode": "given"}
    assert opened.as_json() == expected


@pytest.mark.parametrize(
    ("rollout", "trainer", "sizes"),
    [(3, 1, "given"), (0, 2, "given"), (3, 1, "fitted"), (0, 1, "given"), (4, 4, "given")],
)
def test_given_meshes_of_several_devices_are_refused_on_one(
    given, monkeypatch, rollout, trainer, sizes
):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    sections = dict(rollout=dict(data=rollout), trainer=dict(data=trainer), mode=sizes)
    fields = {f"placement__{name}": value for name, value in sections.items()}
    asked = load_config(changed(given, **fields))
    if sizes == "given" and rollout + trainer in (2, 4):
        with pytest.raises(ConfigError, match=r"config\.placement\.mode"):
            place_here(asked)
    else:
        place_here(asked)  # the last are the default sizes, which nobody has asked for


def test_a_run_is_opened_again_without_its_files(given):
    gone = changed(given, prompts__file="gone.txt", rewards="gone:reward")
    assert read_config(gone).prompts.file == "gone.txt"
    with pytest.raises(ConfigError) as caught:
        fit_config(load_config(gone), 8)
    assert "config.rewards[0]" in str(caught.value) and "gone.txt" in str(caught.value)


def test_a_recipe_is_opened_before_jax_starts(given, tmp_path):
    """It says how many virtual devices JAX shall have; a reward's import may start JAX."""
    (tmp_path / "own.py").write_text(
        "import jax\nsize = lambda *_: jax.device_count()\njax.devices()\n"
    )
    config = complete(changed(given, rewards="own:size")).to_json()
    (tmp_path / "opening.py").write_text(f"""
import json, jax
from jax._src.xla_bridge import backends_are_initialized as started
from digen_jax.config.command_line import check_overrides
from digen_jax.config.load import fit_config, load_config
recipe = load_config(json.loads({config!r}))
assert not started()
fit_config(recipe, 8)
assert started()
""")
    done = subprocess.run(
        [sys.executable, "opening.py"], cwd=tmp_path, env=environment(1, PYTHONPATH=str(ROOT))
    )
    assert done.returncode == 0


def test_the_layout_is_the_text_that_checkpoints_hold(given):
    assert read_config(given).layout == (
        '{"cut": [144, 144, 1], "placement": '
        '{"rollout": {"data": 4, "fsdp": 1, "hosts": 1, "max_workers": 0, "sequence": 1, "tensor": 1, "workers": 1}, '
        '"rules": [[".*", "replicate"]], '
        '"trainer": {"data": 4, "fsdp": 1, "hosts": 1, "sequence": 1, "tensor": 1, "time": 1, "workers": 1}}}'
    )


def test_trackers_are_off_until_a_project_is_named(given):
    assert load_config(given).trackers == {}
    full = load_config(changed(given, wandb__project="shapes", wandb__tags=["a"]))
    assert full.trackers == {"wandb": {"project": "shapes", "tags": ("a",)}}, "WANDB_MODE counts"
    both = load_config(changed(given, trackio__project="shapes", trackio__space_id="me/here"))
    assert both.trackers == {
        **full.trackers,
        "trackio": {"project": "shapes", "space_id": "me/here"},
    }


def test_what_trainer_and_algorithm_are_made_of(given):
    full = load_config(changed(given, trainer__ema=0.9, algorithm__kl_coefficient=0.5))
    settings, algorithm = full.trainer, full.algorithm
    assert (settings.ema, settings.micro_batch) == (0.9, full.trainer.micro_batch)
    assert (algorithm.kl_coefficient, algorithm.clip_range) == (0.5, full.algorithm.clip_range)


def test_a_moving_window_is_drawn_by_the_runs_own_seed(given):
    fields = dict(mode="random", first=1, length=2, end=7, interval=3, stride=2, roll_back=False)
    fields = {f"sampler__window__{name}": value for name, value in fields.items()}
    full = load_config(changed(given, seed=5, **fields))
    assert full.rng == SampleRng(5, Window("random", 2, 1, 7, 3, 2, False))
    assert load_config(ConfigDict()).rng == SampleRng(0, Window(length=4))


def test_what_advantages_are_made_of(given):
    full = load_config(changed(given, advantages__std="none", advantages__drop_zero_std=True))
    expected = AdvantageSettings(std="none", drop_zero_std=True)
    assert full.advantages == expected
    full = load_config(changed(given, **TWO))
    assert full.advantages.reward_weights == (1.0, 1.0)
    given.rewards = [
        {"name": "a:b", "weight": 2},
        {"name": "c:d", "weight": {"x": 1, "y": -0.5}, "clip": 5},
    ]
    full = load_config(changed(given, advantages__combine="advantages"))  # as read from JSON
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
    full = load_config(changed(given, **fields))
    assert full.scheduler.readiness == readiness


@pytest.mark.parametrize("updates", [1, 2])
def test_of_one_dtype_old_log_probabilities_are_the_rollouts(given, updates):
    given = changed(given, trainer__updates=updates, sampler__chunk=72)
    assert read_config(given).algorithm.old_log_probs == "rollout"


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        (dict(precision__arithmetic="bfloat16"), "current"),
        (dict(precision__rollout="bfloat16"), "current"),
        (dict(precision__arithmetic="bfloat16", precision__rollout="float32"), "current"),
        (dict(precision__rollout="float32"), "rollout"),
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
    assert read_config(changed(given, **fields)).algorithm.old_log_probs == chosen


@pytest.mark.parametrize("name", FORWARD)
def test_the_algorithms_section_has_the_fields_of_its_settings(given, name):
    full = fit_config(load_config(changed(given, **FORWARD[name])), 8)
    settings = full.algorithm
    own = {field.name for field in dataclasses.fields(settings)}
    assert set(full.asked) == own | {"name"} and "times" in own
    again = read_config(json.loads(json.dumps(full.as_json())))
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
    full = load_config(changed(given, **FORWARD["diffusion_dpo"], **TWO, **fields))
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
    full = load_config(changed(given, **FORWARD[name], sampler__guidance=4.5, **fields))
    settings = full.algorithm
    assert (settings.guidance, settings.reference_guidance) == expected


def test_awms_ratios_are_recomputed_where_they_are_not_1(given):
    given = changed(given, **FORWARD["awm"])
    assert load_config(given).algorithm.old_log_probs == "current"
    stale = read_config(changed(given, runtime__max_policy_lag=1))
    assert stale.algorithm.old_log_probs == "recomputed"


def test_with_dynamic_sampling_a_step_draws_prompts_for_all_its_candidates(given):
    assert load_config(given).drawn_groups == 12
    sizes = dict(sampler__chunk=12, trainer__micro_batch=12)
    fields = dict(runtime__max_candidates=20, runtime__oversampled_groups=3)
    full = load_config(changed(given, **sizes, **fields))
    settings = full.scheduler
    assert (settings.groups, settings.max_candidates, settings.oversampled_groups) == (12, 20, 3)
    assert settings.ordered and full.drawn_groups == 20


def test_whether_chunks_are_trained_in_their_order_may_be_said(given):
    for fields, ordered in (
        (dict(), True),
        (dict(runtime__deterministic_order="no"), False),
        (dict(runtime__max_policy_lag=1), False),
        (dict(runtime__max_policy_lag=1, runtime__deterministic_order="yes"), True),
    ):
        full = read_config(changed(given, **fields))
        assert full.scheduler.ordered == ordered


@pytest.mark.parametrize(
    ("fields", "readiness"),
    [
        ({}, "group"),
        (dict(advantages__std="global", algorithm__adv_clip=12.0), "step"),
    ],
)
def test_training_early_is_for_the_scheduler_what_the_algorithm_needs(given, fields, readiness):
    full = load_config(changed(given, **EARLY | fields))
    settings = full.scheduler
    assert settings.readiness == readiness
    assert settings.max_incomplete_groups == 2 and not settings.ordered


def test_where_what_sampled_is_corrected_for_it_is_what_was_stored(given):
    given = changed(given, precision__rollout="bfloat16", algorithm__importance_cap=2.0)
    assert load_config(given).algorithm.old_log_probs == "rollout"
