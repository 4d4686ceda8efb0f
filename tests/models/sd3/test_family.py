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
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from digen_jax.policies import trained_of
from tests.cases import said
from tests.models.families import first
from tests.pipelines import ROOT, decode_floats
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


@pytest.mark.slow
def test_images_are_those_of_the_pipelines_default_call():
    """Of the embedded model."""
    folder = ROOT / "assets" / "shapes-sd3"
    family, params = ours(folder)
    policy = Policy(family, family.default_guidance)
    sampler = Sampler(policy, group(), SamplerSettings(Size(48, 64), 8, Ode()))
    trained = trained_of(family, params)
    weights = Weights(*policy.split(jax.random.key(0), trained, reference=False), params)
    rows = np.arange(len(PROMPTS), dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))
    with jax.default_matmul_precision("highest"):
        trajectory = sampler.generate(weights, sampler.encode(weights, said(*PROMPTS)), rows, keys)
        images = decode_floats(sampler, weights, trajectory)[:, 0]
    call = functools.partial(
        oracle(folder),
        PROMPTS,
        height=48,
        width=64,
        num_inference_steps=8,
        latents=first(start_noise(keys, sampler.shape)),
        output_type="np",
    )
    expected = call().images
    np.testing.assert_allclose(np.asarray(images), expected, rtol=0, atol=2 / 255)
    # Neither clipped nearly everywhere, nor equal for another guidance: such images would prove nothing.
    assert ((expected > 0.02) & (expected < 0.98)).mean() > 0.3
    assert np.abs(expected - call(guidance_scale=1).images).max() > 20 / 255


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


def test_decoding_takes_memory_for_a_chunk_not_for_the_batch(base, monkeypatch):
    """The images are those of one call, up to the rounding of sums in another order."""
    family, params = ours(pipeline(base))
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
    latents_and_images = 2 * (latents.nbytes + whole.clips.nbytes)
    assert chunks < two + latents_and_images < sixteen / 2
    # A number beside the middle of two bytes may become either.
    np.testing.assert_allclose(np.int16(found.clips), np.int16(whole.clips), atol=1)


def test_encoding_takes_memory_for_a_chunk_not_for_a_step(base, monkeypatch):
    family, params = ours(pipeline(base))
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
