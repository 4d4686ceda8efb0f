"""The config.json of the language models that `language_model` covers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from digen_jax.json_fields import check_values, number
from digen_jax.models.text import rope

# transformers' `default_theta` for files that do not give it.
THETA, THETA_OF_QWEN2_5_VL = 1e4, 1e6
ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """The fields of transformers' config.json that change the network.

    Attributes:
      num_key_value_heads: None: as many as num_attention_heads.
      head_dim: width of a head; None: hidden_size / num_attention_heads.
      sliding_window: tokens that a layer attends to; None: all.
      scaling: of rotary frequencies; None: none.
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
    scaling: rope.Llama3Scaling | None = None

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
        """The configuration in a transformers config.json, whose other fields are about other uses.

        Raises:
          ValueError: a field is missing, or has a value that this network does not support.
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
    """The fields of Qwen's config.json that say which layers have a sliding window."""

    use_sliding_window: bool | None
    max_window_layers: int | None = number(None, 0)
    layer_types: tuple[str, ...] | None = None


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, not {value!r}")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[Any, rope.Llama3Scaling | None]:
    """The base of the frequencies and their scaling.

    transformers 5 has both in `rope_parameters`, earlier versions the scaling in `rope_scaling`. The three axes of
    Qwen2.5-VL's positions (`mrope_section`) are equal for a text, so that its rope is an ordinary one.
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
    scaled = [field.name for field in dataclasses.fields(rope.Llama3Scaling)]
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
        check_values(rope.Llama3Scaling, given)
        return theta, rope.Llama3Scaling(**{field: given[field] for field in scaled})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _window(config: Mapping[str, Any]) -> int | None:
    """The tokens that a layer with a sliding window attends to; None if all layers attend to all."""
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
