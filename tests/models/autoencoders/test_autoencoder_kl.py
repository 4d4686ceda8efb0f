import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from digen_jax.models.autoencoders.autoencoder_kl import (
    LISTS,
    AutoencoderKL,
    AutoencoderKLConfig,
    GroupNorm,
    scale_latents,
    unscale_latents,
)
from tests.models import parity

SD3 = {
    "_class_name": "AutoencoderKL",
    "_diffusers_version": "0.29.0",
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "force_upcast": True,
    "in_channels": 3,
    "latent_channels": 16,
    "latents_mean": None,
    "latents_std": None,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 1024,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}


def tiny(channels=(8, 12), **fields) -> dict:
    return {
        **SD3,
        "block_out_channels": list(channels),
        "down_block_types": ["DownEncoderBlock2D"] * len(channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(channels),
        "latent_channels": 3,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        **fields,
    }


PLAIN = tiny(mid_block_add_attention=False)
ALL_PARTS = tiny((8, 8, 12), layers_per_block=2, use_quant_conv=True, use_post_quant_conv=True)


def pair(config: dict, dtype=jnp.float32):
    """diffusers' module, ours, and its parameters in our tree."""
    kwargs = {k: v for k, v in config.items() if not k.startswith("_")}
    module = parity.randomise(diffusers.AutoencoderKL(**kwargs))
    model = AutoencoderKL(AutoencoderKLConfig.from_config(config), dtype)
    return module, model, parity.to_flax(module.state_dict(), shapes(model), LISTS)


def shapes(model: AutoencoderKL):
    size = 2 ** len(model.config.block_out_channels)
    images = jnp.zeros((1, size, size, 3))
    return jax.eval_shape(lambda key: model.init(key, images, method="reconstruct"), SEED)["params"]


SEED = jax.random.key(0)


def inputs(config: dict):
    """Images whose sides are neither equal nor multiples of the downscaling; latents."""
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (2, 14, 9, 3))
    latents = rng.normal(size=(2, 3, 5, config["latent_channels"]))
    return jnp.asarray(images, jnp.float32), jnp.asarray(latents, jnp.float32)


def to_torch(array) -> torch.Tensor:
    return torch.tensor(np.asarray(array)).permute(0, 3, 1, 2).requires_grad_()


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().permute(0, 2, 3, 1).numpy()


def forward(model: AutoencoderKL, params, images, latents) -> dict:
    mean, logvar = model.apply({"params": params}, images, method="encode")
    decoded = model.apply({"params": params}, latents, method="decode")
    return {"decoded": decoded, "logvar": logvar, "mean": mean}


def torch_forward(module, images: torch.Tensor, latents: torch.Tensor) -> dict:
    moments = module.encode(images).latent_dist
    decoded = module.decode(latents).sample
    return {"decoded": decoded, "logvar": moments.logvar, "mean": moments.mean}


def cotangents(outputs: dict) -> dict:
    rng = np.random.default_rng(1)
    return {k: rng.normal(size=outputs[k].shape).astype(np.float32) for k in sorted(outputs)}


def test_equals_diffusers_forward_and_in_all_gradients():
    module, model, params = pair(ALL_PARTS)
    images, latents = inputs(ALL_PARTS)
    torch_images, torch_latents = to_torch(images), to_torch(latents)
    outputs = torch_forward(module, torch_images, torch_latents)
    expected = {k: from_torch(v) for k, v in outputs.items()}
    weights = cotangents(expected)
    sum((v * to_torch(weights[k])).sum() for k, v in outputs.items()).backward()

    @jax.jit
    def run(*arguments):
        actual, pull = jax.vjp(lambda *a: forward(model, *a), *arguments)
        return actual, pull(weights)

    with jax.default_matmul_precision("highest"):
        actual, (grads, *input_grads) = run(params, images, latents)

    assert parity.worst(actual, expected)[0] < 1e-4
    expected_grads = parity.to_flax(parity.gradients(module), params, LISTS)
    assert parity.worst(grads, expected_grads, whole=True)[0] < 1e-4
    expected_input_grads = [from_torch(t.grad) for t in (torch_images, torch_latents)]
    assert parity.worst(input_grads, expected_input_grads)[0] < 1e-4


def test_clips_the_log_variance_as_diffusers_does():
    module, model, params = pair(PLAIN)
    with torch.no_grad():
        module.encoder.conv_out.weight *= 30
    params["encoder"]["conv_out"]["kernel"] *= 30
    images, _ = inputs(PLAIN)
    moments = module.encode(to_torch(images)).latent_dist
    with jax.default_matmul_precision("highest"):
        mean, logvar = jax.jit(lambda x: model.apply({"params": params}, x, method="encode"))(
            images
        )
    assert (float(logvar.min()), float(logvar.max())) == (-30, 20)
    expected = [from_torch(moments.mean), from_torch(moments.logvar)]
    assert parity.worst([mean, logvar], expected)[0] < 1e-4


def test_bfloat16_stays_close_and_returns_float32():
    module, model, params = pair(PLAIN, jnp.bfloat16)
    images, latents = inputs(PLAIN)
    actual = jax.jit(lambda *a: forward(model, *a))(params, images, latents)
    expected = torch_forward(module, to_torch(images), to_torch(latents))
    error, _ = parity.worst(actual, {k: from_torch(v) for k, v in expected.items()})
    assert {v.dtype for v in actual.values()} == {jnp.dtype(jnp.float32)}
    assert 1e-3 < error < 5e-2


@pytest.mark.parametrize(("offset", "spread"), [(300, 1), (0, 1e-3)], ids=["far from 0", "tiny"])
def test_group_norm_is_exact(offset, spread):
    module, model, _ = pair(PLAIN)
    (epsilon,) = {m.eps for m in module.modules() if isinstance(m, torch.nn.GroupNorm)}
    x = np.random.default_rng(0).normal(offset, spread, (2, 5, 7, 12)).astype(np.float32)
    variables = {"params": {"scale": jnp.ones(12), "bias": jnp.zeros(12)}}
    actual = GroupNorm(model.config, jnp.float32).apply(variables, jnp.asarray(x))
    groups = x.astype(np.float64).reshape(2, 5, 7, 4, 3)
    centred = groups - groups.mean((1, 2, 4), keepdims=True)
    expected = centred / np.sqrt((centred**2).mean((1, 2, 4), keepdims=True) + epsilon)
    np.testing.assert_allclose(actual, expected.reshape(x.shape), atol=2e-4)


def test_scaling_is_the_pipelines_and_its_inverse():
    latents = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 16)), jnp.float32)
    config = AutoencoderKLConfig.from_config(SD3)
    scaled = scale_latents(config, latents)
    np.testing.assert_allclose(
        scaled, (np.asarray(latents) - 0.0609) * 1.5305, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(unscale_latents(config, scaled), latents, rtol=1e-5, atol=1e-6)
    unshifted = AutoencoderKLConfig.from_config({**SD3, "shift_factor": None})
    np.testing.assert_allclose(scale_latents(unshifted, latents), latents * 1.5305, rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("act_fn", "relu"),
        ("down_block_types", ["AttnDownEncoderBlock2D", "DownEncoderBlock2D"]),
        ("up_block_types", ["UpDecoderBlock2D"]),
        ("norm_num_groups", 5),
        ("latents_mean", [0.0, 0.0, 0.0]),
        ("upblock_types", ["UpDecoderBlock2D"] * 2),
    ],
)
def test_an_unsupported_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        AutoencoderKLConfig.from_config({**PLAIN, field: value})
