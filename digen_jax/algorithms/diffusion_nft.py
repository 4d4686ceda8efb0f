"""DiffusionNFT (arXiv 2509.16117): contrasts good and bad images on the forward process.

Flow matching pulls an implicit positive policy, a mixture of the old and the trained one, towards
images in proportion to their probability r of being good. It pulls an implicit negative policy, the positive
one mirrored at the old policy, in proportion to 1 - r. It needs only final images, from any
sampler (the public code's is a second-order DPM solver, without noise), and no log-probability.

The old policy is the behavior policy, whose weights are synced to the sampler. It follows the trained
policy by `OLD_POLICY_DECAYS`.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.algorithms.algorithm import (
    OLD_POLICY_DECAYS,
    LinearDecay,
    Matching,
    MatchingSamples,
    PreparedChunk,
    Velocities,
)
from digen_jax.algorithms.losses import mask_rows, required, velocity_mse
from digen_jax.diffusion.noising import ScheduleTimes
from digen_jax.errors import NonNegativeFloat, PositiveFloat

# Conversion of an advantage to a probability (see `reward_probabilities`).
AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]

TIMES = ScheduleTimes(9)  # of the sampler's 10 steps


@dataclasses.dataclass(frozen=True)
class DiffusionNFT(Matching):
    """Settings, with the defaults of the public code (NVlabs/DiffusionNFT) for Stable Diffusion 3.5 M.

    That code has beta 1 and decay type 1 for GenEval, PickScore and HPSv2; 0.1 and 2 for OCR; 0.1 and 1
    for several rewards.
    """

    name: ClassVar[str] = "diffusion_nft"
    config_defaults: ClassVar[dict] = dict(reference_guidance=0.0)
    copy_samples_from: ClassVar[int] = 0  # the copy is the old policy, which samples

    # share of the trained policy in the implicit positive policy; 1 / beta is the guidance strength
    beta: PositiveFloat = 1.0
    adv_clip: PositiveFloat = 5.0  # advantage at which the reward probability is 1
    advantage_mode: AdvantageMode = "all"  # how advantages are mapped to reward probabilities
    kl_coefficient: NonNegativeFloat = 1e-4  # weight of the KL to the initial model; 0 means no KL
    weight_floor: PositiveFloat = 1e-5  # minimum mean |x0_hat - x0| by which the error is divided
    # decay of the old policy: 0 copies the trained policy at once, 1 follows it faster than 2
    decay_type: Literal[0, 1, 2] = 1
    # guidance scale in training; 0 means the sampler's; 1 or less otherwise means none
    guidance: NonNegativeFloat = 1.0
    # guidance scale of the reference; 0 means `guidance`
    reference_guidance: NonNegativeFloat = 1.0
    times: ScheduleTimes = TIMES

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that `diffusion_nft_loss` returns."""
        names = "loss", "policy_loss", "positive_loss", "negative_loss", "old_deviation"
        return (*names, *(("kl",) if self.kl_coefficient else ()))

    @property
    def slow_copy(self) -> LinearDecay:
        """Decay of the old policy, as a function of the number of updates."""
        return OLD_POLICY_DECAYS[self.decay_type]

    @property
    def reads_behavior(self) -> bool:
        """True: the old policy's velocities define the implicit positive and negative policies."""
        return True

    @property
    def reads_reference(self) -> bool:
        """Whether there is a KL to the initial policy."""
        return self.kl_coefficient > 0

    def prepare(
        self,
        advantages: Float[np.ndarray, "b"],
        weight: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> PreparedChunk:
        """Converts advantages to probabilities of being good."""
        return PreparedChunk(None, reward_probabilities(self, advantages), weight)

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """Returns the terms of `diffusion_nft_loss`."""
        x0, x, _, sigma, probabilities, trained = samples
        old = required(v.behavior, "v_old", self)
        velocities = v.trained, old, v.reference
        return diffusion_nft_loss(self, x0, x, sigma, *velocities, probabilities, trained)


def reward_probabilities(
    settings: DiffusionNFT, advantages: Float[np.ndarray, "b"]
) -> Float32[np.ndarray, "b"]:
    """Returns r = 1/2 + A / (2 adv_clip), in [0, 1], of advantages A clipped to [-adv_clip, adv_clip].

    This is the paper's 1/2 + clip((reward - mean) / Z, -1, 1) / 2 with Z = adv_clip std. At r = 1/2
    the positive and the negative term hold the policy at the old one. The modes differ in which
    images get this value:

      all: those with A = 0; r in [0, 1].
      positive_only: those with A <= 0, so that no image repels; r in [1/2, 1].
      negative_only: those with A >= 0, so that no image attracts; r in [0, 1/2].
      one_only: those with A <= 0; all others count as A = 1, for any size of A.
      binary: those with A = 0; only the sign of the others counts, as A = 1 or -1.

    The modes are those of the public code, where the last two set A = 1 before the division: their r
    is 1/2 + 1/(2 adv_clip), which is 0.6 with the published clip, not 1.
    """
    advantages = np.clip(advantages.astype(np.float64), -settings.adv_clip, settings.adv_clip)
    match settings.advantage_mode:
        case "positive_only":
            advantages = np.maximum(advantages, 0)
        case "negative_only":
            advantages = np.minimum(advantages, 0)
        case "one_only":
            advantages = (advantages > 0).astype(np.float64)
        case "binary":
            advantages = np.sign(advantages)
    return np.clip(advantages / settings.adv_clip / 2 + 0.5, 0, 1).astype(np.float32)


def diffusion_nft_loss(
    settings: DiffusionNFT,
    x0: Float[Array, "n *shape"],
    x: Float[Array, "n *shape"],
    sigma: Float[Array, "n"],
    v: Float[Array, "n *shape"],
    v_old: Float[Array, "n *shape"],
    v_reference: Float[Array, "n *shape"] | None,
    reward_prob: Float[Array, "n"],
    trained: Bool[Array, "n"],
) -> dict[str, Float32[Array, "n"]]:
    """Returns adv_clip (r L(v+) + (1 - r) L(v-)) / beta + kl_coefficient (v - v_reference)^2, per sample.

    The implicit policies are v+ = (1 - beta) v_old + beta v and v- = (1 + beta) v_old - beta v, and
    L(u) is the error of the image that u predicts: (x - sigma u - x0)^2 averaged over all axes but the
    first, divided by the mean of |x - sigma u - x0|, which has no gradient and is at least
    `weight_floor`. The paper's L is the error of the velocity; this follows the public code, including
    its factors adv_clip and 1 / beta. That code computes the weight in float64; here it is float32.
    (Flow-Factory has the same loss, with mode "all" only.)

    Args:
      settings: beta, the weights and the KL's coefficient.
      x0: Latents of the sampled images.
      x: x0 at noise level sigma (`noised`).
      sigma: Noise levels.
      v: Velocity at (x, sigma) of the policy being trained, with gradient.
      v_old: Velocity of the old policy, without gradient.
      v_reference: Velocity of the reference. None requires kl_coefficient 0.
      reward_prob: r, from `reward_probabilities`.
      trained: False for padding, whose terms and gradient are 0 for any values.

    Returns:
      Terms per sample, to be weighted and summed: loss, policy_loss; positive_loss and negative_loss,
      which are L(v+) and L(v-); old_deviation, the mean of (v - v_old)^2; and kl.

    Raises:
      ValueError: `v_reference` is missing although kl_coefficient is above 0.
    """
    x0, x, v, v_old, sigma, r = mask_rows(trained, x0, x, v, v_old, sigma, reward_prob)
    v_old = jax.lax.stop_gradient(v_old)
    beta, floor = settings.beta, settings.weight_floor
    positive = _image_error(x0, x, sigma, (1 - beta) * v_old + beta * v, floor)
    negative = _image_error(x0, x, sigma, (1 + beta) * v_old - beta * v, floor)
    policy_loss = settings.adv_clip * (r * positive + (1 - r) * negative) / beta
    terms = {
        "loss": policy_loss,
        "policy_loss": policy_loss,
        "positive_loss": positive,
        "negative_loss": negative,
        "old_deviation": velocity_mse(v, v_old),
    }
    if settings.kl_coefficient:
        (v_reference,) = mask_rows(trained, required(v_reference, "v_reference", settings))
        kl = velocity_mse(v, v_reference)
        terms |= {"loss": policy_loss + settings.kl_coefficient * kl, "kl": kl}
    return terms


def _image_error(x0: Array, x: Array, sigma: Array, v: Array, floor: float) -> Array:
    """Returns the squared error of the image that v predicts, divided by its mean absolute error."""
    axes = tuple(range(1, x.ndim))
    difference = x - sigma.reshape(-1, *(1,) * len(axes)) * v - x0
    weight = jnp.maximum(jnp.mean(jnp.abs(difference), axis=axes), floor)
    return jnp.mean(difference**2, axis=axes) / jax.lax.stop_gradient(weight)
