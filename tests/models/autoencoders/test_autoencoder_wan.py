"""The autoencoders of Wan and Qwen-Image against both of diffusers' classes."""

import dataclasses
import functools
import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from digen_jax.attention.kernels import on_device
from digen_jax.checkpoints import folder
from digen_jax.models.autoencoders import autoencoder_wan
from digen_jax.models.autoencoders.autoencoder_wan import (
    AXES,
    LISTS,
    MEAN,
    STD,
    AutoencoderKLWan,
    AutoencoderKLWanConfig,
    scale_latents,
    unscale_latents,
)
from digen_jax.models.autoencoders.autoencoder_wan_layers import CausalConv3d, FrameChunk, RMSNorm
from digen_jax.models.family import logical_axes
from tests.models import parity

TINY = {
    "attn_scales": [],
    "base_dim": 6,
    "dropout": 0.0,
    "dim_mult": [1, 2, 2],
    "latents_mean": [0.1, -0.2, 0.3],
    "latents_std": [1.0, 2.0, 0.5],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "z_dim": 3,
}
# Each class with fields that the other has not.
CASES = {
    "AutoencoderKLQwenImage": {**TINY, "input_channels": 4},
    "AutoencoderKLWan": {
        **TINY,
        "decoder_base_dim": 4,
        "in_channels": 2,
        "out_channels": 1,
        "scale_factor_spatial": 4,
    },
    # Wan 2.2's, with a level that halves sides only.
    "AutoencoderKLWan 2.2": {
        **TINY,
        "decoder_base_dim": 8,
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": True,
        "patch_size": 2,
        "dim_mult": [1, 2, 4, 4],
        "temperal_downsample": [False, True, True],
        "scale_factor_spatial": 16,
    },
}
TWO_LEVELS = {"dim_mult": [1, 2], "temperal_downsample": [True]}
QWEN, WAN, RESIDUAL = CASES
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
SEED = jax.random.key(0)


def shapes(model: AutoencoderKLWan):
    (clips,) = autoencoder_wan.inputs(model.config)

    def init(model, clips):
        model.encode(clips)
        model.decode(jnp.zeros((1, 1, 1, 1, model.config.z_dim)))

    return jax.eval_shape(lambda key: model.init(key, clips, method=init), SEED)["params"]


@functools.cache
def pair(name: str):
    """diffusers' module, ours, and its parameters in our tree."""
    module = parity.randomise(getattr(diffusers, name.partition(" ")[0])(**CASES[name]))
    model = AutoencoderKLWan(AutoencoderKLWanConfig.from_config(CASES[name]))
    return module, model, parity.to_flax(module.state_dict(), shapes(model), LISTS)


def inputs(model: AutoencoderKLWan, frames: int):
    """A clip whose sides are neither equal nor multiples of the downscaling; latents of as many frames."""
    rng = np.random.default_rng(0)
    config = model.config
    length = 1 + (frames - 1) * config.frames_factor
    more = (0, 0) if config.patch_size else (3, 1)
    sides = 2 * config.side_factor + more[0], 3 * config.side_factor + more[1]
    channels = config.in_channels // (config.patch_size or 1) ** 2
    clips = rng.uniform(-1, 1, (2, length, *sides, channels))
    latents = rng.normal(size=(2, frames, 3, 2, config.z_dim))
    return jnp.asarray(clips, jnp.float32), jnp.asarray(latents, jnp.float32)


def to_torch(array) -> torch.Tensor:
    return torch.tensor(np.asarray(array)).permute(0, 4, 1, 2, 3).requires_grad_()


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().permute(0, 2, 3, 4, 1).numpy()


def forward(model: AutoencoderKLWan, at_once: int, params, clips, latents) -> dict:
    mean, logvar = model.apply({"params": params}, clips, at_once, method="encode")
    decoded = model.apply({"params": params}, latents, at_once, method="decode")
    return {"decoded": decoded, "logvar": logvar, "mean": mean}


def torch_forward(module, clips: torch.Tensor, latents: torch.Tensor) -> dict:
    moments = module.encode(clips).latent_dist
    decoded = module.decode(latents).sample
    return {"decoded": decoded, "logvar": moments.logvar, "mean": moments.mean}


@pytest.mark.parametrize(("name", "frames"), [(QWEN, 1), (WAN, 3), slow(RESIDUAL, 3)])
def test_equals_diffusers_forward_and_in_gradients_of_its_input(name, frames):
    module, model, params = pair(name)
    clips, latents = inputs(model, frames)
    assert model.config.frames_factor == 4 and clips.shape[1] == 4 * frames - 3
    torch_clips, torch_latents = to_torch(clips), to_torch(latents)
    outputs = torch_forward(module, torch_clips, torch_latents)
    expected = {k: from_torch(v) for k, v in outputs.items()}
    assert (np.abs(expected["decoded"]) < 1).mean() > 0.5, "most are not clipped"
    rng = np.random.default_rng(1)
    weights = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in expected.items()}
    sum((v * to_torch(weights[k])).sum() for k, v in outputs.items()).backward()

    @jax.jit
    def run(params, *arguments):
        actual, pull = jax.vjp(functools.partial(forward, model, 1, params), *arguments)
        return actual, pull(weights)

    with jax.default_matmul_precision("highest"):
        actual, grads = run(params, clips, latents)

    assert parity.worst(actual, expected)[0] < 1e-5
    expected_grads = [from_torch(t.grad) for t in (torch_clips, torch_latents)]
    assert parity.worst(grads, expected_grads)[0] < 1e-4


# Of all frames in one chunk; of four, of which the first chunk gets two, or all.
@pytest.mark.parametrize(
    ("name", "frames", "at_once"), [(RESIDUAL, 3, 3), slow(RESIDUAL, 4, 2), slow(QWEN, 4, 2)]
)
def test_the_size_of_chunks_never_changes_a_clip(name, frames, at_once):
    module, model, params = pair(name)
    clips, latents = inputs(model, frames)
    with torch.no_grad():
        outputs = torch_forward(module, to_torch(clips), to_torch(latents))
    expected = {k: from_torch(v) for k, v in outputs.items()}
    with jax.default_matmul_precision("highest"):
        actual = jax.jit(functools.partial(forward, model, at_once))(params, clips, latents)
    assert parity.worst(actual, expected)[0] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("frames", "stride"), [(5, 1), (6, 2)])
def test_a_convolution_on_cpus_is_the_same(frames, stride):
    conv = CausalConv3d(3, (3, 3, 3), stride)
    x = jax.random.normal(jax.random.key(0), (2, frames, 4, 6, 5))
    params = conv.init(jax.random.key(1), x, FrameChunk())

    def gradient(params, x):
        return jax.value_and_grad(lambda p, x: (conv.apply(p, x, FrameChunk()) ** 2).sum(), (0, 1))(
            params, x
        )

    expected = gradient(params, x)
    with on_device(jax.devices("cpu")[0]):
        found = gradient(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
    )


def test_a_longer_clip_takes_memory_only_for_its_frames():
    model = AutoencoderKLWan(AutoencoderKLWanConfig.from_config(TINY | TWO_LEVELS))
    params = shapes(model)

    def memory(frames, at_once):
        latents = jax.ShapeDtypeStruct((1, frames, 16, 16, 3), jnp.float32)
        decode = jax.jit(lambda p, z: model.apply({"params": p}, z, at_once, method="decode"))
        return decode.lower(params, latents).compile().memory_analysis()

    short, long, whole = memory(5, 1), memory(25, 1), memory(25, 25)
    pixels = long.output_size_in_bytes - short.output_size_in_bytes
    # Frames lie once as the scan's result and once behind the first frame.
    assert long.temp_size_in_bytes < short.temp_size_in_bytes + 3 * pixels
    assert whole.temp_size_in_bytes > 3 * long.temp_size_in_bytes


def test_latents_are_scaled_as_in_the_pipelines():
    config = AutoencoderKLWanConfig()
    latents = np.random.default_rng(0).normal(size=(2, 2, 3, 4, 16)).astype(np.float32)
    scaled = scale_latents(config, jnp.asarray(latents))
    expected = (latents - np.float32(MEAN)) / np.float32(STD)
    np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(unscale_latents(config, scaled), latents, rtol=1e-5, atol=1e-6)
    assert (config.side_factor, config.frames_factor) == (8, 4)


@pytest.mark.parametrize("name", ["AutoencoderKLQwenImage", "AutoencoderKLWan"])
def test_defaults_are_diffusers(name):
    with torch.device("meta"):
        module = getattr(diffusers, name)()
    config = AutoencoderKLWanConfig.from_config(dict(module.config))
    scales = {"scale_factor_temporal": None, "scale_factor_spatial": None}
    assert dataclasses.replace(config, **scales) == AutoencoderKLWanConfig()


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_and_written(tmp_path, name):
    module, model, params = pair(name)
    module.save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    read_config = AutoencoderKLWanConfig.from_config(config)
    assert read_config.decoder_base_dim == model.config.decoder_base_dim
    model = AutoencoderKLWan(read_config)
    read = folder.read_params(tmp_path / "theirs", shapes(model), LISTS)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    folder.write_params(tmp_path / "ours", read, LISTS, config)
    again, report = type(module).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    for key, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_kernels_have_logical_axes_and_scales_none():
    _, model, _ = pair(QWEN)
    axes = logical_axes(shapes(model), AXES, LISTS)["decoder"]["mid_block"]["attentions_0"]
    assert axes["norm"]["gamma"] == (None, None, None)
    assert axes["proj"]["kernel"] == (None, None, "conv_in", "conv_out")
    assert axes["proj"]["bias"] == ("conv_out",)


def test_a_pixel_of_zeros_has_a_finite_gradient():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 2, 3, 4)), jnp.float32)
    x = x.at[0, 0, 1, 1].set(0)
    oracle = diffusers.models.autoencoders.autoencoder_kl_wan.WanRMS_norm(4, images=False)
    gamma = jnp.asarray([[[[1.0]]], [[[-2.0]]], [[[0.5]]], [[[3.0]]]])
    with torch.no_grad():
        oracle.gamma.copy_(torch.tensor(np.asarray(gamma)))
    actual, pull = jax.vjp(lambda x: RMSNorm().apply({"params": {"gamma": gamma}}, x), x)
    np.testing.assert_allclose(actual, from_torch(oracle(to_torch(x))), rtol=1e-5)
    assert np.isfinite(pull(actual)[0]).all()


def test_a_clip_without_latents_is_refused():
    _, model, params = pair(QWEN)
    clips = jnp.zeros((1, 8, 8, 8, 4))
    with pytest.raises(ValueError, match="multiple of 4, not 8: leave out the last 3"):
        model.apply({"params": params}, clips, method="encode")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("patch_size", 3),
        ("attn_scales", [1.0]),
        ("temperal_downsample", [True]),
        ("latents_mean", [0.0, 0.0]),
        ("latents_std", [1.0, 0.0, 1.0]),
        ("dim_mult", [1, 0, 2]),
        ("scale_factor_spatial", 8),
        ("scale_factor_temporal", 2),
        ("z_dims", 16),
    ],
)
def test_an_unsupported_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        AutoencoderKLWanConfig.from_config({**TINY, field: value})


def test_parameters_that_are_kept_in_bfloat16_decode_in_float32():
    model = AutoencoderKLWan(AutoencoderKLWanConfig.from_config(TINY | TWO_LEVELS))
    rng = np.random.default_rng(0)
    half = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.bfloat16), shapes(model)
    )
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    decode = jax.jit(lambda params, x: model.apply({"params": params}, x, method="decode"))
    latents = inputs(model, 1)[1]
    found = decode(half, latents)
    assert found.dtype == jnp.float32
    assert parity.worst(found, np.asarray(decode(rounded, latents)))[0] < 1e-5
