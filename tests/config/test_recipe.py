"""What a config may contain: every mistake is one sentence that names its field."""

import math
import pathlib
import re
import sys

import jax
import pytest
from ml_collections import ConfigDict

from digen_jax.config import checks, recipe
from digen_jax.config.door import open_recipe, place
from digen_jax.engine.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.errors import LARGEST_SEED, ConfigError


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("a red circle\na blue star\n")
    return file


@pytest.fixture
def given(prompts):
    """A recipe that leaves nearly everything out."""
    file = str(prompts)
    return ConfigDict(dict(prompts=dict(file=file), evaluation=dict(prompts=file)))


def changed(given, **fields):
    """`given` with other values; "__" is the dot of a field's name."""
    for name, value in fields.items():
        *groups, last = name.split("__")
        holder = given
        for group in groups:
            if group not in holder:
                holder[group] = ConfigDict()
            holder = holder[group]
        with holder.ignore_type():
            holder[last] = value
    return given


def refused(config, *parts):
    """The sentence that refuses a config on 8 devices; checks that it is one sentence with all `parts`."""
    with pytest.raises(ConfigError) as caught:
        place(open_recipe(config), 8)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.startswith(("config.", "the "))
    for part in parts:
        assert part in sentence
    return sentence


# ------------------------------------------------------------------------------ completing


def test_fields_that_are_left_out_have_their_defaults(given):
    full = recipe.complete(given)
    defaults = recipe.reference()
    defaults.prompts.file = defaults.evaluation.prompts = given.prompts.file
    assert full.to_dict() == defaults.to_dict()
    place(open_recipe(full), 8)


def test_a_recipe_overrides_single_fields_of_a_group(given):
    full = recipe.complete(changed(given, sampler__kind="flow", seed=7))
    assert (full.seed, full.sampler.kind) == (7, "flow")
    assert full.sampler.steps == recipe.reference().sampler.steps
    assert given.sampler.to_dict() == {"kind": "flow"}  # the given config is unchanged


def test_whole_numbers_become_floats_where_floats_belong(given):
    full = recipe.complete(changed(given, sampler__guidance=3, trainer__clip_norm=1, lora__alpha=8))
    for value in (full.sampler.guidance, full.trainer.clip_norm, full.lora.alpha):
        assert type(value) is float
    assert full.sampler.guidance == 3.0
    assert type(full.sampler.steps) is int


def test_a_tilde_in_a_path_is_the_home_folder(given, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    reward = dict(name="clip_score", settings=dict(folder="~/clip", threads=2))
    fields = dict(model__folder="~/sd3", prompts__files=("~/a.txt", "b~.txt"), rewards=(reward,))
    full = recipe.complete(changed(given, **fields, prompts__store="~", lora__start="~x"))
    assert full.model.folder == "/home/me/sd3"
    assert tuple(full.prompts.files) == ("/home/me/a.txt", "b~.txt")
    assert (full.prompts.store, full.lora.start) == ("/home/me", "~x")
    assert full.rewards[0].settings.to_dict() == {"folder": "/home/me/clip", "threads": 2}
    with pytest.raises(ConfigError):
        recipe.complete(changed(given, model__folder="~no-user/sd3"))


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_tracker_without_a_project_is_refused(given, tracker):
    full = changed(given, **{f"{tracker}__name": "first"})
    sentence = rf"config.{tracker}.name does nothing without config.{tracker}.pro"
    with pytest.raises(ConfigError, match=sentence):
        open_recipe(full)


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused(given, tracker, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker, None)
    full = open_recipe(changed(given, **{f"{tracker}__project": "shapes"}))
    sentence = f"config.{tracker}.project asks for {tracker}, which is not installed: run pip "
    with pytest.raises(ConfigError, match=sentence):
        place(full, 1)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        (
            "sampler__guidence",
            1.0,
            "config.sampler.guidence is not a field; did you mean config.sampler.guidance?",
        ),
        ("guidance", 1.0, "config.guidance is not a field; did you mean config."),
        ("samplr__steps", 8, "config.samplr is not a field; did you mean config.sampler?"),
        ("sampler__steps", "8", "config.sampler.steps must be a whole number, not '8'"),
        ("sampler__steps", 8.5, "config.sampler.steps must be a whole number, not 8.5"),
        ("model__remat", True, "config.model.remat must be a text, not True"),
        ("trainer__eps", True, "config.trainer.eps must be a number, not True"),
        ("sampler__window", 4, "config.sampler.window must be a section, such as dict("),
        (
            "sampler__window",
            (1, 4),
            "config.sampler.window must be a section, such as dict(first=1, length=4), not (1, 4)",
        ),
        (
            "sampler__window__first",
            0.0,
            "config.sampler.window.first must be a whole number, not 0.0",
        ),
        ("trainer", 3, "config.trainer"),
        (
            "algorithm__advantage_std",
            "group",
            "config.algorithm.advantage_std is not a field; it is config.advantages.std now",
        ),
    ],
)
def test_unknown_fields_and_wrong_kinds_are_refused(given, field, value, sentence):
    assert refused(changed(given, **{field: value})).startswith(sentence)


@pytest.mark.parametrize("whole", [False, True])
def test_a_placement_may_be_given_in_a_word(given, whole):
    given = recipe.complete(given) if whole else given
    full = recipe.complete(recipe.replaced(given, placement="auto"))
    assert full.placement.sizes == "auto" != recipe.complete(given).placement.sizes
    assert full.placement.rules == recipe.reference().placement.rules
    sizes = MeshSizes(RolloutAxes(2), TrainerAxes(1, time=3))
    placed = open_recipe(full).with_meshes(sizes)
    assert placed.placement.sizes == "given" and full.placement.sizes == "auto"
    assert (placed.placement.rollout.data, placed.placement.trainer.time) == (2, 3)
    sentence = refused(recipe.replaced(given, placement="atuo"))
    assert sentence.startswith("config.placement.sizes is 'atuo'; did you mean 'auto'?")


# ------------------------------------------------------------------------------ several mistakes


@pytest.mark.parametrize(
    ("fields", "sentences"),
    [
        (
            dict(
                trainer__learning_rate=-1.0,
                precision__arithmetic="f",
                advantages__std="sum",
            ),
            [
                "config.trainer.learning_rate must be above 0, not -1.0",
                "config.precision.arithmetic is 'f'; it must be one of",
                "config.advantages.std is 'sum'; it must be one of",
            ],
        ),
        (
            dict(
                runtime=dict(max_policy_lag=-1, max_off_policy_fraction=2.0),
                sampler__window=dict(mode="moving", stride=0),
            ),
            [
                "config.sampler.window.stride must be above 0, not 0",
                "config.runtime.max_policy_lag must be 0 or more, not -1",
                "config.runtime.max_off_policy_fraction must be at most 1, not 2.0",
                "config.sampler.window.mode is 'moving'; it must be one of 'fixed', 'random'",
            ],
        ),
        (
            dict(
                placement__trainer=dict(data=8, fsdp=1, time=2),
                rewards="json:no",
                prompts__file="",
            ),
            [
                "config.prompts.file is not given: add --config.prompts.file=... to the command",
                "config.rewards[0]: reward 'json:no': module json has no function 'no'",
                "config.placement.trainer.time = 2 must divide config.trainer.pack = 1",
                "config.placement.rollout wants 4 and config.placement.trainer 16 devices, but there are 8",
            ],
        ),
        (
            dict(runtime__max_incomplete_groups=2),
            [
                "config.sampler.chunk = 144 must divide config.batch.images = 12, as with config.runtime."
                "max_incomplete_groups = 2 a chunk belongs to one group: set config.sampler.chunk and "
                "config.trainer.micro_batch to 4",
                "config.algorithm.old_log_probs is 'rollout'; to train before a group is complete set it",
            ],
        ),
    ],
)
def test_several_mistakes_are_listed_at_once(given, fields, sentences):
    with pytest.raises(ConfigError) as caught:
        place(open_recipe(changed(given, **fields)), 8)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{len(sentences)} things must change:"
    for line, sentence in zip(lines, sentences, strict=True):
        assert line.startswith(f"  {sentence}")


@pytest.mark.parametrize(
    ("field", "value", "change"),
    [
        ("max_candidates", 24, "set config.sampler.chunk and config.trainer.micro_batch to 12"),
        ("max_policy_lag", 1, "set config.sampler.chunk and config.trainer.micro_batch to 72, or"),
    ],
)
def test_a_switch_that_needs_smaller_chunks_says_all_that_goes_with_them(
    given, field, value, change
):
    given = changed(given, **{f"runtime__{field}": value})
    refused(given, change)
    size = int(re.search(r"micro_batch to (\d+)", change)[1])
    sizes = dict(sampler__chunk=size, trainer__micro_batch=size)
    place(open_recipe(changed(given, **sizes)), 8)


# ------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("sampler__steps", 0, "config.sampler.steps must be above 0, not 0"),
        ("trainer__learning_rate", 0.0, "config.trainer.learning_rate must be above 0, not 0.0"),
        ("trainer__clip_norm", float("nan"), "config.trainer.clip_norm must be above 0, not nan"),
        ("trainer__eps", -1e-8, "config.trainer.eps must be above 0, not -1e-08"),
        ("model__height", -32, "config.model.height must be above 0, not -32"),
        ("placement__trainer", dict(data=0, fsdp=1), "config.placement.trainer.data must be above"),
        ("placement__rollout", dict(data=4, fsdp=0), "config.placement.rollout.fsdp must be above"),
        ("placement__rollout", dict(data=-1, fsdp=1), "config.placement.rollout.data must be 0 or"),
        (
            "placement__rollout",
            dict(data=1, fsdp=1, workers=0),
            "config.placement.rollout.workers must be above 0, not 0",
        ),
        ("reward_pool__processes", -1, "config.reward_pool.processes must be 0 or more, not -1"),
        ("reward_pool__retries", -1, "config.reward_pool.retries must be 0 or more, not -1"),
        ("runtime__deadline", -1.0, "config.runtime.deadline must be 0 or more, not -1.0"),
        ("runtime__deadline", float("nan"), "config.runtime.deadline must be 0 or more, not nan"),
        ("runtime__max_policy_lag", -1, "config.runtime.max_policy_lag must be 0 or more, not -1"),
        (
            "runtime__max_off_policy_fraction",
            1.5,
            "config.runtime.max_off_policy_fraction must be at most 1, not 1.5",
        ),
        ("runtime__tag_weights", "resharde", "config.runtime.tag_weights is 'resharde'; did you"),
        ("seed", -1, "config.seed must be 0 or more, not -1"),
        ("lora__rank", -4, "config.lora.rank must be 0 or more, not -4"),
        ("lora__alpha", 0.0, "config.lora.alpha must be above 0, not 0.0"),
        ("lora__init", "gausian", "config.lora.init is 'gausian'; did you mean 'gaussian'"),
        (
            "lora__start",
            "tuned",
            "config.lora.start = 'tuned' is a LoRA to continue, but config.lora.",
        ),
        ("trainer__pack", 0, "config.trainer.pack must be above 0, not 0"),
        (
            "trainer__pack",
            5,
            "config.trainer.pack = 5 is more than the 4 trained steps of config.sampler.window fill: "
            "set it to 4 or less",
        ),
        (
            "placement__trainer",
            dict(data=1, fsdp=1, time=2),
            "config.placement.trainer.time = 2 must divide config.trainer.pack = 1, as the steps of a "
            "pass are split evenly over that axis",
        ),
        ("trainer__weight_decay", -0.1, "config.trainer.weight_decay must be 0 or more, not -0.1"),
        ("trainer__ema", 1.0, "config.trainer.ema must lie in [0, 1), not be 1.0"),
        ("trainer__ema_every", 0, "config.trainer.ema_every must be above 0, not 0"),
        ("trainer__ema_every", 8, "config.trainer.ema = 0 keeps no average"),
        ("trainer__ema_warm_up", True, "config.trainer.ema = 0 keeps no average"),
        ("trainer__ema_unit", "step", "config.trainer.ema = 0 keeps no average"),
        ("trainer__ema_repeats", 0, "config.trainer.ema_repeats must be above 0, not 0"),
        ("trainer__ema_repeats", 2, "config.trainer.ema = 0 keeps no average"),
        ("trainer__decay", -1, "config.trainer.decay must be 0 or more, not -1"),
        (
            "trainer__decay",
            1,
            "config.trainer.warmup + config.trainer.decay = 1 updates, after which",
        ),
        ("trainer__b2", 1.5, "config.trainer.b2 must lie in [0, 1), not be 1.5"),
        ("batch__images", 1, "config.batch.images = 1: a group needs 2 images or more"),
        (
            "precision__arithmetic",
            "float16",
            "config.precision.arithmetic is 'float16'; did you mean",
        ),
        ("model__folder", "", "config.model.folder is not given: add --config.model.folder=..."),
        (
            "algorithm__name",
            "flow_dpo",
            "config.algorithm.name is 'flow_dpo'; it must be one of 'policy_",
        ),
        ("advantages__std", "batch", "config.advantages.std is 'batch'; it must"),
        (
            "algorithm__old_log_probs",
            "stored",
            "config.algorithm.old_log_probs is 'stored'; it must",
        ),
        ("algorithm__ratio", "gard", "config.algorithm.ratio is 'gard'; did you mean 'guard'? It"),
        ("algorithm__ratio", "guard", "config.algorithm.ratio is 'guard', which is for Gaussian"),
        ("algorithm__surrogate", "ppo", "config.algorithm.surrogate is 'ppo'; it must be one of"),
        ("algorithm__kl", "mse", "config.algorithm.kl is 'mse'; it must be one of 'gaussian'"),
        (
            "precision__published",
            "float16",
            "config.precision.published is 'float16'; did you mean",
        ),
        ("sampler__kind", "dpm2", "config.sampler.kind is 'dpm2'; it must be one of 'flow'"),
        ("algorithm__clip_range", 1e-7, "config.algorithm.clip_range is 1e-07; it must lie in"),
        ("algorithm__adv_clip", 0.0, "config.algorithm.adv_clip is 0.0; it must be positive"),
        (
            "algorithm__kl_coefficient",
            -0.1,
            "config.algorithm.kl_coefficient is -0.1; it must be finite and not negative",
        ),
        (
            "sampler__kind",
            "ode",
            "config.sampler.kind is 'ode'; it must be one of 'flow', 'dance', 'cps'",
        ),
        ("sampler__kind", "danse", "config.sampler.kind is 'danse'; did you mean 'dance'? It must"),
        ("sampler__noise_level", 0.0, "config.sampler.noise_level of Cps is 0.0; it must be"),
        ("sampler__guidance", float("nan"), "config.sampler.guidance must be 0 or more, not nan"),
        ("sampler__guidance", -1.0, "config.sampler.guidance must be 0 or more, not -1.0"),
        ("evaluation__guidance", 1e9, "config.evaluation.guidance must be at most 1000, not 10"),
        ("trainer__learning_rate", float("inf"), "config.trainer.learning_rate must be a finite"),
        ("trainer__weight_decay", float("nan"), "config.trainer.weight_decay must be 0 or more"),
        ("algorithm__clip_range", float("nan"), "config.algorithm.clip_range must be a finite"),
        (
            "runtime__max_off_policy_fraction",
            float("nan"),
            "config.runtime.max_off_policy_fraction must be 0 or more, not nan",
        ),
        ("seed", 2**32, "config.seed must be at most 4294967295, not 4294967296"),
        ("sampler__steps", 10**6, "config.sampler.steps must be at most 1000, not 1000000"),
        ("model__height", 10**6, "config.model.height must be at most 16384, not 1000000"),
        ("placement__cpu_devices", 10**5, "config.placement.cpu_devices must be at most 256, not"),
        (
            "reward_pool__processes",
            10**5,
            "config.reward_pool.processes must be at most 1000, not 100000",
        ),
        (
            "sampler__noise_level",
            1.5,
            "config.sampler.noise_level of cps is 1.5; it must be at most 1",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(given, field, value, sentence):
    assert refused(changed(given, **{field: value})).startswith(sentence)


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (
            ((".*", "fdsp"),),
            "the tactic of '.*' in config.placement.rules is 'fdsp'; did you mean 'fsdp'?",
        ),
        (
            (("attn(", "fsdp"),),
            "config.placement.rules: 'attn(' is not a regular expression: missing",
        ),
        ((".*", "fsdp"), "config.placement.rules must hold pairs such as ('.*', 'replicate')"),
        (((".*", "fsdp", 2),), "config.placement.rules must hold pairs"),
        (((".*", 2),), "config.placement.rules must hold pairs"),
        (
            ((".*", "mlps", "tensor"),),
            "the logical axis of '.*' in config.placement.rules is 'mlps'; did you mean 'mlp'?",
        ),
        (
            ((".*", "mlp", "data"),),
            "the mesh axis of '.*' in config.placement.rules is 'data'; it must be one of 'fsdp', 'tensor'",
        ),
    ],
)
def test_sharding_rules_are_pairs_of_an_expression_and_a_tactic(given, rules, sentence):
    assert refused(changed(given, placement__rules=rules)).startswith(sentence)


MOVING = dict(mode="progressive", end=7)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            dict(first=6),
            "config.sampler.window.length is 4, first is 6 and end is 0: the window must fit between "
            "them, within the schedule's 8 steps",
        ),
        (dict(first=-1), "config.sampler.window.length is 4, first is -1 and end is 0"),
        (dict(length=0), "config.sampler.window.length is 0; it must be at least 1"),
        (
            dict(mode="moving"),
            "config.sampler.window.mode is 'moving'; it must be one of 'fixed', 'ra",
        ),
        (
            dict(end=6),
            "config.sampler.window.end is 6 in mode 'fixed'; a window that moves needs the step before which it "
            "stops, a fixed one has none, which is 0",
        ),
        (
            dict(mode="random"),
            "config.sampler.window.end is 0 in mode 'random'",
        ),
        (
            MOVING | dict(end=9),
            "config.sampler.window.length is 4, first is 0 and end is 9: the window",
        ),
        (
            MOVING | dict(end=3),
            "config.sampler.window.length is 4, first is 0 and end is 3: the window",
        ),
        (MOVING | dict(interval=0), "config.sampler.window.interval must be above 0, not 0"),
        (MOVING | dict(stride=0), "config.sampler.window.stride must be above 0, not 0"),
        (dict(fraction=0.0), "config.sampler.window.fraction is 0.0; it must lie in (0, 1]"),
        (dict(fraction=1.5), "config.sampler.window.fraction is 1.5; it must lie in (0, 1]"),
        (
            dict(fraction=0.2),
            "config.sampler.window.fraction is 0.2, which selects none of 4 denoising steps; raise it",
        ),
    ],
)
def test_windows_that_cannot_be_trained_are_refused(given, fields, sentence):
    fields = {f"sampler__window__{name}": value for name, value in fields.items()}
    assert refused(changed(given, **fields)).startswith(sentence)


def test_a_pass_takes_no_more_steps_than_an_image_trains(given):
    given = changed(given, sampler__window__fraction=0.75, trainer__pack=3)
    full = open_recipe(given)
    assert full.trained_steps == 3
    sentence = (
        "config.trainer.pack = 4 is more than the 3 trained steps of config.sampler.window fill"
    )
    assert refused(changed(given, trainer__pack=4)).startswith(sentence)


@pytest.mark.parametrize("kind", ["ode", "dpm2"])
def test_start_noise_is_not_shared_where_nothing_else_is_random(given, kind):
    given = changed(given, sampler__shared_noise=True)
    open_recipe(given)
    sentence = (
        "config.sampler.shared_noise = True makes all images of a group equal, as a sampler of "
    )
    forward = dict(algorithm__name="awm", sampler__window=dict(length=0), sampler__noise_level=0.0)
    assert refused(changed(given, sampler__kind=kind, **forward)).startswith(sentence)


def test_a_pass_may_be_filled_up_to_an_equal_share_of_steps_for_every_device(given):
    """Three steps over two devices along "time": two each, one of them padding."""
    fields = dict(sampler__window=dict(length=3), placement__trainer=dict(data=2, fsdp=1, time=2))
    full = place(open_recipe(changed(given, **fields, trainer__pack=4)), 8)
    assert full.trainer.settings.pack == 4
    assert refused(changed(given, trainer__pack=6)).endswith("fill: set it to 4 or less")


# ------------------------------------------------------------------------------ advantages, rewards

TWO = dict(rewards=("shapes_geneval", "tests.engine.toy:brightness"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            dict(advantages__baseline="mean"),
            "config.advantages.baseline is 'mean'; it must be one of 'group_mean'",
        ),
        (dict(advantages__ddof=2), "config.advantages.ddof is 2; it must be one of 0, 1"),
        (
            dict(advantages__std="none", advantages__ddof=1),
            "config.advantages.ddof is 1, but std is 'none'; set ddof to 0",
        ),
        (dict(advantages__combine="sum"), "config.advantages.combine is 'sum'; it must be one of"),
        (
            dict(advantages__combine="gdpo"),
            "config.advantages.combine is 'gdpo', but reward_weights has a single weight; set combine "
            "to 'rewards'",
        ),
        (
            TWO | dict(advantages__combine="gdpo", advantages__std="global"),
            "config.advantages.combine is 'gdpo', which standardises each reward in its group, but std "
            "is 'global'",
        ),
        (
            dict(advantages__best_and_worst=7),
            "config.advantages.best_and_worst is 7; it must lie in [0, 6], half of the 12 images",
        ),
        (dict(advantages__best_and_worst=-1), "config.advantages.best_and_worst is -1; it must"),
        (
            dict(advantages__best_and_worst=2, sampler__chunk=6),
            "config.batch.images = 12 must divide config.sampler.chunk = 6, as with "
            "config.advantages.best_and_worst = 2 a chunk holds whole groups: set "
            "config.sampler.chunk to 12",
        ),
        (
            dict(advantages__best_and_worst=2, sampler__chunk=24, trainer__micro_batch=24),
            "config.trainer.micro_batch = 24 must divide config.sampler.chunk / config.batch.images "
            "* 2 * config.advantages.best_and_worst = 8, as micro-batches are cut from a chunk",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", weight=0)),
            "config.rewards leaves nothing to train on: give a reward a weight other than 0",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", weight=dict(a=0.0, b=0))),
            "config.rewards leaves nothing to train on",
        ),
        (
            dict(rewards=("json:dumps", dict(name="shapes_geneval", weight=float("inf")))),
            "config.rewards[1].weight must be a finite number, not inf",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", weight="1.0")),
            "config.rewards[0].weight must be a number, not '1.0'",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", weight=dict())),
            "config.rewards[0].weight = {} must be a number, or a dict from scores' names to numbers",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", weight=dict(a="1"))),
            "config.rewards[0].weight = {'a': '1'} must be a number, or a dict",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", wieght=1.0)),
            "config.rewards[0].wieght is not a field; did you mean config.rewards[0].weight?",
        ),
        (
            dict(rewards=(3,)),
            "config.rewards[0] must be a reward's name, or a section such as dict(",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", settings=3)),
            "config.rewards[0].settings must be a group of fields, not 3",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", settings=dict(sharp=3))),
            "config.rewards[0]: reward 'shapes_geneval' has no setting 'sharp'; it has none",
        ),
        (
            dict(rewards=dict(name="shapes_geneval", limit=-1)),
            "config.rewards[0].limit must be 0 or more, not -1",
        ),
        (
            dict(rewards=("json:dumps", dict(name="shapes_geneval", clip=5.0))),
            "config.advantages.combine is 'rewards', which bounds no reward's own advantages, but a reward "
            "has a clip of 5; set that to 0, or combine to 'advantages'",
        ),
        (
            dict(rewards=("shapes_geneval", "shapes")),
            "config.rewards[1]: unknown reward 'shapes': use one of",
        ),
        (
            dict(rewards=("json:dumps", "json:dumps")),
            "config.rewards[0]: reward 'json:dumps' takes",
        ),
        (
            dict(rewards=("shapes_geneval", "shapes_geneval")),
            "config.rewards[1]: reward 'shapes_geneval' is named twice",
        ),
        (
            dict(reward__name=("shapes_geneval",)),
            "config.reward is not a field; it is config.rewards, a list with a section or a name for each "
            "reward, and config.reward_pool now",
        ),
    ],
)
def test_advantages_and_rewards_that_do_not_fit_are_refused(given, fields, sentence):
    assert refused(changed(given, **fields)).startswith(sentence)


def test_devices_divide_the_images_that_are_kept(given):
    """Of 24 images 8 are trained: four devices divide them, as required by the micro-batch."""
    fields = dict(advantages__best_and_worst=2, sampler__chunk=24)
    place(open_recipe(changed(given, **fields, trainer__micro_batch=8)), 8)
    fields = changed(given, **fields, trainer__micro_batch=2)
    sentence = (
        "the number of devices of config.placement.trainer = 4 must divide config.trainer.micro"
    )
    assert refused(fields).startswith(sentence)


# ------------------------------------------------------------------------------ old log-probabilities


def test_current_log_probabilities_are_taken_for_one_update_and_refused_for_two(given):
    sizes = dict(sampler__chunk=72, trainer__micro_batch=72)
    given = changed(given, algorithm__old_log_probs="current", **sizes)
    assert open_recipe(given).algorithm.old_log_probs == "current"
    sentence = "config.algorithm.old_log_probs is 'current', but with 2 updates a step the policy"
    assert refused(changed(given, trainer__updates=2)).startswith(sentence)


# ------------------------------------------------------------------------------ the forward process

ODE = dict(sampler__kind="ode", sampler__window=dict(length=0), sampler__noise_level=0.0)
FORWARD = {
    "diffusion_nft": ODE | dict(algorithm=dict(name="diffusion_nft", times=dict(count=7))),
    "awm": ODE | dict(algorithm=dict(name="awm")),
    "diffusion_dpo": ODE | dict(algorithm=dict(name="diffusion_dpo"), trainer__micro_batch=24),
}


def of_method(given, name, **fields):
    fields = {k: ConfigDict(v) if type(v) is dict else v for k, v in FORWARD[name].items()} | fields
    return changed(given, **fields)


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (
            "diffusion_nft",
            dict(sampler__window=dict(length=4)),
            "config.algorithm.name = 'diffusion_nft' trains final images, which are sampled without noise: set "
            "config.sampler.window.length to 0, config.sampler.kind to 'ode' or 'dpm2'",
        ),
        ("awm", dict(sampler__kind="cps"), "config.algorithm.name = 'awm' trains final images"),
        ("awm", dict(sampler__noise_level=0.8), "config.sampler.noise_level of ode is 0.8; set it"),
        (
            "awm",
            dict(precision__trajectory="bfloat16"),
            "config.precision.trajectory = 'bfloat16' is the type of stored transitions, but "
            "config.algorithm.name = 'awm' trains final images: set it to 'float32'",
        ),
        (
            "diffusion_nft",
            dict(sampler__steps=6),
            "config.algorithm.times.count is 7; train 1 to 6, the sampler's steps",
        ),
        ("awm", dict(algorithm__times__std=0.0), "config.algorithm.times.std is 0.0; it must be"),
        ("awm", dict(algorithm__ema__largest=1.0), "config.algorithm.ema.largest is 1.0; it must"),
        ("awm", dict(algorithm__weighting="t"), "config.algorithm.weighting is 't'; it must be"),
        (
            "awm",
            dict(algorithm__old_log_probs="current", runtime__max_policy_lag=1),
            "config.algorithm.old_log_probs is 'current', but with asynchrony the policy being trained is "
            "not the one that sampled: set it to 'recomputed'",
        ),
        (
            "awm",
            dict(trainer__pack=7),
            "config.trainer.pack = 7 is more than the 6 noise levels of config.algorithm.times fill: set",
        ),
        (
            "diffusion_nft",
            dict(runtime__max_incomplete_groups=2),
            "config.runtime.max_incomplete_groups = 2 is for policy_gradient, whose loss may be linear",
        ),
        (
            "diffusion_nft",
            dict(algorithm__clip_range=0.1),
            "config.algorithm.clip_range is a field of policy_gradient and awm, but config.algorithm.name is "
            "'diffusion_nft': leave it out of the config file, or where only the name was given on the "
            "command line, start from a recipe for diffusion_nft",
        ),
        ("awm", dict(algorithm__guidance=-1.0), "config.algorithm.guidance is -1.0; it must be"),
        (
            "diffusion_dpo",
            dict(algorithm__reference_guidance=math.nan),
            "config.algorithm.reference_guidance must be a finite number, not nan",
        ),
        (
            "diffusion_nft",
            dict(algorithm__reference_guidance=4.5, algorithm__kl_coefficient=0.0),
            "config.algorithm.reference_guidance is 4.5 and guidance 1.0, but with kl_coefficient 0 no reference "
            "is evaluated: leave",
        ),
        (
            "awm",
            dict(algorithm__wieghting="sigma"),
            "config.algorithm.wieghting is not a field; did",
        ),
        (
            "diffusion_dpo",
            dict(advantages__best_and_worst=2),
            "config.advantages.best_and_worst = 2 cannot change which pair of each group diffusion_dpo trains, its "
            "best and its worst image: set it to 0",
        ),
        (
            "diffusion_dpo",
            TWO
            | dict(advantages__ddof=1, advantages__drop_zero_std=True, advantages__std="global"),
            "config.advantages.ddof = 1 and config.advantages.drop_zero_std = True and config.advantages.std = "
            "'global' cannot change which pair of each group diffusion_dpo trains, its best and its worst image: "
            "set them to 0 and False and 'group'",
        ),
        (
            "diffusion_dpo",
            TWO | dict(advantages__combine="gdpo", advantages__baseline="leave_one_out"),
            "config.advantages.combine is 'gdpo', which standardises each reward",
        ),
        (
            "diffusion_dpo",
            TWO | dict(advantages__combine="advantages", advantages__baseline="leave_one_out"),
            "config.advantages.baseline = 'leave_one_out' cannot change",
        ),
        (
            "diffusion_dpo",
            dict(algorithm__set_steps=-1),
            "config.algorithm.set_steps is -1; set it",
        ),
        (
            "diffusion_dpo",
            dict(sampler__chunk=6, trainer__micro_batch=2),
            "config.batch.images = 12 must divide config.sampler.chunk = 6, as diffusion_dpo chooses",
        ),
        (
            "diffusion_dpo",
            dict(trainer__micro_batch=3),
            "config.trainer.micro_batch = 3 must be even, as diffusion_dpo trains pairs",
        ),
        (
            "diffusion_dpo",
            dict(trainer__micro_batch=16),
            "config.trainer.micro_batch = 16 must divide twice the groups of a chunk = 24",
        ),
        (
            "diffusion_dpo",
            dict(trainer__micro_batch=4),
            "the number of devices of config.placement.trainer = 4 must divide config.trainer.micro_batch / 2, "
            "the pairs of a pass, = 2",
        ),
    ],
)
def test_what_cannot_train_on_the_forward_process_is_refused(given, name, fields, sentence):
    assert refused(of_method(given, name, **fields)).startswith(sentence)


def test_a_policy_gradient_replays_with_the_samplers_guidance(given):
    sentence = (
        "config.algorithm.guidance is a field of diffusion_nft and awm and diffusion_dpo, but"
    )
    assert refused(changed(given, algorithm__guidance=1.0)).startswith(sentence)


def test_a_complete_config_does_not_become_another_algorithms_by_its_name(given):
    full = recipe.complete(given)
    full.algorithm.name = "awm"
    sentence = "config.algorithm.clip_high is a field of policy_gradient, but config.algorithm.name is 'awm'"
    assert refused(full).startswith(sentence)


# ------------------------------------------------------------------------------ dynamic sampling


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            dict(runtime__redundant_groups=2),
            "config.runtime.redundant_groups = 2 is for dynamic sampling, which is off: set "
            "config.runtime.max_candidates to 14 or more, or config.runtime.redundant_groups to 0",
        ),
        (
            dict(runtime__max_candidates=13, runtime__redundant_groups=2),
            "config.runtime.max_candidates = 13 must be at least config.batch.groups + "
            "config.runtime.redundant_groups = 14, or 0 for no dynamic sampling",
        ),
        (
            dict(runtime__max_candidates=-1),
            "config.runtime.max_candidates must be 0 or more, not -1",
        ),
        (
            dict(runtime__redundant_groups=-1),
            "config.runtime.redundant_groups must be 0 or more, not -1",
        ),
        (
            dict(runtime__max_candidates=20, sampler__chunk=144),
            "config.sampler.chunk = 144 must divide config.batch.images = 12, as with "
            "config.runtime.max_candidates a group that is replaced must not share a chunk",
        ),
    ],
)
def test_dynamic_sampling_that_cannot_work_is_refused(given, fields, sentence):
    sizes = dict(sampler__chunk=12, trainer__micro_batch=12)
    assert refused(changed(given, **sizes | fields)).startswith(sentence)


# ------------------------------------------------------------------------------ early groups

EARLY = dict(
    runtime__max_incomplete_groups=2,
    algorithm__old_log_probs="current",
    sampler__chunk=4,
    trainer__micro_batch=4,
)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            dict(runtime__max_policy_lag=1),
            "config.runtime.max_incomplete_groups = 2 cannot go with config.runtime.max_policy_lag = 1, as older "
            "weights' ratios are not 1: set that to 0, or config.runtime.max_incomplete_groups to 0",
        ),
        (
            dict(trainer__updates=2),
            "config.runtime.max_incomplete_groups = 2 cannot go with config.trainer.updates = 2",
        ),
        (
            dict(runtime__max_candidates=20),
            "config.runtime.max_incomplete_groups = 2 cannot go with config.runtime.max_candidates = 20",
        ),
        (
            dict(runtime__ordered="yes"),
            "config.runtime.max_incomplete_groups = 2 cannot go with config.runtime.ordered = 'yes', as what is "
            "trained before its group is complete depends on arrival: set that to 'auto', or config",
        ),
        (
            dict(algorithm__old_log_probs="auto"),
            "config.algorithm.old_log_probs is 'rollout'; to train before a group is complete set it "
            "to 'current'",
        ),
        (
            dict(algorithm__adv_clip=3.0),
            "config.algorithm.adv_clip is 3.0; to train before a group is complete set it to sqrt(11)",
        ),
        (
            dict(advantages__std="global"),
            "config.algorithm.adv_clip is 5.0; to train before a group is complete set it to sqrt(132)",
        ),
        (
            dict(sampler__chunk=8),
            "config.sampler.chunk = 8 must divide config.batch.images = 12, as with "
            "config.runtime.max_incomplete_groups = 2 a chunk belongs to one group",
        ),
        (
            dict(sampler__chunk=12),
            "config.runtime.max_incomplete_groups = 2 changes nothing where config.sampler.chunk = 12 is a "
            "whole group: set that to less, or config.runtime.max_incomplete_groups to 0",
        ),
        (
            TWO,
            "config.runtime.max_incomplete_groups = 2 cannot go with config.rewards = shapes_geneval, "
            "tests.engine.toy:brightness, as it is shown to be exact for a single reward only: set that to "
            "shapes_geneval",
        ),
        *(
            (
                {f"advantages__{name}": value},
                f"config.advantages.{name} is {value!r}; to train before",
            )
            for name, value in (
                ("baseline", "leave_one_out"),
                ("std", "none"),
                ("ddof", 1),
                ("drop_zero_std", True),
            )
        ),
        (
            dict(runtime__max_incomplete_groups=-1),
            "config.runtime.max_incomplete_groups must be 0 or more, not -1",
        ),
    ],
)
def test_training_early_where_that_is_not_exact_is_refused(given, fields, sentence):
    assert refused(changed(given, **EARLY | fields)).startswith(sentence)


# ------------------------------------------------------------------------------ batches


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            dict(trainer__updates=5),
            "config.trainer.updates = 5 must divide config.batch.groups = 12, as each update trains "
            "its own groups: set config.batch.groups to 10 or 15, or change config.trainer.updates",
        ),
        (
            dict(sampler__chunk=100),
            "config.sampler.chunk = 100 must divide config.batch.groups * config.batch.images / "
            "config.trainer.updates = 144, as a chunk belongs to one update",
        ),
        (
            dict(trainer__updates=2),
            "config.sampler.chunk = 144 must divide config.batch.groups * config.batch.images / "
            "config.trainer.updates = 72",
        ),
        (
            dict(trainer__micro_batch=100),
            "config.trainer.micro_batch = 100 must divide config.sampler.chunk = 144",
        ),
    ],
)
def test_a_step_that_cannot_be_cut_is_refused(given, fields, sentence):
    assert refused(changed(given, **fields)).startswith(sentence)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            dict(placement__rollout=dict(data=5, fsdp=1), placement__trainer=dict(data=3, fsdp=1)),
            "the number of devices of config.placement.rollout = 5 must divide "
            "config.sampler.chunk = 144, as images are split evenly over a mesh's devices: set",
        ),
        (
            dict(evaluation__batch=90),
            "the number of devices of config.placement.rollout = 4 must divide "
            "config.evaluation.batch = 90",
        ),
        (
            dict(placement__trainer=dict(data=4, fsdp=1), trainer__micro_batch=2),
            "the number of devices of config.placement.trainer = 4 must divide "
            "config.trainer.micro_batch = 2",
        ),
        (
            dict(placement__rollout=dict(data=0, fsdp=1), placement__trainer=dict(data=5, fsdp=1)),
            "the number of devices of config.placement.trainer = 5 must divide "
            "config.sampler.chunk = 144",
        ),
        (
            dict(placement__trainer=dict(data=2, fsdp=1, time=2), trainer__micro_batch=3)
            | dict(trainer__pack=2),
            "the number of devices of config.placement.trainer / config.placement.trainer.time = 2 must "
            "divide config.trainer.micro_batch = 3, as images",
        ),
        (
            dict(
                placement__rollout=dict(data=0),
                placement__trainer=dict(data=4, tensor=2),
                trainer__micro_batch=2,
            ),
            "the number of devices of config.placement.trainer / config.placement.trainer.tensor = 4 must "
            "divide config.trainer.micro_batch = 2",
        ),
        (
            dict(placement__trainer=dict(data=2, fsdp=4)),
            "config.placement.rollout wants 4 and config.placement.trainer 8 devices, but there are "
            "8: make the meshes smaller",
        ),
    ],
)
def test_meshes_that_do_not_fit_are_refused(given, fields, sentence):
    config = changed(given, **fields)
    assert refused(config).startswith(sentence)
    place(open_recipe(config), 1)  # where nothing is split


# ------------------------------------------------------------------------------ prompts, reward


@pytest.mark.parametrize("field", ["prompts__file", "evaluation__prompts"])
@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.txt", None, "There is no prompt file at FILE"),
        ("empty.txt", "", "FILE holds no prompt: write at least one line."),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', 'FILE, line 2: "prompt" is 3; write a'),
        ("bad.json", "{}", "FILE ends in '.json': a prompt file is .jsonl"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_refused(
    given, tmp_path, field, name, content, sentence
):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    expected = f"config.{field.replace('__', '.')}: {sentence.replace('FILE', str(file))}"
    assert refused(changed(given, **{field: str(file)})).startswith(expected)


def test_several_prompt_files_take_the_place_of_the_one(given, prompts, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("a ring\n")
    files = (str(prompts), str(other))
    for file in ("", "none.txt"):
        config = changed(given, prompts__file=file, prompts__files=files, prompts__weights=(3, 0.5))
        assert place(open_recipe(config), 8).prompts.paths == files
    assert open_recipe(changed(given, prompts__files=(), prompts__weights=())).prompts.paths == (
        "none.txt",
    )
    other.unlink()
    sentence = f"config.prompts.files: There is no prompt file at {other}: give the path"
    assert refused(changed(given, prompts__files=files)).startswith(sentence)


@pytest.mark.parametrize(
    ("files", "weights", "sentence"),
    [
        (
            ("a", "b"),
            (1,),
            "config.prompts.weights = (1,) must have a weight for each of the 2 files of",
        ),
        ((), (1,), "config.prompts.weights = (1,) must have a weight for each of the 0 files of"),
        (
            ("a", "b"),
            (1, 0),
            "config.prompts.weights = (1, 0) must hold positive numbers: leave out",
        ),
        (("a", "b"), (1, math.inf), "config.prompts.weights = (1, inf) must hold positive numbers"),
        (("a", "b"), ("1", 1), "config.prompts.weights = ('1', 1) must hold positive numbers"),
        (("a", "b", "a"), (), "config.prompts.files has 'a' twice: name it once, with a larger"),
        (("a", ""), (), "config.prompts.files must hold paths of prompt files, not ''"),
    ],
)
def test_weights_that_do_not_fit_the_prompt_files_are_refused(given, files, weights, sentence):
    config = changed(given, prompts__files=files, prompts__weights=weights)
    assert refused(config).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shapes", "unknown reward 'shapes': use one of aesthetic, "),
        ("no_such_module:f", "reward 'no_such_module:f': there is no module 'no_such_module' in"),
        ("json:nicest", "reward 'json:nicest': module json has no function 'nicest'"),
    ],
)
def test_a_reward_that_there_is_not_is_refused(given, name, sentence):
    sentence = f"config.rewards[0]: {sentence}"
    assert refused(changed(given, rewards=name)).startswith(sentence)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import no_such_dependency", "ModuleNotFoundError"),
        ("raise ValueError('my bug')", "ValueError"),
    ],
)
def test_an_error_inside_the_users_reward_is_said_with_its_line(
    given, tmp_path, monkeypatch, line, error
):
    name = "reward_" + re.sub(r"\W", "_", line)
    (tmp_path / f"{name}.py").write_text(line + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = refused(changed(given, rewards=f"{name}:f"))
    assert said.startswith(f"config.rewards[0]: reward '{name}:f' cannot be imported: {error}: ")
    assert f"{name}.py, line 1, in <module>: {line}" in said


def test_ratios_of_trajectories_want_all_steps_of_an_image_in_a_pass(given):
    whole = changed(given, algorithm__ratio="sequence_mean", sampler__window__length=3)
    assert refused(whole).startswith(
        "config.algorithm.ratio = 'sequence_mean' puts the steps of an image together, so that a pass has to hold "
        "them all: set config.trainer.pack to 3"
    )
    whole.trainer = ConfigDict(dict(pack=3))
    open_recipe(whole)
    split = changed(whole, trainer__pack=4, placement__trainer=dict(data=2, time=2))
    assert "config.placement.trainer.time = 2 splits them: set that to 1" in refused(split)


# ------------------------------------------------------------------------------ numbers


def test_every_number_has_a_range_or_is_checked_with_what_it_depends_on(given):
    """NaN is refused everywhere, and infinity in all floats except the few that allow it."""
    full = recipe.complete(given)
    for name, value in checks.numbers.RANGES.items():
        one = full.rewards[0] if "[i]" in name else full
        assert value[0] <= checks._value(one, name.removeprefix("rewards[i].")) <= value[1]
    infinite = changed(given, trainer__clip_norm=float("inf"))
    open_recipe(infinite)


def test_a_seed_beyond_the_range_would_be_that_of_another_run():
    """The reason of the range: JAX keeps 32 bits of a seed."""
    keys = [jax.random.key_data(jax.random.key(seed)) for seed in (0, LARGEST_SEED, 2**32)]
    assert (keys[0] == keys[2]).all() and (keys[0] != keys[1]).any()


def test_images_are_split_over_batch_axes_only(given):
    config = changed(
        given,
        placement__rollout=dict(data=2, fsdp=1, tensor=2),
        placement__trainer=dict(data=1, fsdp=2, tensor=2),
        trainer__micro_batch=2,
    )
    place(open_recipe(config), 8)
