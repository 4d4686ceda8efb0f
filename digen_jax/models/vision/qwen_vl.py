"""Qwen2.5-VL with its vision tower (arXiv 2502.13923): encodes prompts with images, for Qwen-Image-Edit.

Names follow transformers' Qwen2_5_VLForConditionalGeneration. The tokens of an image are in the order of transformers'
`pixel_values`: merged tokens row by row, and the patches of each, which are side by side, row by row.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8
from PIL import Image

from digen_jax.attention.attend import attend
from digen_jax.files import check_values, number
from digen_jax.models import rotary
from digen_jax.models.family import Component
from digen_jax.models.layers import block_run
from digen_jax.models.text import language_model
from digen_jax.models.text.language_model import (
    MLP,
    ImageLayout,
    ImageStates,
    LanguageModel,
    LanguageModelConfig,
)
from digen_jax.models.vision import preprocess

Grid = tuple[int, int]  # rows and columns of an image's merged tokens

EPSILON = 1e-6
THETA = 10_000.0
# transformers' default `mrope_section`.
SECTIONS = 16, 24, 24
LISTS = (*language_model.LISTS, "blocks", "mlp")
# Logical axes of kernels (see `logical_axes`).
AXES = (
    (r"visual/patch_embed/proj$", ("channels", "embed")),
    (r"visual/.*attn/qkv$", ("embed", "heads")),
    (r"visual/.*attn/proj$", ("heads", "embed")),
    (r"visual/.*(norm[12]|ln_q)$", ("embed",)),
    (r"visual/merger/mlp_0$", ("embed", "mlp")),
    (r"visual/merger/mlp_2$", ("mlp", "embed")),
    *language_model.AXES,
)


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Fields of `vision_config` in transformers' config.json that change the network, with its defaults.

    Attributes:
      window_size: Side in pixels of the windows in which most blocks attend.
      fullatt_block_indexes: Blocks that attend to the complete image.
    """

    depth: int = number(32, 1, 1000)
    hidden_size: int = 3584
    intermediate_size: int = 3420
    num_heads: int = 16
    patch_size: int = number(14, 1, 1000)
    temporal_patch_size: int = number(2, 1, 100)
    spatial_merge_size: int = number(2, 1, 100)
    window_size: int = number(112, 1, 2**14)
    out_hidden_size: int = 3584
    fullatt_block_indexes: tuple[int, ...] = number((7, 15, 23, 31), 0, 1000)
    in_channels: int = number(3, 3, 3)
    hidden_act: Literal["silu"] = "silu"

    def __post_init__(self):
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of 4 times num_heads {self.num_heads}"
            )
        if self.window_side < 1:
            raise ValueError(
                f"window_size {self.window_size} must be at least {self.side}, the side of a merged token"
            )

    @classmethod
    def from_config(cls, config: Any) -> "VisionConfig":
        """Reads `vision_config`, whose other fields do not change the network.

        Raises:
          ValueError: a field has an unsupported value.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"vision_config must be an object, not {config!r}")
        theta = (config.get("rope_parameters") or {}).get("rope_theta", THETA)
        if theta != THETA:
            raise ValueError(f"rope_theta of vision_config must be {THETA:g}, not {theta!r}")
        fields = {field.name for field in dataclasses.fields(cls)}
        check_values(cls, config)
        given = {name: value for name, value in config.items() if name in fields}
        if "fullatt_block_indexes" in given:
            given["fullatt_block_indexes"] = tuple(given["fullatt_block_indexes"])
        return cls(**given)

    @property
    def side(self) -> int:
        """Pixels along each side of a merged token."""
        return self.patch_size * self.spatial_merge_size

    @property
    def window_side(self) -> int:
        """Merged tokens along each side of a window."""
        return self.window_size // self.side


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig(LanguageModelConfig):
    """Configurations of the language model and the vision tower.

    Attributes:
      vision: Configuration of the vision tower.
      mrope_section: Pairs of channels of a head that are rotated by a token's time, row and column.
    """

    vision: VisionConfig
    mrope_section: tuple[int, ...] = SECTIONS

    def __post_init__(self):
        super().__post_init__()
        if len(self.mrope_section) != 3 or 2 * sum(self.mrope_section) != self.head_width:
            raise ValueError(
                f"mrope_section must be three numbers whose sum is half of head_dim {self.head_width}, not "
                f"{list(self.mrope_section)}"
            )
        if self.vision.out_hidden_size != self.hidden_size:
            raise ValueError(
                f"out_hidden_size {self.vision.out_hidden_size} of vision_config must be hidden_size {self.hidden_size}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VisionLanguageConfig":
        """Reads both from a transformers config.json.

        Raises:
          ValueError: a field is missing, or has an unsupported value.
        """
        text = LanguageModelConfig.from_config(config)
        fields = {field.name: getattr(text, field.name) for field in dataclasses.fields(text)}
        own = config.get("text_config") or config
        rope = own.get("rope_scaling") or own.get("rope_parameters") or {}
        sections = rope.get("mrope_section", SECTIONS)
        if not all(isinstance(one, int) and one >= 0 for one in sections):
            raise ValueError(f"mrope_section must be three integers, not {sections!r}")
        vision = VisionConfig.from_config(config.get("vision_config"))
        return cls(**fields, vision=vision, mrope_section=tuple(sections))


@dataclasses.dataclass(frozen=True)
class VisionProcessor:
    """Settings of transformers' Qwen2VLImageProcessor.

    Attributes:
      least: Minimum pixels of a resized image.
      most: Maximum pixels of a resized image.
      pixels: Filter and normalization.
    """

    least: int = 56 * 56
    most: int = 28 * 28 * 1280
    pixels: preprocess.Pixels = dataclasses.field(default_factory=preprocess.Pixels)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VisionProcessor":
        """Reads a preprocessor_config.json, with transformers' defaults.

        Raises:
          ValueError: names a field with an unsupported value.
        """
        size = config.get("size") or {}
        least = config.get("min_pixels") or size.get("shortest_edge", cls.least)
        most = config.get("max_pixels") or size.get("longest_edge", cls.most)
        if not all(type(one) is int for one in (least, most)) or not 0 < least <= most:
            raise ValueError(
                f"min_pixels and max_pixels must be positive and in this order, not {least!r} and {most!r}"
            )
        return cls(least, most, preprocess.Pixels.from_config(config))

    def grid(self, height: int, width: int, side: int) -> Grid:
        """Returns the rows and columns of merged tokens of `side` pixels that an image of height x width is resized to.

        Raises:
          ValueError: the resized image has too few or too many pixels.
        """
        rows, columns = round(height / side), round(width / side)
        if not self.least <= rows * columns * side**2 <= self.most:
            raise ValueError(
                f"an image of {height}x{width} does not fit the vision tower, which reads {self.least} to {self.most} "
                "pixels: use another aspect ratio"
            )
        return rows, columns

    def resize(self, image: Image.Image, grid: Grid, side: int) -> UInt8[np.ndarray, "h w 3"]:
        """Returns an image in the size of a grid of merged tokens."""
        rows, columns = grid
        kind = Image.Resampling[self.pixels.kind.upper()]
        return np.asarray(image.resize((columns * side, rows * side), kind))


def windows(grid: Grid, side: int) -> tuple[Int[np.ndarray, "w m"], Int[np.ndarray, "w"]]:
    """Returns the merged tokens of each window of side x side tokens, padded with 0, and their number.

    Windows at the right and lower edges may be smaller.
    """
    places = np.arange(grid[0] * grid[1]).reshape(grid)
    found = [
        places[top : top + side, left : left + side].ravel()
        for top in range(0, grid[0], side)
        for left in range(0, grid[1], side)
    ]
    lengths = np.array([len(one) for one in found])
    return np.stack([np.pad(one, (0, side**2 - len(one))) for one in found]), lengths


class VisionAttention(nn.Module):
    """Attention of an image's patches, in windows or over the complete image."""

    config: VisionConfig
    grid: Grid
    full: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Returns the update of each patch."""
        config, (batch, n, width) = self.config, x.shape
        qkv = nn.Dense(3 * width, dtype=self.dtype, name="qkv")(x)
        q, k, v = jnp.unstack(qkv.reshape(batch, n, 3, config.num_heads, -1), axis=2)
        turns = rotary.cos_sin(*self._angles(q.shape[-1]))
        q, k = (rotary.rotate_halves(a, *turns) for a in (q, k))
        if self.full:
            y = attend(q, k, v)
        else:
            merged, lengths = windows(self.grid, config.window_side)
            each = n // (self.grid[0] * self.grid[1])  # patches of a merged token
            patches = (merged[..., None] * each + np.arange(each)).reshape(len(merged), -1)
            q, k, v = (
                a[:, patches].reshape(-1, *patches.shape[1:], *a.shape[2:]) for a in (q, k, v)
            )
            y = attend(q, k, v, jnp.asarray(np.tile(lengths * each, batch)))
            valid = np.arange(patches.shape[1]) < lengths[:, None] * each
            order = np.argsort(patches[valid])
            y = y.reshape(batch, -1, *y.shape[2:])[:, np.flatnonzero(valid)[order]]
        return nn.Dense(width, dtype=self.dtype, name="proj")(y.reshape(batch, n, width))

    def _angles(self, width: int) -> tuple[Any, Any]:
        """Returns each patch's position for each pair of channels, row and then column, and the frequencies."""
        merge = self.config.spatial_merge_size
        rows, columns = (side * merge for side in self.grid)
        places = np.indices((rows, columns), np.float32)
        units = places.reshape(2, self.grid[0], merge, self.grid[1], merge)
        axes = units.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        frequencies = rotary.inverse_frequencies(width // 2, THETA)
        return np.repeat(axes, len(frequencies), axis=1), np.tile(frequencies, 2)


class VisionBlock(nn.Module):
    """Transformer block, normed before attention and before the MLP."""

    config: VisionConfig
    grid: Grid
    full: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> tuple[Float[Array, "b n d"], None]:
        """Maps patches to patches; the second result is for `nn.scan`, which collects nothing."""
        config, dtype = self.config, self.dtype
        y = nn.RMSNorm(epsilon=EPSILON, dtype=dtype, name="norm1")(x)
        x = x + VisionAttention(config, self.grid, self.full, dtype, name="attn")(y)
        y = nn.RMSNorm(epsilon=EPSILON, dtype=dtype, name="norm2")(x)
        return x + MLP(config.intermediate_size, True, dtype, name="mlp")(y), None


class PatchEmbed(nn.Module):
    """Convolution of patches, of which an image is repeated as all frames."""

    config: VisionConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """Maps pixels to patches in the order of this module."""
        config, merge = self.config, self.config.spatial_merge_size
        patch = config.temporal_patch_size, config.patch_size, config.patch_size
        options: Any = dict(use_bias=False, dtype=self.dtype, name="proj")
        clips = jnp.repeat(pixels[:, None], patch[0], axis=1)
        x = nn.Conv(config.hidden_size, patch, patch, "VALID", **options)(clips)
        batch, _, rows, columns, width = x.shape
        x = x.reshape(batch, rows // merge, merge, columns // merge, merge, width)
        return jnp.einsum("brmcnd->brcmnd", x).reshape(batch, rows * columns, width)


class PatchMerger(nn.Module):
    """Maps the patches of each merged token to a token of the language model."""

    config: VisionConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b m o"]:
        """Merges neighboring patches."""
        config, dtype = self.config, self.dtype
        x = nn.RMSNorm(epsilon=EPSILON, dtype=dtype, name="ln_q")(x)
        width = config.hidden_size * config.spatial_merge_size**2
        x = nn.Dense(width, dtype=dtype, name="mlp_0")(x.reshape(len(x), -1, width))
        x = nn.gelu(x, approximate=False)
        return nn.Dense(config.out_hidden_size, dtype=dtype, name="mlp_2")(x)


class VisionTower(nn.Module):
    """Maps images to tokens of the language model."""

    config: VisionConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b m o"]:
        """Returns the merged tokens of normalized images, whose sides are multiples of a merged token's."""
        config, dtype = self.config, self.dtype
        grid = pixels.shape[1] // config.side, pixels.shape[2] // config.side
        x = PatchEmbed(config, dtype, name="patch_embed")(pixels.astype(dtype))
        full = {block for block in config.fullatt_block_indexes if block < config.depth}
        first = 0
        for last in sorted({*full, *(block - 1 for block in full if block), config.depth - 1}):
            run = block_run(VisionBlock, "blocks", first, last, "none")
            x, _ = run(config, grid, last in full, dtype)(x)
            first = last + 1
        return PatchMerger(config, dtype, name="merger")(x)


class VisionLanguageModel(LanguageModel):
    """Text encoder that also reads images; computes in and returns `dtype`."""

    config: VisionLanguageConfig

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        ids: Int[Array, "b n"],
        mask: Bool[Array, "b n"] | Int[Array, "b n"],
        pixels: Float[Array, "b s h w 3"],
        layout: ImageLayout,
    ) -> tuple[Float[Array, "b n d"], ...]:
        """Returns the hidden states of all tokens (see `LanguageModel`).

        Args:
          ids: Token ids, arbitrary where images are.
          mask: Nonzero for a prompt's tokens, at least one per row, and 0 for trailing padding.
          pixels: Normalized images of each prompt.
          layout: Places of the images' tokens.

        Raises:
          ValueError: there are more tokens than a layer's sliding window, or no such state.
        """
        batch = len(pixels)
        tower = VisionTower(self.config.vision, self.dtype, name="visual")
        x = tower(pixels.reshape(-1, *pixels.shape[2:]))
        states = x.reshape(batch, -1, x.shape[-1])
        return super().__call__(ids, mask, ImageStates(states, layout))


def inputs(config: VisionLanguageConfig) -> tuple[Any, ...]:
    """Returns the inputs of a short text with a small image, for `init`."""
    pixels = jnp.zeros((1, 1, config.vision.side, config.vision.side, 3))
    layout = ImageLayout((0,), 1, 1, config.mrope_section)
    return *language_model.inputs(config), pixels, layout


def canonical_name(name: str) -> str:
    """Returns the name in this package of a tensor in a file, which may have "model." before "visual."."""
    visual = name.removeprefix("model.")
    return visual if visual.startswith("visual.") else language_model.canonical_name(name)


COMPONENT = Component(
    library="transformers",
    classes=("Qwen2_5_VLForConditionalGeneration",),
    network=VisionLanguageModel,
    read_config=VisionLanguageConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    ignored=lambda network: ("lm_head.weight", "model.*rotary_emb.inv_freq"),
    renamed=canonical_name,
    tokenizer="Qwen2Tokenizer",
)
