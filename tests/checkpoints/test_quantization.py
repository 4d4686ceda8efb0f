"""Quantized kernels against float64 numpy and torch's float8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from digen_jax.checkpoints import tensors
from digen_jax.checkpoints.lora import dense_layers, lora_layers, merge
from digen_jax.checkpoints.quantization import (
    LARGEST,
    SCALE,
    quantize,
    quantized_layers,
    scale_axes,
    stored_shapes,
)
from digen_jax.parallel.policy import AS_WRITTEN
from tests.checkpoints import toy
from tests.checkpoints.test_lora import TOY, redrawn, toy_lora, toy_params
from tests.checkpoints.test_tensors import counted, stored

BOTH = pytest.mark.parametrize("dtype", LARGEST, ids=str)


def kernel():
    """A channel of zeros, one with an outlier, one of tiny numbers, and one with ties."""
    w = np.random.default_rng(2).standard_normal((64, 40)).astype(np.float32)
    w[:, 3] = 0
    w[5, 7] = 1e4
    w[:, 9] *= 1e-30
    w[:, 11] = np.linspace(-127, 127, 509)[::8]
    return w


def rounded(scaled, dtype):
    """The nearest numbers of a dtype, ties to even, as float64."""
    if dtype == jnp.int8:
        return np.rint(scaled)
    cast = torch.tensor(np.asarray(scaled, np.float32)).to(torch.float8_e4m3fn)
    return cast.to(torch.float64).numpy()


def by_layer(kernel, dtype):
    """The quantized kernel and its scale of one layer, or of the stacked layers of a scan."""
    pairs = [quantize(one, dtype) for one in (kernel if kernel.ndim == 3 else kernel[None])]
    return tuple(
        np.stack(each) if kernel.ndim == 3 else each[0] for each in zip(*pairs, strict=True)
    )


def dequantized(q, scale):
    return np.asarray(q).astype(np.float64) * np.asarray(scale, np.float64)[..., None, :]


@BOTH
@pytest.mark.parametrize("of", [np.float32, jnp.bfloat16, np.float64])
def test_values_are_the_nearest_ones_and_the_largest_of_a_channel_is_the_largest(dtype, of):
    w = kernel().astype(of)
    q, scale = quantize(w, dtype)
    exact = w.astype(np.float64)
    assert (q.dtype, scale.dtype, scale.shape) == (dtype, np.float32, (40,))
    most = np.abs(exact).max(0)
    used = np.where(most > 0, most / LARGEST[dtype], 1)
    np.testing.assert_allclose(scale, used, rtol=2e-7)
    np.testing.assert_array_equal(
        q.astype(np.float64), rounded(w.astype(np.float32) / scale, dtype)
    )
    values = np.abs(q.astype(np.float64))
    np.testing.assert_array_equal(values.max(0), np.where(most > 0, LARGEST[dtype], 0))
    # Half a step of int8; three bits of mantissa, or half of the smallest number.
    step = np.ones_like(exact) if dtype == jnp.int8 else np.maximum(values / 8, 2**-9)
    assert (np.abs(dequantized(q, scale) - exact) <= (0.5 + 1e-4) * step * scale).all()


@BOTH
def test_kernels_of_linear_layers_are_quantized_when_they_are_read(tmp_path, dtype):
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    shapes = stored_shapes(toy.template(), dtype)
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes)
    specs = {"kernel": PartitionSpec(None, "x", "y"), SCALE: PartitionSpec(None, "y")}
    shardings["blocks_0to2"]["to_in"] |= {k: NamedSharding(mesh, v) for k, v in specs.items()}
    shardings["blocks_3"]["to_in"]["kernel"] = NamedSharding(mesh, PartitionSpec("y"))
    plain, reads = stored(tmp_path), []
    plain["blocks.1.to_in.weight"] = counted(plain["blocks.1.to_in.weight"], reads)
    found = flatten_dict(tensors.read_tree(plain, toy.template(), toy.LISTS, shardings, dtype))

    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {
        k: (v.shape, v.dtype) for k, v in flatten_dict(shapes).items()
    }
    layers = {path for path, *_ in dense_layers(toy.template(), toy.LISTS)}
    assert {path[:-1] for path in found if path[-1] == SCALE} == layers and len(layers) == 5
    for path, leaf in flatten_dict(toy_params()).items():
        leaf = np.asarray(leaf)
        if path[:-1] not in layers or path[-1] != "kernel":
            np.testing.assert_array_equal(found[path], leaf.astype(jnp.bfloat16))
            continue
        for name, expected in zip(("kernel", SCALE), by_layer(leaf, dtype), strict=True):
            array = found[*path[:-1], name]
            np.testing.assert_array_equal(array, expected)
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index])
    assert reads == [(6, 8)] * 2  # every number once


def test_axes_of_scales_are_those_of_outputs():
    axes = {("a", "kernel"): ("layers", "embed", "mlp"), ("a", "bias"): ("layers", "mlp")}
    axes |= {("b", "kernel"): ("embed", "heads"), ("c", "scale"): ("embed",)}
    assert scale_axes(axes) == {("a", SCALE): ("layers", "mlp"), ("b", SCALE): ("heads",)}


# --------------------------------------------------------------------------------------- products


@functools.cache
def quantized(dtype):
    """(the toy's parameters with quantized kernels, the same dequantized in float64)."""
    params, wide = flatten_dict(toy_params()), flatten_dict(toy_params())
    for path, array, _ in dense_layers(toy_params(), toy.LISTS):
        q, scale = by_layer(np.asarray(array), dtype)
        params[*path, "kernel"], params[*path, SCALE] = jnp.asarray(q), jnp.asarray(scale)
        wide[*path, "kernel"] = dequantized(q, scale)
    return unflatten_dict(params), unflatten_dict(wide)


def apply_toy(params, lora, images, dtype=None):
    with jax.default_matmul_precision("highest"), lora_layers(TOY.scale), quantized_layers():
        variables = {"params": params, "lora": lora}
        return toy.Toy(dtype).apply(variables, images, toy.inputs()[1])


def loss(*arguments):
    return jnp.sum(jnp.sin(apply_toy(*arguments)))


@BOTH
def test_results_and_gradients_are_those_of_dequantized_weights_in_float64(dtype):
    """Through scan and remat, with a LoRA on some layers, with respect to its factors and the images."""
    params, wide = quantized(dtype)
    images, lora = toy.inputs()[0], redrawn(toy_lora())
    y = jax.jit(apply_toy)(params, lora, images)
    found = jax.jit(jax.grad(loss, argnums=(1, 2)))(params, lora, images)
    with jax.enable_x64(True):
        given = jax.tree.map(lambda a: np.asarray(a, np.float64), (wide, lora, images))

        def exact(lora, images):
            merged = jax.tree.map(lambda a: a, wide)
            for *path, leaf in flatten_dict(lora):
                if leaf == "a":
                    node, factors = merged, lora
                    for part in path:
                        node, factors = node[part], factors[part]
                    node["kernel"] = node["kernel"] + TOY.scale * factors["a"] @ factors["b"]
            variables = {"params": jax.tree.map(lambda a: a.astype(np.float64), merged)}
            return toy.Toy(jnp.float64).apply(variables, images, toy.inputs()[1])

        expected_y = exact(*given[1:])
        expected = jax.grad(lambda *a: jnp.sum(jnp.sin(exact(*a))), argnums=(0, 1))(*given[1:])
        expected_y, expected = jax.device_get((expected_y, expected))
    assert np.abs(y - apply_toy(toy_params(), lora, images)).max() > 1e-3
    np.testing.assert_allclose(y, expected_y, atol=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@BOTH
def test_weights_are_rounded_to_the_compute_dtype(dtype):
    """In bfloat16 the results are those of a plain layer with the rounded kernel, to the last bit."""
    params, wide = quantized(dtype)

    def half(path, leaf):
        leaf = jnp.asarray(leaf, jnp.float32)
        return leaf.astype(jnp.bfloat16) if path[-1].key == "kernel" and leaf.ndim < 4 else leaf

    @functools.partial(jax.jit, compiler_options=AS_WRITTEN)
    def run(params, lora):
        return apply_toy(params, lora, toy.inputs()[0], jnp.bfloat16)

    plain = run(jax.tree.map_with_path(half, wide), toy_lora())
    np.testing.assert_array_equal(run(params, toy_lora()), plain)


@BOTH
def test_no_dequantized_kernel_is_kept_for_the_backward_pass(dtype):
    params, _ = quantized(dtype)
    lora, images = toy_lora(), toy.inputs()[0]

    def saved(params):
        def run(*given):
            return jax.vjp(lambda *given: apply_toy(params, *given), *given)[1]

        kept = jax.eval_shape(run, lora, images)
        return {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(kept)}

    wide = {((3, 12, 8), jnp.dtype("float32")), ((8, 8), jnp.dtype("float32"))}
    assert wide <= saved(toy_params())  # plain kernels are kept
    assert not wide & saved(params)


def test_weights_with_a_lora_are_not_merged_into_quantized_ones():
    with pytest.raises(ValueError, match="float32"):
        merge(quantized(jnp.dtype("int8"))[0], toy_lora(), TOY.scale)
