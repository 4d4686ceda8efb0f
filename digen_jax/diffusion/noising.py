"""Forward process for training: noise levels and noise of each image, from the image's key.

They depend only on the image's key and the sample number, not on the batch, nor on where or when the image is
trained.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int, Key

from digen_jax.errors import Count, PositiveFloat, PositiveInt

# Streams of an image's key, in addition to START and TRANSITION of `sampling`.
FORWARD_NOISE, TRAINING_TIMES, REPEATS = 2, 3, 4


class Noised(NamedTuple):
    """Images at a noise level, and the velocity targets of flow matching."""

    x: Float32[Array, "n ..."]
    target: Float32[Array, "n ..."]


@dataclasses.dataclass(frozen=True)
class ScheduleTimes:
    """Samples a random subset of the sampler's steps for each image, without replacement, in random order.

    As in DiffusionNFT's public code (arXiv 2509.16117), which trains 9 of its 10 steps, each image has a separate
    permutation. The subset may include the first step, sigma = 1, where x is noise only.
    """

    count: PositiveInt  # noise levels per image, from the sampler's steps
    first: Count = 0  # number of the sampler's first steps to choose from; 0 means all

    def check(self, steps: int) -> None:
        """Raises ValueError if a schedule of `steps` steps is too short for `first` or `count`."""
        if self.first > steps:
            raise ValueError(
                f"first is {self.first}; set it to {steps}, the sampler's steps, or less"
            )
        steps = self.first or steps
        if self.count > steps:
            raise ValueError(f"count is {self.count}; train 1 to {steps}, the steps to choose from")

    def draw(
        self, keys: Key[Array, "b"], sigmas: Float[ArrayLike, "sigmas"]
    ) -> Float32[Array, "s b"]:
        """Returns the noise levels of each image; `sigmas` is the sampler's schedule, including the last one, 0.

        Raises:
          ValueError: the schedule has too few steps.
        """
        sigmas = jnp.asarray(sigmas, jnp.float32)[:-1]
        self.check(len(sigmas))
        sigmas = sigmas[: self.first or None]

        def draw(key):
            return jax.random.permutation(key, sigmas)[: self.count]

        return jax.vmap(draw, out_axes=1)(times_keys(keys))


@dataclasses.dataclass(frozen=True)
class LogitNormalTimes:
    """Samples noise levels sigmoid(mean + std z), z standard normal, then shifted (arXiv 2403.03206).

    This is the density of Stable Diffusion 3's pretraining, with the schedule's `shift`. All noise levels of
    an image are independent (AWM's public code stratifies them and shares them within a micro-batch).
    """

    count: PositiveInt  # noise levels per image
    mean: float = 0.0  # mean of z, the normal variable whose sigmoid is the noise level
    std: PositiveFloat = 1.0  # standard deviation of z
    shift: PositiveFloat = 1.0  # schedule shift of the noise levels; above 1 means noisier

    def draw(
        self, keys: Key[Array, "b"], sigmas: Float[ArrayLike, "sigmas"]
    ) -> Float32[Array, "s b"]:
        """Returns the noise levels of each image; the schedule is not read."""

        def draw(key):
            return jax.random.normal(key, (self.count,))

        z = jax.vmap(draw, out_axes=1)(times_keys(keys))
        sigma = jax.nn.sigmoid(self.mean + self.std * z)
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)


class FirstLevel:
    """The schedule's first noise level: one pass for each image, whose algorithm chooses the steps by itself."""

    count: ClassVar[int] = 1

    def draw(
        self, keys: Key[Array, "b"], sigmas: Float[ArrayLike, "sigmas"]
    ) -> Float32[Array, "1 b"]:
        """Returns the noise level of each image."""
        sigma = jnp.asarray(sigmas, jnp.float32)[0]
        return jnp.broadcast_to(sigma, (1, len(keys)))


Times = ScheduleTimes | LogitNormalTimes | FirstLevel


def forward_noise(
    keys: Key[Array, "n"], draws: Int[ArrayLike, "n"], shape: tuple[int, ...]
) -> Float32[Array, "n ..."]:
    """Samples standard normal noise of `shape`; `draws` are the sample numbers of the images.

    Different sample numbers give independent noise, which is also independent of the noise of sampling.
    """

    def draw(key, number):
        return jax.random.normal(jax.random.fold_in(key, number), shape)

    return jax.vmap(draw)(_stream(keys, FORWARD_NOISE), jnp.asarray(draws))


def times_keys(keys: Key[Array, "n"]) -> Key[Array, "n"]:
    """Returns the keys that draw noise levels or steps for training."""
    return _stream(keys, TRAINING_TIMES)


def repeat_keys(keys: Key[Array, "b"], repeat: int) -> Key[Array, "b"]:
    """Returns other keys for images that were trained in `repeat` earlier passes, for new noise and noise levels.

    Without an earlier pass they are the images' keys.
    """
    if not repeat:
        return keys
    return jax.vmap(lambda key: jax.random.fold_in(key, repeat))(_stream(keys, REPEATS))


def noised(
    x0: Float[Array, "n *shape"], noise: Float[Array, "n *shape"], sigma: Float[Array, "n"]
) -> Noised:
    """Returns images x = (1 - sigma) x0 + sigma noise and target velocities noise - x0, in float32."""
    x0, noise, sigma = (jnp.asarray(a, jnp.float32) for a in (x0, noise, sigma))
    sigma = sigma.reshape(-1, *(1,) * (x0.ndim - 1))
    return Noised((1 - sigma) * x0 + sigma * noise, noise - x0)


def noised_together(
    x0: Float[Array, "n k *shape"], noise: Float[Array, "n *shape"], sigma: Float[Array, "n"]
) -> Noised:
    """Adds one noise at one noise level to the k images of each sample; x and target are `[n k ...]`."""
    return jax.vmap(noised, in_axes=(1, None, None), out_axes=1)(x0, noise, sigma)


def _stream(keys: Key[Array, "n"], number: int) -> Key[Array, "n"]:
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
