"""The Qwen-Image transformer against diffusers' in torch, every parameter redrawn."""

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from flax.traverse_util import flatten_dict

from digen_jax.checkpoints.tensors import file_shape, tensor_names
from digen_jax.models.family import logical_axes
from digen_jax.models.qwen_image import network as qwen_image
from tests.models import parity

TINY = {
    "in_channels": 12,
    "out_channels": 3,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 3,
    "joint_attention_dim": 10,
    "axes_dims_rope": (2, 4, 6),
}
SINGLE = TINY | {
    "in_channels": 8,
    "out_channels": 5,
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 8, 4),
}
# Of each: the config, tokens of the image, and of each prompt.
CASES = {
    "tiny": (TINY, (3, 5), (4, 7)),
    "single": (SINGLE, (5, 2), (6, 1, 5)),
}
# A fact of the repository Qwen/Qwen-Image.
PARAMETERS = 20_430_401_088
# What verl-project/verl-omni's run_qwen_image_ocr_lora.sh gives to PEFT.
PUBLISHED_TARGETS = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *(f"{net}.net.{layer}" for net in ("img_mlp", "txt_mlp") for layer in ("0.proj", "2")),
]


@functools.cache
def inputs(name: str):
    """Unlike examples: (latents, context), which have gradients, sigma and mask; padding is not zero."""
    fields, (height, width), lengths = CASES[name]
    draw = np.random.default_rng(0).standard_normal
    rows = len(lengths)
    latents = draw((rows, 2 * height, 2 * width, fields["in_channels"] // 4))
    context = draw((rows, max(lengths), fields["joint_attention_dim"]))
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    # Numbers that bfloat16 holds, so that its error is not that of time, which diffusers rounds.
    sigma = np.linspace(250, 76, rows) / 256
    arrays = (jnp.asarray(a, jnp.float32) for a in (latents, context, sigma))
    return *arrays, jnp.asarray(mask)


@functools.cache
def abstract(config: qwen_image.QwenImageConfig):
    shapes = (1, 4, 4, config.in_channels // 4), (1,), (1, 5, config.joint_attention_dim)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    init, mask = qwen_image.QwenImageTransformer(config).init, jax.ShapeDtypeStruct((1, 5), bool)
    return jax.eval_shape(init, jax.random.key(0), *args, mask)["params"]


@functools.cache
def models(name: str):
    """A torch model with every tensor redrawn, its config, and its parameters as a flax tree."""
    torch_model = parity.randomise(QwenImageTransformer2DModel(**CASES[name][0]))
    config = qwen_image.QwenImageConfig.from_config(dict(torch_model.config))
    params = parity.to_flax(torch_model.state_dict(), abstract(config), qwen_image.LISTS)
    return torch_model, config, params


def velocity(name: str, params, latents, context, **options) -> jax.Array:
    _, config, _ = models(name)
    _, _, sigma, mask = inputs(name)
    network = qwen_image.QwenImageTransformer(config, **options)
    return network.apply({"params": params}, latents, sigma, context, mask)


@functools.cache
def value_and_gradients(name: str, remat: str = "none"):
    """The velocity and the gradients of its product with a fixed direction."""

    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(arguments):
        v = velocity(name, *arguments, remat=remat)
        return jnp.sum(v * direction(v.shape)), v

    with jax.default_matmul_precision("highest"):
        (_, v), gradients = jax.jit(objective)((models(name)[2], *inputs(name)[:2]))
    return v, gradients


def direction(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def torch_velocity(model, name: str, latents, context) -> torch.Tensor:
    """As diffusers' pipeline calls the network: packed latents, sizes in tokens, time from 0 to 1."""
    sigma, mask = (torch.tensor(np.asarray(a)) for a in inputs(name)[2:])
    batch, height, width, channels = latents.shape
    raw = latents.permute(0, 3, 1, 2).contiguous()
    v = model(
        hidden_states=QwenImagePipeline._pack_latents(raw, batch, channels, height, width).to(
            model.dtype
        ),
        encoder_hidden_states=context.to(model.dtype),
        encoder_hidden_states_mask=mask,
        timestep=sigma.to(model.dtype),
        img_shapes=[[(1, height // 2, width // 2)]] * batch,
    ).sample
    v = QwenImagePipeline._unpack_latents(v, height, width, vae_scale_factor=1)[:, :, 0]
    return v.permute(0, 2, 3, 1).float()


@functools.cache
def expected(name: str):
    """The same from diffusers."""
    torch_model, config, _ = models(name)
    arrays = [torch.tensor(np.asarray(a)).requires_grad_() for a in inputs(name)[:2]]
    v = torch_velocity(torch_model, name, *arrays)
    torch_model.zero_grad()
    (v * torch.tensor(direction(v.shape))).sum().backward()
    gradients = parity.to_flax(parity.gradients(torch_model), abstract(config), qwen_image.LISTS)
    return v.detach().numpy(), (gradients, *(array.grad.numpy() for array in arrays))


@pytest.mark.parametrize("name", CASES)
def test_velocity_and_gradients_equal_diffusers(name):
    (actual, gradients), (reference, reference_gradients) = (
        value_and_gradients(name),
        expected(name),
    )
    assert actual.dtype == jnp.float32
    assert parity.worst(actual, reference)[0] < 1e-5
    error, path = parity.worst(gradients[0], reference_gradients[0], whole=True)
    assert error < 1e-4, path
    for part, reference_part in zip(gradients[1:], reference_gradients[1:], strict=True):
        assert parity.worst(part, reference_part)[0] < 1e-4
    mask = inputs(name)[3]
    assert not np.any(gradients[2][~mask]) and np.any(gradients[2][mask])


def test_a_prompt_alone_has_the_velocity_of_the_one_beside_a_longer():
    latents, context, sigma, mask = inputs("tiny")
    _, config, params = models("tiny")
    short = int(mask[0].sum())
    network = qwen_image.QwenImageTransformer(config)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(network.apply)(
            {"params": params}, latents[:1], sigma[:1], context[:1, :short], mask[:1, :short]
        )
    assert parity.worst(found, np.asarray(value_and_gradients("tiny")[0][:1]))[0] < 1e-5


@pytest.mark.parametrize("sides", [(64, 64), (58, 104), (101, 1)])
def test_rotary_tables_are_diffusers_in_published_sizes(sides):
    """Their angles are float32: with those of float64 numbers differ by up to 6e-5."""
    widths = (16, 56, 56)
    rope = QwenEmbedRope(10_000, list(widths), scale_rope=True)
    expected = rope([[(1, *sides)]], torch.device("cpu"), 1024)
    for table, numbers in zip(
        qwen_image.rotary_tables(widths, *sides, 1024), expected, strict=True
    ):
        for found, reference in (
            (table.cos[:, 0::2], numbers.real),
            (table.cos[:, 1::2], numbers.real),
            (table.sin[:, 0::2], -numbers.imag),
            (table.sin[:, 1::2], numbers.imag),
        ):
            np.testing.assert_allclose(found, reference.numpy(), rtol=0, atol=1e-6)


def test_remat_gives_the_same_gradients():
    plain, rematerialised = (value_and_gradients("single", each) for each in ("none", "blocks"))
    error, path = parity.worst(rematerialised, plain, whole=True)
    assert error < 1e-5, path


@pytest.mark.slow
def test_the_error_in_bfloat16_is_not_above_torchs():
    """Of the same parameters, which bfloat16 holds exactly; time, norms and modulation are float32 here."""
    torch_model, config, _ = models("tiny")
    half = copy.deepcopy(torch_model).bfloat16()
    exact = copy.deepcopy(half).float()
    params = parity.to_flax(exact.state_dict(), abstract(config), qwen_image.LISTS)
    arrays = [torch.tensor(np.asarray(a)) for a in inputs("tiny")[:2]]
    with torch.no_grad():
        reference, torchs = (torch_velocity(m, "tiny", *arrays).numpy() for m in (exact, half))
    forward = jax.jit(functools.partial(velocity, "tiny", dtype=jnp.bfloat16))
    actual = forward(params, *inputs("tiny")[:2])
    error, torchs_error = (np.sqrt(np.square(a - reference).mean()) for a in (actual, torchs))
    assert actual.dtype == jnp.float32
    assert 1e-4 * np.abs(reference).max() < error < 1.5 * torchs_error


def test_blocks_are_scanned_and_every_dimension_has_a_name():
    _, config, params = models("tiny")
    assert {name for name in params if "blocks" in name} == {"transformer_blocks_0to1"}
    assert {n for n in models("single")[2] if "blocks" in n} == {"transformer_blocks_0"}
    shapes = abstract(config)
    axes = flatten_dict(logical_axes(shapes, qwen_image.AXES, qwen_image.LISTS))
    sizes = {}
    for path, leaf in flatten_dict(shapes).items():
        for name, size in zip(axes[path], leaf.shape, strict=True):
            sizes.setdefault(name, set()).add(size)
    dim = config.dim
    assert sizes["embed"] == sizes["heads"] == {dim}
    assert sizes["mlp"] == {4 * dim, dim}  # of blocks, of the embedding of time
    assert sizes["modulation"] == {6 * dim, 2 * dim}
    assert sizes["text"] == {config.joint_attention_dim}
    assert sizes["channels"] == {config.in_channels}
    assert sizes["head_dim"] == {config.attention_head_dim}
    assert sizes["layers"] == {2} and sizes[None] == {256}


def test_the_published_model_has_diffusers_parameters():
    with torch.device("meta"):
        tensors = QwenImageTransformer2DModel().state_dict()
    config = qwen_image.QwenImageConfig()
    assert qwen_image.QwenImageConfig.from_config({"pooled_projection_dim": 768}) == config
    found = {
        key: file_shape(path, leaf.shape, qwen_image.LISTS)
        for path, leaf in flatten_dict(abstract(config)).items()
        for key in tensor_names(path, qwen_image.LISTS)
    }
    assert found == {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert sum(int(np.prod(shape)) for shape in found.values()) == PARAMETERS


def test_lora_targets_are_the_published_ones():
    """PEFT takes a list of names as the ends of layers' names."""
    linear = [n for n, m in models("tiny")[0].named_modules() if isinstance(m, torch.nn.Linear)]
    ends = {n for n in linear if any(n.endswith(f".{end}") for end in PUBLISHED_TARGETS)}
    assert {n for n in linear if re.fullmatch(qwen_image.LORA_TARGETS, n)} == ends
    assert len(ends) == 2 * 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 1}, "patch_size must be 2, not 1"),
        ({"in_channels": 6}, "in_channels must be a multiple of 4"),
        ({"num_layers": 0}, "num_layers"),
        ({"guidance_embeds": True}, "guidance_embeds must be False, not True"),
        ({"zero_cond_t": True}, "zero_cond_t must be False"),
        ({"use_additional_t_cond": True}, "use_additional_t_cond must be False"),
        ({"use_layer3d_rope": True}, "use_layer3d_rope must be False"),
        ({"axes_dims_rope": (2, 4, 4)}, "axes_dims_rope must be three even numbers"),
        ({"axes_dims_rope": (1, 5, 6)}, "axes_dims_rope must be three even numbers"),
        ({"axes_dims_rope": (6, 6)}, "axes_dims_rope must be three even numbers"),
        ({"qk_norm": "rms_norm"}, "qk_norm is not a field.*: remove it"),
    ],
)
def test_unsupported_fields_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        qwen_image.QwenImageConfig.from_config(TINY | change)


def test_defaults_are_diffusers():
    with torch.device("meta"):
        default, wide = (
            QwenImageTransformer2DModel(num_layers=1, in_channels=32, **given)
            for given in ({}, {"out_channels": None})
        )
    config = qwen_image.QwenImageConfig(num_layers=1, in_channels=32)
    assert qwen_image.QwenImageConfig.from_config(dict(default.config)) == config
    assert qwen_image.QwenImageConfig.from_config(dict(wide.config)).out_channels == 32
