"""Encoders of T5 v1.1, used by SD3 and FLUX, and of UMT5, used by Wan.

Raffel et al., arXiv 1910.10683; Chung et al., arXiv 2304.09151. Names follow transformers' T5EncoderModel and
UMT5EncoderModel.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from digen_jax.files import check_values, number
from digen_jax.models.family import Component

LISTS: tuple[str, ...] = ("block", "layer")

# Logical axes of kernels (see `logical_axes`).
AXES = (
    (r"^shared$", ("vocab", "embed")),
    (r"/relative_attention_bias$", (None, None)),
    (r"SelfAttention/[qkv]$", ("embed", "heads")),
    (r"SelfAttention/o$", ("heads", "embed")),
    (r"DenseReluDense/wi(_[01])?$", ("embed", "mlp")),
    (r"DenseReluDense/wo$", ("mlp", "embed")),
    (r"layer_norm$", ("embed",)),
)

# Some files contain the embedding twice, also under the name that transformers ties to `shared.weight`.
IGNORED: tuple[str, ...] = ("encoder.embed_tokens.weight",)

Kind = Literal["t5", "umt5"]
FeedForward = Literal["relu", "gated-gelu"]

# Defaults of transformers' UMT5Config that differ from those of its T5Config.
UMT5_DEFAULTS = {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Fields of transformers' config.json that change the encoder, with T5's defaults."""

    model_type: Kind = "t5"
    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64  # width of a head; all heads together may be wider or narrower than d_model
    d_ff: int = 2048
    num_layers: int = number(6, 1, 1000)
    num_heads: int = 8
    relative_attention_num_buckets: int = number(32, 4)
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = number(1e-6, 0, 1)
    feed_forward_proj: FeedForward = "relu"

    def __post_init__(self):
        buckets, distance = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )
        if distance <= buckets // 4:
            raise ValueError(
                f"relative_attention_max_distance must be more than {buckets // 4}, a quarter of "
                f"relative_attention_num_buckets, not {distance}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "T5Config":
        """Reads the configuration from a transformers config.json; other fields are about training or the decoder.

        Raises:
          ValueError: a field has an unsupported value.
        """
        if config.get("model_type") == "umt5":
            config = UMT5_DEFAULTS | dict(config)
        check_values(cls, config)
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in known})

    @property
    def shares_bias(self) -> bool:
        """Whether all blocks share the first block's position bias, as in T5; in UMT5 each block has one."""
        return self.model_type == get_args(Kind)[0]


def relative_buckets(tokens: int, buckets: int, max_distance: int) -> Int[np.ndarray, "s t"]:
    """Returns the bucket of the distance from each query s to each key t (arXiv 1910.10683, section 2.1).

    Half of the buckets are for keys after the query. In each half, half are for one distance each, and the others grow
    logarithmically with the distance up to `max_distance`; the last covers all larger distances.
    """
    distance = np.arange(tokens)[None, :] - np.arange(tokens)[:, None]
    behind, distance = distance > 0, np.abs(distance)
    half = buckets // 2
    exact = half // 2
    # float32 as in transformers, because rounding decides at bucket boundaries.
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    place = np.log(ratio) / np.float32(np.log(max_distance / exact)) * np.float32(half - exact)
    large = np.minimum(exact + place.astype(np.int64), half - 1)
    return (half * behind + np.where(distance < exact, distance, large)).astype(np.int32)


def _linear(features: int, dtype: DTypeLike, name: str) -> nn.Dense:
    return nn.Dense(features, use_bias=False, dtype=dtype, name=name)


def _norm(config: T5Config, dtype: DTypeLike, name: str = "layer_norm") -> nn.RMSNorm:
    """Returns an RMS norm (arXiv 1910.07467) with float32 statistics."""
    return nn.RMSNorm(epsilon=config.layer_norm_epsilon, dtype=dtype, name=name)


class T5Attention(nn.Module):
    """Self-attention over all tokens with a bias for each distance and head."""

    config: T5Config
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        bias: Float[Array, "1 h n n"] | None,
        mask: Bool[Array, "b n"] | None,
    ) -> tuple[Float[Array, "b n d"], Float[Array, "1 h n n"]]:
        """Returns the attended tokens and the position bias, which this block computes if `bias` is None."""
        config, (batch, tokens, width) = self.config, x.shape
        heads = (batch, tokens, config.num_heads, config.d_kv)
        q, k, v = (
            _linear(config.num_heads * config.d_kv, self.dtype, name)(x).reshape(heads)
            for name in ("q", "k", "v")
        )
        if bias is None:
            bias = self._bias(tokens)
        # Does not use `attend`, whose kernels have no bias per pair of tokens: prompts are short, and encoded once.
        # The scores are not divided by sqrt(d_kv), as in the training of the weights.
        y = jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias,
            None if mask is None else mask[:, None, None],
            scale=1.0,
            implementation="xla",
        )
        return _linear(width, self.dtype, "o")(y.reshape(batch, tokens, -1)), bias

    def _bias(self, tokens: int) -> Float[Array, "1 h n n"]:
        config = self.config
        buckets, heads = config.relative_attention_num_buckets, config.num_heads
        table = nn.Embed(buckets, heads, dtype=jnp.float32, name="relative_attention_bias")
        bias = table(relative_buckets(tokens, buckets, config.relative_attention_max_distance))
        return jnp.einsum("sth->hst", bias)[None]


class T5LayerSelfAttention(nn.Module):
    """Norm and attention with a residual connection."""

    config: T5Config
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        bias: Float[Array, "1 h n n"] | None,
        mask: Bool[Array, "b n"] | None,
    ) -> tuple[Float[Array, "b n d"], Float[Array, "1 h n n"]]:
        """Maps tokens to tokens; the bias is as in `T5Attention`."""
        y = _norm(self.config, self.dtype)(x)
        attention = T5Attention(self.config, self.dtype, name="SelfAttention")
        y, bias = attention(y, bias, mask)
        return x + y, bias


class T5Dense(nn.Module):
    """Two linear layers with ReLU between, or with a gate of GELU's tanh approximation (arXiv 2002.05202)."""

    config: T5Config
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Applies the layers to each token."""
        hidden = self.config.d_ff
        if self.config.feed_forward_proj == "relu":
            y = nn.relu(_linear(hidden, self.dtype, "wi")(x))
        else:
            y = nn.gelu(_linear(hidden, self.dtype, "wi_0")(x), approximate=True)
            y = y * _linear(hidden, self.dtype, "wi_1")(x)
        # transformers keeps this layer in float32 where the others are float16, because it would overflow. bfloat16 has
        # the range of float32, and transformers computes the layer in it, as here.
        return _linear(x.shape[-1], self.dtype, "wo")(y)


class T5LayerFF(nn.Module):
    """Norm and feed-forward layers with a residual connection."""

    config: T5Config
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Maps tokens to tokens."""
        y = _norm(self.config, self.dtype)(x)
        return x + T5Dense(self.config, self.dtype, name="DenseReluDense")(y)


class T5Block(nn.Module):
    """Attention, then feed-forward layers."""

    config: T5Config
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        bias: Float[Array, "1 h n n"] | None,
        mask: Bool[Array, "b n"] | None,
    ) -> tuple[Float[Array, "b n d"], Float[Array, "1 h n n"]]:
        """Maps tokens to tokens; the bias is as in `T5Attention`."""
        attention = T5LayerSelfAttention(self.config, self.dtype, name="layer_0")
        x, bias = attention(x, bias, mask)
        return T5LayerFF(self.config, self.dtype, name="layer_1")(x), bias


class T5Stack(nn.Module):
    """Blocks and the final norm; equal blocks are scanned."""

    config: T5Config
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None
    ) -> Float[Array, "b n d"]:
        """Maps embeddings to normed states."""
        first, last, bias = 0, self.config.num_layers - 1, None
        if self.config.shares_bias:
            x, bias = T5Block(self.config, self.dtype, name="block_0")(x, None, mask)
            first = 1
        if first <= last:
            x = self._scanned(first, last, x, bias, mask)
        return _norm(self.config, self.dtype, "final_layer_norm")(x)

    def _scanned(
        self,
        first: int,
        last: int,
        x: Float[Array, "b n d"],
        bias: Float[Array, "1 h n n"] | None,
        mask: Bool[Array, "b n"] | None,
    ) -> Float[Array, "b n d"]:
        """Returns tokens after the blocks first..last."""
        name = f"block_{first}to{last}" if last > first else f"block_{first}"
        block = T5Block(self.config, self.dtype, name=name)
        if last == first:
            return block(x, bias, mask)[0]

        def step(block, x, bias, mask):
            return block(x, bias, mask)[0], None

        scan = nn.scan(
            step,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=last - first + 1,
        )
        return scan(block, x, bias, mask)[0]


class T5EncoderModel(nn.Module):
    """Encoder of T5 or UMT5 that returns the last hidden state; computes in and returns `dtype`.

    Scores, softmax and norm statistics are float32.
    """

    config: T5Config
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, ids: Int[Array, "b n"], mask: Bool[Array, "b n"] | None = None
    ) -> Float[Array, "b n d"]:
        """Returns the state of every token after the final norm.

        Args:
          ids: Token ids, with padding.
          mask: True for tokens to attend to, at least one per row. None means all tokens, padding included, as in SD3
            and FLUX; Wan masks the padding.
        """
        config = self.config
        x = nn.Embed(config.vocab_size, config.d_model, dtype=self.dtype, name="shared")(ids)
        return T5Stack(config, self.dtype, name="encoder")(x, mask)


def inputs(config: T5Config) -> tuple[Int[Array, "1 2"]]:
    """Returns ids of a short text, for `init`."""
    return (jnp.zeros((1, 2), jnp.int32),)


COMPONENT = Component(
    library="transformers",
    classes=("T5EncoderModel",),
    network=T5EncoderModel,
    read_config=T5Config.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    ignored=lambda network: IGNORED,
    tokenizer="T5Tokenizer",
)
