"""The FLUX.2 transformer against diffusers' in torch, every parameter redrawn."""

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from flax.traverse_util import flatten_dict

from digen_jax.checkpoints.tensors import file_shape, tensor_names
from digen_jax.models.family import logical_axes
from digen_jax.models.flux2 import network as flux2
from digen_jax.models.flux2.network import Flux2Config
from tests.models import parity

TINY = {
    "in_channels": 6,
    "out_channels": None,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 3,
    "joint_attention_dim": 10,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (2, 4, 4, 2),
    "rope_theta": 2000,
    "guidance_embeds": False,
}
NARROW = TINY | {
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "mlp_ratio": 1.5,
    "axes_dims_rope": (4, 2, 4, 6),
    "rope_theta": 50,
}
# Of each: the config, rows and columns of the image, tokens of the text.
CASES = {
    "tiny": (TINY, (3, 5), 4),
    "narrow": (NARROW, (5, 1), 6),
}
# The transformers of black-forest-labs/FLUX.2-klein-4B and -9B, base and distilled alike.
PUBLISHED = {
    "4B": (dict(num_layers=5, num_single_layers=20, num_attention_heads=24), 7680, 3_875_544_576),
    "9B": (dict(num_layers=8, num_single_layers=24, num_attention_heads=32), 12288, 9_078_581_248),
}
# `default_target_modules` of Flow-Factory's adapter, which it gives to PEFT.
PUBLISHED_TARGETS = [
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{net}.linear_{end}" for net in ("ff", "ff_context") for end in ("in", "out")),
]


@functools.cache
def inputs(name: str) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Two unlike examples: (latents, context), which have gradients, and sigma."""
    fields, (height, width), text = CASES[name]
    draw = np.random.default_rng(0).standard_normal
    latents = draw((2, height, width, fields["in_channels"]))
    context = draw((2, text, fields["joint_attention_dim"]))
    arrays = (jnp.asarray(a, jnp.float32) for a in (latents, context))
    return tuple(arrays), jnp.asarray([0.3, 0.977], jnp.float32)


@functools.cache
def abstract(config: Flux2Config):
    shapes = (1, 2, 3, config.in_channels), (1,), (1, 5, config.joint_attention_dim)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.eval_shape(flux2.Flux2Transformer(config).init, jax.random.key(0), *args)["params"]


@functools.cache
def models(name: str):
    """A torch model with every tensor redrawn, its config, and its parameters as a flax tree."""
    torch_model = parity.randomise(Flux2Transformer2DModel(**CASES[name][0]))
    config = Flux2Config.from_config(dict(torch_model.config))
    params = parity.to_flax(torch_model.state_dict(), abstract(config), flux2.LISTS)
    return torch_model, config, params


def velocity(name: str, params, latents, context, sigma=None, **options) -> jax.Array:
    network = flux2.Flux2Transformer(models(name)[1], **options)
    sigma = inputs(name)[1] if sigma is None else sigma
    return network.apply({"params": params}, latents, sigma, context)


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


def torch_velocity(model, name: str, latents, context, sigma=None) -> torch.Tensor:
    """As diffusers' pipeline calls the network: packed latents, positions of tokens, time from 0 to 1."""
    dtype, sigma = model.dtype, inputs(name)[1] if sigma is None else sigma
    raw = latents.permute(0, 3, 1, 2)
    v = model(
        hidden_states=Flux2KleinPipeline._pack_latents(raw).to(dtype),
        encoder_hidden_states=context.to(dtype),
        timestep=torch.tensor(np.asarray(sigma)).to(dtype),
        img_ids=Flux2KleinPipeline._prepare_latent_ids(raw),
        txt_ids=Flux2KleinPipeline._prepare_text_ids(context),
    ).sample
    return v.reshape(*latents.shape[:3], -1).float()


@functools.cache
def expected(name: str):
    """The same from diffusers in float64, so that the errors are ours alone."""
    torch_model, config, _ = models(name)
    torch_model = copy.deepcopy(torch_model).double()
    torch_model.time_guidance_embed.time_proj.forward = parity.time_features
    arrays = [torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in inputs(name)[0]]
    v = torch_velocity(torch_model, name, *arrays)
    torch_model.zero_grad()
    (v * torch.tensor(direction(v.shape))).sum().backward()
    gradients = parity.to_flax(parity.gradients(torch_model), abstract(config), flux2.LISTS)
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
    blocks = {name for name in models("tiny")[2] if "blocks" in name}
    assert blocks == {"transformer_blocks_0to1", "single_transformer_blocks_0to2"}
    blocks = {name for name in models("narrow")[2] if "blocks" in name}
    assert blocks == {"transformer_blocks_0", "single_transformer_blocks_0"}


def test_remat_gives_the_same_gradients():
    plain, rematerialised = (value_and_gradients("tiny", each) for each in ("none", "blocks"))
    error, path = parity.worst(rematerialised, plain, whole=True)
    assert error < 1e-5, path


@pytest.mark.slow
def test_the_error_in_bfloat16_is_not_above_torchs():
    """Of parameters and times that bfloat16 holds exactly; norms and modulation are float32 here."""
    torch_model, config, _ = models("tiny")
    half = copy.deepcopy(torch_model).bfloat16()
    exact = copy.deepcopy(half).float()
    params = parity.to_flax(exact.state_dict(), abstract(config), flux2.LISTS)
    sigma = np.array([0.25, 0.5], np.float32)  # times of 250 and 500
    arrays = [torch.tensor(np.asarray(a)) for a in inputs("tiny")[0]]
    with torch.no_grad():
        expected, torchs = (
            torch_velocity(m, "tiny", *arrays, sigma).numpy() for m in (exact, half)
        )
    forward = jax.jit(functools.partial(velocity, "tiny", dtype=jnp.bfloat16))
    actual = forward(params, *inputs("tiny")[0], sigma)
    error, torchs_error = (np.sqrt(np.square(a - expected).mean()) for a in (actual, torchs))
    assert actual.dtype == jnp.float32
    assert 1e-4 * np.abs(expected).max() < error < 1.5 * torchs_error


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_models_have_diffusers_parameters(name):
    change, context, count = PUBLISHED[name]
    fields = change | {"joint_attention_dim": context, "guidance_embeds": False}
    with torch.device("meta"):
        tensors = Flux2Transformer2DModel(**fields).state_dict()
    expected = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    found = {
        key: file_shape(path, leaf.shape, flux2.LISTS)
        for path, leaf in flatten_dict(abstract(Flux2Config.from_config(fields))).items()
        for key in tensor_names(path, flux2.LISTS)
    }
    assert found == expected
    assert sum(int(np.prod(shape)) for shape in found.values()) == count


def test_every_dimension_has_a_name():
    config = models("tiny")[1]
    shapes = abstract(config)
    axes = flatten_dict(logical_axes(shapes, flux2.AXES, flux2.LISTS))
    sizes = {}
    for path, leaf in flatten_dict(shapes).items():
        for name, size in zip(axes[path], leaf.shape, strict=True):
            sizes.setdefault(name, set()).add(size)
    dim, hidden = config.dim, config.hidden
    assert sizes["embed"] == sizes["heads"] == {dim}
    # Of time, gates and values, hidden layers, and of what a single block reads and writes at once.
    assert sizes["mlp"] == {dim, 2 * hidden, hidden, 3 * dim + 2 * hidden, dim + hidden}
    assert sizes["modulation"] == {6 * dim, 3 * dim, 2 * dim}
    assert sizes["text"] == {config.joint_attention_dim}
    assert sizes["channels"] == {config.in_channels}
    assert sizes["head_dim"] == {config.attention_head_dim}
    assert sizes["layers"] == {2, 3}


def test_lora_targets_are_the_published_ones():
    """PEFT takes a list of names as the ends of layers' names."""
    linear = [n for n, m in models("tiny")[0].named_modules() if isinstance(m, torch.nn.Linear)]
    expected = {n for n in linear if any(n.endswith(f".{end}") for end in PUBLISHED_TARGETS)}
    assert {n for n in linear if re.fullmatch(flux2.LORA_TARGETS, n)} == expected
    assert len(expected) == 2 * 12 + 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 2}, "patch_size must be 1"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_single_layers": 0}, "num_single_layers"),
        ({"guidance_embeds": True}, "guidance_embeds must be False, not True"),
        ({"timestep_guidance_channels": 128}, "timestep_guidance_channels must be 256"),
        ({"eps": 1e-5}, "eps must be 1e-06"),
        ({"mlp_ratio": 0.02}, "mlp_ratio times 36 must be 1 or more, not 0.02"),
        ({"axes_dims_rope": (2, 4, 6)}, "axes_dims_rope must be four even numbers"),
        ({"axes_dims_rope": (2, 4, 4, 4)}, "axes_dims_rope must be four even numbers"),
        ({"axes_dims_rope": (1, 5, 4, 2)}, "axes_dims_rope must be four even numbers"),
        ({"axes_dims_rope": (0, 6, 4, 2)}, "axes_dims_rope must be four even numbers"),
        ({"pooled_projection_dim": 768}, "pooled_projection_dim is not a field.*: remove it"),
    ],
)
def test_unsupported_fields_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Flux2Config.from_config(TINY | change)


def test_defaults_are_diffusers():
    with torch.device("meta"):
        tiny = Flux2Transformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=False)
    expected = Flux2Config(num_layers=1, num_single_layers=1)
    assert Flux2Config.from_config(dict(tiny.config)) == expected
    with pytest.raises(ValueError, match="guidance_embeds must be False, not True"):
        Flux2Config.from_config({})
