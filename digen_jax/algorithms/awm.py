"""AWM, advantage weighted matching (arXiv 2509.25050): a policy gradient on the forward process.

The flow-matching loss of an image replaces its negative log-probability, so the objective is the pretraining
objective weighted by advantages. It needs only final images.

Implementations differ. This one follows the authors' code (scxue/advantage_weighted_matching): the ratio
is per image and time (its `loss_type` "exp_first"; "sum_first" averages log-probabilities over
an image's times before the exponential, with the same gradient at a ratio of 1), advantages are
scaled to `advantage_max` after clipping, and there is a second KL, to a slow copy of the trained policy.
Flow-Factory does not scale, omits the second KL by default, weights uniformly and clips the ratio at
1e-4. Both compute the matching error in float64; here it is float32.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from digen_jax.algorithms.algorithm import LinearDecay, Matching, MatchingSamples, Velocities
from digen_jax.algorithms.losses import (
    SPREAD_LIMIT,
    ClipRange,
    clipped,
    mask_rows,
    required,
    spread_terms,
    velocity_mse,
)
from digen_jax.diffusion.noising import LogitNormalTimes
from digen_jax.errors import NonNegativeFloat, PositiveFloat, Range

# Weight of a matching error e at noise level sigma (see `matching_log_prob`).
Weighting = Literal["uniform", "sigma", "sigma_squared", "huber", "ghuber"]
HUBER_EPS = 1e-10  # added to e before a power below 1, whose slope at 0 is infinite
# Decay of the slow copy in the second KL, applied once per step, after all its updates.
SLOW_COPY = LinearDecay(start=0, slope=0.001, largest=0.3)
TIMES = LogitNormalTimes(6, shift=3.0)


@dataclasses.dataclass(frozen=True)
class AWM(Matching):
    """Settings, with the defaults of the authors' code for Stable Diffusion 3.5 M on GenEval.

    Its kl_coefficient is 0.003 for OCR and 1e-4 for PickScore; everything else is equal. It samples noise levels
    from the shifted schedule of Stable Diffusion 3; here they come from that model's training density.
    """

    name: ClassVar[str] = "awm"
    config_defaults: ClassVar[dict] = dict(old_log_probs="auto", reference_guidance=0.0)

    weighting: Weighting = "ghuber"  # weighting of an image's matching error by noise level
    ghuber_power: Annotated[float, Range(0, 1, "least")] = 0.25  # "ghuber": power of the error
    clip_range: ClipRange = 1.0  # clips the ratio to [1 - clip_range, 1 + clip_range]
    # clips advantages to [-adv_clip, adv_clip] before they are scaled
    adv_clip: PositiveFloat = 5.0
    # scales clipped advantages to [-advantage_max, advantage_max]
    advantage_max: PositiveFloat = 1.0
    kl_coefficient: NonNegativeFloat = 0.001  # weight of the KL to the initial model; 0 means no KL
    # weight of the KL to a slow copy of the policy; 0 means no copy
    ema_kl_coefficient: NonNegativeFloat = 1.0
    ema: LinearDecay = SLOW_COPY
    # source of old matching errors: recomputed with the behavior policy, or the current ones, so that ratios are 1;
    # "auto" chooses by policy lag and updates
    old_log_probs: Literal["current", "recomputed"] = "current"
    # maximum deviation from 1 of 99% of the ratios before the first update, which is caused by rounding, as a fraction
    # of the distance to their bound; the run stops beyond it
    spread_limit: PositiveFloat = SPREAD_LIMIT
    # guidance scale in training; 0 means the sampler's; 1 or less otherwise means none
    guidance: NonNegativeFloat = 1.0
    # guidance scale of the reference; 0 means `guidance`
    reference_guidance: NonNegativeFloat = 1.0
    times: LogitNormalTimes = TIMES

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that `awm_loss` returns."""
        names = ["loss", "policy_loss", "matching_error", "ratio", "clip_fraction", "approx_kl"]
        names += ["kl"] if self.kl_coefficient else []
        names += ["ratio_spread", "over_spread_limit"] if self.ratio_bound else []
        return (*names, *(("ema_kl",) if self.ema_kl_coefficient else ()))

    @property
    def ratio_bound(self) -> float | None:
        """Clip range. None means that ratios are 1 by definition."""
        return self.clip_range if self.old_log_probs == "recomputed" else None

    @property
    def reads_reference(self) -> bool:
        """Whether there is a KL to the initial policy."""
        return self.kl_coefficient > 0

    @property
    def reads_behavior(self) -> bool:
        """Whether the old matching error is recomputed."""
        return self.old_log_probs == "recomputed"

    @property
    def slow_copy(self) -> LinearDecay | None:
        """Decay of the slow copy in the second KL. None means no copy."""
        return self.ema if self.ema_kl_coefficient else None

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """Returns the terms of `awm_loss`."""
        old = None
        if v.behavior is not None:
            old = matching_log_prob(self, v.behavior, samples.target, samples.sigma)
        return awm_loss(self, v.trained, *samples[2:], old, v.reference, v.copy)


def matching_log_prob(
    settings: AWM,
    v: Float[Array, "n *shape"],
    target: Float[Array, "n *shape"],
    sigma: Float[Array, "n"],
) -> Float32[Array, "n"]:
    """Returns minus the weighted matching error e of each sample, as a substitute for a log-probability.

    Weights: uniform e, sigma e, sigma^2 e, huber sigma sqrt(e), or ghuber sigma e^p / p with p = ghuber_power. Roots
    are taken of e + 1e-10, minus their value at e = 0. The public code's names for the second and third are "t" and
    "t**2".
    """
    return -_weighted(settings, velocity_mse(v, target), sigma.astype(jnp.float32))


def _weighted(settings: AWM, error: Array, sigma: Array) -> Array:
    power = settings.ghuber_power
    match settings.weighting:
        case "uniform":
            return error
        case "sigma":
            return error * sigma
        case "sigma_squared":
            return error * sigma**2
        case "huber":
            return (jnp.sqrt(error + HUBER_EPS) - HUBER_EPS**0.5) * sigma
        case "ghuber":
            return ((error + HUBER_EPS) ** power - HUBER_EPS**power) * sigma / power


def awm_loss(
    settings: AWM,
    v: Float[Array, "n *shape"],
    target: Float[Array, "n *shape"],
    sigma: Float[Array, "n"],
    advantages: Float[Array, "n"],
    trained: Bool[Array, "n"],
    old_log_prob: Float[Array, "n"] | None = None,
    v_reference: Float[Array, "n *shape"] | None = None,
    v_ema: Float[Array, "n *shape"] | None = None,
) -> dict[str, Float32[Array, "n"]]:
    """Returns max(-A r, -A clip(r)) + the two KLs, per sample, with r = exp(log_prob - old_log_prob).

    The KLs are mean squared differences of velocities (the public code's weight "Uniform").

    Args:
      settings: Weighting, clip ranges and the KLs' coefficients.
      v: Velocity at (x, sigma) of the policy being trained, with gradient.
      target: eps - x0, with the noise eps in x.
      sigma: Noise levels.
      advantages: Advantages before clipping and scaling.
      trained: False for padding, whose terms and gradient are 0 for any values.
      old_log_prob: `matching_log_prob` of the behavior policy with the same noise and sigma, if
        old_log_probs is "recomputed".
      v_reference: Velocity of the reference, if kl_coefficient is above 0.
      v_ema: Velocity of the slow copy, if ema_kl_coefficient is above 0.

    Returns:
      Terms per sample, to be weighted and summed: loss, policy_loss; matching_error before weighting;
      ratio, clip_fraction, approx_kl (log_prob - old_log_prob)^2 / 2; kl and ema_kl; and with a
      `ratio_bound` ratio_spread |ratio - 1| and over_spread_limit, whether it exceeds its limit.

    Raises:
      ValueError: an input that the settings require is missing.
    """
    v, target, sigma, advantages = mask_rows(trained, v, target, sigma, advantages)
    error = velocity_mse(v, target)
    log_prob = -_weighted(settings, error, sigma)
    if settings.old_log_probs == "current":
        old_log_prob = log_prob
    (old,) = mask_rows(trained, required(old_log_prob, "old_log_prob", settings))
    log_ratio = log_prob - jax.lax.stop_gradient(old)
    ratio = jnp.exp(log_ratio)
    advantages = jnp.clip(advantages, -settings.adv_clip, settings.adv_clip)
    advantages = advantages / settings.adv_clip * settings.advantage_max
    policy_loss = clipped(log_ratio, advantages, settings.clip_range, settings.clip_range)
    terms = {
        "loss": policy_loss,
        "policy_loss": policy_loss,
        "matching_error": error,
        "ratio": jnp.where(trained, ratio, 0.0),
        "clip_fraction": (jnp.abs(ratio - 1) > settings.clip_range).astype(jnp.float32),
        "approx_kl": log_ratio**2 / 2,
    }
    if settings.ratio_bound:
        terms |= spread_terms(jnp.abs(ratio - 1), settings.ratio_bound, settings.spread_limit)
    for name, coefficient, argument, other in (
        ("kl", settings.kl_coefficient, "v_reference", v_reference),
        ("ema_kl", settings.ema_kl_coefficient, "v_ema", v_ema),
    ):
        if coefficient:
            (other,) = mask_rows(trained, required(other, argument, settings))
            terms[name] = velocity_mse(v, other)
            terms["loss"] += coefficient * terms[name]
    return terms
