"""The autoencoders of images against diffusers' classes with random parameters, forward and in gradients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline

from digen_jax.models.autoencoders import autoencoder_flux2 as flux2
from digen_jax.models.autoencoders import autoencoder_kl as kl
from digen_jax.models.family import logical_axes
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


def tiny_kl(channels=(8, 12), **fields) -> dict:
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


PLAIN = tiny_kl(mid_block_add_attention=False)
ALL_PARTS = tiny_kl((8, 8, 12), layers_per_block=2, use_quant_conv=True, use_post_quant_conv=True)
FLUX2 = dict(block_out_channels=[8, 12], decoder_block_out_channels=[4, 8])
FLUX2 |= dict(down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
FLUX2 |= dict(latent_channels=3, layers_per_block=1, norm_num_groups=4, batch_norm_eps=0.01)


def to_torch(array) -> torch.Tensor:
    """With channels first."""
    return torch.tensor(np.asarray(array)).movedim(-1, 1).requires_grad_()


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().movedim(1, -1).numpy()


@dataclasses.dataclass(frozen=True)
class Case:
    """An autoencoder.

    Attributes:
      fields: of diffusers' config.
      module: ours.
      config: the class of ours.
      images: the shape of images whose sides are neither equal nor multiples of the downscaling.
      latents: the shape of latents.
      forward: of our bound module, images and latents.
      torch_forward: the same of diffusers' class.
      ignored: tensors of a file that are not read.
      unsupported: fields and values that are refused.
    """

    fields: dict[str, Any]
    module: Any
    config: Any
    images: tuple[int, ...]
    latents: tuple[int, ...]
    forward: Callable[..., dict[str, Any]]
    torch_forward: Callable[..., dict[str, torch.Tensor]]
    ignored: tuple[str, ...]
    unsupported: tuple[tuple[str, Any], ...]


def coded(model, images, latents) -> dict:
    mean, logvar = model.encode(images)
    return {"decoded": model.decode(latents), "logvar": logvar, "mean": mean}


def torch_coded(module, images, latents) -> dict:
    moments = module.encode(images).latent_dist
    decoded = module.decode(latents).sample
    return {"decoded": decoded, "logvar": moments.logvar, "mean": moments.mean}


def flux2_coded(model, images, latents) -> dict:
    mean, logvar = model.encode(images)
    decoded = model.decode(model.unscale_latents(latents))
    return {"decoded": decoded, "logvar": logvar, "scaled": model.scale_latents(mean)}


def flux2_torch_coded(module, images, latents) -> dict:
    """With the end of Flux2KleinPipeline's call, from its latents before they are packed."""
    mean, variance = (s.view(1, -1, 1, 1) for s in (module.bn.running_mean, module.bn.running_var))
    latents = latents * torch.sqrt(variance + module.config.batch_norm_eps) + mean
    moments = module.encode(images).latent_dist
    return {
        "decoded": module.decode(Flux2KleinPipeline._unpatchify_latents(latents)).sample,
        "logvar": moments.logvar,
        # A batch norm out of training norms by its statistics.
        "scaled": module.bn(Flux2KleinPipeline._patchify_latents(moments.mean)),
    }


CASES = {
    "AutoencoderKL": Case(
        ALL_PARTS,
        kl.AutoencoderKL,
        kl.AutoencoderKLConfig,
        (2, 14, 9, 3),
        (2, 3, 5, 3),
        coded,
        torch_coded,
        (),
        unsupported=(
            *(("act_fn", "relu"), ("norm_num_groups", 5), ("latents_mean", [0.0, 0.0, 0.0])),
            ("down_block_types", ["AttnDownEncoderBlock2D", *["DownEncoderBlock2D"] * 2]),
            *(("up_block_types", ["UpDecoderBlock2D"]), ("upblock_types", ["UpDecoderBlock2D"])),
        ),
    ),
    "AutoencoderKLFlux2": Case(
        FLUX2,
        flux2.AutoencoderKLFlux2,
        flux2.AutoencoderKLFlux2Config,
        (2, 13, 9, 3),
        (2, 3, 2, 12),
        flux2_coded,
        flux2_torch_coded,
        flux2.IGNORED,
        unsupported=(
            *(("patch_size", [1, 1]), ("norm_num_groups", 5), ("batch_norm_eps", -1.0)),
            *(("decoder_block_out_channels", each) for each in ([4], [4, 6])),
            ("scaling_factor", 0.5),
        ),
    ),
}


def shapes(model):
    side = 2 ** len(model.config.block_out_channels)
    init = functools.partial(model.init, method="reconstruct")
    return jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, side, side, 3)))["params"]


def tensors(case: Case, module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in module.state_dict().items() if name not in case.ignored}


@functools.cache
def pair(name: str):
    """diffusers' module, ours, and its parameters in our tree."""
    case = CASES[name]
    module = parity.randomise(getattr(diffusers, name)(**without_private(case.fields)))
    if hasattr(module, "bn"):
        generator = torch.Generator().manual_seed(1)
        module.bn.running_mean.normal_(generator=generator)
        module.bn.running_var.uniform_(0.01, 2, generator=generator)
    model = case.module(case.config.from_config(case.fields))
    return module, model, parity.to_flax(tensors(case, module), shapes(model), kl.LISTS)


def without_private(fields: dict) -> dict:
    return {k: v for k, v in fields.items() if not k.startswith("_")}


def inputs(case: Case):
    rng = np.random.default_rng(0)
    images, latents = rng.uniform(-1, 1, case.images), rng.normal(size=case.latents)
    return jnp.asarray(images, jnp.float32), jnp.asarray(latents, jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_equals_diffusers_forward_and_in_gradients(name):
    """Of its inputs; AutoencoderKL, which can be trained, of all parameters, too."""
    case, (module, model, params) = CASES[name], pair(name)
    images, latents = inputs(case)
    given = to_torch(images), to_torch(latents)
    outputs = case.torch_forward(module, *given)
    expected = {k: from_torch(v) for k, v in outputs.items()}
    rng = np.random.default_rng(1)
    weights = {k: rng.normal(size=expected[k].shape).astype(np.float32) for k in sorted(expected)}
    sum((v * to_torch(weights[k])).sum() for k, v in outputs.items()).backward()

    def forward(params, *inputs):
        return model.apply({"params": params}, *inputs, method=case.forward)

    @jax.jit
    def run(params, *inputs):
        if name == "AutoencoderKL":
            actual, pull = jax.vjp(forward, params, *inputs)
        else:
            actual, pull = jax.vjp(functools.partial(forward, params), *inputs)
        return actual, pull(weights)

    with jax.default_matmul_precision("highest"):
        actual, gradients = run(params, images, latents)
    assert parity.worst(actual, expected)[0] < (1e-4 if name == "AutoencoderKL" else 1e-5)
    wanted = [from_torch(tensor.grad) for tensor in given]
    assert parity.worst(gradients[-2:], wanted)[0] < 1e-4
    if name == "AutoencoderKL":
        of_parameters = parity.to_flax(parity.gradients(module), params, kl.LISTS)
        assert parity.worst(gradients[0], of_parameters, whole=True)[0] < 1e-4


def test_defaults_of_flux2_are_diffusers():
    with torch.device("meta"):
        module = diffusers.AutoencoderKLFlux2()
    fields = dict(module.config) | {"force_upcast": True}
    config = flux2.AutoencoderKLFlux2Config
    assert config.from_config(fields) == config()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(name, *each) for name, case in CASES.items() for each in case.unsupported],
)
def test_an_unsupported_field_is_named(name, field, value):
    with pytest.raises(ValueError, match=field):
        CASES[name].config.from_config({**CASES[name].fields, field: value})


def test_kernels_of_flux2_have_logical_axes_and_statistics_none():
    axes = logical_axes(shapes(pair("AutoencoderKLFlux2")[1]), flux2.AXES, kl.LISTS)
    assert axes["bn"] == {"running_mean": (None,), "running_var": (None,)}
    assert axes["quant_conv"]["kernel"] == (None, None, "conv_in", "conv_out")
    assert axes["encoder"]["conv_norm_out"]["scale"] == ("conv_out",)


# ------------------------------------------------------------------------------------ AutoencoderKL


def plain(dtype=jnp.float32):
    """As `pair`, without attention."""
    module = parity.randomise(diffusers.AutoencoderKL(**without_private(PLAIN)))
    model = kl.AutoencoderKL(kl.AutoencoderKLConfig.from_config(PLAIN), dtype)
    return module, model, parity.to_flax(module.state_dict(), shapes(model), kl.LISTS)


def test_the_log_variance_is_clipped_as_by_diffusers():
    module, model, params = plain()
    with torch.no_grad():
        module.encoder.conv_out.weight *= 30
    params["encoder"]["conv_out"]["kernel"] *= 30
    images, _ = inputs(CASES["AutoencoderKL"])
    moments = module.encode(to_torch(images)).latent_dist
    encode = jax.jit(lambda x: model.apply({"params": params}, x, method="encode"))
    with jax.default_matmul_precision("highest"):
        mean, logvar = encode(images)
    assert (float(logvar.min()), float(logvar.max())) == (-30, 20)
    expected = [from_torch(moments.mean), from_torch(moments.logvar)]
    assert parity.worst([mean, logvar], expected)[0] < 1e-4


def test_bfloat16_stays_close_and_returns_float32():
    module, model, params = plain(jnp.bfloat16)
    images, latents = inputs(CASES["AutoencoderKL"])
    run = jax.jit(lambda *a: model.apply({"params": params}, *a, method=coded))
    actual = run(images, latents)
    expected = torch_coded(module, to_torch(images), to_torch(latents))
    error, _ = parity.worst(actual, {k: from_torch(v) for k, v in expected.items()})
    assert {v.dtype for v in actual.values()} == {jnp.dtype(jnp.float32)}
    assert 1e-3 < error < 5e-2


@pytest.mark.parametrize(("offset", "spread"), [(300, 1), (0, 1e-3)], ids=["far from 0", "tiny"])
def test_group_norm_is_exact(offset, spread):
    module, model, _ = plain()
    (epsilon,) = {m.eps for m in module.modules() if isinstance(m, torch.nn.GroupNorm)}
    x = np.random.default_rng(0).normal(offset, spread, (2, 5, 7, 12)).astype(np.float32)
    variables = {"params": {"scale": jnp.ones(12), "bias": jnp.zeros(12)}}
    actual = kl.GroupNorm(model.config, jnp.float32).apply(variables, jnp.asarray(x))
    groups = x.astype(np.float64).reshape(2, 5, 7, 4, 3)
    centred = groups - groups.mean((1, 2, 4), keepdims=True)
    expected = centred / np.sqrt((centred**2).mean((1, 2, 4), keepdims=True) + epsilon)
    np.testing.assert_allclose(actual, expected.reshape(x.shape), atol=2e-4)


@pytest.mark.parametrize("shift", [0.0609, None])
def test_scaling_is_the_pipelines_and_its_inverse(shift):
    latents = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 16)), jnp.float32)
    config = kl.AutoencoderKLConfig.from_config({**SD3, "shift_factor": shift})
    scaled = kl.scale_latents(config, latents)
    expected = (np.asarray(latents) - (shift or 0)) * 1.5305
    np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-6)
    found = kl.unscale_latents(config, scaled)
    np.testing.assert_allclose(found, latents, rtol=1e-5, atol=1e-6)
