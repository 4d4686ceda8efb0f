"""Configs that are refused before anything slow: one sentence, which names the fields to change."""

import math
import re
import sys

import jax
import pytest
from ml_collections import ConfigDict

from digen_jax.config.checks import allowed_of
from digen_jax.config.fields import flat
from digen_jax.config.load import complete, fit_config, load_config, replaced
from digen_jax.config.train_config import ALGORITHMS
from digen_jax.errors import LARGEST_SEED, ConfigError
from tests.config.cases import DYNAMIC, EARLY, FORWARD, TWO, changed

NFT, AWM, DPO, GROUPS = (
    FORWARD[name] for name in ("diffusion_nft", "awm", "diffusion_dpo", "dgpo")
)

FILES = DPO | dict(
    algorithm=dict(name="diffusion_dpo", from_files=True), batch__groups=72, batch__images=2
)


def refused(config) -> str:
    """The sentence that refuses a config on 8 devices."""
    with pytest.raises(ConfigError) as caught:
        fit_config(load_config(config), 8)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def named(sentence: str) -> list[str]:
    """The fields that a sentence names, in this order, each once."""
    found = re.findall(r"config\.([a-z_]+(?:\[\d\])?(?:\.[a-z_0-9]+)*)", sentence)
    return list(dict.fromkeys(found))


def outside(allowed, integer: bool):
    """Values below and above a range, and NaN, or one that is no choice."""
    if isinstance(allowed, tuple):
        return [-1 if integer else "nothing"]
    ends = [
        (allowed.least, allowed.excluded == "least", -1),
        (allowed.most, allowed.excluded == "most", 1),
    ]
    found = [end if excluded else end + by for end, excluded, by in ends if math.isfinite(end)]
    return [int(one) if integer else float(one) for one in found] + [math.nan] * (not integer)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_outside_of_ranges_and_choices_are_refused(given, algorithm):
    """With one message for each of the fields, which are all changed at once."""
    given = complete(changed(given, **FORWARD.get(algorithm, {})))
    defaults, wrong = flat(given), {}
    for name, allowed in allowed_of(algorithm).items():
        if algorithm in FORWARD and not name.startswith("algorithm."):
            continue  # as with the other algorithm
        default = defaults.get(f"config.{name}")
        if type(default) in (int, float, str) and name not in ("algorithm.name", "placement.mode"):
            wrong[name] = outside(allowed, type(default) is int)
    for place in range(max(map(len, wrong.values()))):
        values = {name: each[place] for name, each in wrong.items() if place < len(each)}
        config = given.copy_and_resolve_references()
        changed(config, **{name.replace(".", "__"): value for name, value in values.items()})
        with pytest.raises(ConfigError) as caught:
            load_config(config)
        found = {named(line)[0] for line in str(caught.value).splitlines() if "config." in line}
        assert found == {*values}
    assert sum(map(len, wrong.values())) > (4 if algorithm in FORWARD else 80)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (dict(lora__path="tuned"), "lora.path lora.rank lora.alpha lora.targets"),
        (dict(precision__frozen="int8"), "precision.frozen lora.rank"),
        (dict(precision__frozen="float8"), "precision.frozen lora.rank"),
        (dict(trainer__pack=5), "trainer.pack sampler.window"),
        (
            dict(placement__trainer=dict(data=1, fsdp=1, time=2)),
            "placement.trainer.time trainer.pack",
        ),
        (dict(trainer__ema_every=8), "trainer.ema"),
        (dict(trainer__decay=1), "trainer.warmup trainer.decay"),
        (dict(model__folder=""), "model.folder"),
        (dict(algorithm__name="flow_dpo"), "algorithm.name"),
        (dict(algorithm__ratio="guard"), "algorithm.ratio sampler.kind"),
        (dict(algorithm__clip_range=1e-07), "algorithm.clip_range"),
        (dict(sampler__kind="ode"), "sampler.kind"),
        (dict(sampler__noise_level=0.0), "sampler.noise_level"),
        (dict(sampler__guidence=1.0), "sampler.guidence sampler.guidance"),
        (dict(guidance=1.0), "guidance sampler.guidance"),
        (dict(samplr__steps=8), "samplr sampler"),
        (dict(sampler__steps="8"), "sampler.steps"),
        (dict(model__remat=True), "model.remat"),
        (dict(sampler__window=(1, 4)), "sampler.window"),
        (dict(sampler__window__first=0.0), "sampler.window.first"),
        (dict(trainer=3), "trainer"),
        (dict(algorithm__advantage_std="group"), "algorithm.advantage_std advantages.std"),
        (dict(placement__rules=((".*", "fdsp"),)), "placement.rules"),
        (dict(placement__rules=(("attn(", "fsdp"),)), "placement.rules"),
        (dict(placement__rules=(".*", "fsdp")), "placement.rules"),
        (dict(placement__rules=((".*", "mlps", "tensor"),)), "placement.rules"),
        (dict(placement__rules=((".*", "mlp", "data"),)), "placement.rules"),
        (dict(sampler__window__first=6), "sampler.window.length"),
        (dict(sampler__window__length=0), "sampler.window.length"),
        (dict(sampler__window__end=6), "sampler.window.end"),
        (dict(sampler__window__mode="random"), "sampler.window.end"),
        (
            dict(sampler__window__mode="progressive", sampler__window__end=9),
            "sampler.window.length",
        ),
        (
            dict(sampler__window__mode="progressive", sampler__window__end=3),
            "sampler.window.length",
        ),
        (
            dict(
                sampler__window__mode="progressive",
                sampler__window__end=7,
                sampler__window__stride=0,
            ),
            "sampler.window.stride",
        ),
        (dict(sampler__window__timestep_fraction=0.2), "sampler.window.timestep_fraction"),
        (dict(advantages__std="none", advantages__ddof=1), "advantages.ddof"),
        (dict(advantages__combine="gdpo"), "advantages.combine"),
        (dict(advantages__combine="advantages"), "advantages.combine"),
        (TWO | dict(advantages__combine="gdpo", advantages__std="global"), "advantages.combine"),
        (dict(advantages__best_and_worst=7), "advantages.best_and_worst"),
        (
            dict(advantages__best_and_worst=2, sampler__chunk=6),
            "batch.images sampler.chunk advantages.best_and_worst",
        ),
        (
            dict(advantages__best_and_worst=2, sampler__chunk=24, trainer__micro_batch=24),
            "trainer.micro_batch sampler.chunk batch.images advantages.best_and_worst",
        ),
        (dict(rewards=dict(name="shapes_geneval", weight=dict(a=0.0, b=0))), "rewards"),
        (
            dict(rewards=("json:dumps", dict(name="shapes_geneval", weight=math.inf))),
            "rewards[1].weight",
        ),
        (dict(rewards=dict(name="shapes_geneval", weight="1.0")), "rewards[0].weight"),
        (dict(rewards=dict(name="shapes_geneval", weight=dict(a="1"))), "rewards[0].weight"),
        (
            dict(rewards=dict(name="shapes_geneval", wieght=1.0)),
            "rewards[0].wieght rewards[0].weight",
        ),
        (dict(rewards=(3,)), "rewards[0]"),
        (dict(rewards=dict(name="shapes_geneval", settings=3)), "rewards[0].settings"),
        (dict(rewards=dict(name="shapes_geneval", settings=dict(sharp=3))), "rewards[0]"),
        (dict(rewards=("json:dumps", dict(name="shapes_geneval", clip=5.0))), "advantages.combine"),
        (dict(rewards=("shapes_geneval", "shapes")), "rewards[1]"),
        (dict(rewards=("json:dumps", "json:dumps")), "rewards[0]"),
        (dict(rewards=("shapes_geneval", "shapes_geneval")), "rewards[1]"),
        (dict(reward__name=("shapes_geneval",)), "reward rewards reward_pool"),
        (
            NFT | dict(sampler__window=dict(length=4)),
            "algorithm.name sampler.window.length sampler.kind sampler.noise_level",
        ),
        (
            AWM | dict(sampler__kind="cps"),
            "algorithm.name sampler.window.length sampler.kind sampler.noise_level",
        ),
        (AWM | dict(sampler__noise_level=0.8), "sampler.noise_level"),
        (AWM | dict(precision__trajectory="bfloat16"), "precision.trajectory algorithm.name"),
        (NFT | dict(sampler__steps=6), "algorithm.times.count"),
        (
            AWM | dict(algorithm__old_log_probs="current", runtime__max_policy_lag=1),
            "algorithm.old_log_probs",
        ),
        (AWM | dict(trainer__pack=7), "trainer.pack algorithm.times"),
        (NFT | dict(runtime__max_incomplete_groups=2), "runtime.max_incomplete_groups"),
        (NFT | dict(algorithm__clip_range=0.1), "algorithm.clip_range algorithm.name"),
        (
            NFT | dict(algorithm__reference_guidance=4.5, algorithm__kl_coefficient=0.0),
            "algorithm.reference_guidance",
        ),
        (AWM | dict(algorithm__wieghting="sigma"), "algorithm.wieghting algorithm.weighting"),
        (DPO | dict(advantages__best_and_worst=2), "advantages.best_and_worst"),
        (
            DPO
            | TWO
            | dict(advantages__ddof=1, advantages__drop_zero_std=True, advantages__std="global"),
            "advantages.ddof advantages.drop_zero_std advantages.std",
        ),
        (
            DPO | TWO | dict(advantages__combine="gdpo", advantages__baseline="leave_one_out"),
            "advantages.combine",
        ),
        (
            DPO
            | TWO
            | dict(advantages__combine="advantages", advantages__baseline="leave_one_out"),
            "advantages.baseline",
        ),
        (DPO | dict(sampler__chunk=6, trainer__micro_batch=2), "batch.images sampler.chunk"),
        (DPO | dict(trainer__micro_batch=3), "trainer.micro_batch"),
        (DPO | dict(trainer__micro_batch=16), "trainer.micro_batch"),
        (
            GROUPS | dict(sampler__chunk=16, trainer__micro_batch=16),
            "batch.images sampler.chunk",
        ),
        (GROUPS | dict(trainer__micro_batch=16), "batch.images trainer.micro_batch"),
        (
            GROUPS | dict(sampler__chunk=72, trainer__micro_batch=48),
            "trainer.micro_batch sampler.chunk",
        ),
        (GROUPS | dict(advantages__best_and_worst=2), "advantages.best_and_worst"),
        (GROUPS | dict(algorithm__times__first=9), "algorithm.times.first"),
        (GROUPS | dict(algorithm__times__first=3), "algorithm.times.count"),
        (DPO | dict(trainer__micro_batch=4), "placement.trainer trainer.micro_batch"),
        (
            DYNAMIC | dict(runtime__oversampled_groups=2),
            "runtime.oversampled_groups runtime.max_candidates",
        ),
        (
            DYNAMIC | dict(runtime__max_candidates=13, runtime__oversampled_groups=2),
            "runtime.max_candidates batch.groups runtime.oversampled_groups",
        ),
        (
            DYNAMIC | dict(runtime__max_candidates=20, sampler__chunk=144),
            "sampler.chunk batch.images runtime.max_candidates",
        ),
        (
            EARLY | dict(runtime__max_policy_lag=1),
            "runtime.max_incomplete_groups runtime.max_policy_lag",
        ),
        (EARLY | dict(trainer__updates=2), "runtime.max_incomplete_groups trainer.updates"),
        (
            EARLY | dict(runtime__max_candidates=20),
            "runtime.max_incomplete_groups runtime.max_candidates",
        ),
        (
            EARLY | dict(runtime__deterministic_order="yes"),
            "runtime.max_incomplete_groups runtime.deterministic_order",
        ),
        (EARLY | dict(algorithm__old_log_probs="auto"), "algorithm.old_log_probs"),
        (EARLY | dict(algorithm__adv_clip=3.0), "algorithm.adv_clip"),
        (EARLY | dict(advantages__std="global"), "algorithm.adv_clip"),
        (
            EARLY | dict(sampler__chunk=8),
            "sampler.chunk batch.images runtime.max_incomplete_groups",
        ),
        (EARLY | dict(sampler__chunk=12), "runtime.max_incomplete_groups sampler.chunk"),
        (EARLY | TWO, "runtime.max_incomplete_groups rewards"),
        (EARLY | dict(advantages__baseline="leave_one_out"), "advantages.baseline"),
        (EARLY | dict(advantages__std="none"), "advantages.std"),
        (EARLY | dict(advantages__std="max_group"), "advantages.std"),
        (EARLY | dict(advantages__best_and_worst=2), "advantages.best_and_worst"),
        (EARLY | dict(algorithm__old_log_probs="recomputed"), "algorithm.old_log_probs"),
        (EARLY | dict(algorithm__surrogate="topr"), "algorithm.surrogate"),
        (EARLY | dict(algorithm__ratio="guard", sampler__kind="flow"), "algorithm.ratio"),
        (EARLY | dict(algorithm__step_weight="longcat"), "algorithm.step_weight"),
        (dict(algorithm__step_weight="flash"), "algorithm.step_weight sampler.kind"),
        (FILES | dict(batch__images=3, sampler__chunk=12), "batch.images algorithm.name"),
        (FILES | dict(runtime__max_policy_lag=1), "runtime.max_policy_lag algorithm.name"),
        (FILES | dict(runtime__max_candidates=99), "runtime.max_candidates algorithm.name"),
        (FILES | dict(advantages__baseline="leave_one_out"), "advantages.baseline algorithm.name"),
        (FILES | dict(model__frames=5), "algorithm.name model.frames"),
        (FILES | dict(algorithm__set_steps=3), "algorithm.set_steps"),
        (
            FILES | dict(placement__mode="auto"),
            "placement algorithm.name placement.rollout.data placement.trainer.data",
        ),
        (EARLY | dict(advantages__ddof=1), "advantages.ddof"),
        (EARLY | dict(advantages__kl_reward=0.1), "advantages.kl_reward"),
        (NFT | dict(advantages__kl_reward=0.1), "advantages.kl_reward algorithm.name"),
        (
            dict(advantages__kl_reward=0.1, sampler__window__timestep_fraction=0.5),
            "advantages.kl_reward sampler.window.timestep_fraction",
        ),
        (EARLY | dict(advantages__drop_zero_std=True), "advantages.drop_zero_std"),
        (dict(trainer__updates=5), "trainer.updates batch.groups"),
        (dict(sampler__chunk=100), "sampler.chunk batch.groups batch.images trainer.updates"),
        (dict(trainer__updates=2), "sampler.chunk batch.groups batch.images trainer.updates"),
        (dict(trainer__micro_batch=100), "trainer.micro_batch sampler.chunk"),
        (
            dict(placement__rollout=dict(data=5), placement__trainer=dict(data=3)),
            "placement.rollout sampler.chunk",
        ),
        (dict(evaluation__batch=90), "placement.rollout evaluation.batch"),
        (
            dict(placement__trainer=dict(data=4, fsdp=1), trainer__micro_batch=2),
            "placement.trainer trainer.micro_batch",
        ),
        (
            dict(placement__rollout=dict(data=0), placement__trainer=dict(data=5)),
            "placement.trainer sampler.chunk",
        ),
        (
            dict(
                placement__trainer=dict(data=2, fsdp=1, time=2),
                trainer__micro_batch=3,
                trainer__pack=2,
            ),
            "placement.trainer placement.trainer.time trainer.micro_batch",
        ),
        (
            dict(
                placement__rollout=dict(data=0),
                placement__trainer=dict(data=4, tensor=2),
                trainer__micro_batch=2,
            ),
            "placement.trainer placement.trainer.tensor trainer.micro_batch",
        ),
        (dict(placement__trainer=dict(data=2, fsdp=4)), "placement.rollout placement.trainer"),
        (dict(prompts__files=("a", "b"), prompts__weights=(1,)), "prompts.weights prompts.files"),
        (dict(prompts__files=(), prompts__weights=(1,)), "prompts.weights prompts.files"),
        (dict(prompts__files=("a", "b"), prompts__weights=(1, 0)), "prompts.weights"),
        (dict(prompts__files=("a", "b"), prompts__weights=(1, math.inf)), "prompts.weights"),
        (dict(prompts__files=("a", "b", "a"), prompts__weights=()), "prompts.files"),
        (dict(prompts__files=("a", ""), prompts__weights=()), "prompts.files"),
        (dict(rewards="shapes"), "rewards[0]"),
        (dict(rewards="json:nicest"), "rewards[0]"),
        (
            dict(rewards=("shapes_geneval", "tests.parallel.toy:brightest"), sampler__chunk=72)
            | dict(batch__images=48, batch__groups=3, trainer__micro_batch=72),
            "batch.images sampler.chunk rewards[1]",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused(given, fields, names):
    assert named(refused(changed(given, **fields))) == names.split()


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        (dict(trainer__pack=5), "set it to 4 or less"),
        (dict(trainer__updates=5), "config.batch.groups to 10 or 15"),
        (dict(trainer__warmup=2, trainer__decay=1), "config.trainer.decay to 98 or more"),
        (DYNAMIC | dict(runtime__max_candidates=13, runtime__oversampled_groups=2), "14, or 0"),
        (EARLY | dict(algorithm__adv_clip=3.0), "sqrt(11)"),
        (EARLY | dict(advantages__std="global"), "sqrt(132)"),
        (EARLY | dict(sampler__chunk=12), "config.runtime.max_incomplete_groups to 0"),
    ],
)
def test_the_sentence_says_what_to_change(given, fields, change):
    assert change in refused(changed(given, **fields))


def test_several_errors_are_listed_at_once(given):
    fields = dict(
        placement__trainer=dict(data=8, fsdp=1, time=2), rewards="json:no", prompts__file=""
    )
    with pytest.raises(ConfigError) as caught:
        fit_config(load_config(changed(given, **fields)), 8)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("4 errors") and len(lines) == 4
    first = ["prompts.file", "rewards[0]", "placement.trainer.time", "placement.rollout"]
    assert [named(line)[0] for line in lines] == first


@pytest.mark.parametrize(
    ("field", "value", "size"), [("max_candidates", 24, 12), ("max_policy_lag", 1, 72)]
)
def test_an_option_that_needs_smaller_chunks_names_all_that_change(given, field, value, size):
    given = changed(given, **{f"runtime__{field}": value})
    assert f"config.sampler.chunk and config.trainer.micro_batch to {size}" in refused(given)
    sizes = dict(sampler__chunk=size, trainer__micro_batch=size)
    fit_config(load_config(changed(given, **sizes)), 8)


@pytest.mark.parametrize("kind", ["ode", "dpm2", "unipc"])
def test_start_noise_is_not_shared_where_nothing_else_is_random(given, kind):
    load_config(changed(given, sampler__shared_noise=True))
    sentence = refused(changed(given, **AWM | dict(sampler__kind=kind)))
    assert named(sentence) == ["sampler.shared_noise", "sampler.kind"]


def test_a_pass_takes_the_steps_of_an_image_padded_to_an_equal_share_of_each_device(given):
    """Three steps over two devices along "time": two each, one of them padding."""
    fields = dict(sampler__window=dict(length=3), placement__trainer=dict(data=2, fsdp=1, time=2))
    full = fit_config(load_config(changed(given, **fields, trainer__pack=4)), 8)
    assert full.trainer.pack == 4
    assert refused(changed(given, trainer__pack=6)).endswith("4 or less")


def test_ratios_of_trajectories_need_all_steps_of_an_image_in_a_pass(given):
    given = changed(given, algorithm__ratio="sequence_mean", sampler__window__length=3)
    assert "config.trainer.pack to 3" in refused(given)
    load_config(changed(given, trainer__pack=3))
    split = changed(given, trainer__pack=4, placement__trainer=dict(data=2, time=2))
    assert named(refused(split)) == ["algorithm.ratio", "placement.trainer.time"]


def test_a_fraction_of_the_window_is_trained(given):
    given = changed(given, sampler__window__timestep_fraction=0.75, trainer__pack=3)
    assert load_config(given).trained_steps == 3
    assert refused(changed(given, trainer__pack=4)).startswith("config.trainer.pack = 4")


def test_meshes_are_not_checked_where_nothing_is_split(given):
    config = changed(given, placement__rollout=dict(data=5), placement__trainer=dict(data=3))
    refused(config)
    fit_config(load_config(config), 1)


def test_devices_divide_the_images_that_are_kept(given):
    """Of 24 images 8 are trained: four devices divide them, as required by the micro-batch."""
    fields = dict(advantages__best_and_worst=2, sampler__chunk=24)
    fit_config(load_config(changed(given, **fields, trainer__micro_batch=8)), 8)
    sentence = refused(changed(given, **fields, trainer__micro_batch=2))
    assert named(sentence) == ["placement.trainer", "trainer.micro_batch"]


def test_images_are_split_over_batch_axes_only(given):
    config = changed(
        given,
        placement__rollout=dict(data=2, fsdp=1, tensor=2),
        placement__trainer=dict(data=1, fsdp=2, tensor=2),
        trainer__micro_batch=2,
    )
    fit_config(load_config(config), 8)


def test_current_log_probabilities_are_for_one_update(given):
    sizes = dict(sampler__chunk=72, trainer__micro_batch=72)
    given = changed(given, algorithm__old_log_probs="current", **sizes)
    assert load_config(given).algorithm.old_log_probs == "current"
    assert named(refused(changed(given, trainer__updates=2))) == ["algorithm.old_log_probs"]


def test_a_complete_config_does_not_become_that_of_another_algorithm_by_its_name(given):
    full = complete(given)
    full.algorithm.name = "awm"
    assert named(refused(full)) == ["algorithm.clip_high", "algorithm.name"]


def test_a_word_for_the_placement_is_one_of_its_sizes(given):
    sentence = refused(replaced(given, placement="atuo"))
    assert named(sentence) == ["placement.mode"] and "'auto'" in sentence


def test_infinity_is_allowed_in_few_fields(given):
    load_config(changed(given, trainer__clip_norm=math.inf, algorithm__importance_cap=math.inf))


def test_a_seed_beyond_the_range_would_be_that_of_another_run():
    """The reason of the range: JAX keeps 32 bits of a seed."""
    keys = [jax.random.key_data(jax.random.key(seed)) for seed in (0, LARGEST_SEED, 2**32)]
    assert (keys[0] == keys[2]).all() and (keys[0] != keys[1]).any()


# ------------------------------------------------------------------------------ inputs


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_tracker_needs_a_project_and_its_package(given, tracker, monkeypatch):
    assert named(refused(changed(given, **{f"{tracker}__name": "first"}))) == [
        f"{tracker}.name",
        f"{tracker}.project",
    ]
    monkeypatch.setitem(sys.modules, tracker, None)
    sentence = refused(changed(given, **{f"{tracker}__project": "shapes"}))
    assert f"pip install {tracker}" in sentence


@pytest.mark.parametrize("field", ["prompts__file", "evaluation__prompts"])
@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("none.txt", None, "FILE"),
        ("empty.txt", "", "FILE"),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "FILE, line 2"),
        ("bad.json", "{}", "FILE"),
        ("named.jsonl", '{"prompt": "a"}\n{"prompt": "b", "rewards": ["ocr"]}', "FILE, line 2"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_refused(given, tmp_path, field, name, content, place):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    sentence = refused(changed(given, **{field: str(file)}))
    assert sentence.startswith(f"config.{field.replace('__', '.')}: ")
    assert place.replace("FILE", str(file)) in sentence


def test_several_prompt_files_replace_the_single_one(given, prompts, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("a ring\n")
    files = (str(prompts), str(other))
    for file in ("", "none.txt"):
        config = changed(given, prompts__file=file, prompts__files=files, prompts__weights=(3, 0.5))
        assert fit_config(load_config(config), 8).prompts.paths == files
    config = changed(given, prompts__files=(), prompts__weights=())
    assert load_config(config).prompts.paths == ("none.txt",)
    other.unlink()
    sentence = refused(changed(given, prompts__files=files))
    assert sentence.startswith("config.prompts.files: ") and str(other) in sentence


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import no_such_dependency", "ModuleNotFoundError"),
        ("raise ValueError('my bug')", "ValueError"),
    ],
)
def test_an_error_inside_the_users_reward_is_shown_with_its_line(
    given, tmp_path, monkeypatch, line, error
):
    name = "reward_" + re.sub(r"\W", "_", line)
    (tmp_path / f"{name}.py").write_text(line + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = refused(changed(given, rewards=f"{name}:f"))
    assert error in sentence and f"{name}.py, line 1, in <module>: {line}" in sentence


def test_sections_are_named_where_one_value_is_given(given):
    with given.ignore_type():
        given.trainer = 3
    assert named(refused(given))[0] == "trainer"
    assert named(refused(ConfigDict(dict(sampler=dict(window=(1, 4)))))) == ["sampler.window"]
