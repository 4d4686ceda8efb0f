"""CRD, centered reward distillation (arXiv 2603.14128): implicit rewards of a group match its rewards.

The implicit reward of an image is how much smaller the policy's flow-matching error is than an older policy's. Within a
group both kinds of rewards are centered, because their offset depends on the prompt and is unknown, and regressed. It
needs only final images, from any sampler, and no log-probability. A KL pulls the policy to the guided initial model,
more strongly on images with higher rewards. The older and the sampling policy are two slow copies, so that the implicit
reward does not vanish.

This follows Flow-Factory (X-GenGroup/Flow-Factory, src/flow_factory/trainers/crd.py and examples/crd/lora/sd3_5,
a0b2bc5). Differences:

- it centers over the images of a micro-batch on all GPUs, here over a group, as in the paper.
- its noise levels are stratified and shared by the images of a micro-batch; here each group has a random subset.
- centering weighted by rewards (`weight_temp`), the loss "bce", and the initial model as the older policy are left out.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from digen_jax.algorithms.algorithm import (
    GroupMatching,
    LinearDecay,
    MatchingSamples,
    Velocities,
)
from digen_jax.algorithms.losses import mask_rows, required, velocity_mse
from digen_jax.diffusion.noising import ScheduleTimes
from digen_jax.errors import NonNegativeFloat, PositiveFloat

OLD_POLICY = LinearDecay(start=0, slope=0.005, largest=0.999, first=0.25)
SAMPLING_POLICY = LinearDecay(start=75, slope=0.0075, largest=0.999)
TIMES = ScheduleTimes(9)  # of the sampler's 10 steps
WEIGHT_FLOOR = 1e-5  # minimum mean absolute error by which a squared error is divided
LEAST_KL = 1e-4  # coefficient of the KL of an image with the lowest reward, if `adaptive_kl`


@dataclasses.dataclass(frozen=True)
class CRD(GroupMatching):
    """Settings, with the defaults of Flow-Factory's code for Stable Diffusion 3.5 M on OCR."""

    name: ClassVar[str] = "crd"
    shares_noise: ClassVar[bool] = False

    beta: PositiveFloat = 1.0  # factor of implicit rewards
    # clips advantages to [-adv_clip, adv_clip] before they are scaled to [0, 1]
    adv_clip: PositiveFloat = 5.0
    adaptive: bool = True  # whether an image's squared error is divided by its mean absolute error
    kl_coefficient: NonNegativeFloat = 0.1  # weight of the KL to the initial model; 0 means no KL
    # whether the KL's weight falls with an image's advantage, from kl_coefficient to 1e-4
    adaptive_kl: bool = True
    old_policy: LinearDecay = OLD_POLICY
    sampling_policy: LinearDecay = SAMPLING_POLICY
    # guidance scale in training; 0 means the sampler's; 1 or less otherwise means none
    guidance: NonNegativeFloat = 1.0
    # guidance scale of the reference; 0 means `guidance`
    reference_guidance: NonNegativeFloat = 4.5
    times: ScheduleTimes = TIMES

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that `crd_loss` returns."""
        names = "loss", "policy_loss", "matching_error", "implicit_reward"
        return (*names, *(("kl",) if self.kl_coefficient else ()))

    @property
    def slow_copy(self) -> LinearDecay:
        """Decay of the older policy of implicit rewards."""
        return self.old_policy

    @property
    def sampling_copy(self) -> LinearDecay:
        """Decay of the policy that samples."""
        return self.sampling_policy

    @property
    def reads_reference(self) -> bool:
        """Whether there is a KL to the initial policy."""
        return self.kl_coefficient > 0

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """Returns the terms of `crd_loss`."""
        given = samples.target, samples.advantages, samples.trained
        return crd_loss(self, v.trained, *given, required(v.copy, "v_copy", self), v.reference)


def crd_loss(
    settings: CRD,
    v: Float[Array, "n g *shape"],
    target: Float[Array, "n g *shape"],
    advantages: Float[Array, "n g"],
    trained: Bool[Array, "n"],
    v_copy: Float[Array, "n g *shape"],
    v_reference: Float[Array, "n g *shape"] | None = None,
) -> dict[str, Float32[Array, "n"]]:
    """Returns adv_clip / beta mean((beta (r - mean r) - (a - mean a))^2) + mean(k KL) over the g images, per group.

    a = 1/2 + A / (2 adv_clip) is the clipped advantage A in [0, 1], and r = e_old - e the implicit reward, with mean r
    without gradient. e is the flow-matching error (v - target)^2, divided by the mean of |v - target| if `adaptive`,
    which has no gradient and is at least 1e-5; e_old is the slow copy's. KL = (v - v_reference)^2, and its coefficient
    k is kl_coefficient or, if `adaptive_kl`, 1e-4 + a (kl_coefficient - 1e-4).

    Args:
      settings: Settings.
      v: Velocities of the policy being trained, with gradient, at images noised to the group's level.
      target: eps - x0, with a separate noise for each image.
      advantages: Advantages before clipping.
      trained: False for padding, whose terms and gradient are 0 for any values.
      v_copy: Velocities of the slow copy, without gradient.
      v_reference: Velocities of the initial policy, if kl_coefficient is above 0.

    Returns:
      Terms per group, to be weighted and summed: loss, policy_loss; matching_error, the mean of (v - target)^2;
      implicit_reward, the mean of r; and kl.

    Raises:
      ValueError: `v_reference` is missing although kl_coefficient is above 0.
    """
    v, target, advantages, v_copy = mask_rows(trained, v, target, advantages, v_copy)
    axes = tuple(range(2, v.ndim))

    def error(v: Array) -> Array:
        square = jnp.mean((v - target) ** 2, axis=axes)
        if not settings.adaptive:
            return square
        weight = jnp.maximum(jnp.mean(jnp.abs(v - target), axis=axes), WEIGHT_FLOOR)
        return square / jax.lax.stop_gradient(weight)

    scaled = jnp.clip(advantages, -settings.adv_clip, settings.adv_clip) / settings.adv_clip
    rewards = scaled / 2 + 0.5
    implicit = error(jax.lax.stop_gradient(v_copy)) - error(v)
    mean = jax.lax.stop_gradient(jnp.mean(implicit, axis=1, keepdims=True))
    off = settings.beta * (implicit - mean) - (rewards - jnp.mean(rewards, axis=1, keepdims=True))
    policy_loss = settings.adv_clip / settings.beta * jnp.mean(off**2, axis=1)
    terms = {
        "loss": policy_loss,
        "policy_loss": policy_loss,
        "matching_error": velocity_mse(v, target),
        "implicit_reward": mean[:, 0],
    }
    if settings.kl_coefficient:
        (v_reference,) = mask_rows(trained, required(v_reference, "v_reference", settings))
        kl = jnp.mean((v - jax.lax.stop_gradient(v_reference)) ** 2, axis=axes)
        weight: float | Array = settings.kl_coefficient
        if settings.adaptive_kl:
            weight = LEAST_KL + rewards * (settings.kl_coefficient - LEAST_KL)
        terms |= {"loss": policy_loss + jnp.mean(weight * kl, axis=1), "kl": jnp.mean(kl, axis=1)}
    return terms
