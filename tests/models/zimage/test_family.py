"""Z-Image against diffusers' own pipeline, on a folder of random weights."""

import dataclasses
import inspect
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
from diffusers.pipelines.z_image import pipeline_z_image
from peft.utils import get_peft_model_state_dict

from digen_jax.checkpoints.folder import read_json, write_params
from digen_jax.checkpoints.lora import LoraConfig, adapted_layers, lora_init, lora_layers
from digen_jax.checkpoints.lora_files import read_lora, write_lora
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import load_family, open_pipeline, read_parts
from digen_jax.inference.model import all_devices
from digen_jax.models.family import Size
from digen_jax.models.zimage.network import forward_flops
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from tests.cases import said
from tests.models.zimage.folders import TRANSFORMER, zimage_folder, zimage_pipeline

PROMPTS = ["a photo of a red circle", "two blue squares and schräge ☃ left of a photo", ""]
NEGATIVE = ["a circle left of it", "", "red"]
LONG = "a red circle left of a blue square and " * 3 + "a green star"
# Tokens of a chat; odd, so that captions are padded to it, and then filled up to 64.
LENGTH = 61
STEPS, SIZE = 4, Size(12, 20)


@pytest.fixture(scope="module")
def folder(base):
    return zimage_folder(base)


@pytest.fixture(scope="module")
def pipe(folder):
    """diffusers' pipeline."""
    return zimage_pipeline(folder)


@pytest.fixture(scope="module")
def ours(folder):
    """The family with all its parameters, and its jitted `encode` and `decode`."""
    family = load_family(folder, max_sequence_length=LENGTH)
    params = read_parts(family, folder, family.shapes(), all_devices(jax.devices()[:1]))
    return family, params, jax.jit(family.encode), jax.jit(family.decode)


def close(actual, expected, tolerance: float = 1e-5) -> None:
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() < tolerance * np.abs(expected).max()


def of_pipeline(pipe, prompts, x, **options):
    """Latents after each step, and pixels; the pipeline changes a list of prompts that it is given."""
    latents = []

    def keep(pipe, step, timestep, given):
        latents.append(given["latents"].permute(0, 2, 3, 1).numpy())
        return {}

    if "negative_prompt" in options:
        options["negative_prompt"] = list(options["negative_prompt"])
    pixels = pipe(
        list(prompts),
        height=SIZE.height,
        width=SIZE.width,
        num_inference_steps=STEPS,
        latents=torch.tensor(np.asarray(x).transpose(0, 3, 1, 2)),
        max_sequence_length=LENGTH,
        callback_on_step_end=keep,
        output_type="np",
        **options,
    ).images
    return latents, pixels


def start(rows: int = 3) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(rows, SIZE.height // 2, SIZE.width // 2, 4))
    return x.astype(np.float32)


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield


def test_prompts_are_encoded_as_by_the_pipeline(ours, pipe, folder):
    family, params, encode, _ = ours
    prompts = [*PROMPTS, LONG, "Ein ROTER Kreis,  schräg ☃\n日本"]
    expected, null = pipe.encode_prompt(list(prompts), max_sequence_length=LENGTH)
    records = said(*prompts)
    for _ in range(2):
        found = encode(params, family.tokenize(records))
        for context, mask, states in zip(*found, expected, strict=True):
            assert not mask[mask.sum() :].any()
            close(context[mask], states)
    assert records == said(*prompts)
    lengths = [len(states) for states in expected]
    assert found.context.shape[1] == family.max_sequence_length == LENGTH
    assert len(set(lengths)) > 2 and max(lengths) == LENGTH
    assert family.cut(prompts).tolist() == [False] * 3 + [True] + [False]
    empty = encode(params, family.tokenize_null(records))
    assert len(empty.mask) == 1
    close(empty.context[empty.mask], null[0])


@pytest.mark.parametrize("shift", [3.0, 6.0])
def test_sigmas_and_timesteps_equal_the_pipelines_to_the_bit(ours, shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    family = dataclasses.replace(
        ours[0], scheduler=dataclasses.replace(ours[0].scheduler, shift=shift)
    )
    for steps in range(1, 51):
        given = pipeline_z_image.get_default_z_image_sigmas(steps)
        timesteps, _ = pipeline_z_image.retrieve_timesteps(scheduler, sigmas=given, mu=0.7)
        for size in (SIZE, Size(32, 16)):
            sigmas = family.sigmas(steps, size)
            np.testing.assert_array_equal(sigmas, scheduler.sigmas.numpy())
            np.testing.assert_array_equal(sigmas[:-1] * np.float32(1000), timesteps.numpy())


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


@pytest.mark.parametrize(("scale", "normalisation"), [(3.5, 0), (2.0, 0.9), (0.0, 0), (6.0, 1)])
def test_latents_are_the_pipelines_after_each_step_and_so_are_pixels(
    ours, pipe, velocities, scale, normalisation
):
    """With a negative prompt that is not empty."""
    family, params, _, decode = ours
    family = dataclasses.replace(family, cfg_normalization=float(normalisation))
    options = dict(guidance_scale=scale, negative_prompt=NEGATIVE)
    expected, pixels = of_pipeline(
        pipe, PROMPTS, start(), cfg_normalization=normalisation, **options
    )
    x, sigmas = start(), family.sigmas(STEPS, SIZE)
    np.testing.assert_array_equal(sigmas, pipe.scheduler.sigmas.numpy())
    for sigma, after, latents in zip(sigmas[:-1], sigmas[1:], expected, strict=True):
        x = x + (after - sigma) * family.guided(*velocities(x, sigma), scale + 1)
        close(x, latents, 1e-4)
    images = np.asarray(decode(params, x))[:, 0]
    np.testing.assert_allclose(images, pixels, rtol=0, atol=1e-3)
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3
    if normalisation:
        plain, _ = of_pipeline(pipe, PROMPTS, start(), **options)
        assert np.abs(plain[-1] - expected[-1]).max() > 0.01 * np.abs(expected[-1]).max()


def test_the_samplers_images_are_the_pipelines_and_those_of_a_prompt_alone(ours, pipe):
    scale = 3.5
    family, params, *_ = ours
    policy, group = Policy(family, scale + 1), all_devices(jax.devices()[:1])
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
    _, expected = of_pipeline(pipe, prompts, noise, guidance_scale=scale)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    # Captions of 64 tokens and of 32, then of 32 alone.
    short = images(prompts[0], prompts[0])
    np.testing.assert_allclose(short[0], found[0], rtol=0, atol=1e-4)
    assert np.abs(short[1] - found[1]).max() > 10 / 255


def test_an_export_reloads_in_diffusers(ours, folder, pipe, tmp_path):
    family, params, *_ = ours
    copy = shutil.copytree(folder, tmp_path / "pipeline")
    config = read_json(folder / "transformer" / "config.json")
    shutil.rmtree(copy / "transformer")
    changed = jax.tree.map(lambda leaf: leaf * 1.25, params["transformer"])
    write_params(copy / "transformer", changed, family.lists["transformer"], config)
    again = ZImagePipeline.from_pretrained(copy).transformer.state_dict()
    before = pipe.transformer.state_dict()
    assert again.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(again[name], tensor * 1.25, rtol=0, atol=0)


def test_loras_load_both_ways(ours, folder, tmp_path):
    family, params, encode, _ = ours
    trained = {"transformer": params["transformer"]}
    config = LoraConfig(rank=2, alpha=6, targets=family.lora_targets)
    lora = lora_init(jax.random.key(0), trained, config, family.lists)
    rng = np.random.default_rng(0)
    lora = jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype("f4"), lora)
    write_lora(tmp_path / "ours", lora, config.alpha, family.lists)
    found, rank, alpha = read_lora(tmp_path / "ours", trained, family.lists)["transformer"]
    assert (rank, alpha) == (2, 6)
    jax.tree.map(np.testing.assert_array_equal, found, lora["transformer"])

    def velocity(lora, scale):
        with lora_layers(scale):
            variables = {"transformer": {"params": params["transformer"], "lora": lora}}
            sigma = jnp.full(3, 0.7)
            return family.velocity(variables, jnp.asarray(start()), sigma, prompts)

    prompts, jitted = (
        encode(params, family.tokenize(said(*PROMPTS))),
        jax.jit(velocity, static_argnums=1),
    )
    tuned = jitted(lora["transformer"], config.scale)
    pipe = ZImagePipeline.from_pretrained(folder)
    plain = theirs(pipe, prompts)
    pipe.load_lora_weights(tmp_path / "ours")
    close(tuned, theirs(pipe, prompts))
    assert np.abs(theirs(pipe, prompts) - plain).max() > 0.1 * np.abs(plain).max()

    # Flow-Factory's default targets, which our regular expression selects, too.
    other = ZImagePipeline.from_pretrained(folder)
    modules = ["attention.to_k", "attention.to_q", "attention.to_v", "attention.to_out.0"]
    modules += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    given = dict(r=2, lora_alpha=6, init_lora_weights=False, target_modules=modules)
    other.transformer.add_adapter(peft.LoraConfig(**given))
    names = {
        name
        for name, module in other.transformer.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert adapted_layers(trained, family.lora_targets, family.lists)["transformer"] == names
    ZImagePipeline.save_lora_weights(
        tmp_path / "theirs",
        transformer_lora_layers=get_peft_model_state_dict(other.transformer),
        transformer_lora_adapter_metadata=other.transformer.peft_config["default"].to_dict(),
    )
    read, rank, alpha = read_lora(tmp_path / "theirs", trained, family.lists)["transformer"]
    close(jitted(read, alpha / rank), theirs(other, prompts))


def theirs(pipe, prompts) -> np.ndarray:
    images = list(torch.tensor(start()).permute(0, 3, 1, 2).unsqueeze(2))
    rows = [torch.tensor(np.asarray(c[m])) for c, m in zip(*prompts, strict=True)]
    time = torch.full((3,), float(np.float32(1) - np.float32(0.7)))
    out = pipe.transformer(images, time, rows, return_dict=False)[0]
    return -torch.stack(out).squeeze(2).permute(0, 2, 3, 1).numpy()


def test_sizes_defaults_and_flops(folder, ours):
    family = load_family(folder)
    assert family.default_size() == Size(1024, 1024) and family.heads == (4, 8, False, 0, 0)
    defaults = inspect.signature(ZImagePipeline.__call__).parameters
    assert family.default_steps == defaults["num_inference_steps"].default
    assert family.default_guidance - 1 == defaults["guidance_scale"].default
    assert family.max_sequence_length == defaults["max_sequence_length"].default
    assert not family.cfg_normalization and not defaults["cfg_normalization"].default
    assert defaults["cfg_truncation"].default == 1
    assert family.latent_shape(SIZE) == (6, 10, 4)
    config = family.transformer.config
    assert family.flops(SIZE)["transformer"] == forward_flops(config, (6, 10, 4), 512)
    assert ours[0].flops(SIZE)["transformer"] == forward_flops(config, (6, 10, 4), LENGTH)
    for size in (Size(12, 18), Size(68, 4)):
        with pytest.raises(ValueError, match="must be multiples of 4 from 4 to 64"):
            family.latent_shape(size)
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


def test_what_does_not_fit_is_refused_by_its_file(copy):
    assert refused(copy, max_sequence_length=545).startswith(
        "config.model.max_sequence_length must be at most 544, for which the transformer has"
    )
    edit(copy / "transformer" / "config.json", cap_feat_dim=7)
    assert refused(copy).startswith(
        "text_encoder/config.json: hidden_size must be 7, the transformer's"
    )
    edit(copy / "transformer" / "config.json", **TRANSFORMER | {"in_channels": 5})
    assert refused(copy).startswith("vae/config.json: latent_channels must be 5, the transformer's")
    edit(copy / "text_encoder" / "config.json", architectures=["LlamaForCausalLM"])
    assert refused(copy).startswith(
        "text_encoder/config.json describes a LlamaForCausalLM, not a Qwen3Model or Qwen3ForCausalLM"
    )
    edit(copy / "model_index.json", text_encoder=["transformers", "Qwen2Model"])
    assert refused(copy).startswith(
        'model_index.json says that text_encoder is ["transformers", "Qwen2Model"], but only '
        '["transformers", "Qwen3Model"] or ["transformers", "Qwen3ForCausalLM"] is supported'
    )


def test_an_encoder_saved_without_its_head_is_read(copy, folder, ours):
    """As the index of the published folder names it."""
    edit(copy / "model_index.json", text_encoder=["transformers", "Qwen3Model"])
    encoder = zimage_pipeline(folder).text_encoder.model
    shutil.rmtree(copy / "text_encoder")
    encoder.save_pretrained(copy / "text_encoder")
    params = ours[1]
    read = load_family(copy, max_sequence_length=LENGTH).read(copy, "text_encoder")
    jax.tree.map(np.testing.assert_array_equal, read, params["text_encoder"])


@pytest.mark.parametrize(("window", "fits"), [(LENGTH, True), (LENGTH - 1, False)])
def test_prompts_must_fit_the_text_encoders_sliding_window(copy, window, fits):
    """Decided by the JSON files: the copy has no weights."""
    for file in copy.rglob("*.safetensors"):
        file.unlink()
    path = copy / "text_encoder" / "config.json"
    edit(
        path, use_sliding_window=True, sliding_window=window, max_window_layers=0, layer_types=None
    )
    if fits:
        assert load_family(copy, max_sequence_length=LENGTH).max_sequence_length == LENGTH
        return
    with pytest.raises(ConfigError) as caught:
        load_family(copy, max_sequence_length=LENGTH)
    assert str(caught.value).startswith(f"{path}: ") and "sliding_window" in str(caught.value)
