"""Diffusion DPO (arXiv 2311.12908) for flow matching: preferences between two images of a prompt.

Online, the pairs are the best and the worst image of each group by advantage, which the config's section
`advantages` computes from the rewards. Offline, they come from a set that is generated once, or are the user's own.
The loss is the same. The caller chooses the behavior policy and the reference: Flow-GRPO's public code samples from the
reference, which it keeps, or occasionally renews from the trained policy.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.algorithms.advantages import zero_std_groups
from digen_jax.algorithms.algorithm import Matching, MatchingSamples, PreparedChunk, Velocities
from digen_jax.algorithms.losses import mask_rows, required, velocity_mse
from digen_jax.diffusion.noising import LogitNormalTimes
from digen_jax.errors import Count, NonNegativeFloat, PositiveFloat

TIMES = LogitNormalTimes(1, shift=3.0)  # the training density of Stable Diffusion 3


@dataclasses.dataclass(frozen=True)
class DiffusionDPO(Matching):
    """Settings, with the beta and the density of noise levels of Flow-GRPO's public code for Stable Diffusion 3.5 M.

    That code trains each pair at 39 noise levels (`times`), with 40 sampling steps; the paper at one, as here.
    Flow-Factory's beta is 2000; the paper's, for noise prediction, is 2000 to 5000.

    Online (`set_steps` 0), the policy being trained samples. Offline, the images are a fixed, repeated set of
    `set_steps` steps, sampled by the initial policy. They are sampled again each time with the same weights and
    keys, so that they are the same and need not be stored. Each time they are trained at other noise levels.
    """

    name: ClassVar[str] = "diffusion_dpo"
    config_defaults: ClassVar[dict] = dict(reference_guidance=0.0)
    images_per_sample: ClassVar[int] = 2
    ranks: ClassVar[bool] = True

    # whether the pairs are image files, which the fields "chosen" and "rejected" of prompts name, instead of samples
    from_files: bool = False
    beta: PositiveFloat = 100.0  # inverse temperature of the preference; beta T omega in the paper
    # offline training: number of steps whose images form the fixed set; 0 means online
    set_steps: Count = 0
    # guidance scale in training; 0 means the sampler's; 1 or less otherwise means none
    guidance: NonNegativeFloat = 1.0
    # guidance scale of the reference; 0 means `guidance`
    reference_guidance: NonNegativeFloat = 1.0
    times: LogitNormalTimes = TIMES

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that `diffusion_dpo_loss` returns."""
        return "loss", "margin", "accuracy", "preferred_error", "dispreferred_error"

    @property
    def given_images(self) -> tuple[str, ...]:
        """Fields of a prompt record that name its two images."""
        return ("chosen", "rejected") if self.from_files else ()

    def check(self) -> None:
        """Raises ValueError for a fixed set of sampled images if the images are files."""
        super().check()
        if self.from_files and self.set_steps:
            raise ValueError(
                f"set_steps is {self.set_steps}, but from_files trains image files, not a set of samples: set it to 0"
            )

    @property
    def reads_reference(self) -> bool:
        """True: the margin is relative to the initial policy."""
        return True

    def prepare(
        self,
        advantages: Float[np.ndarray, "b"],
        weight: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> PreparedChunk:
        """Selects the best and the worst image of each group; image weights are not read."""
        pairs, weights = preference_pairs(advantages, rows)
        return PreparedChunk(pairs, np.zeros(len(pairs), np.float32), weights)

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """Returns the terms of `diffusion_dpo_loss`."""
        reference = required(v.reference, "v_reference", self)
        return diffusion_dpo_loss(self, v.trained, reference, samples.target, samples.trained)


def diffusion_dpo_loss(
    settings: DiffusionDPO,
    v: Float[Array, "n 2 *shape"],
    v_reference: Float[Array, "n 2 *shape"],
    target: Float[Array, "n 2 *shape"],
    trained: Bool[Array, "n"],
) -> dict[str, Float32[Array, "n"]]:
    """Returns -log sigmoid(-beta/2 ((e_w - e_w_reference) - (e_l - e_l_reference))), per pair.

    Equation 14 of the paper, where e = (v - target)^2 is the error of the noise. The second axis is
    (preferred w, dispreferred l). The paper sums e over an image's elements; implementations average it, as
    here, and their betas are for the average.

    Args:
      settings: Settings; only beta is read.
      v: Velocities of the policy being trained, with gradient, at the two images noised with the same
        noise to the same sigma (`noised_together`), as in the paper's code.
      v_reference: Velocities of the reference, without gradient.
      target: eps - x0.
      trained: False for padding, whose terms and gradient are 0 for any values.

    Returns:
      Terms per pair, to be weighted and summed: loss; margin, the argument of the sigmoid; accuracy, 1
      if the margin is positive; preferred_error and dispreferred_error of the policy.
    """
    v, target, v_reference = mask_rows(trained, v, target, v_reference)
    v_reference = jax.lax.stop_gradient(v_reference)
    error = jax.vmap(velocity_mse, in_axes=1, out_axes=1)
    policy = error(v, target)
    change = policy - error(v_reference, target)
    margin = -settings.beta / 2 * (change[:, 0] - change[:, 1])
    return {
        "loss": jnp.where(trained, jax.nn.softplus(-margin), 0.0),
        "margin": margin,
        "accuracy": (margin > 0).astype(jnp.float32),
        "preferred_error": policy[:, 0],
        "dispreferred_error": policy[:, 1],
    }


def preference_pairs(
    rewards: Float[np.ndarray, "b"], group_ids: Int[np.ndarray, "b"]
) -> tuple[Int[np.ndarray, "groups 2"], Float32[np.ndarray, "groups"]]:
    """Returns (pairs, weights): the (preferred, dispreferred) images of each present group, its best and its worst.

    Of equal images the first is selected. A group whose rewards are all equal, or with a single image, has no
    preference: its pair is its first image twice, with weight 0, so that the number of pairs is fixed. Other weights
    are 1. (Flow-GRPO's public code takes the first two images of a group, Flow-Factory's the same image twice.)
    `rewards` may be any numbers in the same order, such as `advantages.ranking`. For several rewards Flow-GRPO
    (scripts/train_sd3_dpo.py, ac4c86e) compares the weighted sum, Flow-Factory (src/flow_factory/trainers/dpo.py,
    a0b2bc5) the advantages, which are GDPO's in its example.

    Raises:
      ValueError: a reward is not finite, or a group id is negative.
    """
    undecided = zero_std_groups(rewards, group_ids, int(group_ids.max()) + 1)
    groups = np.unique(group_ids)
    pairs = np.empty((len(groups), 2), np.int64)
    for number, group in enumerate(groups):
        (members,) = np.nonzero(group_ids == group)
        pairs[number] = members[[rewards[members].argmax(), rewards[members].argmin()]]
    return pairs, (~undecided[groups]).astype(np.float32)
