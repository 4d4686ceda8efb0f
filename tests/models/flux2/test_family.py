"""FLUX.2 klein as a family, against diffusers' own pipeline on folders of random weights."""

import inspect
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import (
    compute_empirical_mu,
    retrieve_timesteps,
)

from digen_jax.checkpoints.folder import copy_pipeline, open_tensors, read_json, write_params
from digen_jax.checkpoints.tensors import tensor_names
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import load_family, open_pipeline, read_parts
from digen_jax.inference.model import all_devices
from digen_jax.models.family import Size
from digen_jax.models.flux2.network import forward_flops
from digen_jax.models.published import published_folder
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from tests.cases import said
from tests.models.flux2.folders import klein_folder, klein_pipeline

PROMPTS = ["a photo of a red circle", "two blue squares and schräge ☃ left of a photo", ""]
LONG = "a red circle left of a blue square and " * 3 + "a green star"
STEPS, GUIDANCE, SIZE, LENGTH = 4, 3.5, Size(20, 12), 61  # 5 x 3 tokens of the image


@pytest.fixture(scope="module")
def folder(base):
    return klein_folder(base)


@pytest.fixture(scope="module")
def pipe(folder):
    """diffusers' pipeline."""
    return klein_pipeline(folder)


@pytest.fixture(scope="module")
def ours(folder):
    """The family with all its parameters, and its jitted `encode`; fewer tokens than by default save time."""
    family = load_family(folder, max_sequence_length=LENGTH)
    params = read_parts(family, folder, family.shapes(), all_devices(jax.devices()[:1]))
    return family, params, jax.jit(family.encode)


def close(actual, expected, tolerance: float = 1e-5) -> None:
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() < tolerance * np.abs(expected).max()


def encoded_exactly(pipe, prompts, **given):
    """The pipeline's embeddings of prompts, and of an empty one, in float64.

    After 27 random layers single padding tokens are so near zero before a norm that float32 moves them by 1e-5 of the
    largest value, torch's, too: more or less on another CPU.
    """
    pipe.text_encoder.double()
    try:
        return tuple(pipe.encode_prompt(text, **given)[0] for text in (prompts, ""))
    finally:
        pipe.text_encoder.float()


def start(rows: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 5, 3, 12)).astype(np.float32)


def call(pipe, x, prompts=PROMPTS, guidance=GUIDANCE):
    """(latents after each step, pixels) of the pipeline from some start latents."""
    steps = []

    def keep(pipe, step, timestep, given):
        steps.append(given["latents"].reshape(x.shape).numpy())
        return {}

    pixels = pipe(
        prompt=list(prompts),
        height=SIZE.height,
        width=SIZE.width,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        max_sequence_length=LENGTH,
        latents=torch.tensor(np.asarray(x).transpose(0, 3, 1, 2)),
        callback_on_step_end=keep,
        output_type="np",
    ).images
    return steps, pixels


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield


# --------------------------------------------------------------------------------------- prompts


def test_prompts_are_encoded_as_by_the_pipeline(ours, pipe, folder):
    """In float64, and padding included; a second call gives the same."""
    family, params, encode = ours
    prompts = [*PROMPTS, LONG, "Ein ROTER Kreis,  schräg ☃\n日本"]
    expected, nothing = encoded_exactly(pipe, list(prompts), max_sequence_length=LENGTH)
    records = said(*prompts)
    for _ in range(2):
        tokens = family.tokenize(records)
        found = encode(params, tokens)
        close(found.context, expected, 5e-5)
    assert records == said(*prompts)
    lengths = tokens.mask.sum(1)
    assert found.context.shape[1] == family.max_sequence_length == LENGTH
    assert len(set(lengths)) > 2 and max(lengths) == LENGTH
    assert family.cut(prompts).tolist() == [False] * 3 + [True] + [False]
    empty = encode(params, family.tokenize_null(records))
    close(empty.context, nothing, 5e-5)
    # The three depths differ, and so do prompts.
    depths = np.split(np.asarray(found.context), 3, axis=-1)
    pairs = [(depths[0], depths[1]), (depths[1], depths[2]), (expected[0], expected[1])]
    assert min(float(np.abs(np.asarray(a - b)).max()) for a, b in pairs) > 1e-2


# ------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("height", "width"),
    [
        *((1024, 1024), (1088, 1024), (512, 512), (720, 1280), (384, 384), (16, 16), (2048, 1024)),
        *((688, 1600), (2992, 368)),  # of 4300 and 4301 tokens
    ],
)
def test_sigmas_and_timesteps_are_the_pipelines(height, width):
    """Of the published models, bit by bit; above 4300 tokens the steps do not matter."""
    family = load_family(published_folder("black-forest-labs/FLUX.2-klein-4B"))
    folder = published_folder("black-forest-labs/FLUX.2-klein-4B") / "scheduler"
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder)
    tokens = (height // 16) * (width // 16)
    for steps in range(1, 51):
        uniform = np.linspace(1.0, 1 / steps, steps)
        mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
        timesteps, _ = retrieve_timesteps(scheduler, steps, "cpu", sigmas=uniform, mu=mu)
        sigmas = family.sigmas(steps, Size(height, width))
        assert sigmas.dtype == np.float32
        np.testing.assert_array_equal(sigmas, scheduler.sigmas.numpy())
        np.testing.assert_array_equal(sigmas[:-1] * np.float32(1000), timesteps.numpy())


# ------------------------------------------------------------------------------ the whole pipeline


@pytest.fixture(scope="module")
def velocities(ours):
    """The jitted velocities (without, with) the prompt."""
    family, params, encode = ours
    null, prompts = (encode(params, family.tokenize(said(*p))) for p in ([""] * 3, PROMPTS))
    variables = {"transformer": {"params": params["transformer"]}}

    @jax.jit
    def both(x, sigma):
        pair = jax.tree.map(lambda *rows: jnp.concatenate(rows), null, prompts)
        v = family.velocity(variables, jnp.tile(x, (2, 1, 1, 1)), jnp.full(6, sigma), pair)
        return v[:3], v[3:]

    return both


@pytest.mark.parametrize(("kind", "scale"), [("base", GUIDANCE), ("distilled", 1.0), ("base", 1.0)])
def test_latents_are_the_pipelines_after_each_step_and_so_are_pixels(
    base, ours, velocities, kind, scale
):
    """The distilled pipeline ignores a guidance, of which it is told here."""
    family, params, _ = ours
    given = 7.0 if kind == "distilled" else scale
    pipe = klein_pipeline(klein_folder(base, kind))
    expected, pixels = call(pipe, start(), guidance=given)
    x, sigmas = start(), family.sigmas(STEPS, SIZE)
    np.testing.assert_array_equal(sigmas, pipe.scheduler.sigmas.numpy())
    for sigma, after, latents in zip(sigmas[:-1], sigmas[1:], expected, strict=True):
        x = x + (after - sigma) * family.guided(*velocities(x, sigma), scale)
        close(x, latents, 1e-4)
    images = np.asarray(jax.jit(family.decode)(params, x))[:, 0]
    assert images.shape == (3, SIZE.height, SIZE.width, 3)
    np.testing.assert_allclose(images, pixels, rtol=0, atol=1e-3)
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3


def test_the_samplers_images_are_the_pipelines_and_those_of_a_prompt_alone(ours, pipe):
    family, params, _ = ours
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

    noise, prompts = np.asarray(start_noise(keys, sampler.shape)), (PROMPTS[0], LONG)
    found = images(*prompts)
    expected = call(pipe, noise, prompts)[1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    alone = images(prompts[0], prompts[0])
    np.testing.assert_allclose(alone[0], found[0], rtol=0, atol=1e-4)
    assert np.abs(alone[1] - found[1]).max() > 10 / 255
    assert np.abs(call(pipe, noise, prompts, 1.0)[1] - expected).max() > 10 / 255


# ---------------------------------------------------------------------------------------- folders


def test_every_tensor_is_read_once_or_is_on_the_list(folder, ours):
    """`read` refuses a tensor that is neither; the list has what the pipeline does not use."""
    family = ours[0]
    unread = {}
    for part, tree in family.shapes().items():
        lists = family.lists[part]
        paths = [[key.key for key in path] for path, _ in jax.tree.leaves_with_path(tree)]
        used = [name for path in paths for name in tensor_names(tuple(path), lists)]
        assert len(set(used)) == len(used)
        unread[part] = set(open_tensors(folder / part)) - set(used)
        assert set(used) <= set(open_tensors(folder / part))
    layer = {name for name in unread["text_encoder"] if name.startswith("model.layers.27.")}
    assert unread == {
        "transformer": set(),
        "vae": {"bn.num_batches_tracked"},
        "text_encoder": {"lm_head.weight", "model.norm.weight", *layer},
    }
    assert len(layer) == 11
    for part in ("transformer", "text_encoder"):
        assert len(list((folder / part).glob("*.safetensors"))) > 1


def test_the_export_gives_the_same_pixels_in_diffusers(folder, pipe, ours, tmp_path):
    """The transformer written anew, in several files; the other components are copied."""
    family, params, _ = ours

    def write(target):
        config = read_json(folder / "transformer" / "config.json")
        lists = family.lists["transformer"]
        write_params(target, params["transformer"], lists, config, max_shard_bytes=60_000)

    copy_pipeline(folder, tmp_path / "copy", {"transformer": write}, {"steps": STEPS})
    assert len(list((tmp_path / "copy" / "transformer").glob("*.safetensors"))) > 1
    for part in ("text_encoder", "vae", "tokenizer", "scheduler"):
        for file in (folder / part).iterdir():
            assert (tmp_path / "copy" / part / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "copy" / "tokenizer" / "chat_template.jinja").is_file()
    again = Flux2KleinPipeline.from_pretrained(tmp_path / "copy")
    again.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(call(again, start())[1], call(pipe, start())[1])


# ---------------------------------------------------------------------------- what it says of itself


def test_defaults_are_the_pipelines(base, pipe, folder, ours):
    defaults = inspect.signature(Flux2KleinPipeline.__call__).parameters
    family, distilled = load_family(folder), load_family(klein_folder(base, "distilled"))
    assert family.default_steps == defaults["num_inference_steps"].default
    assert family.max_sequence_length == defaults["max_sequence_length"].default
    assert family.text_encoder.states == defaults["text_encoder_out_layers"].default
    assert family.guidance == "classifier-free" and distilled.guidance == "none"
    assert family.default_guidance == defaults["guidance_scale"].default
    assert distilled.default_guidance == 1.0
    side = pipe.default_sample_size * 8  # of the published autoencoder
    assert family.default_size() == Size(side, side)
    assert family.heads == (4, 8, False, 0, 0)
    with pytest.raises(ValueError, match="this model's guidance is 'none'"):
        Policy(distilled, 3.5)


def test_flops_are_of_the_tokens_that_the_transformer_is_given(ours):
    family = ours[0]
    config, latent = family.transformer.config, family.latent_shape(SIZE)
    assert latent == (5, 3, 12)
    assert family.flops(SIZE) == {"transformer": forward_flops(config, latent, LENGTH)}


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (Size(18, 12), "an image of 18x12 does not fit.*multiples of 4, 4 or more"),
        (Size(20, 0), "an image of 20x0 does not fit"),
        (Size(20, 12, 5), "a clip of 5 frames does not fit this model, which makes images"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(ours, size, message):
    with pytest.raises(ValueError, match=message):
        ours[0].latent_shape(size)


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("text_encoder/config.json", {"hidden_size": 10}, "hidden_size times 3 must be 24, the"),
        ("text_encoder/config.json", {"num_hidden_layers": 26}, "num_hidden_layers must be 27 or"),
        ("text_encoder/config.json", {"architectures": ["LlamaModel"]}, "not a Qwen3ForCausalLM"),
        ("vae/config.json", {"latent_channels": 8}, "latent_channels times 4 must be 12"),
        ("vae/config.json", {"_class_name": "AutoencoderKL"}, "not a AutoencoderKLFlux2"),
        ("transformer/config.json", {"out_channels": 4}, "out_channels must be 12, the transfo"),
        ("transformer/config.json", {"guidance_embeds": True}, "guidance_embeds must be False"),
        ("model_index.json", {"is_distilled": 1}, "is_distilled must be true or false, not 1"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, 'only \\["diffusers", "Auto'),
    ],
)
def test_what_does_not_fit_is_refused_by_its_file(folder, tmp_path, file, change, message):
    copy = shutil.copytree(folder, tmp_path / "pipeline")
    edit(copy / file, **change)
    with pytest.raises(ConfigError, match=message) as caught:
        load_family(copy)
    assert str(caught.value).startswith(str(copy / file))


def test_what_it_cannot_do_without_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="its 'text_encoder', which config"):
        open_pipeline(str(folder), ("text_encoder",))
    copy = shutil.copytree(folder, tmp_path / "pipeline")
    (copy / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match=r"tokenizer holds no chat template: chat_template\.jinja"
    ):
        load_family(copy)


@pytest.mark.parametrize(("window", "fits"), [(LENGTH, True), (LENGTH - 1, False)])
def test_prompts_must_fit_the_text_encoders_sliding_window(folder, tmp_path, window, fits):
    """Decided by the JSON files: the copy has no weights."""
    copy = shutil.copytree(folder, tmp_path / "pipeline")
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
