"""Linear layers whose products XLA hands to its fast kernels, on CPUs too."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.attention.surroundings import current


@jax.custom_vjp
def _of_rows(x: Float[Array, "n i"], kernel: Float[Array, "i o"]) -> Float[Array, "n o"]:
    return x @ kernel


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return cotangent @ kernel.T, _of_kernel(x, cotangent)


def _of_kernel(x: Float[Array, "n i"], cotangent: Float[Array, "n o"]) -> Float[Array, "i o"]:
    """The kernel's gradient, with the wider factor on the right."""
    if x.shape[1] <= cotangent.shape[1]:
        return x.T @ cotangent
    # Without the barrier XLA would swap the factors again, to save the transpose.
    return jax.lax.optimization_barrier(cotangent.T @ x).T


_of_rows.defvjp(_forward, _backward)


def dot_general(x: Array, kernel: Array, *arguments: Any, **options: Any) -> Array:
    """`jax.lax.dot_general` as `nn.Dense` calls it: x [..., i], kernel [i, o] -> [..., o].

    On CPUs tokens are merged into rows, and the kernel's gradient has its wider factor on the right. In the form in
    which JAX writes this gradient XLA copies a factor, transposed, and then multiplies at half the speed. Elsewhere
    XLA chooses layouts itself, and rows would have to be copied where tokens do not fill the tiles of a TPU.
    """
    around = current()
    on_cpu = around.device is not None and around.device.platform == "cpu"
    if not on_cpu or around.parts(around.tokens) > 1:
        return jax.lax.dot_general(x, kernel, *arguments, **options)
    # In float32 a CPU's products are exact, so that their precision has no meaning there.
    rows = _of_rows(x.reshape(-1, x.shape[-1]), kernel)
    return rows.reshape(*x.shape[:-1], kernel.shape[1])


# A `nn.Dense` with this product, which a LoRA on it uses, too.
Linear = functools.partial(nn.Dense, dot_general=dot_general)


def patch_product(x: Array, kernel: Array, strides: Any, padding: Any, **options: Any) -> Array:
    """`jax.lax.conv_general_dilated` of patches that do not overlap, as `nn.Conv` calls it, as a matrix product.

    On CPUs XLA takes far longer for the gradient of such a convolution's kernel.

    Args:
      x: [b, h, w, c], with sides that are multiples of the patch's.
      kernel: [p, q, c, o].
      strides: (p, q).
      padding: none.
      options: of a convolution of images, channels last, without dilation and groups.
    """
    b, h, w, c = x.shape
    p, q, _, o = kernel.shape
    assert tuple(strides) == (p, q) and not h % p and not w % q
    x = jnp.einsum("bhpwqc->bhwpqc", x.reshape(b, h // p, p, w // q, q, c))
    x = x.reshape(b, h // p, w // q, p * q * c)
    kernel = kernel.reshape(p * q * c, o)
    return dot_general(x, kernel, (((3,), (0,)), ((), ())), precision=options.get("precision"))
