"""The decoder of HunyuanVideo 1.5's autoencoder against diffusers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15 as Oracle

from digen_jax.models.autoencoders import autoencoder_hunyuan_video15 as hunyuan
from tests.models import parity

TINY = {
    "block_out_channels": (4, 8, 16),
    "spatial_compression_ratio": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
}


def shapes(config: hunyuan.AutoencoderKLHunyuanVideo15Config):
    model = hunyuan.AutoencoderKLHunyuanVideo15(config)
    return jax.eval_shape(model.init, jax.random.key(0), *hunyuan.inputs(config))["params"]


@functools.cache
def pair():
    """diffusers' module, ours, and its parameters in our tree."""
    module = parity.randomise(Oracle(**TINY))
    module.enable_slicing()  # its attention fails for several clips
    config = hunyuan.AutoencoderKLHunyuanVideo15Config.from_config(dict(module.config))
    state = {k: v for k, v in module.state_dict().items() if k.startswith("decoder.")}
    model = hunyuan.AutoencoderKLHunyuanVideo15(config)
    return module, model, parity.to_flax(state, shapes(config), hunyuan.LISTS)


def decoded(module: Oracle, latents: np.ndarray) -> np.ndarray:
    """Clips of diffusers' module, channels last."""
    with torch.no_grad():
        clips = module.decode(torch.tensor(latents).permute(0, 4, 1, 2, 3)).sample
    return clips.permute(0, 2, 3, 4, 1).numpy()


@pytest.mark.parametrize("frames", [1, 4])
def test_clips_are_diffusers(frames):
    module, model, params = pair()
    latents = np.random.default_rng(0).normal(size=(2, frames, 2, 3, 4)).astype(np.float32)
    expected = decoded(module, latents)
    with jax.default_matmul_precision("highest"):
        actual = jax.jit(model.apply)({"params": params}, latents)
    assert expected.shape == (2, 4 * frames - 3, 8, 12, 3)
    assert parity.worst(actual, expected)[0] < 1e-5


def test_activations_of_a_longer_clip_take_no_more_memory():
    _, model, params = pair()

    def memory(frames):
        latents = jax.ShapeDtypeStruct((1, frames, 8, 8, 4), jnp.float32)
        return jax.jit(model.apply).lower({"params": params}, latents).compile().memory_analysis()

    short, long = memory(8), memory(26)
    pixels = long.output_size_in_bytes - short.output_size_in_bytes
    # Frames are in the scan's result and in the clip; the latents' resolution has all frames.
    assert long.temp_size_in_bytes < short.temp_size_in_bytes + 4 * pixels


def test_the_published_decoder_has_the_tensors_of_diffusers():
    """Whose defaults are the published config."""
    with torch.device("meta"):
        module = Oracle()
    config = hunyuan.AutoencoderKLHunyuanVideo15Config.from_config(dict(module.config))
    assert config == hunyuan.AutoencoderKLHunyuanVideo15Config()
    state = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    found = parity.file_shapes(shapes(config), hunyuan.LISTS)
    assert found == {k: shape for k, shape in state.items() if k.startswith("decoder.")}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spatial_compression_ratio", 8),
        ("temporal_compression_ratio", 8),
        ("upsample_match_channel", False),
        ("block_out_channels", [4, 6, 8]),
        ("latent_channels", 3),
        ("scaling_factor", 0.0),
        ("norm_num_groups", 4),
    ],
)
def test_an_unsupported_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        hunyuan.AutoencoderKLHunyuanVideo15Config.from_config({**TINY, field: value})
