"""Library flash attention: Pallas splash attention on TPUs, and cuDNN on NVIDIA GPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from digen_jax.attention.attend import RESIDUALS, masked, parts, unit, with_channels
from digen_jax.attention.kernels import MULTIPLE

LANES = 128
# Largest blocks that fit a core's memory on v5e, v5p and v6e, by bytes per element; scores are float32.
LARGEST_BLOCK = {2: 9 * LANES, 4: 6 * LANES}
# Overhead of a block, in tokens: larger blocks keep the matrix units busier.
COST_OF_BLOCK = 64


def splash(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    lengths: Int[Array, "b"] | None = None,
    log_weights: Float[np.ndarray, "t"] | None = None,
) -> Float[Array, "b s h d"]:
    """Computes `attend.attend` with jax.experimental.pallas.ops.tpu.splash_attention.

    Tokens are padded to full blocks. Padding is masked by an extra channel where a lane is unused, which is free, or
    otherwise by segments, which cost one comparison per score.
    """
    (s, d), t = q.shape[1::2], k.shape[1]
    padded = _in_blocks(t, k)
    masks = lengths is not None or padded > t
    terms = np.zeros((0, padded), np.float32)
    if log_weights is not None:
        terms = np.pad(parts(log_weights, k.dtype), ((0, 0), (0, padded - t)))
    elif masks and d % LANES:
        terms = np.zeros((1, padded), np.float32)
    by_channel = masks and len(terms) > 0
    # The kernel has no scale argument. In bfloat16 this rounds, unless the width is a power of four.
    q, k, v = _padded(q * d**-0.5, _in_blocks(s, q)), _padded(k, padded), _padded(v, padded)
    if len(terms):
        all_terms = masked(terms, lengths, t) if by_channel else terms[:, None]
        q, k = with_channels(q, k, all_terms)
    segments = _segments(q, k, lengths, t) if masks and not by_channel else None
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    precision = "highest" if q.dtype == jnp.float32 else "default"
    return _kernel(precision, q, k, v, segments).swapaxes(1, 2)[:, :s]


def block(tokens: int, dtype: DTypeLike) -> int:
    """Returns the block size for `tokens`: a multiple of the lanes, with little padding and few blocks."""
    sizes = range(LANES, LARGEST_BLOCK[jnp.dtype(dtype).itemsize] + 1, LANES)
    return min(sizes, key=lambda size: -(-tokens // size) * (size + COST_OF_BLOCK))


def _in_blocks(tokens: int, a: Array) -> int:
    size = block(tokens, a.dtype)
    return -(-tokens // size) * size


def _padded(a: Float[Array, "b s h d"], tokens: int) -> Float[Array, "b n h d"]:
    return jnp.pad(a, ((0, 0), (0, tokens - a.shape[1]), (0, 0), (0, 0)))


def _segments(q: Array, k: Array, lengths: Int[Array, "b"] | None, valid: int) -> Any:
    """Returns segment 1 for all queries and valid keys, and 0 for padding."""
    keys = jnp.arange(k.shape[1])
    inside = jnp.broadcast_to(keys < valid, k.shape[:2])
    if lengths is not None:
        inside = inside & (keys < lengths[:, None])
    ones = jnp.ones(q.shape[:2], jnp.int32)
    return splash_attention.SegmentIds(ones, inside.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(
    precision: str,
    q: Float[Array, "b h s e"],
    k: Float[Array, "b g t e"],
    v: Float[Array, "b g t d"],
    segments: Any,
) -> Float[Array, "b h s d"]:
    """Runs the kernel over a batch with a fixed matmul precision.

    The backward pass is traced later, outside the caller's `jax.default_matmul_precision`, hence the custom gradient.
    """
    with jax.default_matmul_precision(precision):
        return jax.vmap(_of_heads(q, k))(q, k, v, segments)


def _forward(precision: str, q: Array, k: Array, v: Array, segments: Any) -> tuple[Array, Any]:
    kernel = jax.vmap(_of_heads(q, k))
    with jax.default_matmul_precision(precision):
        return jax.vjp(lambda q, k, v: kernel(q, k, v, segments), q, k, v)


def _backward(precision: str, pullback: Any, cotangent: Array) -> tuple[Array, Array, Array, None]:
    with jax.default_matmul_precision(precision):
        return *pullback(cotangent), None


_kernel.defvjp(_forward, _backward)


def _of_heads(q: Array, k: Array) -> Any:
    """Returns the kernel for all heads of one sequence, with a fused backward pass."""
    heads, s, t = q.shape[1], q.shape[2], k.shape[2]
    full = splash_attention.MultiHeadMask([splash_attention.FullMask((s, t))] * heads)
    of_q, of_k = block(s, q.dtype), block(t, k.dtype)
    sizes = splash_attention.BlockSizes(
        block_q=of_q,
        block_kv=of_k,
        block_q_dkv=of_q,
        block_kv_dkv=of_k,
        use_fused_bwd_kernel=True,
    )
    return splash_attention.make_splash_mha_single_device(
        full, block_sizes=sizes, residual_checkpoint_name=RESIDUALS
    )


def cudnn(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    lengths: Int[Array, "b"] | None = None,
    log_weights: Float[np.ndarray, "t"] | None = None,
) -> Float[Array, "b s h d"]:
    """Computes `attend.attend` with cuDNN. It supports no bias on keys alone, so weights become extra channels.

    JAX's gradient of cuDNN attention requires even numbers of tokens (0.10.2 and 0.12.0.1). An odd number of keys is
    padded by one key that `lengths` excludes, an odd number of queries by a zero query. Its result is dropped, so its
    gradient and its contribution to those of keys and values are zero.
    """
    (b, s, _, d), t = q.shape, k.shape[1]
    scale = d**-0.5
    if t % 2 and lengths is None:
        lengths = jnp.full(b, t, jnp.int32)
    q, k, v = (jnp.pad(a, ((0, 0), (0, a.shape[1] % 2), (0, 0), (0, 0))) for a in (q, k, v))
    if log_weights is not None:
        of_query = unit(scale)
        log_weights = np.pad(log_weights, (0, t % 2))
        terms = parts(log_weights / (scale * of_query), k.dtype)[:, None]
        q, k = with_channels(
            q, k, terms, of_query, width=-(-(d + len(terms)) // MULTIPLE) * MULTIPLE
        )
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - d)))
    out = jax.nn.dot_product_attention(
        q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation="cudnn"
    )
    return out[:, :s, :, :d]
