"""Latents as tokens, against diffusers' FLUX pipeline."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline

from digen_jax.models import layers


def test_latents_are_packed_and_unpacked_as_by_the_pipeline():
    height, width, channels = 6, 10, 3
    latents = np.random.default_rng(0).normal(size=(2, height, width, channels))
    latents = latents.astype(np.float32)
    raw = torch.tensor(latents.transpose(0, 3, 1, 2)).contiguous()
    expected = FluxPipeline._pack_latents(raw, 2, channels, height, width)
    tokens = layers.pack(jnp.asarray(latents))
    np.testing.assert_array_equal(tokens, expected.numpy())
    np.testing.assert_array_equal(layers.unpack(tokens, height, width), latents)


@pytest.mark.parametrize("shape", [(1, 5, 4, 2), (1, 4, 5, 2)])
def test_an_odd_side_is_refused(shape):
    with pytest.raises(ValueError, match=f"latents of {shape[1]} x {shape[2]} do not fit"):
        layers.pack(jnp.zeros(shape))
