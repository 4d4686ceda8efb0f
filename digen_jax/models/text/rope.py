"""Rotary position embedding (Su et al., arXiv 2104.09864): pairs of channels turn with a token's position."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from digen_jax.json_fields import number


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's slower frequencies for longer texts, with transformers' names (its `rope_type` "llama3").

    A wave longer than `original_max_position_embeddings / low_freq_factor` tokens gets `factor` times as long, one
    shorter than `original_max_position_embeddings / high_freq_factor` stays, and those between are interpolated.
    """

    factor: float | int = number(dataclasses.MISSING, 1)
    low_freq_factor: float | int = number(dataclasses.MISSING, 1e-6)
    high_freq_factor: float | int = number(dataclasses.MISSING, 1e-6)
    original_max_position_embeddings: int = number(dataclasses.MISSING, 1)

    def __post_init__(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be larger than low_freq_factor"
                f" {self.low_freq_factor}"
            )


def inverse_frequencies(width: int, theta: float) -> Float32[np.ndarray, "half"]:
    """theta^(-2i / width) for the pairs i of a head's channels: radians a token, rounded where torch rounds."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    powers = np.power(np.float64(theta), exponents.astype(np.float64))
    return np.float32(1) / powers.astype(np.float32)


def llama3_scaled(
    frequencies: Float32[np.ndarray, "half"], scaling: Llama3Scaling
) -> Float32[np.ndarray, "half"]:
    """The frequencies by `Llama3Scaling`."""
    frequencies = frequencies.astype(np.float64)
    waves = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return (frequencies * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def cos_sin(
    positions: Float32[np.ndarray, "n"], frequencies: Float32[np.ndarray, "half"]
) -> tuple[Float32[np.ndarray, "n half"], Float32[np.ndarray, "n half"]]:
    """Cosine and sine of float32 angles, which are positions times frequencies."""
    angles = np.outer(positions, frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate_halves(
    x: Float[Array, "b n h d"],
    cos: Float32[np.ndarray, "n half"],
    sin: Float32[np.ndarray, "n half"],
) -> Float[Array, "b n h d"]:
    """Turns channels i and i + d/2 as a pair, in float32, and rounds to x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
