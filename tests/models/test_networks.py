"""The transformers of all families against diffusers' in torch, every parameter redrawn."""

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict, unflatten_dict

from digen_jax.models.family import logical_axes
from digen_jax.models.rotary import video_rotary
from tests.models import parity
from tests.models.flux import spec as flux
from tests.models.flux2 import spec as flux2
from tests.models.hunyuan import spec as hunyuan
from tests.models.hunyuan import spec15 as hunyuan15
from tests.models.networks import tensors
from tests.models.qwen_image import spec as qwen_image
from tests.models.sd3 import spec as sd3
from tests.models.wan import spec as wan
from tests.models.zimage import spec as zimage

NETWORKS = {
    "sd3": sd3.NETWORK,
    "flux": flux.NETWORK,
    "flux2": flux2.NETWORK,
    "zimage": zimage.NETWORK,
    "qwen_image": qwen_image.NETWORK,
    "wan": wan.NETWORK,
    "hunyuan": hunyuan.NETWORK,
    "hunyuan15": hunyuan15.NETWORK,
}
CASES = [
    pytest.param(network, case, marks=[pytest.mark.slow] * found.slow, id=f"{name}-{case}")
    for name, network in NETWORKS.items()
    for case, found in network.cases.items()
]
each_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
MASKED = pytest.mark.parametrize(
    "network", [n for n in NETWORKS.values() if "mask" in n.cases[n.first].numbers]
)


@pytest.mark.parametrize(("network", "case"), CASES)
def test_velocity_and_gradients_equal_diffusers(network, case):
    """Of all parameters and inputs; by the cases the backward pass recomputes nothing, products or whole blocks."""
    names = network.abstract(network.models(case)[1]).keys()
    runs = sorted(name for name in names if re.search("blocks_|layers_|refiner_", name))
    assert " ".join(name.rpartition("_")[2] for name in runs) == network.cases[case].blocks
    v, *gradients = network.found(case)
    expected, *references = network.expected(case)
    assert v.dtype == jnp.float32
    assert parity.worst(v, expected)[0] < 1e-5
    error, path = parity.worst(gradients[0], references[0], whole=True)
    assert error < 1e-4, path
    for name, reference in references[1].items():
        assert parity.worst(gradients[1][name], reference)[0] < 1e-4, name
    mask = network.cases[case].numbers.get("mask")
    if mask is not None:
        context = gradients[1]["context"]
        assert not np.any(context[~mask]) and np.any(context[mask])
    if "source" in gradients[1]:
        source, latents = (np.abs(gradients[1][name]).max() for name in ("source", "latents"))
        assert source > 1e-3 * latents


@pytest.mark.parametrize(
    ("name", "case"),
    [
        # With an image, and two times for each clip.
        ("wan", "single"),
        *(
            pytest.param(n, one.first, marks=[pytest.mark.slow] * (n not in ("flux", "sd3", "wan")))
            for n, one in NETWORKS.items()
        ),
    ],
)
def test_the_error_in_bfloat16_is_not_above_torchs(name, case):
    """Of parameters and times that bfloat16 holds exactly; time, norms and modulation are float32 here.

    diffusers keeps some modules in float32 where it loads a model in bfloat16.
    """
    network = NETWORKS[name]
    module, config, _ = network.models(case)
    half = copy.deepcopy(module).bfloat16()
    for path, parameter in half.named_parameters():
        if any(kept in path for kept in half._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.float()
    exact = copy.deepcopy(half).float()
    params = network.to_flax(exact.state_dict(), config)
    inputs, numbers = network.inputs(case)
    if case == network.first:
        numbers = numbers | network.exact
    with torch.no_grad():
        expected, torchs = (
            network.call(m, **tensors(inputs), **tensors(numbers)).numpy() for m in (exact, half)
        )
    run = functools.partial(network.velocity, case, numbers=numbers, dtype=jnp.bfloat16)
    found = jax.jit(run)(params, inputs)
    error, torchs_error = (np.sqrt(np.square(a - expected).mean()) for a in (found, torchs))
    assert found.dtype == jnp.float32
    assert 1e-5 * np.abs(expected).max() < error < 1.5 * torchs_error


@MASKED
def test_a_prompt_alone_has_the_velocity_of_the_one_beside_a_longer(network):
    inputs, numbers = network.inputs(network.first)
    _, config, params = network.models(network.first)
    short = int(numbers["mask"][0].sum())
    given = {name: array[:1] for name, array in (inputs | numbers).items()}
    given |= {name: given[name][:, :short] for name in ("context", "mask")}
    apply = jax.jit(network.component.network(config).apply)
    with jax.default_matmul_precision("highest"):
        found = apply({"params": params}, **given)
    assert parity.worst(found, np.asarray(network.found(network.first)[0][:1]))[0] < 1e-5


@each_network
def test_every_dimension_has_a_name(network):
    config = network.models(network.first)[1]
    shapes = network.abstract(config)
    axes = flatten_dict(logical_axes(shapes, network.component.axes, network.component.lists))
    found = {}
    for path, leaf in flatten_dict(shapes).items():
        for name, size in zip(axes[path], leaf.shape, strict=True):
            found.setdefault(name, set()).add(size)
    expected = network.sizes(config)
    assert {name: found[name] for name in expected} == expected


@each_network
def test_lora_targets_are_the_published_ones(network):
    """PEFT takes a list of names as the ends of layers' names."""
    ends, count = network.targets
    module = network.models(network.first)[0]
    linear = [n for n, m in module.named_modules() if isinstance(m, torch.nn.Linear)]
    expected = {n for n in linear if any(n.endswith(f".{end}") for end in ends)}
    assert {n for n in linear if re.fullmatch(network.lora_targets, n)} == expected
    assert len(expected) == count


@pytest.mark.parametrize(
    ("network", "change"),
    [
        pytest.param(network, change, id=f"{name}-{'-'.join(map(str, next(iter(change.items()))))}")
        for name, network in NETWORKS.items()
        for change in network.refused
    ],
)
def test_unsupported_fields_are_named(network, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        network.config.from_config(network.cases[network.first].fields | change)


@each_network
def test_defaults_are_diffusers(network):
    """A file's fields that start with an underscore are about the file; null channels of the result are the input's."""
    with torch.device("meta"):
        module = network.torch_class(**network.minimal)
    config = network.config.from_config(dict(module.config) | {"_class_name": "ignored"})
    assert config == network.config(**network.minimal)
    if hasattr(config, "out_channels"):
        other = network.config.from_config(network.minimal | {"out_channels": None})
        assert other.out_channels == config.in_channels


@pytest.mark.parametrize(
    "flops,network",
    [
        pytest.param(flops, network, id=f"{name}-{place}")
        for name, network in NETWORKS.items()
        for place, flops in enumerate(network.flops)
    ],
)
def test_flops_are_the_compilers_or_counted_by_hand(flops, network):
    """The compiler counts a loop's body once, so there is one block of each kind."""
    found = network.component.flops(*flops.given)
    assert found.keys() == {"image", "text", "attention", "modulation"}
    if flops.by_hand is not None:
        assert found == flops.by_hand
        return
    config, latent, *_ = flops.given
    module = network.component.network(flops.compiled or config)
    shapes = {"latents": (1, *latent), next(iter(network.exact)): (1,)} | flops.inputs
    others = {k: v for k, v in shapes.items() if isinstance(v, int)}
    arrays = {
        k: jax.ShapeDtypeStruct(*(v, jnp.float32) if isinstance(v, tuple) else (v.shape, v.dtype))
        for k, v in shapes.items()
        if k not in others
    }

    def run(params, arrays):
        return module.apply(params, **arrays, **others)

    plain = {k: v for k, v in arrays.items() if k != "source"}
    params = jax.eval_shape(lambda a: module.init(jax.random.key(0), **a, **others), plain)
    counted = jax.jit(run).lower(params, arrays).cost_analysis()["flops"]
    assert sum(found.values()) == pytest.approx(counted, rel=0.02)


# ------------------------------------------------------------------------------- of single families


def test_segments_of_scattered_dual_layers_of_sd3():
    config = sd3.sd3.SD3Config(num_layers=6, dual_attention_layers=(0, 2, 3, 5))
    expected = [(0, 0, True), (1, 1, False), (2, 3, True), (4, 4, False), (5, 5, True)]
    assert sd3.sd3.segments(config) == expected


def test_a_fresh_sd3_has_diffusers_positions_and_no_output():
    network, fields = NETWORKS["sd3"], sd3.SD3 | {"num_layers": 1}
    inputs, numbers = network.inputs("sd3")
    module = network.component.network(network.config(**fields))
    given = {**inputs, "sigma": numbers["sigma"]}
    v, variables = jax.jit(lambda a: module.init_with_output(jax.random.key(0), **a))(given)
    buffer = network.torch_class(**fields).pos_embed.pos_embed.numpy()
    assert parity.worst(variables["params"]["pos_embed"]["pos_embed"], buffer)[0] < 1e-6
    assert not np.any(v)


@pytest.mark.parametrize("sides", [(64, 64), (58, 104), (101, 1)])
def test_rotary_tables_of_qwen_image_are_diffusers_in_published_sizes(sides):
    """Their angles are float32: with those of float64 numbers differ by up to 6e-5."""
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

    widths = (16, 56, 56)
    rope = QwenEmbedRope(10_000, list(widths), scale_rope=True)
    sources = [(70, 46), (64, 64)]
    expected = rope([[(1, *one) for one in (sides, *sources)]], torch.device("cpu"), 1024)
    tables = qwen_image.qwen_image.rotary_tables(widths, *sides, 1024, *sources)
    for table, numbers in zip(tables, expected, strict=True):
        for found, reference in (
            (table.cos[:, 0::2], numbers.real),
            (table.cos[:, 1::2], numbers.real),
            (table.sin[:, 0::2], -numbers.imag),
            (table.sin[:, 1::2], numbers.imag),
        ):
            np.testing.assert_allclose(found, reference.numpy(), rtol=0, atol=1e-6)


def test_gates_of_wan_are_float32_in_bfloat16():
    """In a block whose updates are biases alone; gates of bfloat16 would change a tenth of the numbers."""
    config, bfloat16 = wan.wan.WanConfig.from_config(wan.TINY), jnp.bfloat16
    draw = np.random.default_rng(0).standard_normal
    x, context = (jnp.asarray(draw((2, n, config.dim)), bfloat16) for n in (40, 3))
    modulation = jnp.asarray(draw((2, 6, config.dim)), jnp.float32)
    rotary = video_rotary(config.axes_dims, (1, 4, 10), wan.wan.THETA)
    given = x, context, modulation[:, None], jnp.ones(40, bool), None, rotary
    block = wan.wan.Block(config, bfloat16)
    params = flatten_dict(block.init(jax.random.key(0), *given)["params"])
    params = {path: jnp.asarray(draw(leaf.shape), jnp.float32) for path, leaf in params.items()}
    expected, vectors = x, params["scale_shift_table",] + modulation
    for *path, gate in (("attn1", "to_out_0", 2), ("attn2", "to_out_0", None), ("ffn", "net_2", 5)):
        params[*path, "kernel"] = jnp.zeros_like(params[*path, "kernel"])
        update = params[*path, "bias"].astype(bfloat16).astype(jnp.float32)
        update = update if gate is None else vectors[:, gate : gate + 1] * update
        expected = (expected + update).astype(bfloat16)
    found, _ = block.apply({"params": unflatten_dict(params)}, *given)
    assert found.dtype == bfloat16 and (found != expected).mean() < 0.01


@pytest.mark.parametrize("grid", [(21, 30, 52), (1024, 1, 2), (1, 1024, 2), (2, 1, 1024)])
def test_rotary_tables_of_wan_are_diffusers_in_published_sizes(grid):
    """Their angles are float64: with those of float32 numbers differ by up to 6e-5."""
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    rope = WanRotaryPosEmbed(128, (1, 2, 2), 1024)
    frames, rows, columns = grid
    cos, sin = (
        table[0, :, 0].numpy() for table in rope(torch.empty(1, 1, frames, 2 * rows, 2 * columns))
    )
    found = video_rotary(wan.wan.WanConfig().axes_dims, grid, wan.wan.THETA)
    signs = np.where(np.arange(128) % 2, 1, -1)  # of the pair's first channel it is negative
    np.testing.assert_allclose(found.cos, cos, rtol=0, atol=2e-7)
    np.testing.assert_allclose(found.sin * signs, sin, rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sd3", {"latents": (1, 26, 8, 4)}),
        ("sd3", {"latents": (1, 7, 8, 4)}),
        ("zimage", {"latents": (1, 6, 7, 3)}),
        ("zimage", {"latents": (1, 18, 4, 3)}),
        ("wan", {"latents": (1, 3, 6, 7, 3)}),
        ("wan", {"latents": (1, 21, 2, 2, 3)}),
        ("zimage", {"latents": (1, 4, 4, 3), "context": (1, 97, 12), "mask": (1, 97)}),
        ("flux", {"guidance": None}),
        ("flux", {"guidance": (2,), "fields": {"guidance_embeds": False}}),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name, change):
    network = NETWORKS[name]
    change, fields = dict(change), change.get("fields", {})
    change.pop("fields", None)
    case = network.cases["sd3" if name == "sd3" else network.first]
    shapes = {**case.shapes, **{k: np.shape(v) for k, v in case.numbers.items()}}
    shapes.pop("null_tokens", None)
    if name != "flux":
        shapes = {k: (1, *shape[1:]) for k, shape in shapes.items()}
    shapes |= change
    given = {k: jnp.zeros(s, bool if k == "mask" else None) for k, s in shapes.items() if s}
    module = network.component.network(network.config.from_config(case.fields | fields))
    with pytest.raises(ValueError, match=r"do(es)? not fit|guidance"):
        jax.eval_shape(lambda: module.init(jax.random.key(0), **given))
