"""Rotary tables over several axes against diffusers' FLUX, over one axis against transformers' language models."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from diffusers import FluxPipeline
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from transformers.models.qwen3 import modeling_qwen3

from digen_jax.models import rotary
from digen_jax.models.rotary import image_positions, rotary_table, rotate_pairs

WIDTHS = (2, 4, 6)


def positions(index: int = 0) -> np.ndarray:
    return image_positions(61, 43, index)


def turned_by_diffusers(x: np.ndarray, where: np.ndarray) -> np.ndarray:
    tables = FluxPosEmbed(10_000, list(WIDTHS))(torch.tensor(where))
    return apply_rotary_emb(torch.tensor(x), tables, sequence_dim=1).numpy()


@pytest.mark.parametrize("index", [0, 1])
def test_heads_are_turned_as_by_diffusers(index):
    """At the positions of its pipeline, where those of a picture to edit have another index."""
    where = positions(index)
    expected = FluxPipeline._prepare_latent_image_ids(1, 61, 43, "cpu", torch.float32)
    np.testing.assert_array_equal(where, expected.numpy() + np.float32([index, 0, 0]))
    x = np.random.default_rng(0).normal(size=(2, len(where), 3, sum(WIDTHS))).astype(np.float32)
    found = rotate_pairs(jnp.asarray(x), rotary_table(where, WIDTHS, 10_000.0))
    np.testing.assert_allclose(found, turned_by_diffusers(x, where), rtol=0, atol=1e-6)
    # Each pair keeps its length, and text at position zero stays as it is.
    lengths = (np.square(a).reshape(*a.shape[:-1], -1, 2).sum(-1) for a in (x, np.asarray(found)))
    np.testing.assert_allclose(*lengths, rtol=1e-5)
    still = rotate_pairs(jnp.asarray(x), rotary_table(0 * where, WIDTHS, 10_000.0))
    np.testing.assert_array_equal(still, x)


def test_heads_in_bfloat16_are_turned_in_float32():
    where = positions()
    x = np.random.default_rng(0).normal(size=(1, len(where), 2, sum(WIDTHS))).astype(np.float32)
    x = jnp.asarray(x, jnp.bfloat16)
    found = rotate_pairs(x, rotary_table(where, WIDTHS, 10_000.0))
    expected = turned_by_diffusers(np.asarray(x, np.float32), where)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=2**-8, atol=1e-6)


# ---------------------------------------------------------------------------------- language models

LLAMA_31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def of_torch(theta: float, width: int, scaling: dict) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        head_dim=width, rope_parameters={"rope_theta": theta, **scaling}
    )
    return modeling_qwen3.Qwen3RotaryEmbedding(config)


@pytest.mark.parametrize(("theta", "width"), [(1e6, 128), (1e4, 128), (5e5, 64), (1e6, 10)])
def test_frequencies_and_angles_of_long_texts_equal_torch(theta, width):
    module = of_torch(theta, width, {"rope_type": "default"})
    frequencies = rotary.inverse_frequencies(width, theta)
    np.testing.assert_allclose(frequencies, module.inv_freq.numpy(), rtol=5e-7)
    positions = np.arange(1058, dtype=np.float32)
    # With torch's frequencies: the last bit of one, times a thousand, is not rounding of an angle.
    actual = rotary.cos_sin(positions, module.inv_freq.numpy())
    expected = module(torch.zeros(1), torch.arange(1058)[None])
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e[0, :, : width // 2].numpy(), atol=2e-7)


def test_llama3s_scaling_equals_torch():
    module = of_torch(5e5, 128, {"rope_type": "llama3", **LLAMA_31})
    plain = rotary.inverse_frequencies(128, 5e5)
    scaled = rotary.llama3_scaled(plain, rotary.Llama3Scaling(**LLAMA_31))
    np.testing.assert_allclose(scaled, module.inv_freq.numpy(), rtol=1e-6)
    ratios = scaled / plain
    assert (ratios == 1).any() and (ratios == 1 / 8).any()
    assert ((ratios > 0.126) & (ratios < 0.99)).any()
