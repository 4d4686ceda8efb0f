"""The transformer layers of CLIP, which its text and its vision tower have in common.

Radford et al., arXiv 2103.00020. Names follow transformers' CLIPEncoder.
"""

from typing import Protocol, runtime_checkable

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from digen_jax.attention.attend import attend

LISTS: tuple[str, ...] = ("layers",)

# The logical axes of the layers' kernels, see `logical_axes`.
AXES = (
    (r"self_attn/[qkv]_proj$", ("embed", "heads")),
    (r"self_attn/out_proj$", ("heads", "embed")),
    (r"mlp/fc1$", ("embed", "mlp")),
    (r"mlp/fc2$", ("mlp", "embed")),
)


def quick_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """OpenAI's approximation of GELU, with which CLIP-L was trained."""
    return x * nn.sigmoid(1.702 * x)


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The exact GELU (Hendrycks and Gimpel, arXiv 1606.08415), with which OpenCLIP's H and bigG were trained."""
    return nn.gelu(x, approximate=False)


ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu}


@runtime_checkable
class CLIPLayersConfig(Protocol):
    """The fields of a tower's config that its layers read."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    layer_norm_eps: float


def check_layers(config: CLIPLayersConfig) -> None:
    """Raises ValueError for an activation that is not known, or a width that the heads do not divide."""
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act must be one of {sorted(ACTIVATIONS)} but is {config.hidden_act!r}"
        )
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size {config.hidden_size} must be a multiple of num_attention_heads"
            f" {config.num_attention_heads}"
        )


class CLIPAttention(nn.Module):
    """Self-attention with several heads."""

    config: CLIPLayersConfig
    dtype: DTypeLike
    causal: bool

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Attends from each token to all tokens; if causal, to itself and the tokens before it."""
        heads = (*x.shape[:2], self.config.num_attention_heads, -1)
        q, k, v = (
            nn.Dense(x.shape[-1], dtype=self.dtype, name=name)(x).reshape(heads)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        y = attend(q, k, v, causal=self.causal).reshape(x.shape)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="out_proj")(y)


class CLIPMLP(nn.Module):
    """Two layers with an activation between."""

    config: CLIPLayersConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Applies the layers to each token."""
        y = nn.Dense(self.config.intermediate_size, dtype=self.dtype, name="fc1")(x)
        y = ACTIVATIONS[self.config.hidden_act](y)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="fc2")(y)


def norm(config: CLIPLayersConfig, dtype: DTypeLike, name: str | None = None) -> nn.LayerNorm:
    """Layer norm with float32 statistics; a one-pass variance would lose digits if mean >> std."""
    return nn.LayerNorm(
        epsilon=config.layer_norm_eps, dtype=dtype, use_fast_variance=False, name=name
    )


class CLIPEncoderLayer(nn.Module):
    """A transformer block, normed before attention and before the MLP."""

    config: CLIPLayersConfig
    dtype: DTypeLike
    causal: bool

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Tokens to tokens."""
        config, dtype = self.config, self.dtype
        y = norm(config, dtype, "layer_norm1")(x)
        x = x + CLIPAttention(config, dtype, self.causal, name="self_attn")(y)
        y = norm(config, dtype, "layer_norm2")(x)
        return x + CLIPMLP(config, dtype, name="mlp")(y)


class CLIPEncoder(nn.Module):
    """The layers, scanned if there are several."""

    config: CLIPLayersConfig
    dtype: DTypeLike
    causal: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], wanted: int
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b n d"]]:
        """Embeddings to the last layer's output and the input of layer `wanted`, counted from 0."""
        count = self.config.num_hidden_layers
        name = f"layers_0to{count - 1}" if count > 1 else "layers_0"
        layer = CLIPEncoderLayer(self.config, self.dtype, self.causal, name=name)
        if count == 1:
            last = layer(x)
            return last, x if wanted == 0 else last

        def step(layer, carry, index):
            x, kept = carry
            return (layer(x), jnp.where(index == wanted, x, kept)), None

        scan = nn.scan(step, variable_axes={"params": 0, "lora": 0}, split_rngs={"params": True})
        (last, kept), _ = scan(layer, (x, x), jnp.arange(count))
        return last, last if wanted == count else kept
