"""The recipes of configs/: each is accepted, and Stable Diffusion 3.5 Medium's fits at its real size."""

import json
import pathlib
import runpy

import huggingface_hub
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from digen_jax import assemble
from digen_jax.config import recipe
from digen_jax.config.door import open_recipe, place, reopen_recipe
from digen_jax.engine import rounding
from digen_jax.engine.placement import mesh_sizes
from digen_jax.errors import ConfigError
from digen_jax.flow.sampling import image_keys
from digen_jax.models.stable_diffusion_3 import COMPONENTS
from digen_jax.pretraining.tokenizer import build_tokenizer
from digen_jax.runtime.steps import Images
from digen_jax.runtime.training import receive
from tests.cases import quick, said

ROOT = pathlib.Path(__file__).parents[1]
GENEVAL = ROOT / "tests" / "data" / "geneval_test_metadata.jsonl"
SD35 = "sd35_medium"
RECIPES = runpy.run_path(str(ROOT / "configs" / f"{SD35}.py"))["RECIPES"]

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
    if name == SD35:
        config.prompts.file = config.evaluation.prompts = str(GENEVAL)
        config.reward.name = ("shapes_geneval",)
    return config


def trains(name):
    return "algorithm" in load(name)


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """Stable Diffusion 3.5 Medium's pipeline folder without weights, and with a small tokenizer."""
    folder = tmp_path_factory.mktemp("medium")

    def write(part, file, value):
        (folder / part).mkdir(exist_ok=True)
        (folder / part / file).write_text(json.dumps(value))

    write("", "model_index.json", {"_class_name": "StableDiffusion3Pipeline", **COMPONENTS})
    write("transformer", "config.json", TRANSFORMER)
    write("vae", "config.json", VAE)
    write("text_encoder", "config.json", CLIP | CLIP_L)
    write("text_encoder_2", "config.json", CLIP | CLIP_G)
    write("scheduler", "scheduler_config.json", SCHEDULER)
    for part in ("tokenizer", "tokenizer_2"):
        build_tokenizer(["a photo of a bench"], 77).save_pretrained(folder / part)
    return folder


@pytest.fixture(scope="module")
def shapes(medium):
    return assemble.load_family(medium).shapes()


@pytest.fixture
def unread(monkeypatch, shapes):
    """Parameters are shapes without devices; only arrays are put on devices."""
    put = jax.device_put

    def put_arrays(tree, *where):
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
        return tree if abstract else put(tree, *where)

    monkeypatch.setattr(jax, "device_put", put_arrays)
    monkeypatch.setattr(
        assemble,
        "read_parts",
        lambda family, folder, parts, group, dtype: {p: shapes[p] for p in parts},
    )


def gigabytes(*trees):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees)) / 1e9


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_every_recipe_is_accepted(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    if trains(name):
        config = load(name)
        assert recipe.complete(config).to_dict() == config.to_dict()  # any field can be overridden
        place(open_recipe(config), 8)
        place(open_recipe(config), 1)


def test_the_long_shapes_recipe_is_the_same_one_for_longer():
    short, long = (load("shapes_flow_grpo", length).to_dict() for length in ("short", "long"))
    assert long["steps"] > short["steps"]
    changed = {name for name in short if short[name] != long[name]}
    assert changed == {"steps", "trainer", "evaluation"}
    open_recipe(load("shapes_flow_grpo", "long"))
    with pytest.raises(ConfigError, match="must be short or long"):
        load("shapes_flow_grpo", "longer")


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_the_demo_fits_itself_to_the_devices_there_are(devices):
    fitted = place(open_recipe(load("shapes_demo")), devices)
    rollout, trainer = mesh_sizes(fitted.placement.meshes, devices)
    assert rollout + trainer == {1: 1, 2: 2, 3: 3, 4: 4, 5: 4, 6: 6, 7: 6, 8: 8, 16: 8}[devices]


@pytest.mark.parametrize("name", ["reward.name", "prompts.file", "evaluation.prompts"])
def test_what_sd35_leaves_to_the_user_must_be_given(name):
    config = recipe.complete(load(SD35))
    group, field = name.split(".")
    config[group][field] = type(config[group][field])()
    with pytest.raises(ConfigError, match=f"config.{name} is not given: add --config.{name}="):
        place(open_recipe(config), 1)


@pytest.mark.parametrize("argument", ["geneval,0", "ocr,-1", "ocr,two", "8", "", "geneva,8"])
def test_sd35_wants_a_recipe_and_a_number_of_gpus(argument):
    with pytest.raises(ConfigError, match=r"recipe and a number of GPUs.* recipes are geneval, "):
        load(SD35, argument)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gpus", ["1", "2", "4", "8", "64"])
def test_sd35_divides_among_the_gpus(name, gpus):
    config = load(SD35, f"{name},{gpus}")
    place(open_recipe(config), int(gpus))


def test_sd35_has_the_published_batch():
    """48 groups of 24 in two updates, for any number of GPUs; nine images a GPU at once."""
    config = load(SD35, "geneval,8")
    assert (config.batch.groups, config.batch.images, config.trainer.updates) == (48, 24, 2)
    assert config.sampler.fragment == config.trainer.micro_batch == 9 * 8


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


def test_sd35_has_grpo_guards_published_range():
    config = load(SD35, "pickscore_guard,8")
    algorithm = reopen_recipe(config).algorithm
    assert (algorithm.clip_range, algorithm.high, algorithm.kl_coefficient) == (4e-6, 4e-6, 0)
    assert (config.trainer.learning_rate, config.advantages.std) == (1e-4, "group")
    assert load(SD35, "geneval_guard,8").algorithm.clip_range == 2e-6


def test_no_t5_of_sd35_is_downloaded(monkeypatch, tmp_path):
    needed = [f"{part}/model.safetensors" for part in ("text_encoder", "text_encoder_2")]
    needed += ["transformer/diffusion_pytorch_model.safetensors", "model_index.json"]
    others = ["text_encoder_3/model-00001-of-00002.safetensors", "tokenizer_3/spiece.model"]
    others += ["text_encoders/t5xxl_fp16.safetensors", "sd3.5_medium.safetensors"]

    def download(name, revision, **patterns):
        assert name == "stabilityai/stable-diffusion-3.5-medium"
        asked.append(list(huggingface_hub.utils.filter_repo_objects(needed + others, **patterns)))
        return str(tmp_path)

    asked, index = [], tmp_path / "model_index.json"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    index.write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    assert assemble.open_pipeline(load(SD35).model.folder) == tmp_path
    assert asked == [["model_index.json"], needed]
    index.write_text('{"_class_name": "OtherPipeline"}')
    with pytest.raises(ConfigError, match="is a OtherPipeline; supported are"):
        assemble.open_pipeline(load(SD35).model.folder)
    assert asked[2:] == [["model_index.json"]]


@pytest.fixture
def traced(monkeypatch):
    """Programs may be traced within another one, which compiler options rule out."""
    monkeypatch.setattr(rounding, "AS_WRITTEN", {})


@pytest.mark.parametrize("gpus", quick([(1,), (8,)], 0))
@pytest.mark.usefixtures("traced")
def test_a_whole_step_of_sd35_has_the_right_shapes(gpus, medium, unread):
    config = load(SD35, f"geneval,{gpus}")
    config.model.folder = str(medium)
    system = assemble.build(place(open_recipe(config), gpus), jax.devices()[:gpus])
    assert system.placement.colocated

    rows = np.arange(config.sampler.fragment, dtype=np.int32) // config.batch.images
    advantages = np.linspace(-1, 1, len(rows), dtype=np.float32)
    keys = image_keys(jax.random.key(0), rows, np.arange(len(rows)))
    captions = [f"a photo of {n} benches" for n in range(config.batch.groups)]

    def step(state, weights, base):
        prompts = system.sampler.encode(weights, said(*captions))
        trajectory = system.sampler.generate(weights, prompts, rows, keys)
        images = system.sampler.decode(weights, trajectory)
        fragment = Images(0, rows, trajectory.transitions, trajectory.sigmas)
        experience = receive(system, prompts, fragment, advantages)
        totals = system.trainer.accumulate(state, base, experience, None)
        return prompts, images, trajectory, totals, system.trainer.update(state, totals)

    state = jax.eval_shape(system.trainer.init, system.start)
    weights = system.publish(system.start)
    prompts, images, trajectory, totals, (after, metrics) = jax.eval_shape(
        step, state, weights, system.base
    )
    b = len(rows)
    assert prompts.conditioning.context.shape == (config.batch.groups, 77, 4096)
    assert prompts.conditioning.pooled.shape == (config.batch.groups, 2048)
    assert (images.shape, images.dtype) == ((b, 1, 512, 512, 3), np.float32)
    assert trajectory.transitions.x.shape == (9, b, 64, 64, 16)
    assert trajectory.transitions.x.dtype == np.float32
    assert metrics["kl"].shape == ()
    for tree in (totals.gradient, after.tuned, after.ema):
        assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, state.tuned)
    assert_lora(system.start)
    # All data that stay on each GPU from one step to the next, and the gradient.
    held = gigabytes(system.base, system.rollouts[0].frozen, state, totals.gradient)
    assert 13 < held < 15


def assert_lora(factors):
    """Rank 32 on the eight projections of each joint attention; the last has no output for text."""
    names = {"/".join(path[-3:-1]) for path in flatten_dict(factors)}
    projections = ("to_q", "to_k", "to_v", "to_out_0", "to_add_out")
    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    assert names == {f"attn/{name}" for name in projections + added}
    assert sum(leaf.size for leaf in jax.tree.leaves(factors)) == (24 * 8 - 1) * 32 * 2 * 1536


@pytest.mark.usefixtures("traced")
def test_sd35_is_evaluated_in_forty_steps_without_noise(medium, unread):
    config = load(SD35)
    config.model.folder = str(medium)
    system = assemble.build(place(open_recipe(config), 1), jax.devices()[:1])
    weights = system.publish(system.start)
    keys = image_keys(jax.random.key(0), np.arange(14), np.zeros(14, np.int32))

    def look(weights):
        prompts = system.evaluator.encode(weights, said("a photo of a bench") * 14)
        rows = np.arange(14, dtype=np.int32)
        trajectory = system.evaluator.generate(weights, prompts, rows, keys)
        return system.evaluator.decode(weights, trajectory), trajectory

    images, trajectory = jax.eval_shape(look, weights)
    assert images.shape == (14, 1, 512, 512, 3)
    assert trajectory.sigmas.shape == (41,)
    assert trajectory.transitions.x.shape[0] == 0
