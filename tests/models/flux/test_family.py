"""FLUX.1 as a family, against diffusers' own pipeline on folders of random weights."""

import functools
import inspect
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from safetensors.numpy import load_file, save_file

from digen_jax.checkpoints.folder import copy_pipeline, read_json, write_params
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import load_family, open_pipeline, read_parts
from digen_jax.inference.model import SamplingOptions, all_devices, open_model
from digen_jax.models.family import Size
from digen_jax.models.flux.network import forward_flops
from digen_jax.models.published import published_folder
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from tests.cases import said
from tests.models.flux.folders import flux_folder, flux_pipeline, packed

KINDS = ["dev", "schnell"]
PROMPTS = ["a photo of a red circle", "two blue squares and schräge ☃", ""]
LONG = "a green star above a yellow triangle and " * 4 + "a red circle"
ALL = [*PROMPTS, LONG, "Ein ROTER Kreis,  schräg ☃\n日本"]
NEGATIVES = ["four shapes", "", "a green star above a yellow triangle"]
STEPS, GUIDANCE, SIZE, TOKENS = 4, 4.5, Size(20, 12), 21  # 5 x 3 tokens of the image


@pytest.fixture(scope="module")
def folders(base):
    return {kind: flux_folder(base, kind) for kind in KINDS}


@functools.cache
def ours(folder):
    """The family with all its parameters, and its jitted `encode`; fewer tokens than by default save time."""
    family = load_family(folder, max_sequence_length=TOKENS)
    group = all_devices(jax.devices()[:1])
    return family, read_parts(family, folder, family.shapes(), group), jax.jit(family.encode)


def close(actual, expected: torch.Tensor, tolerance: float = 1e-5) -> float:
    expected = expected.numpy()
    assert actual.shape == expected.shape
    error = np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()
    assert error < tolerance
    return error


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield


# --------------------------------------------------------------------------------------- prompts


def test_prompts_are_encoded_as_by_the_pipeline(folders):
    family, params, encode = ours(folders["dev"])
    pipe = flux_pipeline(folders["dev"])
    prompts = list(ALL)
    context, pooled, _ = pipe.encode_prompt(prompts, prompts, max_sequence_length=TOKENS)
    found = encode(params, family.tokenize(said(*prompts)))
    assert found.context.shape[1] == TOKENS
    assert len(pipe.tokenizer_2(LONG).input_ids) > TOKENS > 20 == pipe.tokenizer.model_max_length
    close(found.context, context)
    close(found.pooled, pooled)
    assert min(np.abs(np.diff(a, axis=0)).max() for a in (context, pooled)) > 1e-2


def test_a_prompt_is_encoded_alone_as_beside_a_longer_one_and_twice(folders):
    family, params, encode = ours(folders["dev"])
    records = said(*ALL)
    whole = encode(params, family.tokenize(records))
    again = encode(params, family.tokenize(records))
    assert records == said(*ALL)
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    alone = encode(params, family.tokenize(records[:1] * len(records)))  # in the same program
    for one, all_ in zip(alone, whole, strict=True):
        np.testing.assert_allclose(one[0], all_[0], rtol=0, atol=1e-5 * np.abs(all_).max())


def test_prompts_are_cut_where_the_t5_ends(folders):
    """CLIP reads fewer tokens, but a prompt reaches the network through the T5."""
    family, tokenizer = ours(folders["dev"])[0], flux_pipeline(folders["dev"]).tokenizer_2
    fitting = "a red circle and " * 3
    assert len(tokenizer(fitting).input_ids) <= TOKENS < len(tokenizer(fitting * 2).input_ids)
    assert family.cut([fitting, fitting * 2, ""]).tolist() == [False, True, False]


def test_clips_tensors_may_have_their_old_names(folders, tmp_path):
    """As in published folders; transformers 5 saves them without a prefix."""
    family, params, _ = ours(folders["dev"])
    tensors = load_file(folders["dev"] / "text_encoder" / "model.safetensors")
    assert not any(name.startswith("text_model.") for name in tensors)
    (tmp_path / "text_encoder").mkdir()
    old = {f"text_model.{name}": tensor for name, tensor in tensors.items()}
    old["text_model.embeddings.position_ids"] = np.arange(20)[None]
    save_file(old, tmp_path / "text_encoder" / "model.safetensors")
    found = family.read(tmp_path, "text_encoder")
    jax.tree.map(np.testing.assert_array_equal, found, params["text_encoder"])


# ------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("height", "width"), [(1024, 1024), (512, 512), (720, 1280), (256, 256), (16, 1616)]
)
def test_sigmas_and_timesteps_are_the_pipelines(kind, height, width):
    """Of the published models, bit by bit."""
    folder = published_folder(f"black-forest-labs/FLUX.1-{kind}")
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
    for steps in range(1, 51):
        uniform = np.linspace(1.0, 1 / steps, steps)
        timesteps, _ = retrieve_timesteps(scheduler, steps, "cpu", sigmas=uniform, mu=mu)
        sigmas = family.sigmas(steps, Size(height, width))
        assert sigmas.dtype == np.float32
        np.testing.assert_array_equal(sigmas, scheduler.sigmas.numpy())
        np.testing.assert_array_equal(sigmas[:-1] * np.float32(1000), timesteps.numpy())


# ------------------------------------------------------------------------------ the whole pipeline


def call(pipe, latents: np.ndarray, prompts=PROMPTS, guidance=GUIDANCE, **given):
    """(the packed latents after each step, pixels) of the pipeline from some start latents."""
    steps = []

    def keep(pipe, step, timestep, given):
        steps.append(given["latents"])
        return {}

    pixels = pipe(
        prompts,
        height=SIZE.height,
        width=SIZE.width,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        max_sequence_length=TOKENS,
        latents=packed(latents),
        callback_on_step_end=keep,
        output_type="np",
        **given,
    ).images
    return steps, pixels


@pytest.mark.parametrize(("kind", "true"), [("dev", 0.5), ("dev", 3.0), ("schnell", 0.0)])
def test_latents_are_the_pipelines_after_each_step_and_so_are_pixels(folders, kind, true):
    """In one pass, in two with a negative prompt for each prompt, of which one is empty, and below a scale of 1."""
    family, params, encode = ours(folders[kind])
    policy = Policy(family, GUIDANCE if kind == "dev" else true, true_cfg_scale=true)
    null, given = None, {}
    if true != 1:
        given = dict(true_cfg_scale=true, negative_prompt=NEGATIVES)
    if true > 1:
        null = encode(params, family.tokenize_null(negated(PROMPTS, NEGATIVES)))
    assert policy.reads_null == (null is not None)
    trained = {"transformer": params["transformer"]}
    tuned, base = policy.split(jax.random.key(0), trained, reference=False)
    prompts = encode(params, family.tokenize(said(*PROMPTS)))
    x = np.random.default_rng(0).normal(size=(3, *family.latent_shape(SIZE))).astype(np.float32)
    start, (expected, pixels) = x, call(flux_pipeline(folders[kind]), x, **given)
    sigmas = family.sigmas(STEPS, SIZE)
    velocity = jax.jit(lambda x, sigma: policy.velocity(tuned, base, prompts, null)(x, sigma))
    errors = []
    for sigma, after, latents in zip(sigmas[:-1], sigmas[1:], expected, strict=True):
        x = x + (after - sigma) * velocity(x, jnp.full(3, sigma))
        errors.append(close(packed(x), latents, 1e-4))
    images = np.asarray(jax.jit(family.decode)(params, x))[:, 0]
    assert images.shape == (3, SIZE.height, SIZE.width, 3)
    print(f"latents {max(errors):.1e}, pixels {np.abs(images - pixels).max():.1e}")
    np.testing.assert_allclose(images, pixels, rtol=0, atol=1e-3)
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3
    if given:
        given["negative_prompt"] = NEGATIVES[::-1]
        _, others = call(flux_pipeline(folders[kind]), start, **given)
        assert (np.abs(others - pixels).max((1, 2, 3))[[0, 2]] > 4 / 255).all() == (true > 1)


def negated(prompts, negatives):
    """Records of prompts with negative ones."""
    return [
        {"prompt": prompt, "negative_prompt": negative}
        for prompt, negative in zip(prompts, negatives, strict=True)
    ]


def drawn(family, params, records, guidance, true_cfg_scale=1.0):
    """Images of the prompts by the sampler, and their start noise."""
    policy = Policy(family, guidance, true_cfg_scale=true_cfg_scale)
    sampler = Sampler(policy, all_devices(jax.devices()[:1]), SamplerSettings(SIZE, STEPS, Ode()))
    trained = {"transformer": params["transformer"]}
    tuned, base = policy.split(jax.random.key(0), trained, reference=False)
    weights = Weights(tuned, base, params)
    rows = np.arange(len(records), dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))
    prompts = sampler.encode(weights, records)
    images = sampler.decode(weights, sampler.generate(weights, prompts, rows, keys))
    return np.asarray(images)[:, 0], np.asarray(start_noise(keys, sampler.shape))


def test_the_samplers_images_are_the_pipelines_with_its_guidance(folders):
    family, params, _ = ours(folders["dev"])
    pipe = flux_pipeline(folders["dev"])
    images, noise = drawn(family, params, said(*PROMPTS), GUIDANCE)
    _, pixels = call(pipe, noise)
    np.testing.assert_allclose(images, pixels, rtol=0, atol=1e-3)
    for other in (call(pipe, noise, guidance=1.5), call(pipe, noise, prompts=PROMPTS[::-1])):
        assert np.abs(pixels - other[1]).max() > 10 / 255


@pytest.mark.slow
def test_without_negative_prompts_the_samplers_images_are_the_pipelines_with_empty_ones(folders):
    family, params, _ = ours(folders["dev"])
    images, noise = drawn(family, params, said(*PROMPTS), GUIDANCE, 2.5)
    given = dict(true_cfg_scale=2.5, negative_prompt=[""] * 3)
    _, pixels = call(flux_pipeline(folders["dev"]), noise, **given)
    np.testing.assert_allclose(images, pixels, rtol=0, atol=1e-3)
    _, alone = call(flux_pipeline(folders["dev"]), noise)
    assert np.abs(pixels - alone).max() > 10 / 255


def test_the_export_gives_the_same_pixels_in_diffusers(folders, tmp_path):
    """The transformer written anew; the other components are copied."""
    folder = folders["dev"]
    family, params, _ = ours(folder)

    def write(target):
        config = read_json(folder / "transformer" / "config.json")
        write_params(target, params["transformer"], family.lists["transformer"], config)

    copy_pipeline(folder, tmp_path / "copy", {"transformer": write}, {"steps": STEPS})
    for part in ("text_encoder", "text_encoder_2"):
        files = [path / part / "model.safetensors" for path in (folder, tmp_path / "copy")]
        assert files[0].read_bytes() == files[1].read_bytes()
    x = np.random.default_rng(0).normal(size=(3, *family.latent_shape(SIZE))).astype(np.float32)
    again = FluxPipeline.from_pretrained(tmp_path / "copy")
    again.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(call(again, x)[1], call(flux_pipeline(folder), x)[1])


# ---------------------------------------------------------------------------- what it says of itself


def test_defaults_are_the_pipelines(folders):
    dev, schnell = (ours(folders[kind])[0] for kind in KINDS)
    assert (dev.guidance, dev.default_guidance) == ("both", 3.5)
    assert inspect.signature(FluxPipeline.__call__).parameters["true_cfg_scale"].default == 1
    assert (schnell.guidance, schnell.default_guidance) == ("none", 1.0)
    pipe = flux_pipeline(folders["dev"])
    tokens = inspect.signature(FluxPipeline.__call__).parameters["max_sequence_length"].default
    assert load_family(folders["dev"]).max_sequence_length == tokens == 512
    side = pipe.default_sample_size * pipe.vae_scale_factor
    assert dev.default_size() == Size(side, side)
    with pytest.raises(ValueError, match="this model's guidance is 'none'"):
        Policy(schnell, 3.5)


@pytest.mark.parametrize(
    ("kind", "asked", "sentence"),
    [
        (
            "dev",
            SamplingOptions(),
            "--true_cfg_scale is not above 1, so that there is no second pass that",
        ),
        (
            "schnell",
            SamplingOptions(),
            "this model's guidance is 'none', without a second pass that would",
        ),
        ("dev", SamplingOptions(true_cfg_scale=2.0), "holds no weights"),
    ],
)
def test_a_negative_prompt_that_nothing_reads_is_refused_before_weights_are_read(
    folders, tmp_path, kind, asked, sentence
):
    ignore = shutil.ignore_patterns("*.safetensors")
    folder = shutil.copytree(folders[kind], tmp_path / "pipeline", ignore=ignore)
    given = "--negative_prompt is given"
    with pytest.raises(ConfigError, match=sentence) as caught:
        open_model(str(folder), jax.devices()[:1], options=[asked], negative=given)
    assert str(caught.value).startswith(f"{given}, but ") == (asked.true_cfg_scale is None)


def test_flops_are_of_the_tokens_that_the_transformer_is_given(folders):
    family = ours(folders["dev"])[0]
    config, latent = family.transformer.config, family.latent_shape(SIZE)
    assert latent == (10, 6, 4)
    assert family.flops(SIZE) == {"transformer": forward_flops(config, latent, TOKENS)}


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (Size(18, 12), "an image of 18x12 does not fit.*multiples of 4, 4 or more"),
        (Size(20, 0), "an image of 20x0 does not fit"),
        (Size(20, 12, 5), "a clip of 5 frames does not fit this model, which makes images"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(folders, size, message):
    with pytest.raises(ValueError, match=message):
        ours(folders["dev"])[0].latent_shape(size)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("text_encoder", {"hidden_size": 10}, "hidden_size must be 12, the transformer's pooled"),
        ("text_encoder_2", {"d_model": 7}, "d_model must be 16, the transformer's joint_att"),
        ("vae", {"latent_channels": 8}, "latent_channels must be 4, the transformer's in_channels"),
        ("transformer", {"out_channels": 4}, "out_channels must be 16, the transformer's in_chan"),
        ("transformer", {"axes_dims_rope": [8]}, "axes_dims_rope must be three even numbers"),
        ("transformer", {"_class_name": "SD3Transformer2DModel"}, "describes a SD3Transformer"),
    ],
)
def test_components_that_do_not_fit_are_refused_by_their_file(
    folders, tmp_path, file, change, message
):
    folder = shutil.copytree(folders["dev"], tmp_path / "pipeline")
    path = folder / file / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        load_family(folder)
    assert str(caught.value).startswith(str(path))


def test_what_it_cannot_do_without_is_refused(folders):
    with pytest.raises(ConfigError, match="its 'text_encoder_2', which config"):
        open_pipeline(str(folders["dev"]), ("text_encoder_2",))
    with pytest.raises(
        ConfigError, match=r"^config.model.max_sequence_length must be at most 512, the"
    ):
        load_family(folders["dev"], max_sequence_length=513)
