"""Quantized kernels of frozen linear layers: one byte per weight, and a float32 scale per output channel.

A kernel W [..., in, out] is stored as q = round(W / scale) in int8 or float8 (e4m3fn), rounded to the nearest, ties to
even, with scale = max |W| / largest over `in`, where `largest` is 127 or 448. A layer computes x W' + bias with
W' = q * scale, computed in float32 and rounded to the layer's compute dtype. The forward and the backward pass of a
layer each dequantize its kernel. Kernels and scales have no gradient.

The scale is the parameter `kernel_scale` next to `kernel`. All other parameters are stored in `OTHERS`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped

LARGEST = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.float8_e4m3fn): 448}
OTHERS = jnp.dtype(jnp.bfloat16)
SCALE = "kernel_scale"
Product = Callable[[Array, Array], Array]


def quantize(
    kernel: Shaped[np.ndarray, "in out"], dtype: DTypeLike
) -> tuple[Shaped[np.ndarray, "in out"], Float32[np.ndarray, "out"]]:
    """Returns the quantized kernel and its scale. The scale of a channel of zeros is 1."""
    kernel = kernel.astype(np.float32)
    most = np.abs(kernel).max(axis=0)
    scale = np.where(most > 0, most / np.float32(LARGEST[jnp.dtype(dtype)]), np.float32(1))
    np.divide(kernel, scale, out=kernel)
    if jnp.dtype(dtype) == jnp.int8:
        np.rint(kernel, out=kernel)
    return kernel.astype(dtype), scale


def dequantize(
    kernel: Shaped[Array, "*layers in out"], scale: Float32[Array, "*layers out"], dtype: DTypeLike
) -> Float[Array, "*layers in out"]:
    """Returns W' of quantized kernels (see the module's docstring)."""
    return (kernel.astype(jnp.float32) * scale[..., None, :]).astype(dtype)


def is_quantized(path: tuple, leaf: Any) -> bool:
    """Returns whether a parameter is a quantized kernel or a scale, which are never cast."""
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return name == SCALE or leaf.dtype in LARGEST


def stored_shapes(shapes: Mapping[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    """Returns the shapes of a component's frozen parameters as they are stored in `dtype`.

    If `dtype` is int8 or float8, kernels of linear layers have it and a scale, and other parameters are in `OTHERS`.
    Integer parameters keep their type.
    """
    dtype, stored = jnp.dtype(dtype), {}
    for path, leaf in flatten_dict(shapes).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            stored[path] = leaf
        elif dtype not in LARGEST:
            stored[path] = leaf.update(dtype=dtype)
        elif path[-1] == "kernel" and len(leaf.shape) <= 3:  # a convolution's has more axes
            *stack, _, outputs = leaf.shape
            stored[path] = leaf.update(dtype=dtype)
            stored[*path[:-1], SCALE] = jax.ShapeDtypeStruct((*stack, outputs), jnp.float32)
        else:
            stored[path] = leaf.update(dtype=OTHERS)
    return unflatten_dict(stored)


def scale_axes(axes: Mapping[tuple, tuple[str | None, ...]]) -> dict[tuple, tuple]:
    """Returns the logical axes of the scales of all kernels, given those of the parameters by path."""
    return {
        (*path[:-1], SCALE): (*names[:-2], *names[-1:])
        for path, names in axes.items()
        if path[-1] == "kernel"
    }


@contextlib.contextmanager
def quantized_layers() -> Iterator[None]:
    """Dequantizes kernels in `module.apply`, at trace time, of every `nn.Dense` that has a scale."""

    def intercept(call, args, kwargs, context):
        dense = context.module
        if not has_scale(dense):
            return call(*args, **kwargs)
        kernel, scale, bias = (
            dense.get_variable("params", name) for name in ("kernel", SCALE, "bias")
        )
        x, bias = promote_dtype(*args, bias, dtype=dense.dtype)
        general = dense.dot_general or jax.lax.dot_general
        axes = (((x.ndim - 1,), (0,)), ((), ()))
        product = functools.partial(general, dimension_numbers=axes, precision=dense.precision)
        y = _times(product, jax.config.jax_default_matmul_precision, x, kernel, scale)
        return y if bias is None else y + bias

    with nn.intercept_methods(intercept):
        yield


def has_scale(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer with a quantized kernel."""
    return isinstance(module, nn.Dense) and module.has_variable("params", SCALE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _times(product: Product, precision: str | None, x: Array, kernel: Array, scale: Array) -> Array:
    """Multiplies by the dequantized kernel, which the backward pass dequantizes again instead of keeping it."""
    return product(x, dequantize(kernel, scale, x.dtype))


def _forward(
    product: Product, precision: str | None, x: Array, kernel: Array, scale: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _times(product, precision, x, kernel, scale), (kernel, scale)


def _backward(
    product: Product, precision: str | None, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, None, None]:
    kernel, scale = saved
    x = jnp.zeros((*cotangent.shape[:-1], kernel.shape[0]), cotangent.dtype)  # linear: any value
    wide = dequantize(kernel, scale, cotangent.dtype)
    with jax.default_matmul_precision(precision):
        (gradient,) = jax.vjp(lambda x: product(x, wide), x)[1](cotangent)
    return gradient, None, None


_times.defvjp(_forward, _backward)
