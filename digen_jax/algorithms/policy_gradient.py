"""The policy-gradient family: Flow-GRPO (arXiv 2505.05470) and algorithms that differ from it in the loss.

The defaults are Flow-GRPO. Other algorithms are settings of the same loss: GRPO-Guard and GSPO (`ratio`),
Flow-DPPO, CISPO and TOPR (`surrogate`), TIS and decoupled PPO (`importance_cap`), clip-higher, dual clip,
rejection. DanceGRPO, MixGRPO and CPS differ in the sampling, which is not part of this module.

Losses are returned as sums over the samples, with the sum of their weights. Accumulation over micro-batches
and timesteps therefore divides once, at the update, and does not depend on the packing.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.algorithms.algorithm import Algorithm, Samples
from digen_jax.algorithms.losses import (
    SMALLEST_CLIP_RANGE,
    SPREAD_LIMIT,
    ClipRange,
    OldLogProbs,
    cispo,
    clipped,
    decoupled_log_ratios,
    divergence_masked,
    dual_clipped,
    flash_weight,
    gaussian_kl,
    guard_log_ratio,
    guard_loss_scale,
    importance_weight,
    longcat_weight,
    mask_rows,
    required,
    sequence_log_ratio,
    spread_terms,
    topr,
    weighted_sum,
    well_conditioned,
    within_bound,
)
from digen_jax.errors import NonNegativeFloat, PositiveFloat, Range

# "guard": GRPO-Guard's ratio and loss scale. "sequence_*": ratio of a trajectory, over its trained steps.
Ratio = Literal["plain", "guard", "sequence_mean", "sequence_sum"]
OF_TRAJECTORIES = ("sequence_mean", "sequence_sum")
Surrogate = Literal["clip", "cispo", "topr", "divergence"]  # "divergence": Flow-DPPO
# "tempflow" (arXiv 2508.04324, equation 8): the std of the step, as in Shredded-Pork/TempFlow-GRPO
# (scripts/train_sd3_pr.py, e66824e). "longcat", "flash": see `losses`.
StepWeight = Literal["none", "longcat", "tempflow", "flash"]
# "gaussian": without the step's factor sqrt(-dt), as in Flow-GRPO's image code. "gaussian_dt": with it,
# the true KL. "velocity": the mean squared difference of the velocities.
Kl = Literal["gaussian", "gaussian_dt", "velocity"]


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Algorithm):
    """Settings, with the defaults of Flow-GRPO's public code for Stable Diffusion 3.5 M."""

    name: ClassVar[str] = "policy_gradient"
    objective: ClassVar[Literal["transitions"]] = "transitions"
    config_defaults: ClassVar[dict] = dict(clip_range=1e-3, old_log_probs="auto")
    supports_early_training: ClassVar[bool] = True

    clip_range: ClipRange = 1e-4  # clips the ratio to [1 - clip_range, 1 + clip_high]
    clip_high: NonNegativeFloat = 0.0  # upper clip range (clip-higher); 0 means clip_range
    # maximum ratio for negative advantages (dual clip), above 1; 0 means no maximum
    dual_clip: NonNegativeFloat = 0.0
    # clips advantages to [-adv_clip, adv_clip]; not used with "divergence"
    adv_clip: PositiveFloat = 5.0
    # importance ratio: of one step ("plain"), of GRPO-Guard ("guard"), or of a trajectory (GSPO)
    ratio: Ratio = "plain"
    # surrogate objective: PPO clipping, CISPO, TOPR, or Flow-DPPO ("divergence")
    surrogate: Surrogate = "clip"
    # weight of a step's loss: its std ("tempflow"), or a weight that makes gradients of all steps equally large, for
    # any SDE ("flash") or for that of Flow-GRPO ("longcat", which also weights the KL, by its square)
    step_weight: StepWeight = "none"
    # factor of `step_weight`; 1 / (mean weight of the trained steps) preserves the loss's scale, such as 2.25 in
    # TempFlow-GRPO's code for Stable Diffusion 3.5 M
    step_weight_scale: PositiveFloat = 1.0
    # "divergence": maximum KL to the old policy at which a sample is trained
    kl_threshold: PositiveFloat = 1e-5
    positive_weight: NonNegativeFloat = 1.0  # "topr": weight of images with positive advantages
    negative_weight: NonNegativeFloat = 1.0  # "topr": weight of images with negative advantages
    # 0: the ratio is relative to the behavior policy. Above 0: it is relative to the policy at the start of the step,
    # and the loss is weighted by the ratio of that policy to the behavior policy, up to this cap (TIS; inf is
    # decoupled PPO)
    importance_cap: Annotated[float, Range(0, infinite=True)] = 0.0
    # maximum difference between a sample's log-probability and the sampler's at which it is trained; 0 disables
    # rejection
    rejection_bound: NonNegativeFloat = 0.0
    # minimum noise level at the start of a trained step
    smallest_sigma: Annotated[float, Range(0, 1, "most")] = 0.0
    kl_coefficient: NonNegativeFloat = 0.0  # weight of the KL to the initial model; 0 means no KL
    # form of the KL: as in Flow-GRPO's code ("gaussian"), as in its paper ("gaussian_dt"), or the squared velocity
    # difference ("velocity")
    kl: Kl = "gaussian"
    # source of old log-probabilities: stored by the sampler ("rollout"), recomputed by the trainer, or the current
    # ones, so that ratios are 1; "auto" chooses by dtype, policy lag and updates
    old_log_probs: OldLogProbs = "rollout"
    # maximum deviation from 1 of 99% of the ratios before the first update, which is caused by rounding, as a fraction
    # of the distance to their bound; the run stops beyond it
    spread_limit: PositiveFloat = SPREAD_LIMIT

    @property
    def decoupled(self) -> bool:
        """Whether the ratio is to the policy at the start of the step, for any policy lag.

        The loss is then weighted by the ratio of that policy to the behavior policy, up to `importance_cap`: truncated
        importance sampling or, with cap inf, decoupled PPO as in its paper (`importance_weight`).
        """
        return self.importance_cap > 0

    @property
    def needs_full_trajectories(self) -> bool:
        """Whether all trained steps of an image must be in one call of the loss."""
        return self.ratio in OF_TRAJECTORIES

    @property
    def reads_reference(self) -> bool:
        """Whether there is a KL to the initial policy."""
        return self.kl_coefficient > 0

    @property
    def reads_behavior(self) -> bool:
        """Whether old log-probabilities are recomputed."""
        return self.old_log_probs == "recomputed"

    @property
    def reads_start(self) -> bool:
        """Whether the ratio is to the policy at the start of the step."""
        return self.decoupled

    @property
    def needs_means(self) -> bool:
        """Whether the loss reads the means of x_next, including those of the old policy."""
        return self.ratio == "guard" or self.surrogate == "divergence"

    @property
    def stores_means(self) -> bool:
        """Whether the sampler must store the means of x_next."""
        return self.needs_means and self.old_log_probs == "rollout" and not self.decoupled

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the sums that `loss` returns in addition to the sum of the weights."""
        names = ["loss", "policy_loss", "ratio", "ratio_deviation", "clip_fraction", "approx_kl"]
        names += ["kl"] if self.kl_coefficient else []
        names += ["importance_weight"] if self.decoupled else []
        names += ["left_out"] if self.rejection_bound or self.smallest_sigma else []
        names += ["ratio_spread", "over_spread_limit"] if self.ratio_bound else []
        return tuple(names)

    @property
    def ratio_bound(self) -> float | None:
        """Nearer end of the clip range, or the KL above which "divergence" masks.

        None means that the first update's ratios are 1 by definition ("current"; decoupled, which compares with the
        start of the step), or have no bound ("topr").
        """
        if self.old_log_probs == "current" or self.decoupled or self.surrogate == "topr":
            return None
        if self.surrogate == "divergence":
            return self.kl_threshold
        return min(self.clip_range, self.high)

    @property
    def high(self) -> float:
        """Upper clip range."""
        return self.clip_high or self.clip_range

    def check(self) -> None:
        """Raises ValueError for incompatible settings."""
        for name, least in (
            ("clip_high", SMALLEST_CLIP_RANGE),
            ("rejection_bound", SMALLEST_CLIP_RANGE),
            ("importance_cap", 1),
        ):
            value = getattr(self, name)
            if 0 < value < least:
                raise ValueError(f"{name} is {value}; it must be 0 or at least {least:g}")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be 0 or above 1, such as 3")
        if self.dual_clip and self.surrogate != "clip":
            raise ValueError(
                f"dual_clip is {self.dual_clip}, but surrogate is {self.surrogate!r}, which has no "
                "bound of that kind: set dual_clip to 0 or surrogate to 'clip'"
            )
        if self.step_weight == "none" and self.step_weight_scale != 1:
            raise ValueError(
                f"step_weight_scale is {self.step_weight_scale}, but step_weight is 'none', so nothing is scaled: set "
                "step_weight, or step_weight_scale to 1"
            )
        if self.positive_weight == self.negative_weight == 0:
            raise ValueError(
                "positive_weight and negative_weight are both 0; set one of them above 0"
            )
        if self.importance_cap and self.old_log_probs == "current":
            raise ValueError(
                f"importance_cap is {self.importance_cap}, but old_log_probs 'current' has no log-probability "
                "of the policy that sampled: set that to 'rollout' or 'recomputed', or importance_cap to 0"
            )

    def check_kind(self, kind: str) -> None:
        """Raises ValueError for settings that need Gaussian log-probabilities with cps, whose are not Gaussian."""
        for name, gaussian, plain in (
            ("ratio", ("guard",), "plain"),
            ("step_weight", ("tempflow", "flash"), "none"),
        ):
            if kind == "cps" and getattr(self, name) in gaussian:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, which is for Gaussian log-probabilities, but those of "
                    "config.sampler.kind = 'cps' are not Gaussian: set config.sampler.kind to 'flow' or 'dance', or "
                    f"{name} to {plain!r}"
                )

    def check_early_training(self, advantages: AdvantageSettings, images: int, groups: int) -> None:
        """Checks that training before a group is complete is exact, with groups of `images` images.

        The largest advantage of G images is sqrt(G - 1) with the (population) std of their group, and
        sqrt((G - 1) P) with the global std of P groups. If it is clipped, the loss is not linear in the rewards.

        Raises:
          ValueError: advantages could be clipped, the ratio is not always 1, or the loss is not Flow-GRPO's, the
            only one known to be exact. `AdvantageSettings.check_early_training` checks the advantages.
        """
        if self.old_log_probs != "current":
            raise ValueError(
                f"old_log_probs is {self.old_log_probs!r}; to train before a group is complete set it to "
                "'current', because the loss is linear in the advantages only with a ratio of 1"
            )
        for name, plain in (("surrogate", "clip"), ("ratio", "plain"), ("step_weight", "none")):
            if getattr(self, name) != plain:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; to train before a group is complete set it to {plain!r}"
                )
        square = (images - 1) * (groups if advantages.std == "global" else 1)
        if square > self.adv_clip**2:
            raise ValueError(
                f"adv_clip is {self.adv_clip}; to train before a group is complete set it to "
                f"sqrt({square}) or more, the largest possible advantage ({groups} groups of {images} "
                f"images, std {advantages.std!r})"
            )

    def loss(self, samples: Samples) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Returns the weighted sum of a surrogate of r = exp(log_prob - old_log_prob), plus kl_coefficient KL.

        A sample of weight 0 adds nothing to any sum nor, for any values, to the gradient. An excluded sample
        (`rejection_bound`, `smallest_sigma`) gets weight 0.

        Returns:
          The sum of the loss, to differentiate; and weighted sums to be divided by their "weight": loss,
          policy_loss, ratio, ratio_deviation |r - 1|, clip_fraction, approx_kl (log_prob - old)^2 / 2 and,
          if the settings have them, kl, and left_out, the number of excluded samples. ratio and
          ratio_deviation are relative to the stored log_prob for any settings, because the loss's ratio may be
          1 by definition. Divided by the weight, left_out is relative to the samples that are not excluded.
          clip_fraction counts the ratios (for "divergence" the KLs to the old policy) beyond the bound.
          If there is a `ratio_bound`, ratio_spread is the distance of the loss's ratios from 1 (of the KLs
          from 0), and over_spread_limit counts those beyond `spread_limit` of the bound.
          importance_weight, if the settings are decoupled, is the factor of the policy loss.

        Raises:
          ValueError: the KL, the means or another required input is missing.
        """
        weight = given = samples.weight
        if self.smallest_sigma:
            weight = weight * well_conditioned(samples.sigma, self.smallest_sigma)
        if self.rejection_bound:
            log_ratio = samples.log_prob - samples.stored_log_prob
            weight = weight * within_bound(log_ratio, self.rejection_bound)
        parts = {name: part for name, part in samples._asdict().items() if part is not None}
        parts.pop("trajectory", None)
        masked = mask_rows(weight > 0, *parts.values())
        samples = samples._replace(**dict(zip(parts, masked, strict=True)))

        log_ratio, correction = self._log_ratios(samples, weight)
        to_sampler = jnp.exp(jax.lax.stop_gradient(samples.log_prob) - samples.stored_log_prob)
        policy_loss, distance, outside = self._surrogate(samples, log_ratio)
        policy_loss = correction * policy_loss
        terms: dict = {
            "loss": policy_loss,
            "policy_loss": policy_loss,
            "ratio": to_sampler,
            "ratio_deviation": jnp.abs(to_sampler - 1),
            "clip_fraction": outside.astype(jnp.float32),
            "approx_kl": log_ratio**2 / 2,
        }
        if self.ratio_bound:
            terms |= spread_terms(distance, self.ratio_bound, self.spread_limit)
        if self.decoupled:
            terms["importance_weight"] = correction
        if self.kl_coefficient:
            kl = weighted_kl = required(samples.kl, "kl", self)
            if self.step_weight == "longcat":
                weighted_kl = kl * longcat_weight(samples.sigma, samples.dt) ** 2
            terms |= {"loss": policy_loss + self.kl_coefficient * weighted_kl, "kl": kl}
        sums = {name: weighted_sum(weight, term) for name, term in terms.items()}
        if "left_out" in self.terms:
            sums["left_out"] = jnp.sum(given) - jnp.sum(weight)
        return sums["loss"], sums | {"weight": jnp.sum(weight)}

    def _surrogate(self, samples: Samples, log_ratio: Array) -> tuple[Array, Array, Array]:
        """Returns (loss without KL, distance from the old policy, whether that is beyond the bound) of each sample."""
        low, high = self.clip_range, self.high
        advantages = jnp.clip(samples.advantages, -self.adv_clip, self.adv_clip)
        means = tuple(
            required(getattr(samples, name), name, self)
            for name in ("mean", "old_mean", "std") * self.needs_means
        )
        if self.ratio == "guard":
            log_ratio = guard_log_ratio(samples.log_prob, samples.old_log_prob, *means)
        ratio = jnp.exp(log_ratio)
        distance = jnp.abs(ratio - 1)
        outside = (ratio < 1 - low) | (ratio > 1 + high)
        match self.surrogate:
            case "clip" if self.dual_clip:
                loss = dual_clipped(log_ratio, advantages, low, high, self.dual_clip)
            case "clip":
                loss = clipped(log_ratio, advantages, low, high)
            case "cispo":
                loss = cispo(samples.log_prob, log_ratio, advantages, low, high)
            case "topr":
                weights = self.positive_weight, self.negative_weight
                loss = topr(samples.log_prob, log_ratio, advantages, *weights)
            case "divergence":
                kl = gaussian_kl(*means)
                loss = divergence_masked(log_ratio, samples.advantages, kl, self.kl_threshold)
                distance, outside = kl, kl >= self.kl_threshold
        if self.ratio == "guard":
            loss = loss * guard_loss_scale(samples.dt)
        if self.step_weight == "longcat":
            loss = loss * (self.step_weight_scale * longcat_weight(samples.sigma, samples.dt))
        elif self.step_weight != "none":
            weight = required(samples.std, "std", self)
            if self.step_weight == "flash":
                weight = flash_weight(samples.sigma, samples.dt, weight)
            loss = loss * (self.step_weight_scale * weight)
        return loss, distance, outside

    def _log_ratios(self, samples: Samples, weight: Array) -> tuple[Array, Array | float]:
        """Returns the log-ratio of each sample, or of its trajectory, to the old policy, and the factor of its loss."""

        def reduce_steps(log_ratio):
            if not self.needs_full_trajectories:
                return log_ratio
            reduce: Literal["mean", "sum"] = "mean" if self.ratio == "sequence_mean" else "sum"
            trajectory = required(samples.trajectory, "trajectory", self)
            return sequence_log_ratio(log_ratio, weight, trajectory, len(trajectory), reduce)

        if not self.decoupled:
            return reduce_steps(samples.log_prob - samples.old_log_prob), 1.0
        behavior = required(samples.behavior_log_prob, "behavior_log_prob", self)
        log_ratio, to_behavior = decoupled_log_ratios(
            samples.log_prob, samples.old_log_prob, behavior
        )
        return reduce_steps(log_ratio), importance_weight(
            reduce_steps(to_behavior), self.importance_cap
        )
