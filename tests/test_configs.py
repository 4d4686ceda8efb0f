"""The configs of configs/: each is accepted, has its source's numbers, and fits at its model's real size."""

import dataclasses
import fnmatch
import functools
import operator
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
from digen_jax.config.load import complete, default_config, fit_config, load_config
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
HUNYUAN, HUNYUAN15 = "hunyuan_video", "hunyuan_video15"
REWARD_GRADIENT = "sd35_reward_gradient"
PUBLISHED = SD35, FLUX, KONTEXT, Z_IMAGE, QWEN_IMAGE, KLEIN, WAN, WAN22, HUNYUAN, HUNYUAN15


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
        config.prompts.file = config.evaluation.prompts = str(
            EDITS if config.model.source_height else GENEVAL
        )
        config.rewards = default_config().rewards
        if config.advantages.combine != "rewards":
            config.rewards += ("jpeg_incompressibility",)
    elif name == "shapes_pairs":
        config.prompts.file = str(GENEVAL.with_name("pairs.jsonl"))
    elif "prompts" in config and not config.prompts.file:
        config.prompts.file = config.evaluation.prompts = str(GENEVAL)
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
IMAGES |= {HUNYUAN: (12, 1), HUNYUAN15: (1, 1), "edit_2509": (1, 1), "edit_2511": (16, 4)}
IMAGES |= {"longcat": (4, 1), "clip_pickscore_14b": (1, 1)}
IMAGES |= {"hpsv3_5b": (4, 4), "pickscore_a14b": (1, 1), "flow_factory_i2v": (1, 1)}
IMAGES |= {(WAN, "unirl_i2v"): (4, 1), (WAN22, "unirl_i2v"): (1, 1)}
GPUS = {SD35: (1, 64), KONTEXT: (1, 28), WAN: (1, 8), HUNYUAN: (2, 32)}


@each_recipe
def test_a_config_divides_its_images_among_the_gpus(name, recipe):
    for gpus in GPUS.get(name, (1, 16)):
        config = load(name, argument(recipe, gpus))
        fit_config(load_config(config), gpus)
        if name == SD35:
            continue
        of_flux = (1, 1) if recipe.startswith("dance") else (3, 3)
        sizes = config.sampler.chunk, config.trainer.micro_batch
        keys = (name, recipe), recipe, name
        images = next((IMAGES[key] for key in keys if key in IMAGES), of_flux)
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


# Names of fields: one, which has a value, or several, which have a tuple.
BATCH = "batch.groups batch.images trainer.updates"
WINDOW = "sampler.steps trained_steps sampler.window.places"
SDE = "sampler.kind sampler.noise_level sampler.shared_noise"
SIZES = "model.size evaluation_size"
GUIDANCE = "sampler.guidance evaluation.guidance evaluation.steps"
GUIDANCES = "sampler.guidance sampler.guidance_2 evaluation.guidance evaluation.guidance_2"
OBJECTIVE = "algorithm.clip_range algorithm.adv_clip algorithm.kl_coefficient"
WEIGHTS = "algorithm.kl algorithm.step_weight algorithm.old_log_probs"
OLD = "algorithm.old_log_probs"
OPTIMIZER = "trainer.learning_rate trainer.weight_decay trainer.clip_norm"
AVERAGE = "trainer.ema trainer.ema_warm_up trainer.ema_every trainer.ema_repeats"
LORA = "lora.rank lora.alpha lora.init"
EVERY = "seed evaluation.every checkpoint.every"
OF_KONTEXT = {BATCH: (48, 21, 2), WINDOW: (6, 5, (0,)), GUIDANCE: (2.5, 2.5, 28)}
OF_KONTEXT |= {OBJECTIVE: (1e-4, 5, 0), OLD: "recomputed", "advantages.drop_zero_std": True}
OF_KONTEXT |= {OPTIMIZER: (3e-4, 1e-4, 1), AVERAGE: (0.9, True, 8, 6), LORA: (64, 128, "gaussian")}
OF_KONTEXT |= {"model.size model.source model.max_sequence_length": (*(Size(512, 512),) * 2, 128)}
OF_KONTEXT |= {"sampler.noise_level": 0.9, "seed evaluation.every evaluation.batch": (42, 30, 56)}
OF_Z_IMAGE = {BATCH: (48, 16, 2), WINDOW: (6, 1, (1, 2, 3)), GUIDANCE: (1, 1, 10), "seed": 42}
OF_Z_IMAGE |= {OBJECTIVE: (1e-4, 5, 0), OLD: "recomputed", OPTIMIZER: (3e-4, 1e-4, 1)}
OF_KLEIN = {BATCH: (48, 16, 2), SIZES: (Size(384, 384), Size(1024, 1024)), "seed": 42}
OF_KLEIN |= {OBJECTIVE: (1e-4, 5, 0), OLD: "recomputed"}
# Each of two steps is one of the first five: torch.randint(0, 5 - 2 + 1).
OF_QWEN_IMAGE = {BATCH: (32, 16, 2), WINDOW: (10, 2, (0, 1, 2, 3)), "noisy_steps": 2}
OF_QWEN_IMAGE |= {OBJECTIVE: (1e-5, 5, 0), OLD: "recomputed", "lora.init": "gaussian"}
OF_EDIT = OF_KLEIN | {SIZES: (Size(384, 384), Size(1024, 1024)), "model.source": Size(384, 384)}
OF_EDIT |= {WINDOW: (10, 1, (1, 2, 3)), GUIDANCE: (4, 4, 40), SDE: ("flow", 1, False)}
OF_EDIT |= {OPTIMIZER: (3e-4, 1e-4, 1), LORA: (64, 128, "gaussian"), EVERY: (42, 20, 20)}
OF_EDIT |= {"advantages.std": "group"}
OF_EDIT_2511 = {BATCH: (32, 16, 2), WINDOW: (12, 3, (0, 1, 2, 3)), GUIDANCE: (4, 4, 40)}
OF_EDIT_2511 |= {SDE: ("flow", 0.7, False), OBJECTIVE: (1e-4, 5, 0), OLD: "recomputed"}
OF_EDIT_2511 |= {OPTIMIZER: (3e-4, 1e-4, 1), LORA: (64, 128, "gaussian"), EVERY: (42, 20, 5)}
OF_EDIT_2511 |= {"advantages.std advantages.ddof steps": ("group", 1, 300)}
OF_EDIT_2511 |= {"model.size model.source": (Size(512, 512), Size(1024, 1024))}
# 8 GPUs x 8 clips x 2 batches, 4 of a prompt; the first 19 of 20 steps are trained.
OF_OCR = {BATCH: (32, 4, 2), WINDOW: (20, 19, (0,)), SIZES: (Size(240, 416, 33),) * 2}
OF_OCR |= {GUIDANCE: (4.5, 4.5, 50), WEIGHTS: ("gaussian_dt", "none", "recomputed")}
OF_OCR |= {OPTIMIZER: (1e-4, 1e-4, 1), LORA: (32, 64, "gaussian"), EVERY: (42, 30, 60)}
OF_OCR |= {"advantages.std advantages.drop_zero_std": ("group", True)}
# 64 GPUs x 4 clips, 4 of a prompt; one noisy step, one of the first six.
OF_LONGCAT = {BATCH: (64, 4, 1), WINDOW: (16, 1, tuple(range(6))), SDE: ("flow_capped", 1, True)}
OF_LONGCAT |= {SIZES: (Size(480, 832, 81),) * 2, GUIDANCE: (4.5, 4.5, 50)}
OF_LONGCAT |= {OBJECTIVE: (1e-3, 5, 3e-4), WEIGHTS: ("gaussian_dt", "longcat", "current")}
OF_LONGCAT |= {OPTIMIZER: (1e-4, 1e-4, 1), LORA: (128, 64, "gaussian"), EVERY: (42, 100, 100)}
OF_LONGCAT |= {"advantages.std advantages.combine": ("max_group", "advantages")}
OF_FLOW_FACTORY = {BATCH: (48, 16, 2), WINDOW: (10, 1, (1, 2, 3)), SDE: ("flow", 0.9, False)}
OF_FLOW_FACTORY |= {OBJECTIVE: (1e-4, 5, 0), OPTIMIZER: (1e-4, 1e-4, 1)}
OF_FLOW_FACTORY |= {LORA: (64, 128, "gaussian"), EVERY: (42, 20, 20), "evaluation.steps": 28}
OF_FLOW_FACTORY |= {"advantages.std": "group"}
OF_14B = {SIZES: (Size(256, 256, 5), Size(480, 480, 13)), GUIDANCES: (5, 0, 5, 0)}
OF_A14B = {SIZES: (Size(480, 480, 5), Size(720, 720, 21)), GUIDANCES: (4, 3, 4, 3)}
# Evaluations have the size of the images that clips start with.
OF_I2V_14B = {"model.source": Size(240, 240, 5), SIZES: (Size(240, 240, 5),) * 2}
OF_I2V_14B |= {GUIDANCES: (5, 0, 5, 0)}
OF_I2V_A14B = {"model.source": Size(480, 480, 5), SIZES: (Size(480, 480, 5),) * 2}
OF_I2V_A14B |= {GUIDANCES: (3.5, 0, 3.5, 0), WINDOW: (8, 1, (1,))}
# The first half of 14 steps, and the first fifth of 10.
OF_UNIRL = {
    BATCH: (48, 16, 2),
    SDE: ("flow", 0.7, False),
    "sampler.guidance": 1,
    "seed steps": (42, 1000),
}
OF_UNIRL |= {"algorithm.clip_range algorithm.kl_coefficient": (1e-4, 0), OPTIMIZER: (3e-4, 0, 1)}
OF_UNIRL |= {"advantages.std advantages.ddof trainer.ema": ("global", 1, 0), OLD: "recomputed"}
OF_UNIRL |= {LORA: (64, 128, "kaiming"), "model.max_sequence_length": 512}
OF_UNIRL_21 = {WINDOW: (14, 7, (0,)), "model.size model.source": (Size(720, 1280, 9),) * 2}
OF_UNIRL_22 = {WINDOW: (10, 2, (0,)), "model.size model.source": (Size(480, 640, 9),) * 2}
# verl-omni's: two noisy steps of the first five; its 8 frames become 9.
OF_5B = {BATCH: (64, 8, 4), WINDOW: (10, 2, (0, 1, 2, 3)), SDE: ("dance", 1.2, True)}
OF_5B |= {SIZES: (Size(704, 1280, 9),) * 2, GUIDANCE: (5, 5, 50), OBJECTIVE: (1e-4, 5, 0)}
OF_5B |= {OLD: "recomputed", OPTIMIZER: (1e-5, 1e-4, 1), "trainer.ema lora.rank": (0, 0)}
OF_5B |= {"advantages.std advantages.ddof model.max_sequence_length": ("global", 1, 1024)}
OF_5B |= {EVERY: (42, 30, 30), "steps": 120}
# 32 GPUs with a prompt each, of 24 clips the best and worst 4; int(0.6 * 15) steps; a guidance of 6018 in bfloat16.
OF_HUNYUAN = {BATCH: (32, 24, 2), WINDOW: (16, 9, (0,)), SDE: ("dance", 0.25, True)}
OF_HUNYUAN |= {SIZES: (Size(480, 480, 53),) * 2, GUIDANCE: (6.016, 6.016, 50)}
OF_HUNYUAN |= {OBJECTIVE: (1e-4, 5, 0), OPTIMIZER: (1e-5, 1e-4, 1), "trainer.ema lora.rank": (0, 0)}
OF_HUNYUAN |= {"advantages.std advantages.ddof advantages.best_and_worst": ("group", 1, 4)}
OF_HUNYUAN |= {"seed steps checkpoint.every images.fps": (42, 202, 50, 8)}
# Noise in 8 of the first 9 steps, which are int(0.6 * 16).
OF_HUNYUAN15 = {BATCH: (48, 24, 2), WINDOW: (16, 8, (0,)), SDE: ("flow", 0.25, False)}
OF_HUNYUAN15 |= {SIZES: (Size(480, 480, 5),) * 2, "sampler.guidance sampler.window.length": (1, 9)}
OF_HUNYUAN15 |= {"algorithm.clip_range algorithm.kl_coefficient": (1e-4, 0), "seed": 42}
OF_HUNYUAN15 |= {OPTIMIZER: (1e-5, 1e-4, 1), "trainer.ema lora.rank lora.alpha": (0, 64, 64)}
OF_HUNYUAN15 |= {"advantages.std advantages.ddof": ("global", 1)}
OF_FLOWBP = {BATCH: (64, 1, 1), "sampler.steps steps": (25, 300), GUIDANCE: (3.5, 3.5, 40)}
OF_FLOWBP |= {OPTIMIZER: (1e-5, 1e-4, 1), AVERAGE: (0.995, False, 1, 1), EVERY: (42, 50, 100)}
OF_FLOWBP |= {SIZES: (Size(512, 512),) * 2, "model.max_sequence_length lora.rank": (512, 0)}
OF_DRAFT = {BATCH: (8, 1, 1), "sampler.steps steps": (4, 200), GUIDANCE: (1, 1, 4)}
OF_DRAFT |= {OPTIMIZER: (1e-4, 0, 1), "lora.rank lora.alpha": (32, 64), "trainer.ema": 0}
OF_DRAFT |= {"algorithm.gradient_steps algorithm.kl_coefficient": (1, 0)}
ANCHOR = "algorithm.anchor_gradient algorithm.detach_unconditional"
# Patterns of recipes with a number of GPUs, and settings of their sources.
SETTINGS = [
    (SD35, "geneval,8", {BATCH: (48, 24, 2), "sampler.chunk trainer.micro_batch": (72, 72)}),
    (SD35, "*,8", {"trainer.ema trainer.ema_warm_up lora.init seed": (0.9, True, "gaussian", 42)}),
    # Turns are repeated for the source's micro-batches of an update, whatever ours are.
    (SD35, "[!n]*,8", {"trainer.ema_every advantages.drop_zero_std": (8, True)}),
    (SD35, "[!n]*[!d],8", {"trainer.ema_repeats": 2, EVERY: (42, 60, 60)}),
    (SD35, "[!n]*[!d],2", {"trainer.ema_repeats": 2}),
    (SD35, "[!n]*,1", {"trainer.ema_repeats": 4}),
    (SD35, "*_guard,8", {"trainer.ema_repeats": 4, EVERY: (42, 30, 30)}),
    (SD35, "*_guard,8", {OPTIMIZER: (1e-4, 1e-4, 1), "advantages.std": "group"}),
    (SD35, "geneval_guard,8", {"algorithm.clip_range": 2e-6}),
    (SD35, "pickscore_guard,8", {"algorithm.clip_range algorithm.high": (4e-6, 4e-6)}),
    (SD35, "pickscore_guard,8", {"algorithm.kl_coefficient": 0}),
    (SD35, "nft_*,8", {AVERAGE: (0.9, True, 1, 1), EVERY: (42, 10, 30)}),
    (SD35, "nft_*,8", {"advantages.drop_zero_std": False}),
    (FLUX, "*,8", {OLD: "recomputed", "algorithm.kl_coefficient": 0}),
    (FLUX, "[!d]*,8", {BATCH: (48, 24, 2), "seed sampler.shared_noise": (42, False)}),
    # int(0.99 * 6) steps are trained; a window of 3 in the first 3 has one place.
    (FLUX, "pickscore,8", {WINDOW: (6, 5, (0,)), "algorithm.clip_range": 1e-4}),
    (FLUX, "*_fast,8", {WINDOW: (6, 3, (0,)), "algorithm.clip_range": 1e-5}),
    (FLUX, "dance*,8", {"algorithm.clip_range sampler.shared_noise": (1e-4, True)}),
    (FLUX, "dance,8", {BATCH: (16, 12, 4), "trained_steps": 9, "trainer.ema": 0}),  # int(0.6 * 15)
    (FLUX, "dance_ema,8", {BATCH: (16, 12, 2), "trained_steps": 9}),
    (FLUX, "dance_lora,8", {BATCH: (16, 12, 2), "trained_steps": 6, "trainer.ema": 0}),
    (KONTEXT, "28", OF_KONTEXT),
    (Z_IMAGE, "8", OF_Z_IMAGE),
    (KLEIN, "*,8", OF_KLEIN),
    (KLEIN, "base_*,8", {WINDOW: (8, 1, (1, 2, 3)), GUIDANCE: (4, 4, 28)}),
    (KLEIN, "distilled_*,8", {WINDOW: (4, 1, (1, 2)), GUIDANCE: (1, 1, 10)}),
    (KLEIN, "*_lora,8", {OPTIMIZER: (3e-4, 1e-4, 1)}),
    (KLEIN, "*_full,8", {OPTIMIZER: (1e-5, 1e-4, 1)}),
    (QWEN_IMAGE, "ocr,8", OF_QWEN_IMAGE),
    (QWEN_IMAGE, "edit_2509,8", OF_EDIT),
    (QWEN_IMAGE, "edit_2511,8", OF_EDIT_2511),
    (WAN, "*ocr,8", OF_OCR),
    (WAN, "ocr,8", {SDE: ("flow", 0.7, False), OBJECTIVE: (1e-3, 5, 3e-4)}),
    (WAN, "flow_grpo_ocr,8", {SDE: ("linear", 1, False), OBJECTIVE: (1e-3, 5, 4e-3)}),
    (WAN, "longcat,64", OF_LONGCAT),
    (WAN, "*14b,8", OF_FLOW_FACTORY | OF_14B | {"advantages.combine": "gdpo"}),
    (WAN, "flow_factory_i2v,8", OF_FLOW_FACTORY | OF_I2V_14B | {"advantages.combine": "rewards"}),
    (WAN, "unirl_i2v,8", OF_UNIRL | OF_UNIRL_21),
    (WAN22, "*a14b,8", OF_FLOW_FACTORY | OF_A14B | {"advantages.combine": "rewards"}),
    (
        WAN22,
        "flow_factory_i2v,8",
        OF_FLOW_FACTORY | OF_I2V_A14B | {"advantages.combine": "rewards"},
    ),
    (WAN22, "unirl_i2v,8", OF_UNIRL | OF_UNIRL_22),
    (WAN22, "hpsv3_5b,8", OF_5B),
    (HUNYUAN, "32", OF_HUNYUAN),
    (HUNYUAN15, "8", OF_HUNYUAN15),
    (REWARD_GRADIENT, "draft,8", OF_DRAFT),
    (REWARD_GRADIENT, "[!d]*,8", OF_FLOWBP),
    (REWARD_GRADIENT, "refl,8", {"algorithm.last_steps": 11}),
    (REWARD_GRADIENT, "leap_align,8", {ANCHOR: (0.3, False), "algorithm.tau": 0.1}),
    (REWARD_GRADIENT, "flowbp_bridge,8", {ANCHOR: (0.5, True), "algorithm.late_bias": 4}),
    (REWARD_GRADIENT, "flowbp_lagrange,8", {ANCHOR: (0.1, True), "algorithm.tau": 0.2}),
]


@pytest.mark.parametrize(("name", "pattern", "fields"), SETTINGS)
def test_recipes_have_the_settings_of_their_sources(name, pattern, fields):
    *every, gpus = pattern.split(",")
    found = fnmatch.filter(recipes(name), *every) if every else [""]
    assert found
    for recipe in found:
        config = load_config(load(name, argument(recipe, gpus)))
        for names, expected in fields.items():
            value = operator.attrgetter(*names.split())(config)
            assert value == expected, (recipe, names)
        # No noise is left after the last step, which is never trained.
        assert config.noisy_steps < config.sampler.steps


# Of each recipe with an average, the updates after which it is first mixed, and the decays there, in the source.
AVERAGES = [
    (FLUX, "pickscore,8", {7: (8 / 17) ** 6, 15: (16 / 25) ** 6}),
    (FLUX, "geneval_fast,8", {7: (8 / 17) ** 6, 15: (16 / 25) ** 6}),
    (FLUX, "dance_ema,8", {2: 0.995, 4: 0.995, 6: 0.995}),
    (KONTEXT, "8", {7: (8 / 17) ** 6, 15: (16 / 25) ** 6}),
    *((KLEIN, f"{name},8", {8: 4 / 13, 16: 8 / 17}) for name in recipes(KLEIN)),
    (Z_IMAGE, "8", {8: 4 / 13, 16: 8 / 17}),
    (QWEN_IMAGE, "edit_2509,8", {8: 4 / 13, 16: 8 / 17}),
    *((WAN, f"{name},8", {7: 8 / 17, 15: 16 / 25}) for name in ("ocr", "flow_grpo_ocr", "longcat")),
    *(
        (name, f"{recipe},8", {8: 4 / 13, 16: 8 / 17})
        for name, recipe in (
            *((WAN, "clip_pickscore_14b"), (WAN, "flow_factory_i2v")),
            *((WAN22, "pickscore_a14b"), (WAN22, "flow_factory_i2v")),
        )
    ),
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


@pytest.mark.parametrize(
    ("recipe", "counts", "last"),
    [("pickscore_a14b", (4, 6), 3), ("flow_factory_i2v", (3, 5), 1), ("unirl_i2v", (3, 7), 1)],
)
def test_the_window_of_the_a14bs_is_in_the_trained_expert(recipe, counts, last):
    """Also with `unirl_i2v`'s published shift of 5, which has more steps of that expert."""
    config = load_config(of_published(WAN22, f"{recipe},8"))
    _, family = assemble.pipeline_of(config)
    steps, window = config.sampler.steps, config.sampler.window
    family = family.scheduled(steps, config.model.size)
    assert steps_of_experts(family, family.sigmas(steps, config.model.size)) == counts
    assert max(window.places) + window.length - 1 == last < counts[0]
    assert config.model.trained == ("transformer",)


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
HUNYUAN15_FACTORS = 64 * (54 * (8 * 4096 + 4 * 10240) + 2 * (4 * 4096 + 2 * 10240))
LAYERS = [
    (FLUX, "pickscore,8", 64 * (19 * (8 * 6144 + 4 * 15360) + 38 * 3 * 6144)),
    (FLUX, "dance_lora,8", 128 * (19 * 4 * 6144 + 38 * 3 * 6144)),
    (FLUX, "dance,8", 11_901_408_320),
    (KONTEXT, "8", 64 * (19 * (8 * 6144 + 4 * 15360) + 38 * (3 * 6144 + 15360))),
    (Z_IMAGE, "8", Z_FACTORS),
    (QWEN_IMAGE, "ocr,4", FACTORS),
    (QWEN_IMAGE, "edit_2509,4", FACTORS),
    (KLEIN, "base_lora,8", KLEIN_FACTORS),
    (KLEIN, "distilled_full,8", 3_875_544_576),
    (SD35, "geneval,8", (24 * 8 - 1) * 32 * 2 * 1536),
    # 54 blocks of width 2048 with FLUX.1's eight and two, and two of the text with q, k, v, out and one feed-forward.
    (HUNYUAN15, "8", HUNYUAN15_FACTORS),
    (WAN, "ocr,8", 32 * 30 * 8 * 2 * 1536),
    (WAN, "longcat,8", 128 * 30 * (8 * 2 * 1536 + 2 * (1536 + 8960))),
    (WAN, "clip_pickscore_14b,8", WAN_FACTORS),
    (WAN22, "pickscore_a14b,8", WAN_FACTORS),  # of one expert
    (WAN, "flow_factory_i2v,8", WAN_FACTORS),
    # Keys and values of the image, too.
    (WAN, "unirl_i2v,8", 64 * 40 * 10 * 2 * 5120),
    (WAN22, "flow_factory_i2v,8", WAN_FACTORS),
    (WAN22, "unirl_i2v,8", 64 * 40 * 8 * 2 * 5120),
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


@pytest.mark.parametrize("tensor", [3, 4])
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
    # All that is encoded ahead, because the T5 is large.
    Step(
        *(SD35, "geneval,1", dict(context=(8, 77 + 128, 4096), pooled=(8, 2048))),
        *((8, 512, 512), (9, 8, 64, 64, 16), 11, {"lora.rank": 1}, 10.1, True),
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
    # States of 256 tokens of the prompt and 198 of the image.
    Step(
        *(QWEN_IMAGE, "edit_2511,1"),
        dict(context=(32, 454, 3584), mask=(32, 454), source=(32, 1, 128, 128, 16)),
        *((16, 512, 512), (3, 16, 64, 64, 16), 13, {"lora.rank": 1}, None, True),
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
    Step(
        *(WAN, "unirl_i2v,1", dict(source=(48, 3, 90, 160, 16), image=(48, 257, 1280))),
        *((4, 9, 720, 1280), (7, 4, 3, 90, 160, 16), 15, {"lora.rank": 1}, None, True),
    ),
    # Weights, two moments and gradient in float32; the decoder in bfloat16.
    Step(
        *(HUNYUAN, "1", dict(context=(32, 256, 4096), mask=(32, 256), pooled=(32, 768))),
        *((24, 53, 480, 480), (15, 24, 14, 60, 60, 16), 17, None),
        16 * 12.821013 + 2 * 0.146136,
    ),
    Step(
        *(HUNYUAN15, "1", dict(context=(48, 1000, 3584), glyphs=(48, 256, 1472))),
        *((1, 5, 480, 480), (9, 1, 2, 30, 30, 32), 17, None),
        *(2 * (8.326608 + 0.871310) + 16e-9 * HUNYUAN15_FACTORS, True),
    ),
]


@pytest.mark.parametrize("step", quick([(step,) for step in STEPS], 0))
def test_a_whole_step_has_the_right_shapes(unread, step):
    config = of_published(step.name, step.argument)
    config.update_from_flattened_dict(step.fields or {})
    system = assemble.build(fit_config(load_config(config), 1), jax.devices()[:1])
    record = example_record(system.policy.family) if config.model.source_height else None
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
