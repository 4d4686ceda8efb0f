"""The FLUX.1 transformer with the tokens of a picture that is edited, against diffusers' in torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline, FluxTransformer2DModel

from digen_jax.models.flux import network as flux
from digen_jax.models.flux.network import forward_flops
from tests.models import parity
from tests.models.flux.test_network import DEV, abstract, direction

# Tokens of the image, of the picture, of the text.
IMAGE, PICTURE, TEXT = (3, 5), (4, 2), 5


@functools.cache
def inputs() -> tuple[np.ndarray, ...]:
    """Two unlike examples: latents, context, pooled, source; sigma, guidance."""
    draw = np.random.default_rng(0).standard_normal
    latents, source = (
        draw((2, 2 * h, 2 * w, DEV["in_channels"] // 4)) for h, w in (IMAGE, PICTURE)
    )
    context = draw((2, TEXT, DEV["joint_attention_dim"]))
    pooled = draw((2, DEV["pooled_projection_dim"]))
    numbers = np.array([0.3, 0.977]), np.array([2.5, 1.25])
    return tuple(np.float32(a) for a in (latents, context, pooled, source, *numbers))


def by_diffusers(model, latents, context, pooled, source, sigma, guidance) -> torch.Tensor:
    """As the pipeline calls the network, and unpacks what is of the image; in float64."""
    tokens, ids = [], []
    for index, given in enumerate((latents, source)):
        batch, height, width, channels = given.shape
        raw = given.permute(0, 3, 1, 2).contiguous()
        tokens.append(FluxKontextPipeline._pack_latents(raw, batch, channels, height, width))
        ids.append(
            FluxKontextPipeline._prepare_latent_image_ids(
                batch, height // 2, width // 2, "cpu", torch.float64
            )
        )
        ids[-1][..., 0] = index
    v = model(
        hidden_states=torch.cat(tokens, dim=1),
        encoder_hidden_states=context,
        pooled_projections=pooled,
        timestep=sigma,
        guidance=guidance,
        img_ids=torch.cat(ids),
        txt_ids=torch.zeros(context.shape[1], 3).double(),
    ).sample[:, : tokens[0].shape[1]]
    _, height, width, _ = latents.shape
    v = FluxKontextPipeline._unpack_latents(v, height, width, vae_scale_factor=1)
    return v.permute(0, 2, 3, 1)


def test_velocity_and_gradients_equal_diffusers():
    """Of parameters and of all four inputs."""
    model = parity.randomise(FluxTransformer2DModel(**DEV))
    config = flux.FluxConfig.from_config(dict(model.config))
    params = parity.to_flax(model.state_dict(), abstract(config), flux.LISTS)
    *arrays, sigma, guidance = inputs()

    def objective(params, latents, context, pooled, source):
        network = flux.FluxTransformer(config)
        v = network.apply(
            {"params": params}, latents, jnp.asarray(sigma), context, pooled, jnp.asarray(guidance), source
        )  # fmt: skip
        return jnp.sum(v * direction(v.shape)), v

    with jax.default_matmul_precision("highest"):
        gradient = jax.value_and_grad(objective, argnums=tuple(range(5)), has_aux=True)
        (_, actual), gradients = jax.jit(gradient)(params, *map(jnp.asarray, arrays))

    model.double().time_text_embed.time_proj.forward = parity.time_features
    given = [torch.tensor(np.float64(array), requires_grad=True) for array in arrays]
    expected = by_diffusers(model, *given, torch.tensor(sigma), torch.tensor(guidance))
    assert expected.shape == (2, 2 * IMAGE[0], 2 * IMAGE[1], DEV["in_channels"] // 4)
    (expected * torch.tensor(direction(tuple(expected.shape)))).sum().backward()
    expected_gradients = (
        parity.to_flax(parity.gradients(model), abstract(config), flux.LISTS),
        *(array.grad.numpy() for array in given),
    )
    error, _ = parity.worst(actual, expected.detach().numpy())
    worst, path = parity.worst(gradients, expected_gradients, whole=True)
    print(f"velocity {error:.1e}, gradients {worst:.1e}")
    assert error < 1e-5
    assert worst < 1e-4, path
    for part, other in zip(gradients[1:], expected_gradients[1:], strict=True):
        assert parity.worst(part, other)[0] < 1e-4
    assert np.abs(gradients[-1]).max() > 1e-3 * np.abs(gradients[1]).max()


@pytest.mark.parametrize(("h", "w"), [(8, 12)])
def test_the_compiler_counts_as_many_operations(h, w):
    """One block of each kind, because a loop's body is counted once; 9 x 5 tokens of the picture."""
    config = flux.FluxConfig(
        num_layers=1, num_single_layers=1, num_attention_heads=4, joint_attention_dim=256
    )
    network = flux.FluxTransformer(config)
    shapes = (1, h, w, 16), (1,), (1, 40, 256), (1, 768)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    source = jax.ShapeDtypeStruct((1, 18, 10, 16), jnp.float32)
    params = jax.eval_shape(network.init, jax.random.key(0), *arrays)
    apply = jax.jit(lambda *given: network.apply(*given[:-1], source=given[-1]))
    counted = apply.lower(params, *arrays, source).compile().cost_analysis()["flops"]
    assert sum(forward_flops(config, (h, w, 16), 40, 45).values()) == pytest.approx(
        counted, rel=0.02
    )
