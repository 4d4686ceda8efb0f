"""Decoder-only language models as text encoders: Qwen2.5-VL (its text path), Qwen2, Qwen3, Llama and Mistral.

Their hidden states condition Qwen-Image, Z-Image, FLUX.2 klein and HunyuanVideo. Names follow transformers'
Qwen3ForCausalLM; the LM head is never read.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.attention.attend import attend
from digen_jax.files import check_values, number
from digen_jax.models import rotary
from digen_jax.models.family import Component
from digen_jax.models.layers import block_run

# transformers' `default_theta` for files without it.
THETA, THETA_OF_QWEN2_5_VL = 1e4, 1e6
ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Fields of transformers' config.json that change the network.

    Attributes:
      num_key_value_heads: Key and value heads. None means num_attention_heads.
      head_dim: Width of a head. None means hidden_size / num_attention_heads.
      sliding_window: Tokens that a layer attends to. None means all.
      scaling: Scaling of rotary frequencies. None means no scaling.
    """

    model_type: Literal["qwen2_5_vl", "qwen2_5_vl_text", "qwen2", "qwen3", "llama", "mistral"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = number(dataclasses.MISSING, 1, 1000)
    num_attention_heads: int
    rms_norm_eps: float = number(dataclasses.MISSING, 0, 1)
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    rope_theta: float = number(THETA, 1, 1e12)
    scaling: rotary.Llama3Scaling | None = None

    def __post_init__(self):
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads"
                f" {self.num_attention_heads} where there is no head_dim"
            )
        if self.num_attention_heads % self.groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads"
                f" {self.groups}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_dim must be even but is {self.head_width}")

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LanguageModelConfig":
        """Reads the configuration from a transformers config.json, whose other fields do not change the network.

        Raises:
          ValueError: a field is missing, or has an unsupported value.
        """
        text = config.get("text_config")
        config = dict(config if text is None else _mapping("text_config", text))
        fields = dataclasses.fields(cls)
        for field in fields:
            if field.default is dataclasses.MISSING and field.name not in config:
                raise ValueError(f"{field.name} is missing")
        config["rope_theta"], scaling = _rope(config)
        config.pop("scaling", None)
        check_values(cls, config)
        for name in ("rope_theta", "rms_norm_eps"):
            config[name] = float(config[name])
        config |= {"scaling": scaling, "sliding_window": _window(config)}
        if config["model_type"] == "qwen3":
            config.setdefault("head_dim", 128)
        return cls(**{field.name: config[field.name] for field in fields if field.name in config})


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Fields of Qwen's config.json that select the layers with a sliding window."""

    use_sliding_window: bool | None
    max_window_layers: int | None = number(None, 0)
    layer_types: tuple[str, ...] | None = None


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, not {value!r}")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[Any, rotary.Llama3Scaling | None]:
    """Returns the base of the frequencies and their scaling.

    transformers 5 has both in `rope_parameters`, earlier versions have the scaling in `rope_scaling`. The three
    position axes of Qwen2.5-VL (`mrope_section`) are equal for text (see `ImageLayout`).
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = _mapping(name, config.get(name) or {})
    vision = str(config["model_type"]).startswith("qwen2_5_vl")
    default = THETA_OF_QWEN2_5_VL if vision else THETA
    theta = given.get("rope_theta", config.get("rope_theta", default))
    kind = given.get("rope_type", given.get("type", "default"))
    if vision and kind == "mrope":
        kind = "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"{name}: rope_type must be 'default' or 'llama3' but is {kind!r}")
    scaled = [field.name for field in dataclasses.fields(rotary.Llama3Scaling)]
    known = {*ROPE_FIELDS, *scaled * (kind == "llama3"), *["mrope_section"] * vision}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{name}: {unknown[0]} is not supported with rope_type {kind!r}")
    part = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    if part != 1:
        raise ValueError(f"partial_rotary_factor must be 1 but is {part!r}")
    if kind == "default":
        return theta, None
    if missing := [field for field in scaled if field not in given]:
        raise ValueError(f"{name}: {missing[0]} is missing")
    try:
        check_values(rotary.Llama3Scaling, given)
        return theta, rotary.Llama3Scaling(**{field: given[field] for field in scaled})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _window(config: Mapping[str, Any]) -> int | None:
    """Returns the sliding window in tokens, or None if all layers attend to all tokens."""
    kind, window = config["model_type"], config.get("sliding_window")
    if kind == "mistral":
        return window
    check_values(_Windows, config)
    layers, full = config["num_hidden_layers"], config.get("max_window_layers") or 0
    types = config.get("layer_types") or ["full_attention"] * min(layers, full)
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types: {min(unknown)!r} is not supported")
    slides = len(types) < layers or "sliding_attention" in types
    return window if kind != "llama" and config.get("use_sliding_window") and slides else None


LISTS: tuple[str, ...] = ("layers",)

# Logical axes of kernels (see `logical_axes`).
AXES = (
    (r"/embed_tokens$", ("vocab", "embed")),
    (r"self_attn/[qkv]_proj$", ("embed", "heads")),
    (r"self_attn/[qk]_norm$", ("head_dim",)),
    (r"self_attn/o_proj$", ("heads", "embed")),
    (r"mlp/(gate|up)_proj$", ("embed", "mlp")),
    (r"mlp/down_proj$", ("mlp", "embed")),
    (r"norm$", ("embed",)),
)

# Tensors that the text path does not use: the head, the vision tower, a buffer of old versions of transformers.
IGNORED: tuple[str, ...] = (
    "lm_head.weight",
    "visual.*",
    "model.visual.*",
    "model.*rotary_emb.inv_freq",
)

# Prefixes that correspond to `model.`, for models with and without a vision tower, and with and without a head.
PREFIXES = ("model.language_model.", "language_model.", "model.", "")
CHILDREN = ("embed_tokens.", "layers.", "norm.")


def canonical_name(name: str) -> str:
    """Returns the name in this package of a tensor in a file (see `PREFIXES`)."""
    for prefix in PREFIXES:
        if name.startswith(prefix) and name[len(prefix) :].startswith(CHILDREN):
            return "model." + name[len(prefix) :]
    return name


def state_indices(config: LanguageModelConfig, states: tuple[int, ...]) -> tuple[int, ...]:
    """Returns nonnegative indices of hidden states; negative ones count from the last.

    Raises:
      ValueError: `states` is empty or names a state that does not exist.
    """
    count = config.num_hidden_layers + 1
    if not states:
        raise ValueError("states must name at least one hidden state")
    for state in states:
        if not -count <= state < count:
            raise ValueError(f"hidden state {state} must be in [{-count}, {count})")
    return tuple(state % count for state in states)


def unused(config: LanguageModelConfig, states: tuple[int, ...]) -> tuple[str, ...]:
    """Returns patterns of tensors, by `canonical_name`, that a model with these states does not read."""
    layers = config.num_hidden_layers
    last = max(state_indices(config, states))
    above = tuple(f"model.layers.{layer}.*" for layer in range(last, layers))
    return IGNORED + above + ("model.norm.weight",) * (last < layers)


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """Places of the images in prompts, which are the same in all prompts.

    Attributes:
      starts: Place of the first token of each image.
      rows: Rows of tokens of each image, which are row by row.
      columns: Columns of tokens.
      sections: Pairs of channels of a head that are rotated by a token's time, row and column.
    """

    starts: tuple[int, ...]
    rows: int
    columns: int
    sections: tuple[int, ...]

    @property
    def tokens(self) -> Int[np.ndarray, "m"]:
        """Places of all tokens of images."""
        return np.concatenate(
            [start + np.arange(self.rows * self.columns) for start in self.starts]
        )

    def positions(self, length: int) -> Float32[np.ndarray, "n half"]:
        """Returns the position of each token for each pair of channels: transformers' `get_rope_index`.

        A text token has the same position on all axes. The first one after an image is one above its last positions.
        """
        found = np.repeat(np.arange(length, dtype=np.float32)[:, None], 3, axis=1)
        grid = np.indices((1, self.rows, self.columns)).reshape(3, -1).T
        for start in self.starts:
            end = start + len(grid)
            found[end:] += max(self.rows, self.columns) - len(grid)
            found[start:end] = found[start] + grid
        return np.repeat(found, self.sections, axis=1)


class ImageStates(NamedTuple):
    """Tokens of all images of each prompt, used instead of embeddings, and their places."""

    states: Float[Array, "b m d"]
    layout: ImageLayout


def _norm(config: LanguageModelConfig, dtype: DTypeLike, name: str) -> nn.RMSNorm:
    """Returns an RMS norm over the last axis (arXiv 1910.07467) with float32 statistics."""
    return nn.RMSNorm(epsilon=config.rms_norm_eps, dtype=dtype, name=name)


class Attention(nn.Module):
    """Causal self-attention with grouped heads and rotary positions."""

    config: LanguageModelConfig
    dtype: DTypeLike
    layout: ImageLayout | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], lengths: Int[Array, "b"]) -> Float[Array, "b n d"]:
        """Attends from each token, including padding, to valid tokens up to its position."""
        config, dtype = self.config, self.dtype
        biased = config.attention_bias and config.model_type in ("llama", "qwen3")
        qkv_biased = biased or config.model_type.startswith("qwen2")

        def heads(name: str, number: int) -> Float[Array, "b n h w"]:
            width = number * config.head_width
            y = nn.Dense(width, use_bias=qkv_biased, dtype=dtype, name=name)(x)
            return y.reshape(*x.shape[:2], number, config.head_width)

        q = heads("q_proj", config.num_attention_heads)
        k, v = heads("k_proj", config.groups), heads("v_proj", config.groups)
        if config.model_type == "qwen3":
            q, k = _norm(config, dtype, "q_norm")(q), _norm(config, dtype, "k_norm")(k)
        frequencies = rotary.inverse_frequencies(config.head_width, config.rope_theta)
        if config.scaling is not None:
            frequencies = rotary.llama3_scaled(frequencies, config.scaling)
        positions = np.arange(x.shape[1], dtype=np.float32)
        if self.layout is not None:
            positions = self.layout.positions(x.shape[1])
        turns = rotary.cos_sin(positions, frequencies)
        q, k = rotary.rotate_halves(q, *turns), rotary.rotate_halves(k, *turns)
        y = attend(q, k, v, lengths, causal=True).reshape(*x.shape[:2], -1)
        return nn.Dense(config.hidden_size, use_bias=biased, dtype=dtype, name="o_proj")(y)


class MLP(nn.Module):
    """Gated feed-forward layer, SwiGLU (arXiv 2002.05202)."""

    hidden: int
    use_bias: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Applies the layer to each token."""

        def linear(name: str, width: int) -> nn.Dense:
            return nn.Dense(width, use_bias=self.use_bias, dtype=self.dtype, name=name)

        y = nn.silu(linear("gate_proj", self.hidden)(x)) * linear("up_proj", self.hidden)(x)
        return linear("down_proj", x.shape[-1])(y)


class DecoderLayer(nn.Module):
    """Transformer block, normed before attention and before the MLP."""

    config: LanguageModelConfig
    dtype: DTypeLike
    layout: ImageLayout | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], lengths: Int[Array, "b"]
    ) -> tuple[Float[Array, "b n d"], None]:
        """Maps tokens to tokens; the second result is for `nn.scan`, which collects nothing."""
        config, dtype = self.config, self.dtype
        y = _norm(config, dtype, "input_layernorm")(x)
        x = x + Attention(config, dtype, self.layout, name="self_attn")(y, lengths)
        y = _norm(config, dtype, "post_attention_layernorm")(x)
        biased = config.mlp_bias and config.model_type == "llama"
        return x + MLP(config.intermediate_size, biased, dtype, name="mlp")(y), None


class Decoder(nn.Module):
    """Embeddings and the layers up to the last requested state, scanned from each state to the next."""

    config: LanguageModelConfig
    states: tuple[int, ...]
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, ids: Int[Array, "b n"], lengths: Int[Array, "b"], images: ImageStates | None = None
    ) -> tuple[Float[Array, "b n d"], ...]:
        """Maps token ids and images to the states."""
        config, dtype = self.config, self.dtype
        x = nn.Embed(config.vocab_size, config.hidden_size, dtype=dtype, name="embed_tokens")(ids)
        if images is not None:
            x = x.at[:, images.layout.tokens].set(images.states)
        layout = None if images is None else images.layout
        found, done = {0: x}, 0
        for state in sorted(set(self.states) - {0}):
            layers = block_run(DecoderLayer, "layers", done, state - 1, "none")
            x, _ = layers(config, dtype, layout)(x, lengths)
            found[state] = x
            done = state
        if done == config.num_hidden_layers:
            found[done] = _norm(config, dtype, "norm")(x)
        return tuple(found[state] for state in self.states)


class LanguageModel(nn.Module):
    """Text encoder that returns hidden states; computes in and returns `dtype`.

    Attributes:
      states: Indices into transformers' `output_hidden_states`: 0 is the embeddings, i the output of layer i - 1, and
        the last one is normed. Negative indices count from the last. Layers above the largest index are not created.
    """

    config: LanguageModelConfig
    states: tuple[int, ...] = (-1,)
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        ids: Int[Array, "b n"],
        mask: Bool[Array, "b n"] | Int[Array, "b n"],
        images: ImageStates | None = None,
    ) -> tuple[Float[Array, "b n d"], ...]:
        """Returns the hidden states of all tokens, including padding, in the order of `states`.

        As in transformers, positions count all tokens from 0, and padding is not attended to.

        Args:
          ids: Token ids, arbitrary in the places of images.
          mask: Nonzero for a prompt's tokens, at least one per row, and 0 for trailing padding.
          images: Tokens of each prompt's images. None means that there are none.

        Raises:
          ValueError: there are more tokens than a layer's sliding window, or no such state.
        """
        window, n = self.config.sliding_window, ids.shape[1]
        if window is not None and n > window:
            raise ValueError(
                f"ids has {n} tokens per prompt but sliding_window is {window}, and windows are not "
                f"supported: truncate the prompts to {window} tokens"
            )
        lengths = (mask != 0).sum(axis=1).astype(jnp.int32)
        states = state_indices(self.config, self.states)
        return Decoder(self.config, states, self.dtype, name="model")(ids, lengths, images)


def inputs(config: LanguageModelConfig) -> tuple[Int[Array, "1 2"], Bool[Array, "1 2"]]:
    """Returns ids and mask of a short text, for `init`."""
    return jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)


def component(
    classes: tuple[str, ...], states: tuple[int, ...] = (-1,), tokenizer: str = "Qwen2Tokenizer"
) -> Component:
    """Returns the component of a family that reads the given hidden states of one of the given classes."""
    return Component(
        library="transformers",
        classes=classes,
        network=functools.partial(LanguageModel, states=states),
        read_config=LanguageModelConfig.from_config,
        inputs=inputs,
        lists=LISTS,
        axes=AXES,
        ignored=lambda network: unused(network.config, network.states),
        renamed=canonical_name,
        tokenizer=tokenizer,
    )
