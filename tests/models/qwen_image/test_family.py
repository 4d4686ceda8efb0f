"""Qwen-Image against diffusers' own pipeline, on a folder of random weights."""

import inspect
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from safetensors.numpy import load_file, save_file

from digen_jax.checkpoints.folder import copy_pipeline, open_tensors, read_json, write_params
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import load_family, open_pipeline, read_parts
from digen_jax.inference.model import all_devices
from digen_jax.models.family import Size
from digen_jax.models.published import published_folder
from digen_jax.models.qwen_image.family import DROPPED, NULL, TEMPLATE
from digen_jax.models.qwen_image.network import forward_flops
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from tests.cases import said
from tests.models.qwen_image.folders import packed, qwen_image_folder, qwen_image_pipeline

PROMPTS = ["a photo of a red circle", "two blue squares and schräge ☃ left of a photo", ""]
NEGATIVE = ["a circle left of it", "", "red"]
LONG = "a red circle left of a blue square and " * 3 + "a green star"
# Tokens of a prompt; odd, and fewer than LONG has.
LENGTH = 41
STEPS, SIZE, GUIDANCE = 4, Size(12, 20), 4.0


@pytest.fixture(scope="module")
def folder(base):
    return qwen_image_folder(base)


@pytest.fixture(scope="module")
def pipe(folder):
    """diffusers' pipeline."""
    return qwen_image_pipeline(folder)


@pytest.fixture(scope="module")
def ours(folder):
    """The family with all its parameters, and its jitted `encode` and `decode`."""
    family = load_family(folder, max_sequence_length=LENGTH)
    params = read_parts(family, folder, family.shapes(), all_devices(jax.devices()[:1]))
    return family, params, jax.jit(family.encode), jax.jit(family.decode)


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield


def close(actual, expected, tolerance: float = 1e-5) -> None:
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() < tolerance * np.abs(expected).max()


def start(rows: int = 3) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(rows, SIZE.height // 2, SIZE.width // 2, 4))
    return x.astype(np.float32)


def call(pipe, prompts, x, guidance=GUIDANCE, negative=NEGATIVE):
    """The packed latents after each step, and pixels."""
    latents = []

    def keep(pipe, step, timestep, given):
        latents.append(given["latents"])
        return {}

    pixels = pipe(
        list(prompts),
        negative_prompt=list(negative),
        true_cfg_scale=guidance,
        height=SIZE.height,
        width=SIZE.width,
        num_inference_steps=STEPS,
        latents=packed(x),
        max_sequence_length=LENGTH,
        callback_on_step_end=keep,
        output_type="np",
    ).images
    return latents, pixels


# --------------------------------------------------------------------------------------- prompts


def test_prompts_are_encoded_as_by_the_pipeline(ours, pipe, folder):
    family, params, encode, _ = ours
    prompts = [*PROMPTS, LONG, "Ein ROTER {Kreis},  schräg ☃\n日本"]
    states, mask = pipe.encode_prompt(list(prompts), max_sequence_length=family.max_sequence_length)
    records = said(*prompts)
    for _ in range(2):
        found = encode(params, family.tokenize(records))
        for context, valid, expected, attended in zip(*found, states, mask, strict=True):
            np.testing.assert_array_equal(valid[: len(attended)], attended.bool())
            assert not valid[len(attended) :].any()
            close(context[valid], expected[attended.bool()])
    assert records == said(*prompts)
    lengths = found.mask.sum(axis=1).tolist()
    assert found.context.shape[1] == family.max_sequence_length == LENGTH
    assert len(set(lengths)) > 3 and min(lengths) == lengths[2] == 5
    assert max(lengths) == LENGTH
    assert family.cut(prompts).tolist() == [False] * 3 + [True] + [False]
    alone = encode(params, family.tokenize(records[:1]))
    close(alone.context[0][alone.mask[0]], found.context[0][found.mask[0]])


def test_the_pass_without_a_prompt_has_the_published_one(ours, pipe):
    family, params, encode, _ = ours
    null = encode(params, family.tokenize_null(said(*PROMPTS)))
    assert len(null.mask) == 1
    expected, mask = pipe.encode_prompt([" "])
    assert mask is None
    close(null.context[null.mask], expected[0])


def test_the_chat_is_the_pipelines(pipe):
    assert pipe.prompt_template_encode == TEMPLATE
    assert pipe.prompt_template_encode_start_idx == DROPPED
    beginning = pipe.tokenizer(TEMPLATE.partition("{}")[0]).input_ids
    assert len(beginning) == DROPPED


# ------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("height", "width"), [(1024, 1024), (512, 512), (928, 1664), (256, 256), (16, 1616)]
)
def test_sigmas_and_timesteps_are_the_pipelines(height, width):
    """Of the published model, bit by bit."""
    folder = published_folder("Qwen/Qwen-Image")
    family = load_family(folder)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    config = scheduler.config
    mu = calculate_shift(
        (height // 16) * (width // 16),
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    for steps in range(2, 51):
        uniform = np.linspace(1.0, 1 / steps, steps)
        timesteps, _ = retrieve_timesteps(scheduler, steps, "cpu", sigmas=uniform, mu=mu)
        sigmas = family.sigmas(steps, Size(height, width))
        assert sigmas.dtype == np.float32
        np.testing.assert_array_equal(sigmas, scheduler.sigmas.numpy())
        np.testing.assert_array_equal(sigmas[:-1] * np.float32(1000), timesteps.numpy())


def test_one_step_is_refused(ours, pipe):
    """diffusers divides 0 by 0 there."""
    timesteps, _ = retrieve_timesteps(pipe.scheduler, 1, "cpu", sigmas=[1.0], mu=0.6)
    assert np.isnan(timesteps).all()
    with pytest.raises(ValueError, match="one step is too few for a scheduler with shift_terminal"):
        ours[0].sigmas(1, SIZE)


# ------------------------------------------------------------------------------ the whole pipeline


@pytest.fixture(scope="module")
def velocities(ours):
    """The jitted velocities (without, with) the prompt, whose conditioning is NEGATIVE's and PROMPTS'."""
    family, params, encode, _ = ours
    null, prompts = (encode(params, family.tokenize(said(*p))) for p in (NEGATIVE, PROMPTS))
    variables = {"transformer": {"params": params["transformer"]}}

    @jax.jit
    def both(x, sigma):
        pair = jax.tree.map(lambda *rows: jnp.concatenate(rows), null, prompts)
        v = family.velocity(variables, jnp.tile(x, (2, 1, 1, 1)), jnp.full(6, sigma), pair)
        return v[:3], v[3:]

    return both


@pytest.mark.parametrize("guidance", [GUIDANCE, 1.5, 9.0])
def test_latents_are_the_pipelines_after_each_step_and_so_are_pixels(
    ours, pipe, velocities, guidance
):
    """With a negative prompt that is not empty."""
    family, params, _, decode = ours
    x = start()
    expected, pixels = call(pipe, PROMPTS, x, guidance)
    sigmas = family.sigmas(STEPS, SIZE)
    np.testing.assert_array_equal(sigmas, pipe.scheduler.sigmas.numpy())
    for sigma, after, latents in zip(sigmas[:-1], sigmas[1:], expected, strict=True):
        null, prompt = velocities(x, sigma)
        v = family.guided(null, prompt, guidance)
        # The plain mixture has other lengths.
        lengths = [
            np.linalg.norm(packed(a), axis=-1)
            for a in (prompt, v, null + guidance * (prompt - null))
        ]
        np.testing.assert_allclose(lengths[1], lengths[0], rtol=1e-5)
        assert np.abs(lengths[2] / lengths[0] - 1).max() > 0.005
        x = x + (after - sigma) * v
        close(packed(x), latents, 1e-4)
    images = np.asarray(decode(params, x))[:, 0]
    assert images.shape == (3, SIZE.height, SIZE.width, 3)
    np.testing.assert_allclose(images, pixels, rtol=0, atol=1e-3)
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3


def test_guidance_of_a_velocity_of_zeros_is_a_number(ours):
    """Where diffusers divides 0 by 0: a network of which nothing is trained yet."""
    zeros = jnp.zeros((1, 2, 4, 3))
    guided = jax.jit(jax.value_and_grad(lambda n, p: ours[0].guided(n, p, 3.0).sum(), (0, 1)))
    value, gradients = guided(zeros, zeros)
    assert value == 0 and np.isfinite(gradients).all()


def test_the_samplers_images_are_the_pipelines_and_those_of_a_prompt_alone(ours, pipe):
    family, params, *_ = ours
    policy, group = Policy(family, GUIDANCE), all_devices(jax.devices()[:1])
    sampler = Sampler(policy, group, SamplerSettings(SIZE, STEPS, Ode()))
    trained = {"transformer": params["transformer"]}
    weights = Weights(*policy.split(jax.random.key(0), trained, reference=False), params)
    rows = np.arange(2, dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))

    def images(*prompts):
        encoded = sampler.encode(weights, said(*prompts))
        trajectory = sampler.generate(weights, encoded, rows, keys)
        return np.asarray(sampler.decode(weights, trajectory))[:, 0]

    noise, prompts = start_noise(keys, sampler.shape), (PROMPTS[0], LONG)
    found = images(*prompts)
    _, expected = call(pipe, prompts, noise, negative=[NULL] * 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    # Beside a longer prompt, and beside itself.
    short = images(prompts[0], prompts[0])
    np.testing.assert_allclose(short[0], found[0], rtol=0, atol=1e-4)
    assert np.abs(short[1] - found[1]).max() > 10 / 255


# ---------------------------------------------------------------------------------------- folders


def test_every_tensor_is_read_once_or_is_known_to_be_unread(folder, ours):
    """Reading refuses surplus and missing tensors; what it may ignore is the vision tower and the head."""
    family, params, *_ = ours
    assert family.ignored.keys() == {"text_encoder"}
    for part, tree in params.items():
        stored = open_tensors(folder / part)
        unread = {n for n in stored if n.startswith(("visual.", "lm_head."))}
        assert bool(unread) == (part == "text_encoder")
        read = sum(np.prod(stored[name].shape) for name in stored.keys() - unread)
        assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == read


def test_tensors_are_read_by_their_names_in_memory_too(folder, ours, tmp_path):
    """As transformers 5 has them, which writes the published ones."""
    family, params, *_ = ours
    tensors = load_file(folder / "text_encoder" / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    new = {
        name.replace("model.", "model.language_model.").replace("visual.", "model.visual."): tensor
        for name, tensor in tensors.items()
    }
    (tmp_path / "text_encoder").mkdir()
    save_file(new, tmp_path / "text_encoder" / "model.safetensors")
    found = family.read(tmp_path, "text_encoder")
    jax.tree.map(np.testing.assert_array_equal, found, params["text_encoder"])


def test_the_export_gives_the_same_pixels_in_diffusers(folder, ours, pipe, tmp_path):
    """The transformer written anew, in several files; the other components are copied."""
    family, params, *_ = ours

    def write(target):
        config = read_json(folder / "transformer" / "config.json")
        lists = family.lists["transformer"]
        write_params(target, params["transformer"], lists, config, max_shard_bytes=150_000)

    target = tmp_path / "copy"
    copy_pipeline(folder, target, {"transformer": write}, {"steps": STEPS})
    assert len(list((target / "transformer").glob("*.safetensors"))) > 2
    for part in ("text_encoder", "vae", "tokenizer", "scheduler"):
        for file in (folder / part).iterdir():
            assert file.read_bytes() == (target / part / file.name).read_bytes()
    again = QwenImagePipeline.from_pretrained(target)
    again.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(call(again, PROMPTS, start())[1], call(pipe, PROMPTS, start())[1])
    read = load_family(target).read(target, "transformer")
    jax.tree.map(np.testing.assert_array_equal, read, params["transformer"])


# ---------------------------------------------------------------------------- what it says of itself


def test_sizes_defaults_and_flops(folder, ours, pipe):
    family = load_family(folder)
    defaults = inspect.signature(QwenImagePipeline.__call__).parameters
    assert family.default_steps == defaults["num_inference_steps"].default
    assert family.default_guidance == defaults["true_cfg_scale"].default
    assert family.max_sequence_length == defaults["max_sequence_length"].default
    side = pipe.default_sample_size * pipe.vae_scale_factor
    assert family.default_size() == Size(side, side) and family.heads == (4, 8, False, 0, 0)
    assert family.latent_shape(SIZE) == (6, 10, 4)
    config = family.transformer.config
    assert family.flops(SIZE)["transformer"] == forward_flops(config, (6, 10, 4), 512)
    assert ours[0].flops(SIZE)["transformer"] == forward_flops(config, (6, 10, 4), LENGTH)
    with pytest.raises(ValueError, match="must be multiples of 4, 4 or more"):
        family.latent_shape(Size(12, 18))
    with pytest.raises(ValueError, match="a clip of 5 frames"):
        family.latent_shape(Size(12, 12, 5))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "pipeline")


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load_family(open_pipeline(str(folder)), **options)
    return str(caught.value).replace(f"{folder}/", "")


def test_what_does_not_fit_is_refused_by_its_file(folder, copy):
    assert refused(copy, max_sequence_length=1025) == (
        "config.model.max_sequence_length must be at most 1024, the most that Qwen-Image reads of a prompt, not 1025"
    )
    config = copy / "transformer" / "config.json"
    tokenizer = copy / "tokenizer" / "tokenizer.json"
    whole = tokenizer.read_text()
    own = json.loads(whole)
    own["model"]["merges"] = own["model"]["merges"][:-60]
    tokenizer.write_text(json.dumps(own))
    assert " tokens of the beginning of the model's template, which must be 34: " in refused(copy)
    tokenizer.write_text(whole)
    edit(copy / "vae" / "config.json", base=7)
    assert refused(copy).startswith("vae/config.json: AutoencoderKLQwenImage has no field 'base'")
    shutil.copy(folder / "vae" / "config.json", copy / "vae")
    edit(config, joint_attention_dim=7)
    assert refused(copy).startswith("text_encoder/config.json: hidden_size must be 7, the trans")
    edit(config, joint_attention_dim=24, out_channels=5)
    assert refused(copy).startswith("transformer/config.json: out_channels must be 4, the trans")
    edit(config, in_channels=20)
    assert refused(copy).startswith("vae/config.json: z_dim must be 5, the transformer's in_cha")
    edit(config, zero_cond_t=True)
    assert refused(copy).startswith("transformer/config.json: zero_cond_t must be False")
    edit(copy / "model_index.json", vae=["diffusers", "AutoencoderKL"])
    assert refused(copy).startswith(
        'model_index.json says that vae is ["diffusers", "AutoencoderKL"], but only '
        '["diffusers", "AutoencoderKLQwenImage"] is supported'
    )


def slide(copy, window):
    """Gives the text encoder a sliding window; returns its config.json."""
    path = copy / "text_encoder" / "config.json"
    text = json.loads(path.read_text())["text_config"]
    fields = dict(use_sliding_window=True, sliding_window=window, max_window_layers=0)
    edit(path, text_config=text | fields | {"layer_types": None})
    return path


@pytest.mark.parametrize(
    ("window", "fits"), [(LENGTH + DROPPED, True), (LENGTH + DROPPED - 1, False)]
)
def test_prompts_must_fit_the_text_encoders_sliding_window(copy, window, fits):
    """Decided by the JSON files: the copy has no weights."""
    for file in copy.rglob("*.safetensors"):
        file.unlink()
    path = slide(copy, window)
    if fits:
        assert load_family(copy, max_sequence_length=LENGTH).max_sequence_length == LENGTH
        return
    with pytest.raises(ConfigError) as caught:
        load_family(copy, max_sequence_length=LENGTH)
    assert str(caught.value).startswith(f"{path}: ") and "sliding_window" in str(caught.value)
    assert f"max_sequence_length to {LENGTH - 1} " in str(caught.value)
    load_family(copy, max_sequence_length=LENGTH - 1)


@pytest.mark.parametrize(("window", "fits"), [(DROPPED + 1, True), (DROPPED, False)])
def test_a_sliding_window_that_the_template_fills_has_no_length_to_set(copy, window, fits):
    slide(copy, window)
    assert ("max_sequence_length" in refused(copy)) == fits
    if fits:
        assert load_family(copy, max_sequence_length=1).max_sequence_length == 1


def test_a_tokenizer_that_truncates_the_template_is_refused(copy):
    edit(copy / "tokenizer" / "tokenizer_config.json", truncation_side="left")
    assert refused(copy).startswith("tokenizer/tokenizer_config.json: truncation_side")
