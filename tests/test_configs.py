"""The recipes of configs/: each is accepted, and Stable Diffusion 3.5 Medium's fits at its real size."""

import json
import pathlib
import re
import runpy
import shutil
import types
from typing import NamedTuple

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
from digen_jax.models.published import published_folder
from digen_jax.models.sd3.family import StableDiffusion3
from digen_jax.parallel import policy
from digen_jax.parallel.encoding import example_record
from digen_jax.parallel.placement import devices_per_mesh
from digen_jax.parallel.system import SampledImages, make_train_batch
from digen_jax.planning.memory import model_footprint
from digen_jax.policies import check_heads, describe_computation
from tests.cases import said

ROOT = pathlib.Path(__file__).parents[1]
GENEVAL = ROOT / "tests" / "data" / "geneval_test_metadata.jsonl"
SD35 = "sd35_medium"
FLUX = "flux_dev"
KONTEXT = "flux_kontext"
EDITS = GENEVAL.with_name("edits.jsonl")
Z_IMAGE = "zimage_turbo"
QWEN_IMAGE = "qwen_image"
KLEIN = "flux2_klein"


def recipes(name):
    return runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["RECIPES"]


PUBLISHED = SD35, FLUX, KONTEXT, Z_IMAGE, QWEN_IMAGE, KLEIN
RECIPES = recipes(SD35)
FLUX_RECIPES = recipes(FLUX)

# The hub repository's settings that change the networks.
TRANSFORMER = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm",
}
CLIP = {"model_type": "clip_text_model", "vocab_size": 49408, "max_position_embeddings": 77}
CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "eos_token_id": 2,
}
CLIP_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "eos_token_id": 2,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": True,
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
}


def load(name, *argument):
    """What a config file gives, with the fields that only a user can fill in filled in."""
    config = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"](*argument)
    if name in (SD35, FLUX, KONTEXT, KLEIN, QWEN_IMAGE, Z_IMAGE):
        config.prompts.file = config.evaluation.prompts = str(EDITS if name == KONTEXT else GENEVAL)
        config.rewards = default_config().rewards
    return config


def trains(name):
    return "algorithm" in load(name)


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """Stable Diffusion 3.5 Medium's pipeline folder without weights, and with tokenizers of special tokens alone."""
    folder = tmp_path_factory.mktemp("medium")

    def write(part, file, value):
        (folder / part).mkdir(exist_ok=True)
        (folder / part / file).write_text(json.dumps(value))

    components = StableDiffusion3.classes()
    write("", "model_index.json", {"_class_name": "StableDiffusion3Pipeline", **components})
    write("transformer", "config.json", TRANSFORMER)
    write("vae", "config.json", VAE)
    write("text_encoder", "config.json", CLIP | CLIP_L)
    write("text_encoder_2", "config.json", CLIP | CLIP_G)
    write("text_encoder_3", "config.json", T5)
    write("scheduler", "scheduler_config.json", SCHEDULER)
    for part in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        shutil.copytree(
            published_folder("stabilityai/stable-diffusion-3.5-medium") / part, folder / part
        )
    return folder


def unread_parts(family, folder, parts, group, dtype):
    """Instead of `families.read_parts`."""
    return {
        part: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
        for part, tree in family.shapes().items()
        if part in parts
    }


@pytest.fixture
def unread(monkeypatch):
    """Parameters are shapes without devices; only arrays are put on devices."""
    put = jax.device_put

    def put_arrays(tree, *where):
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
        return tree if abstract else put(tree, *where)

    monkeypatch.setattr(jax, "device_put", put_arrays)
    monkeypatch.setattr(assemble, "check_parts", lambda *_: None)
    monkeypatch.setattr(assemble, "read_parts", unread_parts)


def gigabytes(*trees):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees)) / 1e9


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_every_recipe_is_accepted(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    if trains(name):
        config = load(name)
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


@pytest.mark.parametrize("argument", ["geneval,0", "ocr,-1", "ocr,two", "8", "", "geneva,8"])
def test_sd35_wants_a_recipe_and_a_number_of_gpus(argument):
    with pytest.raises(ConfigError, match=r"recipe and a number of GPUs.* recipes are geneval, "):
        load(SD35, argument)


@pytest.mark.parametrize("argument", ["dance,0", "pickscore,-1", "dance,two", "8", "", "danc,8"])
def test_flux_wants_a_recipe_and_a_number_of_gpus(argument):
    with pytest.raises(ConfigError, match=r"recipe and a number of GPUs.* recipes are pickscore, "):
        load(FLUX, argument)


@pytest.mark.parametrize("name", FLUX_RECIPES)
@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_flux_divides_among_the_gpus(name, gpus):
    config = load(FLUX, f"{name},{gpus}")
    fit_config(load_config(config), gpus)
    each = 1 if name.startswith("dance") else 3
    assert config.sampler.chunk == config.trainer.micro_batch == each * gpus
    if not name.startswith("dance"):
        fit_config(load_config(load(FLUX, f"{name},{4 * gpus}")), 4 * gpus)


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
    config = load(FLUX, f"{name},8")
    found = load_config(config)
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


@pytest.mark.parametrize("name", FLUX_RECIPES)
def test_flux_trains_in_bfloat16_with_recomputed_log_probs(name):
    algorithm = read_config(load(FLUX, f"{name},8")).algorithm
    assert (algorithm.old_log_probs, algorithm.kl_coefficient) == ("recomputed", 0)
    assert algorithm.clip_range == (1e-5 if name.endswith("fast") else 1e-4)


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        # PEFT's `target_modules`, counted by hand. Dual blocks of width 3072: eight projections of attention, and two
        # feed-forwards of 3072 to 12288 and back; single blocks: q, k and v.
        ("pickscore", 64 * (19 * (8 * 6144 + 4 * 15360) + 38 * 3 * 6144)),
        ("dance_lora", 128 * (19 * 4 * 6144 + 38 * 3 * 6144)),
        ("dance", None),
    ],
)
def test_flux_tunes_the_published_layers(name, factors):
    config = load(FLUX, f"{name},8")
    config.model.folder = str(published_folder(config.model.folder))
    recipe_ = load_config(config)
    _, family = assemble.recipe_model(recipe_)
    tuned, base, *_ = assemble.parameter_shapes(recipe_, family)
    assert sum(leaf.size for leaf in jax.tree.leaves(tuned)) == (factors or 11_901_408_320)
    # The weights under a LoRA are as the hub's files have them; trained ones are float32.
    assert {leaf.dtype for leaf in jax.tree.leaves(tuned)} == {np.dtype(np.float32)}
    kept = {leaf.dtype for leaf in jax.tree.leaves(base)}
    assert kept == ({np.dtype(jax.numpy.bfloat16)} if factors else set())


def test_flux_shares_all_weights_among_eight_gpus():
    """Of what the docstring's memory is made: an eighth of the float32 weights in six copies, and the autoencoder."""
    config = load(FLUX, "dance_ema,8")
    config.model.folder = str(published_folder(config.model.folder))
    sizes = model_footprint(load_config(config))
    weights = 11_901_408_320
    assert sizes.copies == 1
    assert 4 * weights / 8 <= sizes.tuned(8, 1) < 4 * weights / 8 * 1.001
    assert sizes.base(8, 1) == 0
    assert 2 * 83_819_683 / 8 <= sizes.frozen(8, 1) < 2 * 83_819_683 / 8 * 1.01
    # T5 and CLIP, which are there before the run samples.
    ahead = 2 * (4_762_310_656 + 123_060_480)
    assert ahead / 8 <= sizes.ahead(8, 1) < ahead / 8 * 1.01


@pytest.mark.parametrize("argument", ["0", "-1", "two", "grpo,8", ""])
def test_z_image_wants_a_number_of_gpus(argument):
    with pytest.raises(ConfigError, match="must be a number of GPUs, such as :8"):
        load(Z_IMAGE, argument)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_z_image_divides_among_the_gpus(gpus):
    config = load(Z_IMAGE, str(gpus))
    fit_config(load_config(config), gpus)
    assert config.sampler.chunk == config.trainer.micro_batch == gpus


def test_z_image_has_the_published_settings():
    """48 groups of 16 in two updates; one noisy step, the second, third or fourth; an average every 4 steps."""
    found = read_config(load(Z_IMAGE, "8"))
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (48, 16, 2)
    assert (found.sampler.steps, found.sampler.window.places, found.trained_steps) == (
        6,
        (1, 2, 3),
        1,
    )
    assert (found.sampler.guidance, found.evaluation.guidance, found.evaluation.steps) == (1, 1, 10)
    trainer, algorithm = found.trainer, found.algorithm
    assert (trainer.learning_rate, trainer.weight_decay, trainer.clip_norm) == (3e-4, 1e-4, 1)
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl_coefficient) == (1e-4, 5, 0)
    assert algorithm.old_log_probs == "recomputed"


def z_image(gpus=1, rank=64, **trainer):
    """The recipe with the configuration of the published model, and other sizes of the trainer's mesh."""
    config = load(Z_IMAGE, str(gpus))
    config.model.folder = str(published_folder(config.model.folder))
    config.lora.rank = rank
    config.placement.trainer.update(trainer)
    return load_config(config)


def test_z_image_holds_what_its_docstring_says():
    """Each of 8 GPUs has the LoRA in six copies, and the transformer, autoencoder and prompts in bfloat16."""
    sizes = model_footprint(z_image(8))
    # PEFT's `target_modules`, counted by hand: q, k, v and out of width 3840, and three layers to 10240 or back.
    factors = 4 * 64 * 34 * (4 * 2 * 3840 + 3 * (3840 + 10240))
    assert (sizes.copies, sizes.tuned(1, 1)) == (1, factors)
    assert sizes.base(1, 1) == 2 * 6_154_908_736
    assert sizes.frozen(1, 1) == 2 * 83_819_683
    assert sizes.trajectory == 2 * 4 * 64 * 64 * 16 + 4
    assert sizes.conditioning == 49 * 512 * (2 * 2560 + 1)  # and the empty prompt
    held = 6 * factors + sizes.base(1, 1) + sizes.frozen(1, 1) + sizes.conditioning
    held += 768 * sizes.trajectory / 8
    assert round(held / 2**30, 1) == 15.3 and ": 15.3, of which 11.5" in docstring(Z_IMAGE)


def docstring(name):
    return runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["__doc__"]


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 5, 6, 7, 8])
def test_z_images_thirty_heads_are_split_by_what_divides_them(tensor):
    recipe_ = z_image(tensor=tensor)
    _, family = assemble.recipe_model(recipe_)
    placement = assemble.placed(fit_config(recipe_, tensor), family, jax.devices()[:tensor])
    if 30 % tensor == 0:
        return check_heads(family, placement)
    sentence = (
        rf"trainer.tensor = {tensor} does not divide the model's 30 attention heads, .* 2, 3, 5, 6"
    )
    with pytest.raises(ConfigError, match=sentence):
        check_heads(family, placement)


@pytest.mark.usefixtures("traced")
def test_a_whole_step_of_z_image_has_the_right_shapes(unread):
    """Its LoRA is drawn, which is most of the time, so it has a rank of 1."""
    system = assemble.build(fit_config(z_image(rank=1), 1), jax.devices()[:1])
    prompts, images, trajectory, totals, (after, metrics) = shapes_of_a_step(
        load(Z_IMAGE, "1"), system
    )
    assert prompts.conditioning.context.shape == (48, 512, 2560)
    assert prompts.conditioning.mask.shape == (48, 512)
    assert (images.shape, images.dtype) == ((1, 1, 512, 512, 3), np.float32)
    assert trajectory.transitions.x.shape == (1, 1, 64, 64, 16)
    assert trajectory.sigmas.shape == (7,)
    assert "kl" not in metrics
    for tree in (totals.gradient, after.tuned, after.ema):
        assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, system.start)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gpus", ["1", "2", "4", "8", "64"])
def test_sd35_divides_among_the_gpus(name, gpus):
    config = load(SD35, f"{name},{gpus}")
    fit_config(load_config(config), int(gpus))


def test_sd35_has_the_published_batch():
    """48 groups of 24 in two updates, for any number of GPUs; nine images a GPU at once."""
    config = load(SD35, "geneval,8")
    assert (config.batch.groups, config.batch.images, config.trainer.updates) == (48, 24, 2)
    assert config.sampler.chunk == config.trainer.micro_batch == 9 * 8


@pytest.mark.parametrize("name", RECIPES)
def test_sd35_has_the_published_average_and_start(name):
    """Its turns are repeated for the source's micro-batches of an update, independent of ours."""
    flow_grpo, guard = not name.startswith("nft"), name.endswith("guard")
    for gpus, repeats in ((1, 4), (2, 4 if guard else 2), (8, 4 if guard else 2)):
        config = load(SD35, f"{name},{gpus}")
        trainer = config.trainer
        expected = (0.9, True, 8, repeats) if flow_grpo else (0.9, True, 1, 1)
        assert expected == (
            trainer.ema,
            trainer.ema_warm_up,
            trainer.ema_every,
            trainer.ema_repeats,
        )
        assert (config.lora.init, config.advantages.drop_zero_std) == ("gaussian", flow_grpo)
        every = (10, 30) if not flow_grpo else (30, 30) if guard else (60, 60)
        assert (config.seed, config.evaluation.every, config.checkpoint.every) == (42, *every)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (SD35, "geneval,8"),
        (FLUX, "pickscore,8"),
        (KONTEXT, "8"),
        (KLEIN, "base_lora,8"),
        (Z_IMAGE, "8"),
    ],
)
def test_seeds_are_the_published_ones(name, argument):
    assert load(name, argument).seed == 42


def test_sd35_has_grpo_guards_published_range():
    config = load(SD35, "pickscore_guard,8")
    algorithm = read_config(config).algorithm
    assert (algorithm.clip_range, algorithm.high, algorithm.kl_coefficient) == (4e-6, 4e-6, 0)
    assert (config.trainer.learning_rate, config.advantages.std) == (1e-4, "group")
    assert load(SD35, "geneval_guard,8").algorithm.clip_range == 2e-6


def test_the_t5_of_sd35_is_downloaded_unless_it_is_left_out(monkeypatch, tmp_path):
    needed = [f"{part}/model.safetensors" for part in ("text_encoder", "text_encoder_2")]
    needed += ["transformer/diffusion_pytorch_model.safetensors", "model_index.json"]
    third = ["text_encoder_3/model-00001-of-00002.safetensors"]
    others = ["text_encoders/t5xxl_fp16.safetensors", "sd3.5_medium.safetensors"]

    def download(name, revision, **patterns):
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
    with pytest.raises(
        ConfigError,
        match=r"^its 'vae', which config.model.without names, cannot be left out: name only text_enc",
    ):
        open_pipeline(load(SD35).model.folder, ("text_encoder_3", "vae"))
    assert asked[2:] == [["model_index.json"]]
    del asked[2:]
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
    _, family = assemble.recipe_model(found)
    devices = np.empty(8, object)
    devices[:] = [Device(i, "NVIDIA H100 80GB HBM3") for i in range(8)]
    mesh = types.SimpleNamespace(devices=devices, shape={"tensor": 1, "sequence": 1})
    group = types.SimpleNamespace(mesh=mesh, attention="auto")
    placement = types.SimpleNamespace(trainer=group, rollout=group, rollouts=())
    line = describe_computation(found, family, placement)
    assert "\n" not in line
    assert all(part in line for part in ("8 x NVIDIA H100 80GB HBM3;", *expected))


@pytest.fixture
def traced(monkeypatch):
    """Programs may be traced within another one, which compiler options rule out."""
    monkeypatch.setattr(policy, "AS_WRITTEN", {})


def shapes_of_a_step(config, system, record=None):
    """Of prompts, images, trajectory, gradient and update, for one chunk; `record` is that of all prompts."""
    rows = np.arange(config.sampler.chunk, dtype=np.int32) // config.batch.images
    advantages = np.linspace(-1, 1, len(rows), dtype=np.float32)
    keys = image_keys(jax.random.key(0), rows, np.arange(len(rows)))
    groups = config.batch.groups
    records = [record] * groups if record else said(*(f"{n} benches" for n in range(groups)))

    def step(state, weights, base, prompts):
        trajectory = system.sampler.generate(weights, prompts, rows, keys)
        images = system.sampler.decode(weights, trajectory)
        chunk = SampledImages(0, rows, trajectory.transitions, trajectory.sigmas)
        train_batch = make_train_batch(system, prompts, chunk, advantages)
        totals = system.trainer.accumulate(state, base, train_batch, None, behavior=state.tuned)
        return images, trajectory, totals, system.trainer.update(state, totals)

    state = jax.eval_shape(system.trainer.init, system.start)
    weights = system.rollout_weights(system.start)
    prompts = system.sampler.encoded(weights, records)
    return prompts, *jax.eval_shape(step, state, weights, system.base, prompts)


@pytest.mark.usefixtures("traced")
def test_a_whole_step_of_flux_has_the_right_shapes(unread):
    """Of DanceGRPO's recipe that has everything: all weights, an average, and a share of the steps."""
    config = load(FLUX, "dance_ema,1")
    config.model.folder = str(published_folder(config.model.folder))
    system = assemble.build(fit_config(load_config(config), 1), jax.devices()[:1])
    prompts, images, trajectory, totals, (after, metrics) = shapes_of_a_step(config, system)
    assert prompts.conditioning.context.shape == (16, 512, 4096)
    assert prompts.conditioning.pooled.shape == (16, 768)
    assert (images.shape, images.dtype) == ((1, 1, 720, 720, 3), np.float32)
    assert trajectory.transitions.x.shape == (15, 1, 90, 90, 16)
    assert trajectory.sigmas.shape == (17,)
    assert "kl" not in metrics
    for tree in (totals.gradient, after.tuned, after.ema):
        assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, system.start)
    # Weights, two moments, average and gradient in float32; the autoencoder in bfloat16. Prompts are encoded ahead.
    held = gigabytes(system.base, system.rollouts[0].frozen, after, totals.gradient)
    assert held == pytest.approx(20 * 11.9014 + 2 * 0.0838, rel=1e-4)


def test_kontext_has_the_published_settings():
    """48 groups of 21 in two updates, five of six steps trained, an average that is mixed six times at a turn."""
    found = read_config(load(KONTEXT, "28"))
    assert (found.batch.groups, found.batch.images, found.trainer.updates) == (48, 21, 2)
    assert (found.sampler.steps, found.sampler.noise_level, found.trained_steps) == (6, 0.9, 5)
    assert (found.sampler.guidance, found.evaluation.guidance, found.evaluation.steps) == (
        2.5,
        2.5,
        28,
    )
    assert (found.model.height, found.model.width, found.model.max_sequence_length) == (
        512,
        512,
        128,
    )
    assert (found.lora.rank, found.lora.alpha, found.lora.init) == (64, 128, "gaussian")
    trainer, algorithm = found.trainer, found.algorithm
    assert (trainer.ema, trainer.ema_every, trainer.ema_repeats) == (0.9, 8, 6)
    assert (trainer.learning_rate, trainer.weight_decay, trainer.clip_norm) == (3e-4, 1e-4, 1)
    assert (algorithm.clip_range, algorithm.adv_clip, algorithm.kl_coefficient) == (1e-4, 5, 0)
    assert (found.evaluation.every, found.evaluation.batch) == (30, 2 * 28)


@pytest.mark.usefixtures("traced")
def test_a_whole_step_of_kontext_has_the_right_shapes(unread):
    """Its LoRA is drawn, which is most of the time, so it has a rank of 1."""
    config = load(KONTEXT, "1")
    config.model.folder = str(published_folder(config.model.folder))
    config.lora.rank = 1
    system = assemble.build(fit_config(load_config(config), 1), jax.devices()[:1])
    record = example_record(system.policy.family)
    prompts, images, trajectory, totals, (after, metrics) = shapes_of_a_step(config, system, record)
    assert prompts.conditioning.context.shape == (48, 128, 4096)
    assert prompts.conditioning.pooled.shape == (48, 768)
    assert prompts.conditioning.source.shape == (48, 64, 64, 16)
    assert (images.shape, images.dtype) == ((3, 1, 512, 512, 3), np.float32)
    assert trajectory.transitions.x.shape == (5, 3, 64, 64, 16)
    assert trajectory.sigmas.shape == (7,)
    assert "kl" not in metrics
    for tree in (totals.gradient, after.tuned, after.ema):
        assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, system.start)


@pytest.mark.usefixtures("traced")
def test_a_whole_step_of_sd35_has_the_right_shapes(medium, unread):
    config = load(SD35, "geneval,1")
    config.model.folder = str(medium)
    system = assemble.build(fit_config(load_config(config), 1), jax.devices()[:1])
    assert system.placement.colocated
    assert system.evaluator.settings.step == Ode() and len(system.evaluator.sigmas) == 41

    prompts, images, trajectory, totals, (after, metrics) = shapes_of_a_step(config, system)
    b = config.sampler.chunk
    # They are encoded ahead, because the T5 is large.
    assert set(system.sampler.stored.encoders) == {f"text_encoder{n}" for n in ("", "_2", "_3")}
    assert prompts.conditioning.context.shape == (config.batch.groups, 77 + 128, 4096)
    assert prompts.conditioning.pooled.shape == (config.batch.groups, 2048)
    assert (images.shape, images.dtype) == ((b, 1, 512, 512, 3), np.float32)
    assert trajectory.transitions.x.shape == (9, b, 64, 64, 16)
    assert trajectory.transitions.x.dtype == np.float32
    assert metrics["kl"].shape == ()
    for tree in (totals.gradient, after.tuned, after.ema):
        assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, system.start)
    assert_lora(system.start)
    # All data that stay on each GPU from one step to the next, and the gradient.
    held = gigabytes(system.base, system.rollouts[0].frozen, after, totals.gradient)
    assert 10 < held < 11


def assert_lora(factors):
    """Rank 32 on the eight projections of each joint attention; the last has no output for text."""
    names = {"/".join(path[-3:-1]) for path in flatten_dict(factors)}
    projections = ("to_q", "to_k", "to_v", "to_out_0", "to_add_out")
    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    assert names == {f"attn/{name}" for name in projections + added}
    assert sum(leaf.size for leaf in jax.tree.leaves(factors)) == (24 * 8 - 1) * 32 * 2 * 1536


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_take_the_numbers_of_gpus_that_divide_them_and_list_them(name):
    found = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))
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


ON_EIGHT = [
    (name, ",".join((*recipe, "8")))
    for name in PUBLISHED
    for recipe in ([()] if name in (KONTEXT, Z_IMAGE) else [(one,) for one in recipes(name)])
]


@pytest.mark.parametrize(("name", "argument"), ON_EIGHT)
def test_a_published_recipe_runs_on_separate_gpus_by_the_fields_in_its_docstring(name, argument):
    config = load(name, argument)
    shared = config.placement.trainer.fsdp == 8
    fields = {"rollout.data": 4, "trainer.data": 4}
    if shared:
        fields = {"rollout.data": 1, "rollout.fsdp": 4, "trainer.fsdp": 4}
    options = " ".join(f"--config.placement.{field}={n}" for field, n in fields.items())
    assert f"\n{options}\n" in docstring(name)
    config.placement.update_from_flattened_dict(fields)
    rollout, trainer = fit_config(load_config(config), 8).placement.meshes
    assert (rollout.devices, trainer.devices, rollout.fsdp) == (4, 4, 4 if shared else 1)
