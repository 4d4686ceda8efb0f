"""The FLUX.1 transformer against diffusers' in torch, every parameter redrawn."""

import copy
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from flax.traverse_util import flatten_dict

from digen_jax.checkpoints.tensors import file_shape, tensor_names
from digen_jax.models.family import logical_axes
from digen_jax.models.flux import network as flux
from tests.models import parity

DEV = {
    "patch_size": 1,
    "in_channels": 16,
    "out_channels": None,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 3,
    "joint_attention_dim": 10,
    "pooled_projection_dim": 7,
    "guidance_embeds": True,
    "axes_dims_rope": (2, 4, 6),
}
SCHNELL = DEV | {
    "in_channels": 8,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "guidance_embeds": False,
    "axes_dims_rope": (4, 8, 4),
}
# Of each: the config, tokens of the image, of the text.
CASES = {
    "dev": (DEV, (3, 5), 5),
    "schnell": (SCHNELL, (5, 2), 4),
}
# Facts of the repositories black-forest-labs/FLUX.1-dev and FLUX.1-schnell.
PUBLISHED = {
    "dev": ({"guidance_embeds": True}, 11_901_408_320),
    "schnell": ({"guidance_embeds": False}, 11_891_178_560),
}
# What yifan123/flow_grpo's scripts/train_flux.py gives to PEFT.
PUBLISHED_TARGETS = [
    *(f"attn.{name}" for name in ("to_k", "to_q", "to_v", "to_out.0", "to_add_out")),
    *(f"attn.{name}" for name in ("add_k_proj", "add_q_proj", "add_v_proj")),
    *(f"{net}.net.{layer}" for net in ("ff", "ff_context") for layer in ("0.proj", "2")),
]


@functools.cache
def inputs(name: str) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    """Two unlike examples: (latents, context, pooled), which have gradients, and (sigma, guidance)."""
    fields, (height, width), text = CASES[name]
    draw = np.random.default_rng(0).standard_normal
    differentiable = (
        draw((2, 2 * height, 2 * width, fields["in_channels"] // 4)),
        draw((2, text, fields["joint_attention_dim"])),
        draw((2, fields["pooled_projection_dim"])),
    )
    numbers = np.array([0.3, 0.977]), np.array([3.5, 1.25])
    return tuple(
        tuple(jnp.asarray(a, jnp.float32) for a in arrays) for arrays in (differentiable, numbers)
    )


@functools.cache
def abstract(config: flux.FluxConfig):
    channels, context = config.in_channels // 4, config.joint_attention_dim
    shapes = [(1, 4, 4, channels), (1,), (1, 5, context), (1, config.pooled_projection_dim)]
    shapes += [(1,)] * config.guidance_embeds
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.eval_shape(flux.FluxTransformer(config).init, jax.random.key(0), *args)["params"]


@functools.cache
def models(name: str):
    """A torch model with every tensor redrawn, its config, and its parameters as a flax tree."""
    torch_model = parity.randomise(FluxTransformer2DModel(**CASES[name][0]))
    config = flux.FluxConfig.from_config(dict(torch_model.config))
    params = parity.to_flax(torch_model.state_dict(), abstract(config), flux.LISTS)
    return torch_model, config, params


def velocity(name: str, params, latents, context, pooled, **options) -> jax.Array:
    _, config, _ = models(name)
    sigma, guidance = inputs(name)[1]
    network = flux.FluxTransformer(config, **options)
    given = (guidance,) if config.guidance_embeds else ()
    return network.apply({"params": params}, latents, sigma, context, pooled, *given)


@functools.cache
def value_and_gradients(name: str, remat: str = "none"):
    """The velocity and the gradients of its product with a fixed direction."""

    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(arguments):
        v = velocity(name, *arguments, remat=remat)
        return jnp.sum(v * direction(v.shape)), v

    with jax.default_matmul_precision("highest"):
        (_, v), gradients = jax.jit(objective)((models(name)[2], *inputs(name)[0]))
    return v, gradients


def direction(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def torch_velocity(model, name: str, latents, context, pooled) -> torch.Tensor:
    """As diffusers' pipeline calls the network: packed latents, positions of tokens, time from 0 to 1."""
    sigma, guidance = (torch.tensor(np.asarray(a)) for a in inputs(name)[1])
    dtype = model.dtype
    batch, height, width, channels = latents.shape
    raw = latents.permute(0, 3, 1, 2).contiguous()
    v = model(
        hidden_states=FluxPipeline._pack_latents(raw, batch, channels, height, width).to(dtype),
        encoder_hidden_states=context.to(dtype),
        pooled_projections=pooled.to(dtype),
        timestep=sigma.to(dtype),
        guidance=guidance if model.config.guidance_embeds else None,
        img_ids=FluxPipeline._prepare_latent_image_ids(
            batch, height // 2, width // 2, "cpu", dtype
        ),
        txt_ids=torch.zeros(context.shape[1], 3).to(dtype),
    ).sample
    v = FluxPipeline._unpack_latents(v, height, width, vae_scale_factor=1)
    return v.permute(0, 2, 3, 1).float()


@functools.cache
def expected(name: str):
    """The same from diffusers in float64, so that the errors are ours alone."""
    torch_model, config, _ = models(name)
    torch_model = copy.deepcopy(torch_model).double()
    torch_model.time_text_embed.time_proj.forward = parity.time_features
    arrays = [torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in inputs(name)[0]]
    v = torch_velocity(torch_model, name, *arrays)
    torch_model.zero_grad()
    (v * torch.tensor(direction(v.shape))).sum().backward()
    gradients = parity.to_flax(parity.gradients(torch_model), abstract(config), flux.LISTS)
    return v.detach().numpy(), (gradients, *(array.grad.numpy() for array in arrays))


@pytest.mark.parametrize("name", CASES)
def test_velocity_and_gradients_equal_diffusers(name):
    (actual, gradients), (reference, reference_gradients) = (
        value_and_gradients(name),
        expected(name),
    )
    assert actual.dtype == jnp.float32
    error, _ = parity.worst(actual, reference)
    assert error < 1e-5
    error, path = parity.worst(gradients, reference_gradients, whole=True)
    assert error < 1e-4, path
    for part, reference_part in zip(gradients[1:], reference_gradients[1:], strict=True):
        assert parity.worst(part, reference_part)[0] < 1e-4


def test_equal_blocks_are_scanned():
    blocks = {name for name in models("dev")[2] if "blocks" in name}
    assert blocks == {"transformer_blocks_0to1", "single_transformer_blocks_0to2"}
    blocks = {name for name in models("schnell")[2] if "blocks" in name}
    assert blocks == {"transformer_blocks_0", "single_transformer_blocks_0to1"}


def test_remat_gives_the_same_gradients():
    plain, rematerialised = (value_and_gradients("schnell", each) for each in ("none", "blocks"))
    error, path = parity.worst(rematerialised, plain, whole=True)
    assert error < 1e-5, path


def test_the_error_in_bfloat16_is_not_above_torchs():
    """Of the same parameters, which bfloat16 holds exactly; time, norms and modulation are float32 here."""
    torch_model, config, _ = models("dev")
    half = copy.deepcopy(torch_model).bfloat16()
    exact = copy.deepcopy(half).float()
    params = parity.to_flax(exact.state_dict(), abstract(config), flux.LISTS)
    arrays = [torch.tensor(np.asarray(a)) for a in inputs("dev")[0]]
    with torch.no_grad():
        expected, torchs = (torch_velocity(m, "dev", *arrays).numpy() for m in (exact, half))
    forward = jax.jit(functools.partial(velocity, "dev", dtype=jnp.bfloat16))
    actual = forward(params, *inputs("dev")[0])
    error, torchs_error = (np.sqrt(np.square(a - expected).mean()) for a in (actual, torchs))
    assert actual.dtype == jnp.float32
    assert 1e-4 * np.abs(expected).max() < error < 1.5 * torchs_error


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_models_have_diffusers_parameters(name):
    change, count = PUBLISHED[name]
    with torch.device("meta"):
        tensors = FluxTransformer2DModel(**change).state_dict()
    expected = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    found = {
        key: file_shape(path, leaf.shape, flux.LISTS)
        for path, leaf in flatten_dict(abstract(flux.FluxConfig.from_config(change))).items()
        for key in tensor_names(path, flux.LISTS)
    }
    assert found == expected
    assert sum(int(np.prod(shape)) for shape in found.values()) == count


def test_every_dimension_has_a_name():
    config = models("dev")[1]
    shapes = abstract(config)
    axes = flatten_dict(logical_axes(shapes, flux.AXES, flux.LISTS))
    sizes = {}
    for path, leaf in flatten_dict(shapes).items():
        for name, size in zip(axes[path], leaf.shape, strict=True):
            sizes.setdefault(name, set()).add(size)
    dim = config.dim
    assert sizes["embed"] == sizes["heads"] == {dim}
    # Of blocks, of embedders, and of a single block's projection of heads and hidden layer.
    assert sizes["mlp"] == {4 * dim, dim, 5 * dim}
    assert sizes["modulation"] == {6 * dim, 3 * dim, 2 * dim}
    assert sizes["text"] == {config.joint_attention_dim, config.pooled_projection_dim}
    assert sizes["channels"] == {config.in_channels}
    assert sizes["layers"] == {2, 3}


def test_lora_targets_are_the_published_ones():
    """PEFT takes a list of names as the ends of layers' names."""
    linear = [n for n, m in models("dev")[0].named_modules() if isinstance(m, torch.nn.Linear)]
    expected = {n for n in linear if any(n.endswith(f".{end}") for end in PUBLISHED_TARGETS)}
    assert {n for n in linear if re.fullmatch(flux.LORA_TARGETS, n)} == expected
    assert len(expected) == 2 * 12 + 3 * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 2}, "patch_size must be 1"),
        ({"in_channels": 6}, "in_channels must be a multiple of 4"),
        ({"out_channels": 6}, "out_channels must be a multiple of 4"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_single_layers": 0}, "num_single_layers"),
        ({"guidance_embeds": 1}, "guidance_embeds"),
        ({"axes_dims_rope": (2, 4, 4)}, "axes_dims_rope must be three even numbers"),
        ({"axes_dims_rope": (1, 5, 6)}, "axes_dims_rope must be three even numbers"),
        ({"axes_dims_rope": (0, 6, 6)}, "axes_dims_rope must be three even numbers"),
        ({"axes_dims_rope": (6, 6)}, "axes_dims_rope must be three even numbers"),
        ({"axes_dims_rope": None}, "axes_dims_rope"),
        ({"qk_norm": "rms_norm"}, "qk_norm is not a field.*: remove it"),
    ],
)
def test_unsupported_fields_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        flux.FluxConfig.from_config(DEV | change)


def test_out_channels_default_to_in_channels():
    config = flux.FluxConfig.from_config(DEV | {"_class_name": "ignored"})
    assert config == flux.FluxConfig(**DEV | {"out_channels": 16})
    assert flux.FluxConfig.from_config({}) == flux.FluxConfig()


@pytest.mark.parametrize("embeds", [True, False])
def test_guidance_must_fit_the_network(embeds):
    config = dataclasses.replace(models("dev")[1], guidance_embeds=embeds)
    (latents, context, pooled), (sigma, guidance) = inputs("dev")
    given = () if embeds else (guidance,)
    word = "needs" if embeds else "takes no"
    with pytest.raises(ValueError, match=f"guidance_embeds {embeds} {word} guidance"):
        init = flux.FluxTransformer(config).init
        jax.eval_shape(init, jax.random.key(0), latents, sigma, context, pooled, *given)
