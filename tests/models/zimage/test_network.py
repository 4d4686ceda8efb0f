"""The Z-Image transformer against diffusers' in torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import ZImageTransformer2DModel

from digen_jax.checkpoints.tensors import file_shape, tensor_names
from digen_jax.models.family import logical_axes
from digen_jax.models.zimage import network as zimage
from digen_jax.models.zimage.network import ZImageConfig, forward_flops
from tests.cases import quick
from tests.models import parity

TINY = {
    "in_channels": 3,
    "dim": 32,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 12,
    "axes_dims": [4, 6, 6],
    "axes_lens": [98, 8, 8],
    "norm_eps": 0.05,
    "rope_theta": 20.0,
    "t_scale": 300.0,
}
SINGLE = TINY | {
    "dim": 24,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "axes_dims": [2, 4, 2],
}
# Config, latents' sides, and the tokens of the captions: with filling of the image and of all captions, without.
CASES = {
    "tiny": (TINY, (6, 10), (7, 45)),
    "single, no filling": (SINGLE, (16, 16), (32, 96)),
}
SWEEP = quick([(name,) for name in CASES], 0)
TURBO = {
    "_class_name": "ZImageTransformer2DModel",
    "_diffusers_version": "0.36.0.dev0",
    "all_f_patch_size": [1],
    "all_patch_size": [2],
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "cap_feat_dim": 2560,
    "dim": 3840,
    "in_channels": 16,
    "n_heads": 30,
    "n_kv_heads": 30,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "norm_eps": 1e-05,
    "qk_norm": True,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
}


def abstract(config: ZImageConfig):
    shapes = (1, 4, 4, config.in_channels), (1,), (1, 5, config.cap_feat_dim)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    mask = jax.ShapeDtypeStruct((1, 5), bool)
    network = zimage.ZImageTransformer(config)
    return jax.eval_shape(network.init, jax.random.key(0), *args, mask)["params"]


@functools.cache
def inputs(name: str):
    """Unlike examples: latents, sigma, captions whose padding is not zero, and mask."""
    fields, sides, lengths = CASES[name]
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(len(lengths), *sides, fields["in_channels"]))
    sigma = np.linspace(0.9, 0.2, len(lengths))
    captions = rng.normal(size=(len(lengths), max(lengths), fields["cap_feat_dim"]))
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    arrays = (jnp.asarray(a, jnp.float32) for a in (latents, sigma, captions))
    return *arrays, jnp.asarray(mask)


@functools.cache
def models(name: str):
    """A torch model with every tensor redrawn, its config, and its parameters as a flax tree."""
    torch_model = parity.randomise(ZImageTransformer2DModel(**CASES[name][0]))
    with torch.no_grad():  # tokens like any other
        torch_model.x_pad_token.normal_(generator=torch.Generator().manual_seed(1))
        torch_model.cap_pad_token.normal_(generator=torch.Generator().manual_seed(2))
    config = ZImageConfig.from_config(dict(torch_model.config))
    params = parity.to_flax(torch_model.state_dict(), abstract(config), zimage.LISTS)
    return torch_model, config, params


def velocity(name: str, params, latents, captions, **options) -> jax.Array:
    _, sigma, _, mask = inputs(name)
    network = zimage.ZImageTransformer(models(name)[1], **options)
    return network.apply({"params": params}, latents, sigma, captions, mask)


def direction(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@functools.cache
def value_and_gradients(name: str):
    """The velocity and the gradients of its product with a fixed direction."""
    latents, _, captions, _ = inputs(name)
    remat = "blocks" if name == "tiny" else "none"

    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(arguments):
        v = velocity(name, *arguments, remat=remat)
        return jnp.sum(v * direction(v.shape)), v

    with jax.default_matmul_precision("highest"):
        (_, v), gradients = jax.jit(objective)((models(name)[2], latents, captions))
    return v, gradients


@functools.cache
def expected(name: str):
    """The same from diffusers, as its pipeline calls it."""
    torch_model, config, _ = models(name)
    latents, sigma, captions, mask = (torch.tensor(np.asarray(a)) for a in inputs(name))
    latents.requires_grad_()
    captions.requires_grad_()
    images = list(latents.permute(0, 3, 1, 2).unsqueeze(2))
    rows = [caption[valid] for caption, valid in zip(captions, mask, strict=True)]
    out = torch_model(images, 1 - sigma, rows, patch_size=config.patch, return_dict=False)[0]
    v = -torch.stack(out).squeeze(2).permute(0, 2, 3, 1)
    torch_model.zero_grad()
    (v * torch.tensor(direction(v.shape))).sum().backward()
    gradients = parity.to_flax(parity.gradients(torch_model), abstract(config), zimage.LISTS)
    return v.detach().numpy(), (gradients, latents.grad.numpy(), captions.grad.numpy())


@pytest.mark.parametrize("name", SWEEP)
def test_velocity_equals_diffusers(name):
    actual, _ = value_and_gradients(name)
    error, _ = parity.worst(actual, expected(name)[0])
    assert actual.dtype == jnp.float32
    assert error < 1e-5


@pytest.mark.parametrize("name", SWEEP)
def test_gradients_equal_diffusers(name):
    _, actual = value_and_gradients(name)
    _, reference = expected(name)
    for part in range(3):
        error, path = parity.worst(actual[part], reference[part], whole=True)
        assert error < 1e-4, path
    mask = inputs(name)[3]
    assert not np.any(actual[2][~mask]) and np.any(actual[2][mask])
    for filler in ("x_pad_token", "cap_pad_token"):
        _, sides, lengths = CASES[name]
        patches = sides[0] * sides[1] // models(name)[1].patch ** 2
        numbers = [patches] if filler == "x_pad_token" else lengths
        assert np.any(actual[0][filler]) == any(number % 32 for number in numbers)


def test_a_caption_alone_has_the_velocity_of_the_one_beside_a_longer():
    latents, sigma, captions, mask = inputs("tiny")
    _, config, params = models("tiny")
    short = int(mask[0].sum())
    alone = latents[:1], sigma[:1], captions[:1, :short], mask[:1, :short]
    network = zimage.ZImageTransformer(config)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(network.apply)({"params": params}, *alone)
    error, _ = parity.worst(found, np.asarray(value_and_gradients("tiny")[0][:1]))
    assert error < 1e-5


def test_bfloat16_stays_as_close_to_float32_as_diffusers():
    torch_model, _, params = models("tiny")
    latents, sigma, captions, mask = inputs("tiny")
    found = jax.jit(functools.partial(velocity, "tiny", dtype=jnp.bfloat16))(
        params, latents, captions
    )
    half = ZImageTransformer2DModel(**TINY)
    half.load_state_dict(torch_model.state_dict())
    half = half.to(torch.bfloat16)
    images = torch.tensor(np.asarray(latents)).permute(0, 3, 1, 2).unsqueeze(2).bfloat16()
    rows = [torch.tensor(np.asarray(c[m])).bfloat16() for c, m in zip(captions, mask, strict=True)]
    with torch.no_grad():
        out = half(list(images), 1 - torch.tensor(np.asarray(sigma)), rows, return_dict=False)[0]
    theirs = -torch.stack(out).squeeze(2).permute(0, 2, 3, 1).float().numpy()
    error, of_torch = (np.sqrt(np.square(a - expected("tiny")[0]).mean()) for a in (found, theirs))
    assert found.dtype == jnp.float32
    assert 1e-5 < error < 1.5 * of_torch


def test_blocks_are_scanned_and_have_axes():
    _, config, params = models("tiny")
    assert {n for n in params if "layers" in n or "refiner" in n} == {
        "layers_0to2",
        "noise_refiner_0to1",
        "context_refiner_0to1",
    }
    axes = logical_axes(abstract(config), zimage.AXES, zimage.LISTS)
    block = axes["layers_0to2"]
    assert block["attention"]["to_q"]["kernel"] == ("layers", "embed", "heads")
    assert block["attention"]["norm_q"]["scale"] == ("layers", "head_dim")
    assert block["adaLN_modulation_0"] == {
        "kernel": ("layers", None, "modulation"),
        "bias": ("layers", "modulation"),
    }
    assert block["ffn_norm2"]["scale"] == ("layers", "embed")
    assert axes["x_pad_token"] == axes["cap_pad_token"] == (None, "embed")


def test_turbo_has_diffusers_parameters():
    tree = jax.tree_util.tree_flatten_with_path(abstract(ZImageConfig.from_config(TURBO)))[0]
    found = {}
    for path, leaf in tree:
        path = tuple(key.key for key in path)
        shape = file_shape(path, leaf.shape, zimage.LISTS)
        found |= dict.fromkeys(tensor_names(path, zimage.LISTS), shape)
    with torch.device("meta"):
        tensors = ZImageTransformer2DModel.from_config(TURBO).state_dict()
    assert found == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert sum(tensor.numel() for tensor in tensors.values()) == 6_154_908_736


def test_defaults_are_diffusers():
    with torch.device("meta"):
        tiny = ZImageTransformer2DModel(n_layers=1)
    assert ZImageConfig.from_config(dict(tiny.config)) == ZImageConfig(n_layers=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_norm": False}, "qk_norm"),
        ({"n_layers": 0}, "n_layers"),
        ({"all_patch_size": [2, 4]}, "all_patch_size must be one number, not"),
        ({"all_f_patch_size": [2]}, "all_f_patch_size"),
        ({"n_kv_heads": 1}, "n_kv_heads must equal n_heads = 2, not 1"),
        ({"axes_dims": [4, 6, 8]}, "axes_dims must be three even numbers whose sum is"),
        ({"axes_dims": [5, 5, 6]}, "axes_dims"),
        ({"axes_lens": [98, 8]}, "axes_lens"),
        ({"siglip_feat_dim": 1152}, "siglip_feat_dim"),
        ({"guidance_embeds": True}, "guidance_embeds is not a field.*: remove it"),
    ],
)
def test_unsupported_fields_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        ZImageConfig.from_config(TINY | change)


@pytest.mark.parametrize(
    ("sides", "tokens", "message"),
    [
        ((6, 7), 5, "latents of 6 x 7 do not fit"),
        ((18, 4), 5, "at most 16 and 16"),
        ((4, 4), 97, "a caption of 97 tokens does not fit: it may have 96"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(sides, tokens, message):
    network = zimage.ZImageTransformer(ZImageConfig.from_config(TINY))
    latents, captions = jnp.zeros((1, *sides, 3)), jnp.zeros((1, tokens, 12))
    mask = jnp.ones((1, tokens), bool)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(network.init, jax.random.key(0), latents, jnp.ones(1), captions, mask)


def test_the_compiler_counts_as_many_flops():
    """The compiler counts a loop's body once, so nothing is scanned."""
    h, w = 16, 24
    config = ZImageConfig.from_config(
        TINY
        | {"dim": 512, "axes_dims": [64, 96, 96], "n_layers": 1, "n_refiner_layers": 1}
        | {"cap_feat_dim": 256, "axes_lens": [98, 16, 16]}
    )
    network = zimage.ZImageTransformer(config)
    shapes = (1, h, w, 3), (1,), (1, 77, 256)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arrays.append(jax.ShapeDtypeStruct((1, 77), bool))
    params = jax.eval_shape(network.init, jax.random.key(0), *arrays)
    program = jax.jit(network.apply).lower(params, *arrays)
    counted = program.compile().cost_analysis()["flops"]
    found = forward_flops(config, (h, w, 3), 77)
    assert found.keys() == {"image", "text", "attention", "modulation"}
    assert sum(found.values()) == pytest.approx(counted, rel=0.02)


def test_each_stream_is_counted_by_hand():
    """Width 6, one block of each kind: 6 patches and 26 that fill up, a caption of 32 tokens and one more."""
    config = ZImageConfig.from_config(
        {"dim": 6, "n_heads": 1, "n_kv_heads": 1, "axes_dims": [2, 2, 2], "in_channels": 1}
        | {"n_layers": 1, "n_refiner_layers": 1, "cap_feat_dim": 5}
    )
    block = 4 * 6 * 6 + 3 * 6 * 16
    assert forward_flops(config, (4, 6, 1), 33) == {
        "image": 2 * (32 * 2 * block + 6 * 2 * 4 * 6),
        "text": 2 * 64 * (2 * block + 5 * 6),
        "attention": 2 * 2 * 6 * (32**2 + 64**2 + 96**2),
        "modulation": 2 * ((2 * 4 + 1) * 6 * 6 + 256 * 1024 + 1024 * 6),
    }
