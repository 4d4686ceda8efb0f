"""The settings behind the door: typed, equal to the config, and complete."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from digen_jax.config import recipe
from digen_jax.config.command_line import check_overrides
from digen_jax.config.door import open_recipe, place, reopen_recipe
from digen_jax.engine.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.errors import ConfigError
from digen_jax.planning.placing import place_here
from digen_jax.rewards.settings import RewardSettings
from tests.config import test_recipe
from tests.config.test_recipe import FORWARD, changed, of_method
from tests.pipelines import ROOT, environment, load_config

given, prompts = test_recipe.given, test_recipe.prompts


def as_written(config: ConfigDict) -> dict:
    """A complete config in the words of JSON."""
    return json.loads(recipe.complete(config).to_json())


@pytest.mark.parametrize("name", ["shapes_demo", "shapes_flow_grpo", "sd35_medium"])
def test_a_runs_files_hold_the_config_as_it_was_asked_for(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(name)
    assert reopen_recipe(config).as_json() == as_written(config)


@pytest.mark.parametrize("name", FORWARD)
def test_what_an_algorithm_leaves_to_others_is_written_as_it_was_asked_for(given, name):
    given = of_method(given, name, algorithm__guidance=0.0, sampler__guidance=4.5)
    opened = open_recipe(given)
    assert opened.algorithm.guidance == opened.algorithm.reference_guidance == 4.5
    assert opened.as_json() == as_written(given)
    assert opened.as_json()["algorithm"]["guidance"] == 0.0
    assert reopen_recipe(opened.as_json()) == opened


def test_nothing_behind_the_door_can_be_changed(given):
    opened = reopen_recipe(changed(given, rewards=["a:b"], placement__rules=[["a", "fsdp"]]))
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
    opened = reopen_recipe(changed(given, rewards=["a:b", dict(name="shapes_geneval", weight=2)]))
    assert opened.rewards == (RewardSettings("a:b"), RewardSettings("shapes_geneval", weight=2.0))
    assert opened.advantages.reward_weights == (1.0, 2.0)
    assert [one["name"] for one in opened.as_json()["rewards"]] == ["a:b", "shapes_geneval"]
    assert reopen_recipe(opened.as_json()) == opened
    for alone in ("a:b", dict(name="a:b"), ConfigDict(dict(name="a:b"))):
        assert reopen_recipe(changed(given, rewards=alone)).rewards == (RewardSettings("a:b"),)


@pytest.mark.parametrize("name", ["a:b ,shapes_geneval", ["a:b ,shapes_geneval"]])
def test_names_in_one_text_are_not_parsed(given, name):
    with pytest.raises(ConfigError) as caught:
        reopen_recipe(changed(given, rewards=name))
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
    found = reopen_recipe(changed(given, rewards=text)).rewards
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
            reopen_recipe(changed(given.copy_and_resolve_references(), rewards=rewards))
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
    return reopen_recipe(flag.value)


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
            "whole list in one option, such as --config.rewards=\"({'name'",
        ),
        (
            ["={'name': 'a:b'}"],
            "--config.rewards={'name': 'a:b'} must be a list: give the whole list in",
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
    given = changed(given, placement__sizes="fitted")
    assert open_recipe(given).placement.sizes == "fitted"
    opened = place(open_recipe(given), 2)
    assert opened.placement.meshes == MeshSizes(RolloutAxes(1), TrainerAxes(1))
    expected = as_written(given)
    expected["placement"] |= opened.placement.meshes.plain() | {"sizes": "given"}
    assert opened.as_json() == expected


@pytest.mark.parametrize(
    ("rollout", "trainer", "sizes"),
    [(3, 1, "given"), (0, 2, "given"), (3, 1, "fitted"), (0, 1, "given"), (4, 4, "given")],
)
def test_given_meshes_of_several_devices_are_refused_on_one(
    given, monkeypatch, rollout, trainer, sizes
):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    sections = dict(rollout=dict(data=rollout), trainer=dict(data=trainer), sizes=sizes)
    fields = {f"placement__{name}": value for name, value in sections.items()}
    asked = open_recipe(changed(given, **fields))
    if sizes == "given" and rollout + trainer in (2, 4):
        with pytest.raises(ConfigError, match=r"config\.placement\.sizes"):
            place_here(asked)
    else:
        place_here(asked)  # the last are the default sizes, which nobody has asked for


def test_a_run_is_opened_again_without_its_files(given):
    gone = changed(given, prompts__file="gone.txt", rewards="gone:reward")
    assert reopen_recipe(gone).prompts.file == "gone.txt"
    with pytest.raises(ConfigError, match=r"(?s)2 things .* no prompt file .* no module 'gone'"):
        place(open_recipe(gone), 8)


def test_a_recipe_is_opened_before_jax_starts(given, tmp_path):
    """It says how many virtual devices JAX shall have; a reward's import may start JAX."""
    (tmp_path / "own.py").write_text(
        "import jax\nsize = lambda *_: jax.device_count()\njax.devices()\n"
    )
    config = recipe.complete(changed(given, rewards="own:size")).to_json()
    (tmp_path / "opening.py").write_text(f"""
import json, jax
from jax._src.xla_bridge import backends_are_initialized as started
from digen_jax.config.command_line import check_overrides
from digen_jax.config.door import open_recipe, place
recipe = open_recipe(json.loads({config!r}))
assert not started()
place(recipe, 8)
assert started()
""")
    done = subprocess.run(
        [sys.executable, "opening.py"], cwd=tmp_path, env=environment(1, PYTHONPATH=str(ROOT))
    )
    assert done.returncode == 0


def test_the_layout_is_the_text_that_checkpoints_hold(given):
    assert reopen_recipe(given).layout == (
        '{"cut": [144, 144, 1], "placement": '
        '{"rollout": {"data": 4, "fsdp": 1, "hosts": 1, "max_workers": 0, "sequence": 1, "tensor": 1, "workers": 1}, '
        '"rules": [[".*", "replicate"]], '
        '"trainer": {"data": 4, "fsdp": 1, "hosts": 1, "sequence": 1, "tensor": 1, "time": 1, "workers": 1}}}'
    )
