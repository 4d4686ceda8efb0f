"""CLIP text encoder with projection, as used by SD3 (CLIP-L, OpenCLIP bigG) and FLUX.

Radford et al., arXiv 2103.00020. Names follow transformers' CLIPTextModelWithProjection.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from digen_jax.attention.attend import attend
from digen_jax.files import check_values, number
from digen_jax.models.family import Component

LISTS: tuple[str, ...] = ("layers",)

# Logical axes of the layers' kernels (see `logical_axes`).
LAYER_AXES = (
    (r"self_attn/[qkv]_proj$", ("embed", "heads")),
    (r"self_attn/out_proj$", ("heads", "embed")),
    (r"mlp/fc1$", ("embed", "mlp")),
    (r"mlp/fc2$", ("mlp", "embed")),
)


def quick_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Computes OpenAI's approximation of GELU, with which CLIP-L was trained."""
    return x * nn.sigmoid(1.702 * x)


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Computes the exact GELU (Hendrycks and Gimpel, arXiv 1606.08415), used by OpenCLIP's H and bigG."""
    return nn.gelu(x, approximate=False)


ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu}


CLIPLayersConfig = Any  # `CLIPTextConfig` or `CLIPVisionConfig`


def check_layers(config: CLIPLayersConfig) -> None:
    """Raises ValueError for an unknown activation, or a width that is not a multiple of the heads."""
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
    """Multi-head self-attention."""

    config: CLIPLayersConfig
    dtype: DTypeLike
    causal: bool

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Attends from each token to all tokens, or if causal to itself and earlier tokens."""
        heads = (*x.shape[:2], self.config.num_attention_heads, -1)
        q, k, v = (
            nn.Dense(x.shape[-1], dtype=self.dtype, name=name)(x).reshape(heads)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        y = attend(q, k, v, causal=self.causal).reshape(x.shape)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="out_proj")(y)


class CLIPMLP(nn.Module):
    """Two linear layers with an activation between."""

    config: CLIPLayersConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Applies the layers to each token."""
        y = nn.Dense(self.config.intermediate_size, dtype=self.dtype, name="fc1")(x)
        y = ACTIVATIONS[self.config.hidden_act](y)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="fc2")(y)


def norm(config: CLIPLayersConfig, dtype: DTypeLike, name: str | None = None) -> nn.LayerNorm:
    """Returns a layer norm with float32 statistics; one-pass variance would lose precision if mean >> std."""
    return nn.LayerNorm(
        epsilon=config.layer_norm_eps, dtype=dtype, use_fast_variance=False, name=name
    )


class CLIPEncoderLayer(nn.Module):
    """Transformer block, normed before attention and before the MLP."""

    config: CLIPLayersConfig
    dtype: DTypeLike
    causal: bool

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Maps tokens to tokens."""
        config, dtype = self.config, self.dtype
        y = norm(config, dtype, "layer_norm1")(x)
        x = x + CLIPAttention(config, dtype, self.causal, name="self_attn")(y)
        y = norm(config, dtype, "layer_norm2")(x)
        return x + CLIPMLP(config, dtype, name="mlp")(y)


class CLIPEncoder(nn.Module):
    """Transformer layers, scanned if there are several."""

    config: CLIPLayersConfig
    dtype: DTypeLike
    causal: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], wanted: int
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b n d"]]:
        """Maps embeddings to the last layer's output and the input of layer `wanted`, counted from 0."""
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


# Logical axes of kernels (see `logical_axes`).
AXES = (
    (r"/token_embedding$", ("vocab", "embed")),
    (r"/position_embedding$", ("positions", "embed")),
    *LAYER_AXES,
    (r"layer_norm", ("embed",)),
    (r"^text_projection$", ("embed", "text")),
)

PREFIX = "text_model."
# Buffer that old versions of transformers saved with the parameters.
IGNORED: tuple[str, ...] = ("text_model.embeddings.position_ids",)

# Incorrect eos_token_id in the config of models saved before transformers corrected it.
LEGACY_EOS = 2


@dataclasses.dataclass(frozen=True)
class CLIPTextConfig:
    """Fields of transformers' config.json that change the network, with its defaults."""

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int = 512
    num_hidden_layers: int = number(12, 1, 1000)
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = number(1e-5, 0, 1)
    pad_token_id: int | None = number(1, 0)
    bos_token_id: int | None = number(49406, 0)
    eos_token_id: int = number(49407, 0)

    def __post_init__(self):
        check_layers(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CLIPTextConfig":
        """Reads the configuration from a transformers config.json, whose other fields are about training.

        Raises:
          ValueError: a field has an unsupported value.
        """
        if config.get("model_type", "clip_text_model") != "clip_text_model":
            raise ValueError(
                f"model_type must be 'clip_text_model' but is {config['model_type']!r}"
            )
        if not isinstance(config.get("eos_token_id", LEGACY_EOS), int):
            raise ValueError(f"eos_token_id must be one number but is {config['eos_token_id']!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        check_values(cls, config)
        return cls(**{name: value for name, value in config.items() if name in known})


def pooling_positions(ids: Int[Array, "b n"], eos_token_id: int) -> Int[Array, "b"]:
    """Returns the end of each prompt: its first end token (position 0 if it has none).

    If a model's config has LEGACY_EOS, a prompt ends at its largest id, because the end token is the last one of CLIP's
    vocabulary.
    """
    if eos_token_id == LEGACY_EOS:
        return jnp.argmax(ids, axis=-1)
    return jnp.argmax(ids == eos_token_id, axis=-1)


class CLIPTextEmbeddings(nn.Module):
    """Token plus position embeddings."""

    config: CLIPTextConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, ids: Int[Array, "b n"]) -> Float[Array, "b n d"]:
        """Maps token ids to embeddings."""
        config, dtype = self.config, self.dtype
        width, length = config.hidden_size, config.max_position_embeddings
        tokens = nn.Embed(config.vocab_size, width, dtype=dtype, name="token_embedding")
        positions = nn.Embed(length, width, dtype=dtype, name="position_embedding")
        return tokens(ids) + positions(jnp.arange(ids.shape[1]))


class CLIPTextTransformer(nn.Module):
    """Embeddings, layers and the final norm."""

    config: CLIPTextConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, ids: Int[Array, "b n"], wanted: int
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b d"]]:
        """Maps token ids to the input of layer `wanted` and the normed last state of the end token."""
        x = CLIPTextEmbeddings(self.config, self.dtype, name="embeddings")(ids)
        x, kept = CLIPEncoder(self.config, self.dtype, causal=True, name="encoder")(x, wanted)
        x = norm(self.config, self.dtype, "final_layer_norm")(x)
        ends = pooling_positions(ids, self.config.eos_token_id)
        return kept, jnp.take_along_axis(x, ends[:, None, None], axis=1)[:, 0]


def check_length(ids: Int[Array, "b n"], config: CLIPTextConfig) -> None:
    """Raises ValueError if there are more tokens than positions."""
    if ids.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"ids has {ids.shape[1]} tokens per prompt but max_position_embeddings is "
            f"{config.max_position_embeddings}: truncate the prompts"
        )


class CLIPTextModel(nn.Module):
    """CLIP text encoder without projection; computes in and returns `dtype`."""

    config: CLIPTextConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, "b n"]) -> Float[Array, "b d"]:
        """Returns transformers' `pooler_output`; padding is not masked, but follows the end token.

        Raises:
          ValueError: there are more tokens than max_position_embeddings.
        """
        check_length(ids, self.config)
        transformer = CLIPTextTransformer(self.config, self.dtype, name="text_model")
        return transformer(ids, self.config.num_hidden_layers)[1]


def stored_name(name: str) -> str:
    """Returns a CLIPTextModel tensor's name in published files; transformers 5 saves it without a prefix."""
    return name if name.startswith(PREFIX) else PREFIX + name


class CLIPTextModelWithProjection(nn.Module):
    """CLIP text encoder for conditioning of a diffusion model; computes in and returns `dtype`."""

    config: CLIPTextConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, ids: Int[Array, "b n"], hidden_state: int = -2
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b p"]]:
        """Returns one hidden state of every token, and the projected state of the end token.

        Attention includes the padding: neither SD3 nor FLUX masks it.

        Args:
          ids: Token ids; a prompt without an end token is pooled at its first position.
          hidden_state: Index into num_hidden_layers + 1 states: the embeddings, then each layer's output before the
            final norm. SD3 uses the penultimate state.

        Raises:
          ValueError: there are more tokens than max_position_embeddings, or no such state.
        """
        states = self.config.num_hidden_layers + 1
        check_length(ids, self.config)
        if not -states <= hidden_state < states:
            raise ValueError(f"hidden_state {hidden_state} must be in [{-states}, {states})")
        transformer = CLIPTextTransformer(self.config, self.dtype, name="text_model")
        kept, pooled = transformer(ids, hidden_state % states)
        project = nn.Dense(
            self.config.projection_dim, use_bias=False, dtype=self.dtype, name="text_projection"
        )
        return kept, project(pooled)


def inputs(config: Any) -> tuple[Int[Array, "1 2"]]:
    """Returns ids of a short text, for `init`."""
    return (jnp.zeros((1, 2), jnp.int32),)


WITH_PROJECTION = Component(
    library="transformers",
    classes=("CLIPTextModelWithProjection",),
    network=CLIPTextModelWithProjection,
    read_config=CLIPTextConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    ignored=lambda network: IGNORED,
    tokenizer="CLIPTokenizer",
)
WITHOUT_PROJECTION = dataclasses.replace(
    WITH_PROJECTION, classes=("CLIPTextModel",), network=CLIPTextModel, renamed=stored_name
)
