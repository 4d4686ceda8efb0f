import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from flax import traverse_util

from digen_jax.models.sd3 import network as sd3
from tests.models import parity

SD3 = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 12,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 10,
    "out_channels": 4,
    "pos_embed_max_size": 12,
}
SD35 = SD3 | {"num_layers": 4, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
# Fields, the number of null tokens, and what the backward pass recomputes.
CASES = {"sd3": (SD3, 0, "keep_attention"), "sd35": (SD35, 7, "keep_products")}


@functools.cache
def inputs() -> tuple[jax.Array, ...]:
    """Two unlike examples on non-square latents: latents, sigma, context, pooled."""
    draw = np.random.default_rng(0).standard_normal
    arrays = draw((2, 8, 12, 4)), np.array([0.3, 0.977]), draw((2, 5, 12)), draw((2, 10))
    return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


def abstract(config: sd3.SD3Config):
    c, d, p = config.in_channels, config.joint_attention_dim, config.pooled_projection_dim
    shapes = (1, 16, 16, c), (1,), (1, 5, d), (1, p)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.eval_shape(sd3.SD3Transformer(config).init, jax.random.key(0), *args)["params"]


@functools.cache
def models(name: str):
    """A torch model with every tensor redrawn, its config, and its parameters as a flax tree."""
    fields = CASES[name][0]
    torch_model = parity.randomise(SD3Transformer2DModel(**fields))
    torch_model.pos_embed.pos_embed.normal_(generator=torch.Generator().manual_seed(1))
    config = sd3.SD3Config.from_config(dict(torch_model.config))
    params = parity.to_flax(torch_model.state_dict(), abstract(config), sd3.LISTS)
    return torch_model, config, params


def velocity(name: str, params, latents, context, **options) -> jax.Array:
    config, null_tokens = models(name)[1], CASES[name][1]
    _, sigma, _, pooled = inputs()
    network = sd3.SD3Transformer(config, **options)
    return network.apply({"params": params}, latents, sigma, context, pooled, null_tokens)


@functools.cache
def value_and_gradients(name: str):
    """The velocity and the gradients of its product with a fixed direction."""
    latents, _, context, _ = inputs()

    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(arguments):
        v = velocity(name, *arguments, remat=CASES[name][2])
        return jnp.sum(v * direction(v.shape)), v

    with jax.default_matmul_precision("highest"):
        (_, v), gradients = jax.jit(objective)((models(name)[2], latents, context))
    return v, gradients


def direction(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@functools.cache
def expected(name: str, null_tokens: int):
    """The same from diffusers, with the null tokens written out."""
    torch_model, config, _ = models(name)
    latents, sigma, context, pooled = (torch.tensor(np.asarray(a)) for a in inputs())
    latents.requires_grad_()
    context.requires_grad_()
    zeros = torch.zeros(len(context), null_tokens, context.shape[-1])
    v = torch_model(
        hidden_states=latents.permute(0, 3, 1, 2),
        encoder_hidden_states=torch.cat([context, zeros], dim=1),
        pooled_projections=pooled,
        timestep=sigma * 1000,
    ).sample.permute(0, 2, 3, 1)
    torch_model.zero_grad()
    (v * torch.tensor(direction(v.shape))).sum().backward()
    gradients = parity.to_flax(parity.gradients(torch_model), abstract(config), sd3.LISTS)
    return v.detach().numpy(), (gradients, latents.grad.numpy(), context.grad.numpy())


@pytest.mark.parametrize("name", CASES)
def test_velocity_equals_diffusers(name):
    """A biased null token equals several zero tokens, whose number matters."""
    actual, _ = value_and_gradients(name)
    null_tokens = CASES[name][1]
    error, _ = parity.worst(actual, expected(name, null_tokens)[0])
    assert actual.dtype == jnp.float32
    assert error < 1e-5
    assert parity.worst(actual, expected(name, null_tokens + 7)[0])[0] > 0.01


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_diffusers(name):
    """With the blocks' forward pass recomputed."""
    _, actual = value_and_gradients(name)
    _, reference = expected(name, CASES[name][1])
    for part, whole in ((0, True), (1, False), (2, False)):
        error, path = parity.worst(actual[part], reference[part], whole=whole)
        assert error < 1e-4, path


def test_blocks_are_scanned_in_runs_of_equal_ones():
    assert {n for n in models("sd3")[2] if n.startswith("transformer")} == {
        "transformer_blocks_0to1",
        "transformer_blocks_2",
    }
    assert {n for n in models("sd35")[2] if n.startswith("transformer")} == {
        "transformer_blocks_0to1",
        "transformer_blocks_2",
        "transformer_blocks_3",
    }


def test_segments_of_scattered_dual_layers():
    config = sd3.SD3Config(num_layers=6, dual_attention_layers=(0, 2, 3, 5))
    assert sd3.segments(config) == [
        (0, 0, True),
        (1, 1, False),
        (2, 3, True),
        (4, 4, False),
        (5, 5, True),
    ]


def test_frozen_leaves_have_no_gradient():
    _, (gradients, _, _) = value_and_gradients("sd35")
    flat = traverse_util.flatten_dict(gradients, sep="/")
    assert all(not np.any(flat[path]) for path in sd3.FROZEN)


def test_bfloat16_stays_close_to_float32():
    latents, _, context, _ = inputs()
    params = models("sd35")[2]
    actual = jax.jit(functools.partial(velocity, "sd35", dtype=jnp.bfloat16))(
        params, latents, context
    )
    error, _ = parity.worst(actual, expected("sd35", CASES["sd35"][1])[0])
    assert actual.dtype == jnp.float32
    assert 1e-5 < error < 0.03


def test_a_fresh_network_has_diffusers_positions_and_no_output():
    fields = SD3 | {"num_layers": 1}
    network = sd3.SD3Transformer(sd3.SD3Config(**fields))
    v, variables = jax.jit(network.init_with_output)(jax.random.key(0), *inputs())
    buffer = SD3Transformer2DModel(**fields).pos_embed.pos_embed.numpy()
    error, _ = parity.worst(variables["params"]["pos_embed"]["pos_embed"], buffer)
    assert error < 1e-6
    assert not np.any(v)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_norm": "layer_norm"}, "qk_norm"),
        ({"pos_embed_max_size": None}, "pos_embed_max_size"),
        ({"num_layers": 0}, "num_layers"),
        ({"patch_size": 2.0}, "patch_size"),
        ({"caption_projection_dim": 31}, "caption_projection_dim"),
        ({"dual_attention_layers": [3]}, "dual_attention_layers"),
        ({"dual_attention_layers": None}, "dual_attention_layers"),
        ({"attention_head_dim": 3, "num_attention_heads": 2}, "num_attention_heads"),
        ({"guidance_embeds": True}, "guidance_embeds"),
    ],
)
def test_unsupported_fields_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        sd3.SD3Config.from_config(SD3 | change)


def test_out_channels_default_to_in_channels():
    config = sd3.SD3Config.from_config(SD3 | {"out_channels": None, "_class_name": "ignored"})
    assert config == dataclasses.replace(sd3.SD3Config(**SD3), out_channels=4)


@pytest.mark.parametrize("shape", [(1, 26, 8, 4), (1, 7, 8, 4)])
def test_latents_that_do_not_fit_are_refused(shape):
    network = sd3.SD3Transformer(sd3.SD3Config(**SD3))
    latents = jnp.zeros(shape)
    with pytest.raises(ValueError, match="latents of"):
        jax.eval_shape(network.init, jax.random.key(0), latents, *(a[:1] for a in inputs()[1:]))
