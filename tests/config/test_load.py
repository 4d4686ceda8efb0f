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
        ("a:b ,shapes_geneval", "('a:b', 'shapes_geneval')"),
        ("(a:b, shapes_geneval)", "('a:b', 'shapes_geneval')"),
        ("((a:b, 0.5), (c:d, 0.5))", "'my_rewards:redness'"),
        ("(('a:b', 0.5), ('c:d'", "'my_rewards:redness'"),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_names_in_one_text_are_refused_with_how_to_write_them(given, text, suggested, listed):
    with pytest.raises(ConfigError) as caught:
        read_config(changed(given, rewards=(text,) if listed else text))
    assert suggested in str(caught.value) and repr(text) in str(caught.value)


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
        (["[0].wieght=2"], "config.rewards[0].wieght is not a field; did you mean"),
        (["[1].name=a:b"], "config.rewards[1] is not a field"),
        (["[-1].name=a:b"], "config.rewards[-1] is not a field"),
        (["[0].settings.q=3"], "config.rewards[0].settings.q is not a field"),
        (["=a:b", "[0].weight=2"], "--config.rewards=a:b replaces the list"),
        (["={'name': 'a:b'}"], "--config.rewards={'name': 'a:b'} must be a list"),
        ([".name=a:b"], "config.rewards is a single value"),
    ],
)
def test_overrides_of_rewards_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(ConfigError) as caught:
        parsed(*(f"--config.rewards{option}" for option in options))
    assert str(caught.value).startswith(sentence)


def test_an_older_option_is_answered_with_its_new_name():
    with pytest.raises(ConfigError, match=r"config\.reward_pool\.processes now"):
        parsed("--config.reward.processes=2")


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


GLOBAL = dict(advantages__std="global")
DPO = TWO | FORWARD["diffusion_dpo"]


@pytest.mark.parametrize(
    ("fields", "readiness"),
    [
        (dict(), "group"),
        (dict(advantages__std="none"), "group"),
        (GLOBAL, "step"),
        (TWO | dict(advantages__combine="advantages"), "group"),
        (TWO | dict(advantages__combine="gdpo"), "step"),
        # Pairs wait for what orders a group.
        (DPO, "group"),
        (DPO | dict(advantages__combine="gdpo"), "group"),
        (DPO | dict(advantages__combine="advantages", advantages__std="none"), "group"),
        (DPO | dict(advantages__combine="advantages") | GLOBAL, "step"),
        # So does training of incomplete groups.
        (EARLY, "group"),
        (EARLY | GLOBAL | dict(algorithm__adv_clip=12.0), "step"),
    ],
)
def test_the_scheduler_waits_for_what_advantages_need(given, fields, readiness):
    settings = load_config(changed(given, **fields)).scheduler
    assert settings.readiness == readiness
    early = "runtime__max_incomplete_groups" in fields
    assert settings.max_incomplete_groups == 2 * early and settings.ordered == (not early)


LAG = dict(runtime__max_policy_lag=1, sampler__chunk=72)
BFLOAT16 = dict(precision__arithmetic="bfloat16")
TWO_UPDATES = dict(trainer__updates=2, sampler__chunk=72)


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({}, "rollout"),
        (TWO_UPDATES, "rollout"),
        (LAG, "rollout"),
        (BFLOAT16 | dict(algorithm__old_log_probs="rollout"), "rollout"),
        (dict(algorithm__old_log_probs="recomputed"), "recomputed"),
        (BFLOAT16, "current"),
        (dict(precision__rollout="bfloat16"), "current"),
        (BFLOAT16 | dict(precision__rollout="float32"), "current"),
        (dict(precision__rollout="float32"), "rollout"),
        (BFLOAT16 | TWO_UPDATES, "recomputed"),
        (BFLOAT16 | LAG, "recomputed"),
        # What sampled is corrected for it.
        (dict(precision__rollout="bfloat16", algorithm__importance_cap=2.0), "rollout"),
        (FORWARD["awm"], "current"),
        (FORWARD["awm"] | LAG, "recomputed"),
    ],
)
def test_old_log_probabilities_are_chosen_by_precision_and_updates(given, fields, chosen):
    assert read_config(changed(given, **fields)).algorithm.old_log_probs == chosen


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
    if name == "crd" and "algorithm__reference_guidance" not in fields:
        expected = expected[0], 4.5
    assert (settings.guidance, settings.reference_guidance) == expected


def test_with_dynamic_sampling_a_step_draws_prompts_for_all_its_candidates(given):
    assert load_config(given).max_groups == 12
    sizes = dict(sampler__chunk=12, trainer__micro_batch=12)
    fields = dict(runtime__max_candidates=20, runtime__oversampled_groups=3)
    full = load_config(changed(given, **sizes, **fields))
    settings = full.scheduler
    assert (settings.groups, settings.max_candidates, settings.oversampled_groups) == (12, 20, 3)
    assert settings.ordered and full.max_groups == 20


def test_whether_chunks_are_trained_in_their_order_may_be_said(given):
    for fields, ordered in (
        (dict(), True),
        (dict(runtime__deterministic_order="no"), False),
        (dict(runtime__max_policy_lag=1), False),
        (dict(runtime__max_policy_lag=1, runtime__deterministic_order="yes"), True),
    ):
        full = read_config(changed(given, **fields))
        assert full.scheduler.ordered == ordered
