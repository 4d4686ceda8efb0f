"""Flow-GRPO (arXiv 2505.05470): a clipped policy gradient with a KL penalty to the reference.

Losses come as sums over the samples, beside the sum of their weights, so that accumulation over
micro-batches and timesteps divides once, at the update, and does not depend on the packing.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.algorithms.kl import gaussian_kl as gaussian_kl  # its users find it here as well
from digen_jax.algorithms.old_log_probs import OldLogProbs
from digen_jax.algorithms.samples import blanked, weighted_sum
from digen_jax.algorithms.surrogates import check_clip_range, clipped


@dataclasses.dataclass(frozen=True)
class FlowGRPO:
    """Settings, with the values of Flow-GRPO's public code for Stable Diffusion 3.5 M."""

    clip_range: float = 1e-4  # the ratio is clipped to [1 - clip_range, 1 + clip_range]
    adv_clip: float = 5.0  # advantages are clipped to [-adv_clip, adv_clip]
    kl_coefficient: float = 0.0  # 0: no reference is evaluated
    advantage_std: Literal["group", "global"] = "global"
    old_log_probs: OldLogProbs = "rollout"

    @property
    def needs(self) -> Literal["group", "step"]:
        """What must be scored before any of it can train: a group, or for a global std the step."""
        return "step" if self.advantage_std == "global" else "group"

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the sums that `flow_grpo_loss` returns."""
        names = "loss", "policy_loss", "ratio", "ratio_deviation", "clip_fraction", "approx_kl"
        return (*names, *(("kl",) if self.kl_coefficient else ()), "weight")

    def check(self) -> None:
        """Raises ValueError for a setting that cannot work, and says what to change."""
        check_clip_range(self.clip_range, self.clip_range, ("clip_range", "clip_range"))
        if not 0 < self.adv_clip < math.inf:
            raise ValueError(f"adv_clip is {self.adv_clip}; it must be positive and finite")
        if not 0 <= self.kl_coefficient < math.inf:
            raise ValueError(
                f"kl_coefficient is {self.kl_coefficient}; it must be finite and not negative"
            )
        if self.advantage_std not in ("group", "global"):
            raise ValueError(
                f"advantage_std is {self.advantage_std!r}; set it to 'group' or 'global'"
            )

    def check_early(self, images: int, groups: int) -> None:
        """Whether training before a group is complete is exact, with groups of so many images.

        The largest advantage of G images is sqrt(G - 1) by the std (of the population) of their group,
        and by the global one of P groups sqrt((G - 1) P): clipped, the loss is not linear in the rewards.

        Raises:
          ValueError: advantages could be clipped, or the ratio is not always 1.
        """
        if self.old_log_probs != "current":
            raise ValueError(
                f"old_log_probs is {self.old_log_probs!r}; to train before a group is complete set it to "
                "'current', as only with a ratio of 1 the loss is linear in the advantages"
            )
        square = (images - 1) * (groups if self.advantage_std == "global" else 1)
        if square > self.adv_clip**2:
            raise ValueError(
                f"adv_clip is {self.adv_clip}; to train before a group is complete set it to "
                f"sqrt({square}) or more, above which no advantage is ({groups} groups of {images} "
                f"images, advantage_std {self.advantage_std!r})"
            )


def flow_grpo_loss(
    settings: FlowGRPO,
    log_prob: Float[Array, "n"],
    old_log_prob: Float[Array, "n"],
    advantages: Float[Array, "n"],
    weight: Float[Array, "n"],
    kl: Float[Array, "n"] | None = None,
    stored_log_prob: Float[Array, "n"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Weighted sum of max(-A r, -A clip(r)) + kl_coefficient KL, with r = exp(log_prob - old).

    Args:
      settings: clip ranges and the KL's coefficient.
      log_prob: of the policy being trained, with gradient.
      old_log_prob: of the behaviour policy (`old_log_probs`).
      advantages: before clipping.
      weight: 1, or 0 for padding: such a sample adds nothing to any sum, nor, whatever its values,
        to the gradient.
      kl: each sample's KL to the reference (`gaussian_kl`), with gradient.
      stored_log_prob: as the sampler computed it, where that is not `old_log_prob`.

    Returns:
      The loss's sum, to be differentiated; and weighted sums to be divided by their "weight": loss,
      policy_loss, ratio, ratio_deviation |r - 1|, clip_fraction, approx_kl (log_prob - old)^2 / 2
      and, where given, kl. ratio and ratio_deviation are to the stored log_prob whatever the loss
      takes, whose own ratio says nothing where that is 1 by definition.

    Raises:
      ValueError: `kl` missing though the settings have a kl_coefficient.
    """
    if kl is None and settings.kl_coefficient:
        raise ValueError(f"kl_coefficient is {settings.kl_coefficient} but no kl was given")
    stored = old_log_prob if stored_log_prob is None else stored_log_prob
    log_prob, old_log_prob, stored = blanked(weight > 0, log_prob, old_log_prob, stored)
    log_ratio = log_prob - old_log_prob
    ratio = jnp.exp(log_ratio)
    advantages = jnp.clip(advantages, -settings.adv_clip, settings.adv_clip)
    policy_loss = clipped(log_ratio, advantages, settings.clip_range, settings.clip_range)
    to_sampler = jnp.exp(jax.lax.stop_gradient(log_prob) - stored)
    terms = {
        "loss": policy_loss,
        "policy_loss": policy_loss,
        "ratio": to_sampler,
        "ratio_deviation": jnp.abs(to_sampler - 1),
        "clip_fraction": (jnp.abs(ratio - 1) > settings.clip_range).astype(jnp.float32),
        "approx_kl": log_ratio**2 / 2,
    }
    if kl is not None:
        terms |= {"loss": policy_loss + settings.kl_coefficient * kl, "kl": kl}
    sums = {name: weighted_sum(weight, term) for name, term in terms.items()}
    return sums["loss"], sums | {"weight": jnp.sum(weight)}
