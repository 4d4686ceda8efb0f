"""The decoder of HunyuanVideo's autoencoder against diffusers."""

import functools

import jax
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo as Oracle

from digen_jax.checkpoints import folder
from digen_jax.models.autoencoders import autoencoder_hunyuan_video as hunyuan
from tests.models import parity

LEVEL = "HunyuanVideo{}Block3D"
TINY = {
    "block_out_channels": (4, 6, 6),
    "down_block_types": (LEVEL.format("Down"),) * 3,
    "up_block_types": (LEVEL.format("Up"),) * 3,
    "spatial_compression_ratio": 4,
    "layers_per_block": 1,
    "latent_channels": 3,
    "norm_num_groups": 2,
    "scaling_factor": 0.7,
}
DECODER = "decoder.", "post_quant_conv."


def shapes(config: hunyuan.AutoencoderKLHunyuanVideoConfig):
    model = hunyuan.AutoencoderKLHunyuanVideo(config)
    return jax.eval_shape(model.init, jax.random.key(0), *hunyuan.inputs(config))["params"]


@functools.cache
def pair():
    """diffusers' module, ours, and its parameters in our tree."""
    module = parity.randomise(Oracle(**TINY))
    config = hunyuan.AutoencoderKLHunyuanVideoConfig.from_config(dict(module.config))
    state = {k: v for k, v in module.state_dict().items() if k.startswith(DECODER)}
    model = hunyuan.AutoencoderKLHunyuanVideo(config)
    return module, model, parity.to_flax(state, shapes(config), hunyuan.LISTS)


def draw(frames: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, frames, 2, 3, 3)).astype(np.float32)


def decoded(module: Oracle, latents: np.ndarray) -> np.ndarray:
    """Clips of diffusers' module, channels last."""
    with torch.no_grad():
        clips = module.decode(torch.tensor(latents).permute(0, 4, 1, 2, 3)).sample
    return clips.permute(0, 2, 3, 4, 1).numpy()


@functools.cache
def compiled(frames: int) -> jax.stages.Compiled:
    """Our decoder of latents of that many frames."""
    _, model, params = pair()
    with jax.default_matmul_precision("highest"):
        return jax.jit(model.apply).lower({"params": params}, draw(frames)).compile()


# 17 and 33 frames: two tiles; three, of which the last is shorter. Of 25 frames diffusers also decodes a tile of which
# nothing is left; 41 have three full tiles and another one. test_families.py has 1, 5 and 9 frames.
@pytest.mark.parametrize(
    "frames", [5, 9, *(pytest.param(frames, marks=pytest.mark.slow) for frames in (1, 3, 7, 11))]
)
def test_clips_are_diffusers_blended_tiles(frames):
    module, _, params = pair()
    expected = decoded(module, draw(frames))
    actual = compiled(frames)({"params": params}, draw(frames))
    assert expected.shape == (2, 4 * frames - 3, 8, 12, 3)
    assert parity.worst(actual, expected)[0] < 1e-5


def test_other_tiles_would_be_other_clips(monkeypatch):
    """A clip that is decoded at once, tiles that are not blended, and a tile with the frames after its own."""
    module, latents = pair()[0], draw(9)
    expected = decoded(module, latents)
    monkeypatch.setattr(module, "blend_t", lambda before, after, extent: after)
    assert np.abs(decoded(module, latents) - expected).max() > 0.05
    monkeypatch.setattr(module, "use_framewise_decoding", False)
    whole = decoded(module, latents)
    assert np.abs(whole - expected).max() > 0.05
    longer = decoded(module, np.concatenate([latents[:, :3], draw(4)[:, 3:]], axis=1))
    assert np.abs(longer[:, :9] - decoded(module, latents[:, :3])).max() > 0.05


def test_a_longer_clip_takes_memory_only_for_its_frames():
    short, long = (compiled(frames).memory_analysis() for frames in (5, 9))
    pixels = long.output_size_in_bytes - short.output_size_in_bytes
    # Frames are once the scan's result and once the clip's.
    assert long.temp_size_in_bytes < short.temp_size_in_bytes + 3 * pixels


def test_the_published_decoder_has_the_tensors_of_diffusers():
    """Whose defaults are the published config."""
    with torch.device("meta"):
        module = Oracle()
    config = hunyuan.AutoencoderKLHunyuanVideoConfig.from_config(dict(module.config))
    assert config == hunyuan.AutoencoderKLHunyuanVideoConfig()
    state = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    assert sum(map(np.prod, state.values())) == 246_478_803
    found = parity.file_shapes(shapes(config), hunyuan.LISTS)
    assert found == {k: shape for k, shape in state.items() if k.startswith(DECODER)}
    assert sum(map(np.prod, found.values())) == 146_136_339


def test_a_folder_is_read_without_its_encoder(tmp_path):
    module, model, params = pair()
    module.save_pretrained(tmp_path)
    ignored = hunyuan.COMPONENT.ignored(model)
    read = folder.read_params(tmp_path, shapes(model.config), hunyuan.LISTS, ignore=ignored)
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("up_block_types", ["HunyuanVideoUpBlock3D"]),
        ("spatial_compression_ratio", 8),
        ("temporal_compression_ratio", 8),
        ("norm_num_groups", 4),
        ("mid_block_add_attention", False),
        ("act_fn", "relu"),
        ("scaling_factor", 0.0),
        ("latents_mean", [0.0]),
    ],
)
def test_an_unsupported_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        hunyuan.AutoencoderKLHunyuanVideoConfig.from_config({**TINY, field: value})
