"""The configs of configs/: each is accepted, has its source's numbers, and fits at its model's real size."""

import dataclasses
import functools
import pathlib
import re
import runpy
import types
from typing import Any, NamedTuple

import huggingface_hub
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from digen_jax import assemble
from digen_jax.config.load import complete, default_config, fit_config, load_config, read_config
from digen_jax.diffusion.sampling import image_keys
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import open_pipeline
from digen_jax.models.family import Size
from digen_jax.models.published import published_folder
from digen_jax.parallel import policy
from digen_jax.parallel.encoding import example_record
from digen_jax.parallel.placement import devices_per_mesh
from digen_jax.parallel.sampler import steps_of_experts
from digen_jax.parallel.system import SampledImages, make_train_batch
from digen_jax.planning.memory import model_footprint
from digen_jax.planning.programs import step_records
from digen_jax.policies import check_heads, describe_computation
from tests.cases import quick, said

ROOT = pathlib.Path(__file__).parents[1]
GENEVAL = ROOT / "tests" / "data" / "geneval_test_metadata.jsonl"
EDITS = GENEVAL.with_name("edits.jsonl")
SD35 = "sd35_medium"
FLUX = "flux_dev"
KONTEXT = "flux_kontext"
Z_IMAGE = "zimage_turbo"
QWEN_IMAGE = "qwen_image"
KLEIN = "flux2_klein"
WAN = "wan21"
WAN22 = "wan22"
HUNYUAN = "hunyuan_video"
PUBLISHED = SD35, FLUX, KONTEXT, Z_IMAGE, QWEN_IMAGE, KLEIN, WAN, WAN22, HUNYUAN


@functools.cache
def module(name):
    return runpy.run_path(str(ROOT / "configs" / f"{name}.py"))


def recipes(name):
    """The names of a config's variants; a config without variants has one without a name."""
    return list(module(name).get("RECIPES", [""]))


def argument(recipe, gpus):
    return f"{recipe},{gpus}".removeprefix(",")


def load(name, *argument):
    """What a config file gives, with the fields that only a user can fill in filled in."""
    config = module(name)["get_config"](*argument)
    if name in PUBLISHED:
        config.prompts.file = config.evaluation.prompts = str(EDITS if name == KONTEXT else GENEVAL)
        config.rewards = default_config().rewards
        if config.advantages.combine != "rewards":
            config.rewards += ("jpeg_incompressibility",)
    return config


def of_published(name, *argument, folder=None):
    """The same with the configuration of the published model."""
    config = load(name, *argument)
    config.model.folder = str(published_folder(folder or config.model.folder))
    return config


EVERY = [(name, recipe) for name in PUBLISHED for recipe in recipes(name)]
each_recipe = pytest.mark.parametrize(("name", "recipe"), EVERY)


# ---------------------------------------------------------------------------------------- accepted


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_every_recipe_is_accepted(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load(name)
    if "algorithm" in config:
        assert complete(config).to_dict() == config.to_dict()  # any field can be overridden
        fit_config(load_config(config), 8)
        fit_config(load_config(config), 1)


def test_the_long_shapes_recipe_is_the_same_one_for_longer():
    short, long = (load("shapes_flow_grpo", length).to_dict() for length in ("short", "long"))
    assert long["steps"] > short["steps"]
    changed = {name for name in short if short[name] != long[name]}
    assert changed == {"steps", "trainer", "evaluation"}
    load_config(load("shapes_flow_grpo", "long"))
    with pytest.raises(ConfigError, match="must be short or long"):
        load("shapes_flow_grpo", "longer")


@pytest.mark.parametrize(("devices", "sizes"), [(1, (0, 1)), (2, (1, 1)), (8, (1, 1))])
def test_the_demo_fits_itself_to_the_devices_there_are(devices, sizes):
    fitted = fit_config(load_config(load("shapes_demo")), devices)
    assert devices_per_mesh(fitted.placement.meshes, devices) == sizes


@pytest.mark.parametrize("name", ["rewards", "prompts.file", "evaluation.prompts"])
def test_what_sd35_leaves_to_the_user_must_be_given(name):
    config = complete(load(SD35))
    *groups, field = name.split(".")
    holder = config[groups[0]] if groups else config
    holder[field] = type(holder[field])()
    with pytest.raises(ConfigError, match=f"config.{name} is not given: add --config.{name}="):
        fit_config(load_config(config), 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_wants_its_recipe_and_a_number_of_gpus(name):
    first = recipes(name)[0]
    if first:
        words = f"recipe and a number of GPUs.* recipes are {first}"
        wrong = ["", "8", "unknown,8"]
    else:
        words, wrong = "must be a number of GPUs, such as :8$", ["", "grpo,8"]
    for one in (*wrong, *(argument(first, gpus) for gpus in (0, -1, "two"))):
        with pytest.raises(ConfigError, match=words):
            load(name, one)


# Of chunks and micro-batches, the images of each GPU.
IMAGES = {KONTEXT: (3, 3), Z_IMAGE: (1, 1), QWEN_IMAGE: (16, 8), KLEIN: (1, 1), WAN: (8, 8)}
IMAGES |= {HUNYUAN: (12, 1)}
IMAGES |= {"longcat": (4, 1), "clip_pickscore_14b": (1, 1)}
IMAGES |= {"hpsv3_5b": (4, 4), "pickscore_a14b": (1, 1)}
GPUS = {
    SD35: (1, 8, 64),
    KONTEXT: (1, 7, 28),
    FLUX: (1, 2, 16),
    WAN: (1, 4, 8),
    HUNYUAN: (2, 8, 32),
}


@each_recipe
def test_a_config_divides_its_images_among_the_gpus(name, recipe):
    for gpus in GPUS.get(name, (1, 4, 16)):
        config = load(name, argument(recipe, gpus))
        fit_config(load_config(config), gpus)
        if name == SD35:
            continue
        of_flux = (1, 1) if recipe.startswith("dance") else (3, 3)
        sizes = config.sampler.chunk, config.trainer.micro_batch
        images = IMAGES.get(recipe, IMAGES.get(name, of_flux))
        assert sizes == tuple(gpus * n for n in images)
    if name == FLUX and not recipe.startswith("dance"):
        fit_config(load_config(load(FLUX, f"{recipe},64")), 64)


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_take_the_numbers_of_gpus_that_divide_them_and_list_them(name):
    found = module(name)
    of_argument = " ".join(found["__doc__"].split("\n\n")[2:4])
    listed = {int(number) for number in re.findall(r"\b\d+\b", of_argument)}
    one = not isinstance(found["PASSES"], dict)
    for key, passes in ({"": found["PASSES"]} if one else found["PASSES"]).items():
        prefix = f"{key}," if key else ""
        # On two GPUs, as SD3.5's batch on one is smaller.
        c = found["get_config"](f"{prefix}2")
        images = c.batch.groups * c.batch.images // c.trainer.updates
        assert images / (c.sampler.chunk / 2) == passes
        with pytest.raises(ConfigError, match=rf"gives 5 GPUs, but .+ takes 1, 2, .* or {passes}$"):
            found["get_config"](f"{prefix}5")
        assert {n for n in range(1, passes + 1) if passes % n == 0} <= listed


@each_recipe
def test_a_published_recipe_runs_on_separate_gpus_by_the_fields_in_its_docstring(name, recipe):
    config = load(name, argument(recipe, 8))
    shared = config.placement.trainer.fsdp == 8
    fields = {"rollout.data": 4, "trainer.data": 4}
    if shared:
        fields = {"rollout.data": 1, "rollout.fsdp": 4, "trainer.fsdp": 4}
    options = " ".join(f"--config.placement.{field}={n}" for field, n in fields.items())
    assert f"\n{options}\n" in module(name)["__doc__"]
    config.placement.update_from_flattened_dict(fields)
    rollout, trainer = fit_config(load_config(config), 8).placement.meshes
    assert (rollout.devices, trainer.devices, rollout.fsdp) == (4, 4, 4 if shared else 1)


# -------------------------------------------------------------------------------- the source's numbers


@pytest.mark.parametrize(
    ("name", "batch", "trained"),
    [
        ("pickscore", (48, 24, 2), 5),
        ("pickscore_fast", (48, 24, 2), 3),
        ("geneval_fast", (48, 24, 2), 3),
        ("dance", (16, 12, 4), 9),  # int(0.6 * 15)
        ("dance_ema", (16, 12, 2), 9),
        ("dance_lora", (16, 12, 2), 6),  # int(0.6 * 11)
    ],
)
def test_flux_has_the_published_batch_and_steps(name, batch, trained):
    found = load_config(load(FLUX, f"{name},8"))
    assert found.seed == 42 or name.startswith("dance")
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == batch
    assert found.trained_steps == trained
    # The last step, after which no noise is left, is never trained.
    assert found.noisy_steps < found.sampler.steps
    assert found.sampler.shared_noise == name.startswith("dance")
    # int(0.99 * 6) steps are trained; a window of 3 in the first 3 has one place.
    assert name.startswith("dance") or found.sampler.window.places == (0,)


# Of each recipe with an average, the updates after which it is first mixed, and the decays there, in the source.
AVERAGES = [
    (FLUX, "pickscore,8", {7: (8 / 17) ** 6, 15: (16 / 25) ** 6}),
    (FLUX, "geneval_fast,8", {7: (8 / 17) ** 6, 15: (16 / 25) ** 6}),
    (FLUX, "dance_ema,8", {2: 0.995, 4: 0.995, 6: 0.995}),
    (KONTEXT, "8", {7: (8 / 17) ** 6, 15: (16 / 25) ** 6}),
    *((KLEIN, f"{name},8", {8: 4 / 13, 16: 8 / 17}) for name in recipes(KLEIN)),
    (Z_IMAGE, "8", {8: 4 / 13, 16: 8 / 17}),
    *((WAN, f"{name},8", {7: 8 / 17, 15: 16 / 25}) for name in ("ocr", "flow_grpo_ocr", "longcat")),
    (WAN, "clip_pickscore_14b,8", {8: 4 / 13, 16: 8 / 17}),
    (WAN22, "pickscore_a14b,8", {8: 4 / 13, 16: 8 / 17}),
    (SD35, "geneval,8", {7: (8 / 17) ** 2, 15: (16 / 25) ** 2}),
    (SD35, "ocr_guard,8", {7: (8 / 17) ** 4, 15: (16 / 25) ** 4}),
    (SD35, "nft_ocr,8", {1: 2 / 11, 2: 3 / 12, 3: 4 / 13}),
    (SD35, "nft_geneval,8", {1: 2 / 11, 2: 3 / 12, 3: 4 / 13}),
]


@pytest.mark.parametrize(("name", "argument", "mixed"), AVERAGES)
def test_averages_are_mixed_after_the_published_updates(name, argument, mixed):
    average = load_config(load(name, argument)).trainer.average
    decays = {n: float(average.at(n)) for n in range(1, max(mixed) + 1)}
    assert {n: d for n, d in decays.items() if d != 1} == pytest.approx(mixed, rel=1e-5)


@pytest.mark.parametrize("name", ["dance", "dance_lora"])
def test_flux_has_no_average_where_the_source_has_none(name):
    assert load(FLUX, f"{name},8").trainer.ema == 0


@pytest.mark.parametrize("name", recipes(FLUX))
def test_flux_trains_in_bfloat16_with_recomputed_log_probs(name):
    algorithm = read_config(load(FLUX, f"{name},8")).algorithm
    assert (algorithm.old_log_probs, algorithm.kl_coefficient) == ("recomputed", 0)
    assert algorithm.clip_range == (1e-5 if name.endswith("fast") else 1e-4)


def test_z_image_has_the_published_settings():
    """48 groups of 16 in two updates; one noisy step, the second, third or fourth; an average every 4 steps."""
    found = read_config(load(Z_IMAGE, "8"))
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (48, 16, 2)
    assert (found.seed, found.sampler.steps, found.trained_steps) == (42, 6, 1)
    assert found.sampler.window.places == (1, 2, 3)
    assert (found.sampler.guidance, found.evaluation.guidance, found.evaluation.steps) == (1, 1, 10)
    trainer, algorithm = found.trainer, found.algorithm
    assert (trainer.learning_rate, trainer.weight_decay, trainer.clip_norm) == (3e-4, 1e-4, 1)
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl_coefficient) == (1e-4, 5, 0)
    assert algorithm.old_log_probs == "recomputed"


def test_sd35_has_the_published_batch():
    """48 groups of 24 in two updates, for any number of GPUs; nine images a GPU at once."""
    config = load(SD35, "geneval,8")
    assert (config.batch.groups, config.batch.images, config.trainer.updates) == (48, 24, 2)
    assert config.sampler.chunk == config.trainer.micro_batch == 9 * 8


@pytest.mark.parametrize("name", recipes(SD35))
def test_sd35_has_the_published_average_and_start(name):
    """Its turns are repeated for the source's micro-batches of an update, independent of ours."""
    flow_grpo, guard = not name.startswith("nft"), name.endswith("guard")
    for gpus, repeats in ((1, 4), (2, 4 if guard else 2), (8, 4 if guard else 2)):
        config = load(SD35, f"{name},{gpus}")
        trainer = config.trainer
        assert (trainer.ema, trainer.ema_warm_up) == (0.9, True)
        expected = (8, repeats) if flow_grpo else (1, 1)
        assert (trainer.ema_every, trainer.ema_repeats) == expected
        assert (config.lora.init, config.advantages.drop_zero_std) == ("gaussian", flow_grpo)
        every = (10, 30) if not flow_grpo else (30, 30) if guard else (60, 60)
        assert (config.seed, config.evaluation.every, config.checkpoint.every) == (42, *every)


def test_sd35_has_grpo_guards_published_range():
    config = load(SD35, "pickscore_guard,8")
    algorithm = read_config(config).algorithm
    assert (algorithm.clip_range, algorithm.high, algorithm.kl_coefficient) == (4e-6, 4e-6, 0)
    assert (config.trainer.learning_rate, config.advantages.std) == (1e-4, "group")
    assert load(SD35, "geneval_guard,8").algorithm.clip_range == 2e-6


def test_kontext_has_the_published_settings():
    """48 groups of 21 in two updates, five of six steps trained, an average that is mixed six times at a turn."""
    found = read_config(load(KONTEXT, "28"))
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (48, 21, 2)
    assert (found.sampler.steps, found.sampler.noise_level, found.trained_steps) == (6, 0.9, 5)
    assert (found.seed, found.sampler.guidance, found.evaluation.guidance) == (42, 2.5, 2.5)
    assert (found.evaluation.steps, found.model.max_sequence_length) == (28, 128)
    assert (found.model.height, found.model.width) == (512, 512)
    assert (found.lora.rank, found.lora.alpha, found.lora.init) == (64, 128, "gaussian")
    trainer, algorithm = found.trainer, found.algorithm
    assert (trainer.ema, trainer.ema_every, trainer.ema_repeats) == (0.9, 8, 6)
    assert (trainer.learning_rate, trainer.weight_decay, trainer.clip_norm) == (3e-4, 1e-4, 1)
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl_coefficient) == (1e-4, 5, 0)
    assert (found.evaluation.every, found.evaluation.batch) == (30, 2 * 28)
    assert found.model.source == Size(512, 512)
    assert (algorithm.old_log_probs, found.advantages.drop_zero_std) == ("recomputed", True)


@pytest.mark.parametrize("name", recipes(KLEIN))
def test_klein_has_the_published_batch_and_steps(name):
    config = load(KLEIN, f"{name},8")
    found = load_config(config)
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (48, 16, 2)
    assert (found.seed, found.trained_steps) == (42, 1)
    # Counted from 0; the last step, after which no noise is left, is never trained.
    of_base = name.startswith("base")
    assert found.sampler.window.places == ((1, 2, 3) if of_base else (1, 2))
    assert (config.sampler.steps, config.evaluation.steps) == ((8, 28) if of_base else (4, 10))
    assert (found.model.size, found.evaluation_size) == (Size(384, 384), Size(1024, 1024))
    assert config.sampler.guidance == config.evaluation.guidance == (4 if of_base else 1)
    algorithm = read_config(config).algorithm
    assert (algorithm.old_log_probs, algorithm.kl_coefficient) == ("recomputed", 0)
    assert (algorithm.clip_range, config.trainer.weight_decay) == (1e-4, 1e-4)
    assert config.trainer.learning_rate == (3e-4 if name.endswith("lora") else 1e-5)


def test_qwen_image_has_the_published_batch_window_and_objective():
    found = load_config(load(QWEN_IMAGE))
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (32, 16, 2)
    # Each of two steps is one of the first five: torch.randint(0, 5 - 2 + 1).
    assert found.trained_steps == found.noisy_steps == 2
    assert found.sampler.window.places == (0, 1, 2, 3)
    algorithm = read_config(load(QWEN_IMAGE)).algorithm
    assert (algorithm.old_log_probs, algorithm.kl_coefficient) == ("recomputed", 0)
    assert (algorithm.clip_range, found.lora.init) == (1e-5, "gaussian")


@pytest.mark.parametrize("name", ["ocr", "flow_grpo_ocr"])
def test_wan_has_the_published_settings_of_ocr(name):
    """8 GPUs x 8 clips x 2 batches, 4 of a prompt; the first 19 of 20 steps are trained."""
    config = load(WAN, f"{name},8")
    found = load_config(config)
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (32, 4, 2)
    assert (found.model.size, found.evaluation_size) == (Size(240, 416, 33),) * 2
    sampler, algorithm = found.sampler, read_config(config).algorithm
    assert (sampler.steps, found.trained_steps, sampler.window.places) == (20, 19, (0,))
    assert (sampler.guidance, found.evaluation.guidance, found.evaluation.steps) == (4.5, 4.5, 50)
    by_source = {"ocr": ("flow", 0.7, 3e-4), "flow_grpo_ocr": ("linear", 1.0, 4e-3)}
    assert (sampler.kind, sampler.noise_level, algorithm.kl_coefficient) == by_source[name]
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl) == (1e-3, 5, "gaussian_dt")
    assert (algorithm.old_log_probs, algorithm.step_weight) == ("recomputed", "none")
    assert (found.advantages.std, found.advantages.drop_zero_std) == ("group", True)
    assert (found.lora.rank, found.lora.alpha, found.lora.init) == (32, 64, "gaussian")
    trainer = found.trainer
    assert (trainer.learning_rate, trainer.weight_decay, trainer.clip_norm) == (1e-4, 1e-4, 1)
    assert (found.seed, found.evaluation.every, found.checkpoint.every) == (42, 30, 60)


def test_wan_has_the_published_settings_of_longcat():
    """64 GPUs x 4 clips, 4 of a prompt; one noisy step, one of the first six."""
    config = load(WAN, "longcat,64")
    found = load_config(config)
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (64, 4, 1)
    assert (found.model.size, found.evaluation_size) == (Size(480, 832, 81),) * 2
    sampler, algorithm = found.sampler, read_config(config).algorithm
    assert (sampler.steps, found.trained_steps, sampler.window.places) == (16, 1, tuple(range(6)))
    assert (sampler.kind, sampler.noise_level, sampler.shared_noise) == ("flow_capped", 1, True)
    assert (sampler.guidance, found.evaluation.guidance, found.evaluation.steps) == (4.5, 4.5, 50)
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl_coefficient) == (1e-3, 5, 3e-4)
    assert (algorithm.kl, algorithm.step_weight) == ("gaussian_dt", "longcat")
    assert algorithm.old_log_probs == "current"
    assert (found.advantages.std, found.advantages.combine) == ("max_group", "advantages")
    assert (found.lora.rank, found.lora.alpha, found.lora.init) == (128, 64, "gaussian")
    assert (found.trainer.learning_rate, found.trainer.weight_decay) == (1e-4, 1e-4)
    assert (found.seed, found.evaluation.every, found.checkpoint.every) == (42, 100, 100)


# Of Flow-Factory's recipes the sides and frames in training and in evaluation, and the guidances of the experts.
FLOW_FACTORY = [
    (WAN, "clip_pickscore_14b,8", ((256, 5), (480, 13)), (5, 0), "gdpo"),
    (WAN22, "pickscore_a14b,8", ((480, 5), (720, 21)), (4, 3), "rewards"),
]


@pytest.mark.parametrize(("name", "argument", "sizes", "guidance", "combine"), FLOW_FACTORY)
def test_wan_has_the_published_settings_of_flow_factory(name, argument, sizes, guidance, combine):
    config = load(name, argument)
    found = load_config(config)
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (48, 16, 2)
    wanted = tuple(Size(side, side, frames) for side, frames in sizes)
    assert (found.model.size, found.evaluation_size) == wanted
    sampler, algorithm = found.sampler, read_config(config).algorithm
    assert (sampler.steps, found.trained_steps, sampler.window.places) == (10, 1, (1, 2, 3))
    assert (sampler.kind, sampler.noise_level, found.evaluation.steps) == ("flow", 0.9, 28)
    for one in (sampler, found.evaluation):
        assert (one.guidance, one.guidance_2) == guidance
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl_coefficient) == (1e-4, 5, 0)
    assert (found.advantages.std, found.advantages.combine) == ("group", combine)
    assert (found.lora.rank, found.lora.alpha, found.lora.init) == (64, 128, "gaussian")
    assert (found.trainer.learning_rate, found.trainer.weight_decay) == (1e-4, 1e-4)
    assert (found.seed, found.evaluation.every, found.checkpoint.every) == (42, 20, 20)


def test_the_window_of_flow_factorys_a14b_is_in_the_trained_expert():
    config = load_config(of_published(WAN22, "pickscore_a14b,8"))
    _, family = assemble.pipeline_of(config)
    family = family.scheduled(10, config.model.size)
    counts = steps_of_experts(family, family.sigmas(10, config.model.size))
    assert (counts, max(config.sampler.window.places)) == ((4, 6), 3)
    assert config.model.trained == ("transformer",)


def test_wan_has_the_published_settings_of_verl_omni():
    """64 groups of 8 in four updates; two noisy steps of the first five; 8 frames become 9."""
    config = load(WAN22, "hpsv3_5b,8")
    found = load_config(config)
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (64, 8, 4)
    assert (found.model.size, found.evaluation_size) == (Size(704, 1280, 9),) * 2
    assert found.model.max_sequence_length == 1024
    sampler, algorithm = found.sampler, read_config(config).algorithm
    assert (sampler.steps, found.trained_steps, sampler.window.places) == (10, 2, (0, 1, 2, 3))
    assert (sampler.kind, sampler.noise_level, sampler.shared_noise) == ("dance", 1.2, True)
    assert (sampler.guidance, found.evaluation.guidance, found.evaluation.steps) == (5, 5, 50)
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl_coefficient) == (1e-4, 5, 0)
    assert (algorithm.old_log_probs, found.trainer.ema) == ("recomputed", 0)
    assert (found.advantages.std, found.advantages.ddof, found.lora.rank) == ("global", 1, 0)
    assert (found.trainer.learning_rate, found.trainer.weight_decay) == (1e-5, 1e-4)
    assert (found.seed, found.steps) == (42, 120)
    assert (found.evaluation.every, found.checkpoint.every) == (30, 30)


def test_hunyuan_video_has_the_published_settings():
    """32 GPUs with a prompt each, the best and worst 4 of 24 clips, half of them in each of two updates."""
    config = load(HUNYUAN, "32")
    found = load_config(config)
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (32, 24, 2)
    assert (found.model.size, found.evaluation_size) == (Size(480, 480, 53),) * 2
    sampler, algorithm = found.sampler, read_config(config).algorithm
    assert (sampler.kind, sampler.noise_level, sampler.shared_noise) == ("dance", 0.25, True)
    assert (sampler.steps, found.trained_steps) == (16, 9)  # int(0.6 * 15)
    # The source's 6018, as bfloat16 has it.
    guidance = float(jax.numpy.bfloat16(6018)) / 1000
    assert (sampler.guidance, found.evaluation.guidance) == (guidance, guidance)
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl_coefficient) == (1e-4, 5, 0)
    advantages, trainer = found.advantages, found.trainer
    assert (advantages.std, advantages.ddof, advantages.best_and_worst) == ("group", 1, 4)
    assert (trainer.learning_rate, trainer.weight_decay, trainer.clip_norm) == (1e-5, 1e-4, 1)
    assert (trainer.ema, found.lora.rank, found.images.fps) == (0, 0, 8)
    assert (found.seed, found.steps, found.checkpoint.every) == (42, 202, 50)


# PEFT's `target_modules`, counted by hand: the numbers of a LoRA, or of all weights. FLUX.1: dual blocks of width 3072
# with eight projections of attention, and two feed-forwards of 3072 to 12288 and back; single blocks with q, k and v
# (Kontext: and 3072 to 12288). klein: eight projections, d to 6 d and 3 d to d of two feed-forwards; d to 9 d.
# Qwen-Image: 60 blocks with FLUX.1's eight and two. Z-Image: q, k, v and out of width 3840, and three layers to 10240
# or back. SD3.5: eight projections of width 1536, of which the last block has seven. Wan: q, k, v and out of two
# attentions, and two layers of a feed-forward.
FACTORS = 64 * 60 * (8 * 6144 + 4 * 15360)
Z_FACTORS = 64 * 34 * (4 * 2 * 3840 + 3 * (3840 + 10240))
KLEIN_FACTORS = 64 * (8 * (8 * 2 * 4096 + 2 * (7 * 4096 + 4 * 4096)) + 24 * 10 * 4096)
WAN_FACTORS = 64 * 40 * (8 * 2 * 5120 + 2 * (5120 + 13824))
LAYERS = [
    (FLUX, "pickscore,8", 64 * (19 * (8 * 6144 + 4 * 15360) + 38 * 3 * 6144)),
    (FLUX, "dance_lora,8", 128 * (19 * 4 * 6144 + 38 * 3 * 6144)),
    (FLUX, "dance,8", 11_901_408_320),
    (KONTEXT, "8", 64 * (19 * (8 * 6144 + 4 * 15360) + 38 * (3 * 6144 + 15360))),
    (Z_IMAGE, "8", Z_FACTORS),
    (QWEN_IMAGE, "ocr,4", FACTORS),
    (KLEIN, "base_lora,8", KLEIN_FACTORS),
    (KLEIN, "distilled_full,8", 3_875_544_576),
    (SD35, "geneval,8", (24 * 8 - 1) * 32 * 2 * 1536),
    (HUNYUAN, "8", 12_821_012_544),
    (WAN, "ocr,8", 32 * 30 * 8 * 2 * 1536),
    (WAN, "longcat,8", 128 * 30 * (8 * 2 * 1536 + 2 * (1536 + 8960))),
    (WAN, "clip_pickscore_14b,8", WAN_FACTORS),
    (WAN22, "pickscore_a14b,8", WAN_FACTORS),  # of one expert
]


@pytest.mark.parametrize(("name", "argument", "numbers"), LAYERS)
def test_the_published_layers_are_trained(name, argument, numbers):
    """Trained weights are float32; those under a LoRA are as the hub's files have them."""
    config = load_config(of_published(name, argument))
    _, family = assemble.pipeline_of(config)
    tuned, base, frozen, ahead = assemble.parameter_shapes(config, family)
    assert sum(leaf.size for leaf in jax.tree.leaves(tuned)) == numbers
    assert {leaf.dtype for leaf in jax.tree.leaves(tuned)} == {np.dtype(np.float32)}
    if name != SD35:
        kept = {leaf.dtype for leaf in jax.tree.leaves(base)}
        assert kept == ({np.dtype(jax.numpy.bfloat16)} if numbers < 10**9 else set())
    if name == KONTEXT:  # what encodes the picture also decodes
        assert {*frozen} == {"vae"} and {*ahead} == {"text_encoder", "text_encoder_2", "vae"}


# ------------------------------------------------------------------------------------------ memory

# GPUs that share all weights; of one copy the bytes of what is trained, fixed, for decoding, and for encoding ahead.
SHARED = [
    (FLUX, "dance_ema,8", 8, (4 * 11_901_408_320, 0, 2 * 83_819_683)),
    (KLEIN, "base_full,8", 8, (4 * 3_875_544_576, 0, 2 * 84_046_371)),
    (QWEN_IMAGE, "ocr,4", 4, (4 * FACTORS, 2 * 20_430_401_088, 2 * 126_892_531)),
]


@pytest.mark.parametrize(("name", "argument", "gpus", "sizes"), SHARED)
def test_gpus_share_all_weights(name, argument, gpus, sizes):
    """The documented memory consists of these sizes."""
    found = model_footprint(load_config(of_published(name, argument)))
    assert found.copies == (name != QWEN_IMAGE)
    for of_mesh, size in zip((found.tuned, found.base, found.frozen), sizes, strict=True):
        assert size / gpus <= of_mesh(gpus, 1) <= size / gpus * 1.01
    if name == FLUX:  # T5 and CLIP, which are there before the run samples
        ahead = 2 * (4_762_310_656 + 123_060_480)
        assert ahead / 8 <= found.encode(8, 1) < ahead / 8 * 1.01


def test_z_image_holds_what_the_documentation_says():
    """Each of 8 GPUs has the LoRA in six copies, and the transformer, autoencoder and prompts in bfloat16."""
    sizes = model_footprint(load_config(of_published(Z_IMAGE, "8")))
    assert (sizes.copies, sizes.tuned(1, 1)) == (1, 4 * Z_FACTORS)
    assert sizes.base(1, 1) == 2 * 6_154_908_736
    assert sizes.frozen(1, 1) == 2 * 83_819_683
    assert sizes.trajectory == 2 * 4 * 64 * 64 * 16 + 4
    assert sizes.conditioning == 49 * 512 * (2 * 2560 + 1)  # and the empty prompt
    held = 24 * Z_FACTORS + sizes.base(1, 1) + sizes.frozen(1, 1) + sizes.conditioning
    held += 768 * sizes.trajectory / 8
    text = (ROOT / "docs" / "performance.md").read_text()
    assert round(held / 2**30, 1) == 15.3 and "| 15.3, of which 11.5" in text


def test_a_prompt_of_kontext_has_as_many_bytes_as_its_arrays():
    config = load_config(of_published(KONTEXT, "1"))
    _, family = assemble.pipeline_of(config)
    tokens = family.tokenize(step_records(config, family)[:2])
    shapes = jax.eval_shape(family.encode, family.shapes(), tokens)
    assert [leaf.shape for leaf in shapes] == [(2, 128, 4096), (2, 768), (2, 64, 64, 16)]
    assert shapes.context.dtype == jax.numpy.bfloat16 and shapes.source.dtype == np.float32
    one = 2 * 128 * 4096 + 2 * 768 + 4 * 64 * 64 * 16
    assert model_footprint(config).conditioning == 48 * one
    guided = dataclasses.replace(config.sampler, true_cfg_scale=2.0)
    guided = dataclasses.replace(config, sampler=guided)
    assert model_footprint(guided).conditioning == 2 * 48 * one


@pytest.mark.slow
def test_qwen_image_2512_has_the_same_sizes():
    first, second = (
        model_footprint(load_config(of_published(QWEN_IMAGE, "ocr,4", folder=f"Qwen/{name}")))
        for name in ("Qwen-Image", "Qwen-Image-2512")
    )
    for size in ("tuned", "base", "frozen"):
        assert getattr(first, size)(4, 1) == getattr(second, size)(4, 1)


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 5, 6, 7, 8])
def test_z_images_thirty_heads_are_split_by_what_divides_them(tensor):
    config = of_published(Z_IMAGE, "1")
    config.placement.trainer.tensor = tensor
    train_config = load_config(config)
    _, family = assemble.pipeline_of(train_config)
    fitted = fit_config(train_config, tensor)
    placement = assemble.placed(fitted, family, jax.devices()[:tensor])
    if 30 % tensor == 0:
        return check_heads(family, placement)
    with pytest.raises(ConfigError, match=rf"trainer.tensor = {tensor} .* 30 .* 2, 3, 5, 6"):
        check_heads(family, placement)


# ---------------------------------------------------------------------------------------- at the start


def test_the_t5_of_sd35_is_downloaded_unless_it_is_left_out(monkeypatch, tmp_path):
    needed = [f"{part}/model.safetensors" for part in ("text_encoder", "text_encoder_2")]
    needed += ["transformer/diffusion_pytorch_model.safetensors", "model_index.json"]
    third = ["text_encoder_3/model-00001-of-00002.safetensors"]
    others = ["text_encoders/t5xxl_fp16.safetensors", "sd3.5_medium.safetensors"]

    def download(name, **patterns):
        assert name == "stabilityai/stable-diffusion-3.5-medium"
        files = needed + third + others
        asked.append(list(huggingface_hub.utils.filter_repo_objects(files, **patterns)))
        return str(tmp_path)

    asked, index = [], tmp_path / "model_index.json"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    index.write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    assert open_pipeline(load(SD35).model.folder) == tmp_path
    assert asked == [["model_index.json"], needed + third]
    del asked[:]
    assert open_pipeline(load(SD35).model.folder, ("text_encoder_3",)) == tmp_path
    assert asked == [["model_index.json"], needed]
    index.write_text('{"_class_name": "OtherPipeline"}')
    with pytest.raises(ConfigError, match="is a OtherPipeline; supported are"):
        open_pipeline(load(SD35).model.folder)
    assert asked[2:] == [["model_index.json"]]


class Device(NamedTuple):
    """An accelerator as far as its kernels depend on it."""

    id: int
    device_kind: str
    platform: str = "gpu"
    compute_capability: str = "9.0"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ((SD35, "geneval,8"), ("attention: ", "float32, float32 products: TF32,")),
        ((FLUX, "dance,8"), ("attention: cudnn;", "precision: bfloat16, frozen weights bfloat16")),
    ],
)
def test_a_start_tells_devices_kernel_of_attention_and_precision(name, expected):
    config = load(*name)
    config.model.folder = str(published_folder(config.model.folder))
    found = load_config(config)
    _, family = assemble.pipeline_of(found)
    devices = np.empty(8, object)
    devices[:] = [Device(i, "NVIDIA H100 80GB HBM3") for i in range(8)]
    mesh = types.SimpleNamespace(devices=devices, shape={"tensor": 1, "sequence": 1})
    group = types.SimpleNamespace(mesh=mesh, attention="auto")
    placement = types.SimpleNamespace(home=group, trainer=group, rollout=group, rollouts=())
    line = describe_computation(found, family, placement)
    assert "\n" not in line
    assert all(part in line for part in ("8 x NVIDIA H100 80GB HBM3;", *expected))


# ------------------------------------------------------------------------------------ a whole step


def unread_parts(family, folder, parts, group, dtype):
    """Instead of `families.read_parts`."""
    return {
        part: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
        for part, tree in family.shapes().items()
        if part in parts
    }


@pytest.fixture
def unread(monkeypatch):
    """Parameters are shapes without devices; only arrays are put on devices, and programs are traced within another.

    Compiler options rule that out.
    """
    monkeypatch.setattr(policy, "AS_WRITTEN", {})
    put = jax.device_put

    def put_arrays(tree, *where):
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
        return tree if abstract else put(tree, *where)

    monkeypatch.setattr(jax, "device_put", put_arrays)
    monkeypatch.setattr(assemble, "check_parts", lambda *_: None)
    monkeypatch.setattr(assemble, "read_parts", unread_parts)


def shapes_of_a_step(config, system, record=None):
    """Of prompts, images, trajectory, gradient and update, for one chunk; `record` is that of all prompts."""
    rows = np.arange(config.sampler.chunk, dtype=np.int32) // config.batch.images
    advantages = np.linspace(-1, 1, len(rows), dtype=np.float32)
    keys = image_keys(jax.random.key(0), rows, np.arange(len(rows)))
    groups = config.batch.groups
    records = [record] * groups if record else said(*(f"{n} benches" for n in range(groups)))

    def step(state, weights, base, prompts):
        trajectory = system.sampler.generate(weights, prompts, rows, keys)
        images = system.sampler.decode(weights, trajectory).clips
        chunk = SampledImages(0, rows, trajectory.transitions, trajectory.sigmas)
        train_batch = make_train_batch(system, prompts, chunk, advantages)
        totals = system.trainer.accumulate(state, base, train_batch, None, behavior=state.tuned)
        return images, trajectory, totals, system.trainer.update(state, totals)

    state = jax.eval_shape(system.trainer.init, system.start)
    weights = system.rollout_weights(system.start)
    prompts = system.sampler.encoded(weights, records)
    return prompts, *jax.eval_shape(step, state, weights, system.base, prompts)


class Step(NamedTuple):
    """What a step on one GPU has.

    Attributes:
      name, argument: of the config.
      conditioning: shapes of a step's prompts.
      images: of a chunk: number, frames of clips, height and width.
      x: shape of the stored transitions' latents.
      sigmas: of the schedule.
      fields: of the config that are changed. A LoRA is drawn, which is most of the time, so some have a rank of 1.
      gigabytes: all data that stay on each GPU from one step to the next, and the gradient.
      null: whether there is a pass without the prompt.
    """

    name: str
    argument: str
    conditioning: dict[str, tuple[int, ...]]
    images: tuple[int, ...]
    x: tuple[int, ...]
    sigmas: int
    fields: dict[str, Any] | None = None
    gigabytes: float | None = None
    null: bool = False


STEPS = [
    # Rank 32; all that is encoded ahead, because the T5 is large.
    Step(
        *(SD35, "geneval,1", dict(context=(8, 77 + 128, 4096), pooled=(8, 2048))),
        *((8, 512, 512), (9, 8, 64, 64, 16), 11, None, 10.5, True),
    ),
    # DanceGRPO's recipe that has everything: all weights, an average, and a share of the steps. Weights, two moments,
    # average and gradient in float32; the autoencoder in bfloat16.
    Step(
        *(FLUX, "dance_ema,1", dict(context=(16, 512, 4096), pooled=(16, 768))),
        *((1, 720, 720), (15, 1, 90, 90, 16), 17, None, 20 * 11.9014 + 2 * 0.0838),
    ),
    Step(
        KONTEXT,
        "1",
        dict(context=(48, 128, 4096), pooled=(48, 768), source=(48, 64, 64, 16)),
        *((3, 512, 512), (5, 3, 64, 64, 16), 7, {"lora.rank": 1}),
    ),
    Step(
        *(Z_IMAGE, "1", dict(context=(48, 512, 2560), mask=(48, 512))),
        *((1, 512, 512), (1, 1, 64, 64, 16), 7, {"lora.rank": 1}, None, True),
    ),
    # Factors, two moments and the gradient in float32; the rest in bfloat16.
    Step(
        *(QWEN_IMAGE, "ocr,1", dict(context=(32, 256, 3584), mask=(32, 256))),
        *((16, 512, 512), (2, 16, 64, 64, 16), 11, None),
        *(2 * (20.430401 + 0.126893) + 16e-9 * FACTORS, True),
    ),
    # Weights and autoencoder in bfloat16; the LoRA in five copies of float32.
    Step(
        *(KLEIN, "base_lora,1", dict(context=(48, 512, 12288))),
        *((1, 384, 384), (1, 1, 24, 24, 128), 9, None, 2 * (9.0786 + 0.0840) + 20 * 0.1426, True),
    ),
    Step(
        *(WAN, "ocr,1", dict(context=(32, 512, 4096), mask=(32, 512))),
        *((8, 33, 240, 416), (19, 8, 9, 30, 52, 16), 21, None),
        *(2 * (1.418997 + 0.126893) + 20e-9 * 32 * 30 * 8 * 2 * 1536, True),
    ),
    Step(
        *(WAN, "clip_pickscore_14b,1", dict(context=(48, 512, 4096), mask=(48, 512))),
        *((1, 5, 256, 256), (1, 1, 2, 32, 32, 16), 11, {"lora.rank": 1}, None, True),
    ),
    # Weights, two moments and gradient in float32; the decoder in bfloat16.
    Step(
        *(HUNYUAN, "1", dict(context=(32, 256, 4096), mask=(32, 256), pooled=(32, 768))),
        *((24, 53, 480, 480), (15, 24, 14, 60, 60, 16), 17, None),
        16 * 12.821013 + 2 * 0.146136,
    ),
]


@pytest.mark.parametrize("step", quick([(step,) for step in STEPS], 0, 1))
def test_a_whole_step_has_the_right_shapes(unread, step):
    config = of_published(step.name, step.argument)
    config.update_from_flattened_dict(step.fields or {})
    system = assemble.build(fit_config(load_config(config), 1), jax.devices()[:1])
    record = example_record(system.policy.family) if step.name == KONTEXT else None
    prompts, images, trajectory, totals, (after, metrics) = shapes_of_a_step(config, system, record)
    for field, shape in step.conditioning.items():
        assert getattr(prompts.conditioning, field).shape == shape
    assert (prompts.null is not None) == step.null
    number, *frames, height, width = step.images
    shape = number, *(frames or [1]), height, width, 3
    assert (images.shape, images.dtype) == (shape, np.uint8)
    x = trajectory.transitions.x
    assert (x.shape, x.dtype, trajectory.sigmas.shape) == (step.x, np.float32, (step.sigmas,))
    assert ("kl" in metrics) == (
        step.name == SD35 or (step.argument == "ocr,1" and step.name == WAN)
    )
    for tree in filter(None, (totals.gradient, after.tuned, after.ema)):
        assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, system.start)
    if step.gigabytes:
        trees = system.base, system.rollouts[0].frozen, after, totals.gradient
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees)) / 1e9
        rel = {SD35: 0.05, KLEIN: 1e-3}.get(step.name, 1e-4)
        assert held == pytest.approx(step.gigabytes, rel=rel)
    if step.name == SD35:
        assert system.evaluator.settings.step == Ode() and len(system.evaluator.sigmas) == 41
        assert set(system.sampler.stored.encoders) == {f"text_encoder{n}" for n in ("", "_2", "_3")}
        names = {"/".join(path[-3:-1]) for path in flatten_dict(system.start)}
        projections = ["to_q", "to_k", "to_v", "to_out_0", "to_add_out"]
        projections += ["add_q_proj", "add_k_proj", "add_v_proj"]
        assert names == {f"attn/{projection}" for projection in projections}
