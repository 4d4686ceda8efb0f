"""DGPO, direct group preference optimization (arXiv 2510.08425): contrasts the good and bad images of a group.

The flow-matching loss of each image is weighted by its advantage, and by the probability that the policy, relative to a
reference, prefers the group's bad images to its good ones. It needs only final images, from any sampler, and
no log-probability. The images of a group are trained together, at one noise level, with one noise.

This follows the authors' code (Luo-Yihong/DGPO, scripts/train_sd3_dgpo.py and config/dgpo.py, 01ceb4b). Differences:

- its noise levels are the same for all groups of a step, and start just below 1, as its solver's; here each group has
  its own ones, of the sampler's schedule.
- its slow copy follows after every update, here after every step; it has one update per step.
- its option `clip_kl`, which no published config sets, is left out.

Flow-Factory (X-GenGroup/Flow-Factory, src/flow_factory/trainers/dgpo.py, a0b2bc5) has the same loss, with one noise for
all noise levels of an image.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from digen_jax.algorithms.algorithm import (
    GroupMatching,
    LinearDecay,
    MatchingSamples,
    Velocities,
)
from digen_jax.algorithms.losses import ClipRange, mask_rows, required, velocity_mse
from digen_jax.diffusion.noising import ScheduleTimes
from digen_jax.errors import Count, NonNegativeFloat, PositiveFloat

# The authors' min(0.3, 0.001 n), n the number of updates before the last one.
SLOW_COPY = LinearDecay(start=1, slope=0.001, largest=0.3)
TIMES = ScheduleTimes(4, first=7)  # of the sampler's 10 steps

_each = jax.vmap(velocity_mse, in_axes=1, out_axes=1)


@dataclasses.dataclass(frozen=True)
class DGPO(GroupMatching):
    """Settings, with the defaults of the authors' code for Stable Diffusion 3.5 M on OCR.

    That code samples with guidance 4.5. For GenEval it has `times.first` 5 and `copy_samples_from` 501; for PickScore
    beta 10, kl_coefficient 0.001 and clip_range 0.05; without guidance in sampling either clip_range 1e-3 and
    reference_guidance 4.5, or kl_coefficient 0.001, clip_range 1e-5, beta 2000 and `reference` "copy".
    """

    name: ClassVar[str] = "dgpo"
    config_defaults: ClassVar[dict] = dict(reference_guidance=0.0)

    beta: PositiveFloat = 100.0  # inverse temperature of the preference between images of a group
    # policy to which the preference is relative: the initial model, or the slow copy (TDM-R1, arXiv 2603.07700)
    reference: Literal["initial", "copy"] = "initial"
    # an image whose likelihood ratio to the slow copy, exp(old error - error), left [1 - clip_range, 1 + clip_range] in
    # the direction of its advantage is not trained
    clip_range: ClipRange = 1e-2
    adv_clip: PositiveFloat = 5.0  # clips advantages to [-adv_clip, adv_clip]
    kl_coefficient: NonNegativeFloat = 0.02  # weight of the KL to the initial model; 0 means no KL
    # number of updates from which the slow copy samples, instead of the trained policy
    copy_samples_from: Count = 201
    # guidance scale in training; 0 means the sampler's; 1 or less otherwise means none
    guidance: NonNegativeFloat = 1.0
    # guidance scale of the reference; 0 means `guidance`
    reference_guidance: NonNegativeFloat = 1.0
    times: ScheduleTimes = TIMES

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that `dgpo_loss` returns."""
        names = "loss", "policy_loss", "matching_error", "group_weight", "clip_fraction"
        return (*names, *(("kl",) if self.kl_coefficient else ()))

    @property
    def slow_copy(self) -> LinearDecay:
        """Decay of the copy to which ratios are clipped."""
        return SLOW_COPY

    @property
    def reads_copy(self) -> bool:
        """True: ratios are to the slow copy."""
        return True

    @property
    def reads_reference(self) -> bool:
        """Whether the preference or the KL is relative to the initial policy."""
        return self.reference == "initial" or self.kl_coefficient > 0

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """Returns the terms of `dgpo_loss`."""
        given = samples.target, samples.advantages, samples.trained
        return dgpo_loss(self, v.trained, *given, required(v.copy, "v_copy", self), v.reference)


def dgpo_loss(
    settings: DGPO,
    v: Float[Array, "n g *shape"],
    target: Float[Array, "n g *shape"],
    advantages: Float[Array, "n g"],
    trained: Bool[Array, "n"],
    v_copy: Float[Array, "n g *shape"],
    v_reference: Float[Array, "n g *shape"] | None = None,
) -> dict[str, Float32[Array, "n"]]:
    """Returns mean(w A e) + kl_coefficient mean((v - v_reference)^2) over the g images, per group.

    e is the flow-matching error of an image, and A its clipped advantage. w = sigmoid(beta mean(A (e - e_reference))),
    without gradient, is the probability that the policy's change since the reference is wrong: it is small where good
    images have already become more likely than bad ones. An image beyond its clip range has no gradient.

    Args:
      settings: Settings.
      v: Velocities of the policy being trained, with gradient, at images noised with the group's noise and level.
      target: eps - x0.
      advantages: Advantages before clipping.
      trained: False for padding, whose terms and gradient are 0 for any values.
      v_copy: Velocities of the slow copy, without gradient.
      v_reference: Velocities of the initial policy, if the settings read it.

    Returns:
      Terms per group, to be weighted and summed: loss, policy_loss; matching_error, the mean of e; group_weight w;
      clip_fraction, the share of images beyond the clip range; and kl.

    Raises:
      ValueError: `v_reference` is missing although the settings read it.
    """
    v, target, advantages, v_copy = mask_rows(trained, v, target, advantages, v_copy)
    initial = v_copy
    if settings.reads_reference:
        (initial,) = mask_rows(trained, required(v_reference, "v_reference", settings))
    advantages = jnp.clip(advantages, -settings.adv_clip, settings.adv_clip)
    error, old_error = _each(v, target), _each(jax.lax.stop_gradient(v_copy), target)
    fixed = jax.lax.stop_gradient(error)
    log_ratio = old_error - fixed
    high, low = jnp.log1p(settings.clip_range), jnp.log1p(-settings.clip_range)
    clipped = jnp.where(advantages > 0, log_ratio > high, log_ratio < low)
    before = v_copy if settings.reference == "copy" else initial
    change = fixed - _each(jax.lax.stop_gradient(before), target)
    weight = jax.nn.sigmoid(settings.beta * jnp.mean(advantages * change, axis=1))
    error = jnp.where(clipped, fixed, error)
    policy_loss = weight * jnp.mean(advantages * error, axis=1)
    terms = {
        "loss": policy_loss,
        "policy_loss": policy_loss,
        "matching_error": jnp.mean(fixed, axis=1),
        "group_weight": jnp.where(trained, weight, 0.0),
        "clip_fraction": jnp.mean(clipped.astype(jnp.float32), axis=1),
    }
    if settings.kl_coefficient:
        kl = velocity_mse(v, initial)
        terms |= {"loss": policy_loss + settings.kl_coefficient * kl, "kl": kl}
    return terms
