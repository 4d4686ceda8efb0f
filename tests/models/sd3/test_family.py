"""The family against diffusers' own pipeline, on a folder of random weights and on the embedded model."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import torch
from diffusers.configuration_utils import FrozenDict

from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import load_family, read_parts
from digen_jax.inference.model import all_devices
from digen_jax.models.family import Size
from digen_jax.models.sd3.network import forward_flops
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from digen_jax.policies import trained_of
from tests.cases import quick, said
from tests.pipelines import ROOT
from tests.tiny_runs import oracle, pipeline

PROMPTS = [
    "a photo of a red circle",
    "a photo of two blue squares",
    "a photo of a green star above a yellow triangle",
    "a photo of a purple circle",
    "four shapes",
    "",
]
LONG = "a red circle left of a blue square and " * 4 + "a green star"
PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2")


@functools.cache
def ours(folder: pathlib.Path):
    """The family and all its parameters."""
    family = load_family(folder)
    return family, read_parts(family, folder, PARTS, group())


def group() -> DeviceGroup:
    return all_devices(jax.devices()[:1])


@pytest.fixture(params=quick([("random",), ("shapes-sd3",)], 0))
def folder(request, base) -> pathlib.Path:
    if request.param == "random":
        return pipeline(base)
    return ROOT / "assets" / request.param


@pytest.mark.parametrize(
    ("folder", "height", "width", "guidance"),
    quick([("random", 32, 32, 0.0), ("shapes-sd3", 48, 64, None)], 0),
    indirect=["folder"],
)
def test_images_are_those_of_the_pipelines_default_call(folder, height, width, guidance):
    family, params = ours(folder)
    policy = Policy(family, family.default_guidance if guidance is None else guidance)
    sampler = Sampler(policy, group(), SamplerSettings(Size(height, width), 8, Ode()))
    tuned, base = policy.split(jax.random.key(0), trained_of(family, params), reference=False)
    weights = Weights(tuned, base, params)
    rows = np.arange(len(PROMPTS), dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))
    with jax.default_matmul_precision("highest"):
        trajectory = sampler.generate(weights, sampler.encode(weights, said(*PROMPTS)), rows, keys)
        images = sampler.decode(weights, trajectory)[:, 0]
    noise = np.asarray(start_noise(keys, sampler.shape)).transpose(0, 3, 1, 2)
    call = functools.partial(
        oracle(folder),
        PROMPTS,
        height=height,
        width=width,
        num_inference_steps=8,
        latents=torch.tensor(noise),
        output_type="np",
    )
    expected = (call() if guidance is None else call(guidance_scale=guidance)).images
    np.testing.assert_allclose(np.asarray(images), expected, rtol=0, atol=2 / 255)
    # Neither clipped nearly everywhere, nor equal for another guidance: such images would prove nothing.
    assert ((expected > 0.02) & (expected < 0.98)).mean() > 0.3
    other = 1 if policy.sequences == 2 else 3.5
    assert np.abs(expected - call(guidance_scale=other).images).max() > 20 / 255


def test_images_have_the_pipelines_negative_prompts(base):
    """One for each prompt, of which one is empty by default."""
    negatives = ["four shapes", None, PROMPTS[2]]
    (family, params), pipe = ours(pipeline(base)), oracle(pipeline(base))
    policy, size = Policy(family, 4.0), Size(32, 32)
    sampler = Sampler(policy, group(), SamplerSettings(size, 3, Ode()))
    tuned, frozen = policy.split(jax.random.key(0), trained_of(family, params), reference=False)
    weights, rows = Weights(tuned, frozen, params), np.arange(3, dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))
    noise = np.asarray(start_noise(keys, sampler.shape)).transpose(0, 3, 1, 2)
    own = [{} if n is None else {"negative_prompt": n} for n in negatives]
    records = [r | n for r, n in zip(said(*PROMPTS[:3]), own, strict=True)]
    with jax.default_matmul_precision("highest"):
        prompts = sampler.encode(weights, records)
        trajectory = sampler.generate(weights, prompts, rows, keys)
        images = np.asarray(sampler.decode(weights, trajectory)[:, 0])
    assert len(prompts.null.context) == len(set(negatives))
    call = functools.partial(
        pipe,
        PROMPTS[:3],
        height=size.height,
        width=size.width,
        num_inference_steps=3,
        guidance_scale=4.0,
        latents=torch.tensor(noise),
        output_type="np",
    )
    expected = call(negative_prompt=[negative or "" for negative in negatives]).images
    np.testing.assert_allclose(images, expected, rtol=0, atol=1e-3)
    print(f"pixels {np.abs(images - expected).max():.1e}")
    changed = np.abs(expected - call().images).max((1, 2, 3)) > 10 / 255
    assert changed.tolist() == [negative is not None for negative in negatives]


def test_prompts_are_encoded_as_by_the_pipeline(folder):
    family, params = ours(folder)
    prompts = [*PROMPTS, LONG, "Ein ROTER Kreis, schräg ☃"]
    with jax.default_matmul_precision("highest"), torch.no_grad():
        context, pooled = jax.jit(family.encode)(params, family.tokenize(said(*prompts)))
        expected, _, expected_pooled, _ = oracle(folder).encode_prompt(
            prompts, prompts, prompts, do_classifier_free_guidance=False
        )
    tokens = context.shape[1]
    largest = [float(tensor.abs().max()) for tensor in (expected, expected_pooled)]
    np.testing.assert_allclose(
        context, expected[:, :tokens].numpy(), rtol=0, atol=1e-4 * largest[0]
    )
    np.testing.assert_allclose(pooled, expected_pooled.numpy(), rtol=0, atol=1e-4 * largest[1])
    assert not expected[:, tokens:].any() and expected.shape[1] - tokens == 256
    assert np.abs(expected[0].numpy() - expected[1].numpy()).max() > 1e-2


def test_tokenizers_that_differ_read_what_they_do_in_the_pipeline(base, tmp_path):
    """Both CLIPs read as many tokens as the first tokenizer says, from the end that each tokenizer keeps."""
    folder = shutil.copytree(pipeline(base), tmp_path / "pipeline")
    for part, length, side in (("tokenizer", 12, "left"), ("tokenizer_2", 8, "right")):
        path = folder / part / "tokenizer_config.json"
        fields = dict(model_max_length=length, truncation_side=side)
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    family, params = ours(folder)
    prompts = [*PROMPTS, LONG]
    with jax.default_matmul_precision("highest"), torch.no_grad():
        context, pooled = jax.jit(family.encode)(params, family.tokenize(said(*prompts)))
        expected, _, expected_pooled, _ = oracle(folder).encode_prompt(
            prompts, prompts, prompts, do_classifier_free_guidance=False
        )
    assert context.shape[1] == 12
    for found, wanted in ((context, expected[:, :12]), (pooled, expected_pooled)):
        largest = float(wanted.abs().max())
        np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("positions", [12, 11])
def test_the_first_tokenizers_length_must_fit_both_clips(base, tmp_path, positions):
    folder = shutil.copytree(pipeline(base), tmp_path / "pipeline")
    changes = {
        "tokenizer/tokenizer_config.json": {"model_max_length": 12},
        "tokenizer_2/tokenizer_config.json": {"model_max_length": 8},
        "text_encoder_2/config.json": {"max_position_embeddings": positions},
    }
    for name, fields in changes.items():
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    if positions == 12:
        assert load_family(folder).tokenize(said(LONG)).second.shape == (1, 12)
        return
    with pytest.raises(ConfigError) as caught:
        load_family(folder)
    assert str(caught.value).startswith(
        f"{folder}/tokenizer/tokenizer_config.json: model_max_length"
    )
    assert "text_encoder_2" in str(caught.value)


def test_a_context_narrower_than_the_network_reads_is_padded_as_by_the_pipeline(base, monkeypatch):
    """As in the published models, whose CLIPs together are narrower than the T5."""
    (family, params), pipe = ours(pipeline(base)), oracle(pipeline(base))
    config = family.transformer.config
    wide = {"joint_attention_dim": config.joint_attention_dim + 8}
    transformer = family.transformer.clone(config=dataclasses.replace(config, **wide))
    family = dataclasses.replace(family, transformer=transformer)
    config = FrozenDict({**pipe.transformer.config, **wide})
    monkeypatch.setattr(pipe.transformer, "_internal_dict", config)
    with jax.default_matmul_precision("highest"), torch.no_grad():
        context, _ = jax.jit(family.encode)(params, family.tokenize(said(*PROMPTS)))
        expected = pipe.encode_prompt(PROMPTS, PROMPTS, PROMPTS, do_classifier_free_guidance=False)
    expected = expected[0][:, : context.shape[1]].numpy()
    np.testing.assert_allclose(context, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert not expected[..., -8:].any() and expected[..., :8].any()


def test_ids_are_padded_and_cut_to_the_tokenizers_length(folder):
    family, _ = ours(folder)
    pipe = oracle(folder)
    *clips, third = family.tokenize(said(LONG, *PROMPTS))
    assert third is None
    for ids, tokenizer in zip(clips, (pipe.tokenizer, pipe.tokenizer_2), strict=True):
        length = tokenizer.model_max_length
        whole = tokenizer(LONG)["input_ids"]
        assert len(whole) > length
        assert ids.shape == (len(PROMPTS) + 1, length) and ids.dtype == np.int32
        # Cut after the words, not after the token that ends the text.
        assert ids[0].tolist() == [*whole[: length - 1], tokenizer.eos_token_id]
        for row, prompt in zip(ids[1:], PROMPTS, strict=True):
            given = tokenizer(prompt, truncation=True)["input_ids"]
            padding = [tokenizer.pad_token_id] * (length - len(given))
            assert row.tolist() == given + padding


def test_latents_are_decoded_as_by_the_pipeline(folder):
    family, params = ours(folder)
    pipe = oracle(folder)
    latents = np.random.default_rng(1).normal(size=(2, *family.latent_shape(Size(24, 40))))
    latents = latents.astype(np.float32)
    with jax.default_matmul_precision("highest"), torch.no_grad():
        images = np.asarray(jax.jit(family.decode)(params, latents))[:, 0]
        raw = torch.tensor(latents.transpose(0, 3, 1, 2))
        raw = raw / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        expected = pipe.image_processor.postprocess(pipe.vae.decode(raw).sample, output_type="np")
    assert images.shape == (2, 24, 40, 3)
    np.testing.assert_allclose(images, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("folder", ["random"], indirect=True)
def test_decoding_takes_memory_for_a_chunk_not_for_the_batch(folder, monkeypatch):
    """The images are those of one call, up to the rounding of sums in another order."""
    family, params = ours(folder)
    size, weights = Size(32, 32), Weights(None, None, params)
    shape = family.latent_shape(size)
    latents = np.random.default_rng(1).normal(size=(16, *shape)).astype(np.float32)

    def decode(images: int, at_once: int):
        """(bytes of temporary arrays, the images)."""
        monkeypatch.setattr(type(family), "decoded_pixels", at_once * 32 * 32)
        sampler = Sampler(Policy(family), group(), SamplerSettings(size, 8, Ode()))
        program = sampler._decode.lower(weights.frozen, latents[:images]).compile()
        return program.memory_analysis().temp_size_in_bytes, program(params, latents[:images])

    with jax.default_matmul_precision("highest"):
        (two, _), (sixteen, whole), (chunks, found) = (
            decode(*n) for n in ((2, 16), (16, 16), (16, 2))
        )
    latents_and_images = 2 * (latents.nbytes + whole.nbytes)
    assert chunks < two + latents_and_images < sixteen / 2
    np.testing.assert_allclose(found, whole, rtol=0, atol=2e-6)


@pytest.mark.parametrize("folder", ["random"], indirect=True)
def test_encoding_takes_memory_for_a_chunk_not_for_a_step(folder, monkeypatch):
    family, params = ours(folder)
    weights = Weights(None, None, params)

    def encode(prompts: int, at_once: int):
        """(bytes of temporary arrays, the conditioning)."""
        monkeypatch.setattr(type(family), "encoded_prompts", at_once)
        sampler = Sampler(Policy(family), group(), SamplerSettings(Size(32, 32), 8, Ode()))
        records = said(*(f"{number} rings" for number in range(prompts)))
        program = sampler.trace_encode(weights, records).lower().compile()
        found = program(params, family.tokenize(records))
        return program.memory_analysis().temp_size_in_bytes, found

    with jax.default_matmul_precision("highest"):
        (few, _), (many, whole), (chunked, found) = (
            encode(*n) for n in ((2, 64), (16, 64), (16, 2))
        )
    results = sum(leaf.nbytes for leaf in whole)
    assert chunked < few + 3 * results < many
    for mine, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-6 * np.abs(other).max())


def test_flops_are_of_the_tokens_that_the_transformer_is_given(folder):
    family, params = ours(folder)
    size, config = Size(32, 48), family.transformer.config
    context = jax.eval_shape(family.encode, params, family.tokenize(said("a"))).context
    found = family.flops(size)
    assert found.keys() == {*family.trained}
    assert found["transformer"] == forward_flops(
        config, family.latent_shape(size), context.shape[1] + 1
    )


def test_an_image_that_does_not_fit_is_refused_with_a_size_that_does(folder):
    family, _ = ours(folder)
    with pytest.raises(ValueError, match=r"30x32 does not fit.*multiples of 8"):
        family.latent_shape(Size(30, 32))
    with pytest.raises(ValueError, match=r"0x32 does not fit.*multiples of 8 from 8 to 128"):
        family.latent_shape(Size(0, 32))
    with pytest.raises(ValueError, match=r"32x136 does not fit.*from 8 to 128"):
        family.latent_shape(Size(32, 136))
