"""Rotary tables over several axes, against diffusers' FLUX in torch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxPosEmbed

from digen_jax.models.rotary import image_positions, rotary_table, rotate_pairs

WIDTHS = (2, 4, 6)


def positions(index: int = 0) -> np.ndarray:
    return image_positions(61, 43, index)


def turned_by_diffusers(x: np.ndarray, where: np.ndarray) -> np.ndarray:
    tables = FluxPosEmbed(10_000, list(WIDTHS))(torch.tensor(where))
    return apply_rotary_emb(torch.tensor(x), tables, sequence_dim=1).numpy()


def test_positions_are_those_of_the_pipeline():
    expected = FluxPipeline._prepare_latent_image_ids(1, 61, 43, "cpu", torch.float32)
    np.testing.assert_array_equal(positions(), expected.numpy())
    assert set(positions(1)[:, 0]) == {1} and np.array_equal(
        positions(1)[:, 1:], positions()[:, 1:]
    )


@pytest.mark.parametrize("index", [0, 1])
def test_heads_are_turned_as_by_diffusers(index):
    where = positions(index)
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
