"""Dual block of MMDiT (Esser et al., arXiv 2403.03206).

Image and text have separate weights and are joined in attention. Names and shapes are those of diffusers' SD3 and
FLUX, which HunyuanVideo shares; `QWEN_IMAGE` has different names. Attention is invariant to the order of keys except
for position embeddings, so the image always comes first, and text, which may end in padding, last.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from digen_jax.attention.attend import HeadNorms, attend_jointly, normed
from digen_jax.models import layers
from digen_jax.models.layers import product
from digen_jax.models.linear import of_one_input
from digen_jax.models.rotary import Rotary, rotate_pairs


class Names(NamedTuple):
    """Parameter names of each stream outside attention, as (image, text).

    Attributes:
      modulation: Names of the modulation of the norms.
      feed_forward: Names of the feed-forward networks.
      nested: Whether the linear layer is a child of the modulation, or the modulation itself.
    """

    modulation: tuple[str, str] = ("norm1", "norm1_context")
    feed_forward: tuple[str, str] = ("ff", "ff_context")
    nested: bool = True


QWEN_IMAGE = Names(("img_mod_1", "txt_mod_1"), ("img_mlp", "txt_mlp"), nested=False)
LISTS = ("transformer_blocks", "to_out", "net")
QWEN_IMAGE_LISTS = (*LISTS, "img_mod", "txt_mod")
# Logical axes of kernels (see `logical_axes`).
AXES = (
    (r"attn2?/(to|add)_[qkv](_proj)?$", ("embed", "heads")),
    (r"attn2?/norm_(added_)?[qk]$", ("head_dim",)),
    (r"attn2?/(to_out_0|to_add_out)$", ("heads", "embed")),
    (r"net_0/proj$", ("embed", "mlp")),
    (r"net_2$", ("mlp", "embed")),
    (r"norm(1|1_context|_out)?/linear$|(img|txt)_mod_1$", ("embed", "modulation")),
)


class HeadScale(nn.Module):
    """Scale of diffusers' RMS norm of heads, shared by all heads."""

    @nn.compact
    def __call__(self, width: int) -> Float[Array, "d"]:
        """Returns the scale for heads of `width` channels."""
        return self.param("scale", nn.initializers.ones, (width,))


class JointAttention(nn.Module):
    """Attention over [x, context], each with separate projections (MMDiT), or over x alone.

    With `context_pre_only` the context is attended to but not updated: its result is None. With `pre_only` there is no
    output projection. `use_bias` applies to all projections.
    """

    heads: int
    qk_norm: str | None
    dtype: DTypeLike
    context_pre_only: bool = False
    pre_only: bool = False
    use_bias: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        context: Float[Array, "b m d"] | None = None,
        log_weights: Float[np.ndarray, "s"] | None = None,
        rotary: Sequence[Rotary] | None = None,
        lengths: Int[Array, "b"] | None = None,
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b m d"] | None]:
        """Returns the attended x and context.

        `log_weights` belong to the n + m keys. `rotary` rotates queries and keys, with one table per stream. `lengths`
        is the number of valid keys in each row, before padding; None means all keys are valid.
        """

        def linear(name: str) -> nn.Dense:
            return layers.linear(x.shape[-1], self.dtype, name, self.use_bias)

        def split(names: Sequence[str], tokens: Array) -> list[Array]:
            heads = (*tokens.shape[:2], self.heads, -1)
            projected = of_one_input([linear(name) for name in names], tokens)
            return [product(y).reshape(heads) for y in projected]

        def scales(names: Sequence[str]) -> list[Float[Array, "d"]]:
            return [HeadScale(name=name)(x.shape[-1] // self.heads) for name in names]

        def merged(out: Array) -> Array:
            return out.reshape(*out.shape[:2], -1)

        q, k, v = ([a] for a in split(("to_q", "to_k", "to_v"), x))
        norms_q, norms_k = ["norm_q"], ["norm_k"]
        if context is not None:
            # Queries are computed even if the context is not updated, because the checkpoint has their parameters.
            of_context = split(("add_q_proj", "add_k_proj", "add_v_proj"), context)
            for streams, stream in zip((q, k, v), of_context, strict=True):
                streams.append(stream)
            norms_q.append("norm_added_q")
            norms_k.append("norm_added_k")
        updated = 1 if self.context_pre_only else len(q)
        q, norms = q[:updated], None
        if self.qk_norm:
            norms = HeadNorms(scales(norms_q)[:updated], scales(norms_k))
        if rotary is not None:
            q, k, norms = *_turned(q, k, norms, rotary), None
        out, *context_out = attend_jointly(q, k, v, lengths, log_weights, norms=norms)
        x_out = merged(out)
        if not self.pre_only:
            x_out = product(linear("to_out_0")(x_out))
        if not context_out:
            return x_out, None
        return x_out, product(linear("to_add_out")(merged(context_out[0])))


def _turned(
    q: Sequence[Array], k: Sequence[Array], norms: HeadNorms | None, rotary: Sequence[Rotary]
) -> tuple[list[Array], list[Array]]:
    """Norms queries and keys of each stream, then applies rotary embeddings."""
    if norms is not None:
        q, k = (list(map(normed, *each)) for each in ((q, norms.q), (k, norms.k)))
    q, k = (
        [rotate_pairs(a, table) for a, table in zip(each, rotary, strict=False)] for each in (q, k)
    )
    return q, k


class DualBlock(nn.Module):
    """Updates two streams, image and text, joined in attention.

    `dual_attention` adds SD3.5's second attention over the image alone. With `context_pre_only` (the last block of SD3)
    the text is attended to but not updated. The last text token counts as `last_counts` equal tokens. `names` are the
    parameter names. `clean_tokens` is the number of image tokens that the embedding `clean` modulates, the last ones.
    """

    heads: int
    qk_norm: str | None
    dtype: DTypeLike
    dual_attention: bool = False
    context_pre_only: bool = False
    last_counts: int = 1
    names: Names = Names()
    clean_tokens: int = 0

    @nn.compact
    def __call__(
        self,
        streams: tuple[Float[Array, "b n d"], Float[Array, "b m d"]],
        embedding: Float[Array, "b d"],
        rotary: tuple[Rotary, Rotary] | None = None,
        lengths: Int[Array, "b"] | None = None,
        clean: Float[Array, "b d"] | None = None,
    ) -> tuple[tuple[Float[Array, "b n d"], Float[Array, "b m d"]], None]:
        """Updates (image, text); the second result is for `nn.scan`, which collects nothing.

        `lengths` is the number of tokens that each row attends to: image tokens, and text tokens without padding.
        """
        x, context = streams
        chunks = 9 if self.dual_attention else 6
        if clean is None:
            shift, scale, gate, *rest = self._modulation(0, chunks, embedding)
        else:
            both = self._modulation(0, chunks, jnp.concatenate([embedding, clean]))
            is_clean = np.arange(x.shape[1])[:, None] >= x.shape[1] - self.clean_tokens
            pairs = (jnp.split(vectors, 2) for vectors in both)
            vectors = [jnp.where(is_clean, of_clean, own) for own, of_clean in pairs]
            shift, scale, gate, *rest = vectors
        normed = layers.layer_norm(x)
        image = layers.modulate(normed, shift, scale, self.dtype)
        if self.context_pre_only:
            scale, shift = self._modulation(1, 2, embedding)
        else:
            shift, scale, *context_rest = self._modulation(1, 6, embedding)
        text = layers.modulate(layers.layer_norm(context), shift, scale, self.dtype)

        weights = None
        if self.last_counts > 1:
            weights = np.zeros(image.shape[1] + text.shape[1], np.float32)
            weights[-1] = np.log(self.last_counts)
        attention = self._attention("attn", self.context_pre_only)
        image, update = attention(image, text, weights, rotary, lengths)
        x = layers.residual(x, gate, image)
        if self.dual_attention:
            shift, scale, gate = rest[3:]
            image = layers.modulate(normed, shift, scale, self.dtype)
            image, _ = self._attention("attn2")(image)
            x = layers.residual(x, gate, image)
        x = self._feed_forward(0, x, *rest[:3])
        if not self.context_pre_only:
            context = layers.residual(context, context_rest[0], cast(Array, update))
            context = self._feed_forward(1, context, *context_rest[1:])
        return (x, context), None

    def _attention(self, name: str, context_pre_only: bool = False) -> JointAttention:
        return JointAttention(self.heads, self.qk_norm, self.dtype, context_pre_only, name=name)

    def _modulation(self, stream: int, chunks: int, embedding: Array) -> Sequence[Array]:
        name = self.names.modulation[stream]
        if self.names.nested:
            return layers.Modulation(chunks, name=name)(embedding)
        return layers.modulation(embedding, chunks, name)

    def _feed_forward(
        self, stream: int, x: Array, shift: Array, scale: Array, gate: Array
    ) -> Array:
        name = self.names.feed_forward[stream]
        normed = layers.modulate(layers.layer_norm(x), shift, scale, self.dtype)
        return layers.residual(x, gate, layers.FeedForward(self.dtype, name=name)(normed))
