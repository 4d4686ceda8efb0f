"""Linear layers with products that XLA computes with fast kernels, also on CPUs, and the precision of products."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from digen_jax.attention.kernels import SEQUENCE, TENSOR, current
from digen_jax.checkpoints.lora import is_adapted, lora_scale
from digen_jax.checkpoints.quantization import has_scale

# TF32 on NVIDIA (10 bits of mantissa), three bfloat16 passes on TPUs, whose default is a single pass with 7 bits:
# that rounding changes an importance ratio by more than typical clip ranges.
FLOAT32_PRODUCTS = "high"
FLOAT32_NAMES = {"gpu": "TF32", "tpu": "three bfloat16 passes"}  # by platform
LANES = 128
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Arrays = Sequence[Array]
Product = Callable[[Array, Array], Array]


@jax.custom_vjp
def _of_rows(x: Float[Array, "n i"], kernel: Float[Array, "i o"]) -> Float[Array, "n o"]:
    return x @ kernel


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return cotangent @ kernel.T, _of_kernel(x, cotangent)


def _of_kernel(x: Float[Array, "n i"], cotangent: Float[Array, "n o"]) -> Float[Array, "i o"]:
    """Returns the kernel's gradient, computed with the wider factor on the right."""
    if x.shape[1] <= cotangent.shape[1]:
        return x.T @ cotangent
    # Without the barrier XLA would swap the factors again to avoid the transpose.
    return jax.lax.optimization_barrier(cotangent.T @ x).T


_of_rows.defvjp(_forward, _backward)


def dot_general(x: Array, kernel: Array, *arguments: Any, **options: Any) -> Array:
    """Computes `jax.lax.dot_general` as `nn.Dense` calls it: x [..., i], kernel [i, o] -> [..., o].

    On CPUs tokens are merged into rows, and the kernel's gradient has its wider factor on the right. For JAX's default
    form of this gradient, XLA copies a transposed factor and then multiplies at half the speed. On other platforms XLA
    chooses layouts, and merging would copy rows where tokens do not fill the tiles of a TPU.
    """
    target = current()
    if target.platform != "cpu" or target.parts(SEQUENCE) > 1:
        product, rows = cast(Any, functools.partial(_general, arguments, options)), x
    else:
        # Float32 products are exact on CPUs, so precision has no effect there.
        product, rows = _of_rows, x.reshape(-1, x.shape[-1])
    # A modulation has one row per image, which is cheaper to move than any kernel.
    y = _gather(product, _precision(), rows, kernel) if x.ndim > 2 else product(rows, kernel)
    return y.reshape(*x.shape[:-1], kernel.shape[1])


def _general(arguments: Any, options: Any, x: Array, kernel: Array) -> Array:
    return jax.lax.dot_general(x, kernel, *arguments, **options)


def gathered(kernel: Float[Array, "i o"]) -> Float[Array, "i o"]:
    """Gathers a kernel that is sharded over devices with different rows.

    XLA compares a kernel with the activations of one product only. Without this constraint it moves the activations of
    the backward pass to the kernel's shards where they are smaller, and then moves the sums of all rows back. A kernel
    that is sharded over the tensor axis is unchanged, because its sharding rules determine how the product is split.
    """
    target = current()
    if target.mesh is None or target.parts(TENSOR) > 1:
        return kernel
    free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * kernel.ndim)
    # The unconstrained spec isolates the kernel from its producer, so that it is rounded before it is gathered.
    for spec in (free, PartitionSpec()):
        kernel = jax.lax.with_sharding_constraint(kernel, NamedSharding(target.mesh, spec))
    return kernel


def _precision() -> str | None:
    """Returns the precision of the caller's products, for a backward pass traced later, outside its context."""
    return jax.config.jax_default_matmul_precision


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(product: Product, precision: str | None, x: Array, kernel: Array) -> Array:
    """Multiplies by the gathered kernel; the backward pass keeps the sharded kernel and gathers it again.

    The gradient is with respect to the sharded kernel, so that devices sum only its shards.
    """
    return product(x, gathered(kernel))


def _gather_forward(
    product: Product, precision: str | None, x: Array, kernel: Array
) -> tuple[Array, tuple[Array, Array]]:
    return product(x, gathered(kernel)), (x, kernel)


def _gather_backward(
    product: Product, precision: str | None, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, kernel = saved
    with jax.default_matmul_precision(precision):
        return jax.vjp(product, x, gathered(kernel))[1](cotangent)


_gather.defvjp(_gather_forward, _gather_backward)


# `nn.Dense` with this product, which a LoRA on it uses, too.
Linear = functools.partial(nn.Dense, dot_general=dot_general)


def of_one_input(
    layers: Sequence[nn.Dense], x: Float[Array, "b n i"]
) -> list[Float[Array, "b n _"]]:
    """Returns the results of several linear layers of the same tokens, including their low-rank terms.

    On TPUs a separate low-rank term takes nearly as long as its layer, because it reads and writes all results again.
    There the low-rank terms of all layers become extra channels of the tokens and extra rows of the layers' kernels.
    """
    scale = lora_scale()
    # Of quantized kernels, the dequantized ones would be kept for the backward pass.
    separate = not all(map(is_adapted, layers)) or any(map(has_scale, layers))
    if scale is None or current().platform != "tpu" or separate:
        return [layer(x) for layer in layers]
    (dtype,) = {layer.dtype for layer in layers}

    def of_all(collection: str, name: str) -> Arrays:
        return promote_dtype(
            *(layer.get_variable(collection, name) for layer in layers), dtype=dtype
        )

    (x,) = promote_dtype(x, dtype=dtype)
    kernels, factors = of_all("params", "kernel"), (of_all("lora", "a"), of_all("lora", "b"))
    products = _adapted(x, kernels, *factors, scale, _precision())
    if not layers[0].use_bias:
        return products
    return [y + bias for y, bias in zip(products, of_all("params", "bias"), strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _adapted(
    x: Array, kernels: Arrays, a: Arrays, b: Arrays, scale: float, precision: str | None
) -> list[Array]:
    """Computes [x, x A_1 s, x A_2 s, ..] [W_1; B_1; 0; ..], and likewise for each layer."""
    ranks = [factor.shape[1] for factor in a]
    padding = -sum(ranks) % LANES
    low = x @ jnp.pad(jnp.concatenate(a, axis=1), ((0, 0), (0, padding))) * scale
    x = jnp.concatenate([x, low], axis=-1)
    out, before = [], 0
    for kernel, factor, rank in zip(map(gathered, kernels), b, ranks, strict=True):
        behind = low.shape[-1] - before - rank
        rows = jnp.pad(factor, ((before, behind), (0, 0)))
        out.append(x @ jnp.concatenate([kernel, rows], axis=0))
        before += rank
    return out


def _adapted_forward(
    x: Array, kernels: Arrays, a: Arrays, b: Arrays, scale: float, precision: str | None
) -> tuple[list[Array], tuple[Array, Arrays, Arrays, Arrays]]:
    return _adapted(x, kernels, a, b, scale, precision), (x, kernels, a, b)


def _adapted_backward(
    scale: float,
    precision: str | None,
    saved: tuple[Array, Arrays, Arrays, Arrays],
    cotangents: list[Array],
) -> tuple[Array, Arrays, Arrays, Arrays]:
    """Returns gradients of the separate terms: a kernel has a gradient only if it is trained, without LoRA factors."""

    def separate_terms(x: Array, kernels: Arrays, a: Arrays, b: Arrays) -> list[Array]:
        layers = zip(kernels, a, b, strict=True)
        return [(x @ down * scale) @ up + x @ kernel for kernel, down, up in layers]

    x, kernels, *factors = saved
    with jax.default_matmul_precision(precision):
        return jax.vjp(separate_terms, x, list(map(gathered, kernels)), *factors)[1](cotangents)


_adapted.defvjp(_adapted_forward, _adapted_backward)


def patch_product(x: Array, kernel: Array, strides: Any, padding: Any, **options: Any) -> Array:
    """Computes `jax.lax.conv_general_dilated` of non-overlapping patches, as `nn.Conv` calls it, as a matrix product.

    On CPUs XLA is far slower at the gradient of such a convolution's kernel.

    Args:
      x: [b, h, w, c], with sides that are multiples of the patch's, or clips [b, t, h, w, c].
      kernel: [p, q, c, o], or [1, p, q, c, o] for patches of one frame.
      strides: (p, q), or (1, p, q).
      padding: Unused; must be none.
      options: Options of a convolution of images, channels last, without dilation and groups.
    """
    *rows, h, w, c = x.shape
    *frames, p, q, _, o = kernel.shape
    assert tuple(strides) == (*frames, p, q) and frames in ([], [1]) and not h % p and not w % q
    x = jnp.einsum("bhpwqc->bhwpqc", x.reshape(-1, h // p, p, w // q, q, c))
    x = x.reshape(*rows, h // p, w // q, p * q * c)
    kernel = kernel.reshape(p * q * c, o)
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    return dot_general(x, kernel, axes, precision=options.get("precision"))


def exact_products(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Traces `method` and its gradient with a precision of at least FLOAT32_PRODUCTS for float32 products.

    A precision that the user sets (`JAX_DEFAULT_MATMUL_PRECISION`, `jax.default_matmul_precision`) has priority.
    Products of bfloat16 are not affected.
    """

    @functools.wraps(method)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        chosen = jax.config.jax_default_matmul_precision
        with jax.default_matmul_precision(chosen or FLOAT32_PRODUCTS):
            return method(*args, **kwargs)

    return traced
