"""Diffusion DPO (arXiv 2311.12908) for flow matching: preferences between two images of a prompt.

Online, the pairs are the best and the worst image of each group by their advantage, which the config's
section `advantages` computes from the rewards; offline, they come from a set that was generated once.
The loss is the same. The caller chooses the policy that samples and the reference: Flow-GRPO's
public code samples from the reference, which it keeps, or renews from the trained policy now and then.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.algorithms.advantages import zero_std_groups
from digen_jax.algorithms.algorithm import (
    Matching,
    MatchingSamples,
    PreparedChunk,
    Velocities,
    check_guidance,
)
from digen_jax.algorithms.losses import mask_rows, velocity_mse
from digen_jax.diffusion.noising import LogitNormalTimes

TIMES = LogitNormalTimes(1, shift=3.0)  # the training density of Stable Diffusion 3


@dataclasses.dataclass(frozen=True)
class DiffusionDPO(Matching):
    """Settings, with the beta and the density of noise levels of Flow-GRPO's public code for Stable Diffusion 3.5 M.

    That code trains each pair at 39 noise levels (`times`), with 40 sampling steps; the paper at one, as
    here. Flow-Factory's beta is 2000, and the paper's, for noise prediction, 2000 to 5000.

    Online, with `set_steps` 0, the policy being trained samples. Offline the images are a fixed set of
    `set_steps` steps, sampled by the policy before tuning, and repeated. They are sampled again each time,
    with the same weights and keys, so that they are the same and need not be stored; each time they are
    trained at other noise levels.
    """

    name: ClassVar[str] = "diffusion_dpo"
    config_defaults: ClassVar[dict] = dict(reference_guidance=0.0)
    images_per_sample: ClassVar[int] = 2
    ranks: ClassVar[bool] = True

    beta: float = 100.0  # the inverse temperature of the preference; the paper's beta T omega
    set_steps: int = 0  # offline: number of steps whose images form the fixed set; 0: online
    guidance: float = 1.0  # guidance scale in training, at most 1: none; 0: the sampler's
    reference_guidance: float = 1.0  # guidance scale of the reference; 0: as `guidance`
    times: LogitNormalTimes = TIMES

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the terms that `diffusion_dpo_loss` returns."""
        return "loss", "margin", "accuracy", "preferred_error", "dispreferred_error"

    def check(self) -> None:
        """Raises ValueError for a setting that cannot work; the message says what to change."""
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta is {self.beta}; it must be positive and finite")
        check_guidance(self.guidance, self.reference_guidance, has_reference=True)
        if self.set_steps < 0:
            raise ValueError(
                f"set_steps is {self.set_steps}; set it to the steps whose images are the fixed set, "
                "or to 0 to train online"
            )

    @property
    def reads_reference(self) -> bool:
        """True: the margin is relative to the policy before tuning."""
        return True

    def prepare(
        self,
        advantages: Float[np.ndarray, "b"],
        weight: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> PreparedChunk:
        """Takes the best and the worst image of each group; the weights of images are not read."""
        pairs, decided = pair_of_each_group(advantages, rows, int(rows.max()) + 1)
        return PreparedChunk(pairs, np.zeros(len(pairs), np.float32), decided)

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """See `diffusion_dpo_loss`."""
        return diffusion_dpo_loss(self, v.trained, v.reference, samples.target, samples.trained)


def diffusion_dpo_loss(
    settings: DiffusionDPO,
    v: Float[Array, "n 2 *shape"],
    v_reference: Float[Array, "n 2 *shape"],
    target: Float[Array, "n 2 *shape"],
    trained: Bool[Array, "n"],
) -> dict[str, Float32[Array, "n"]]:
    """-log sigmoid(-beta/2 ((e_w - e_w_reference) - (e_l - e_l_reference))), per pair.

    Equation 14 of the paper, where e = (v - target)^2 is the error of the noise. The second axis is
    (preferred w, dispreferred l). The paper sums e over an image's elements; implementations average it, as
    here, and their betas are for the average.

    Args:
      settings: beta.
      v: velocities of the policy being trained, with gradient, at the two images noised with the same
        noise to the same sigma (`noised_pairs`), as in the paper's code.
      v_reference: of the reference, without gradient.
      target: eps - x0.
      trained: False for padding: the terms and gradient of such a pair are 0, whatever its values.

    Returns:
      Terms per pair, to be weighted and summed: loss; margin, the argument of the sigmoid; accuracy, 1
      if that is positive; preferred_error and dispreferred_error, the policy's.
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
    rewards: Float[np.ndarray, "b"], group_ids: Int[np.ndarray, "b"], num_groups: int
) -> Int[np.ndarray, "pairs 2"]:
    """(preferred, dispreferred) as indices into the batch: each group's best and worst image.

    Among equal images it takes the first. A group whose rewards are all equal, or with a single image, has no
    preference and no pair. (Flow-GRPO's public code takes its first two images, Flow-Factory's the same
    image twice.) `rewards` may be any numbers in the same order, such as `advantages.ranking`: of several
    rewards Flow-GRPO (scripts/train_sd3_dpo.py, ac4c86e) compares the weighted sum, Flow-Factory
    (src/flow_factory/trainers/dpo.py, a0b2bc5) the advantages, which are GDPO's in its example.

    Raises:
      ValueError: a reward is not finite, or a group id is out of range.
    """
    undecided = zero_std_groups(rewards, group_ids, num_groups)
    pairs = []
    for group in np.unique(group_ids):
        if not undecided[group]:
            (members,) = np.nonzero(group_ids == group)
            pairs.append(members[[rewards[members].argmax(), rewards[members].argmin()]])
    return np.array(pairs, np.int64).reshape(-1, 2)


def pair_of_each_group(
    rewards: Float[np.ndarray, "b"], group_ids: Int[np.ndarray, "b"], num_groups: int
) -> tuple[Int[np.ndarray, "groups 2"], Float32[np.ndarray, "groups"]]:
    """(pairs, weights): one pair for each present group, so that their number is fixed.

    A group without a preference has its first image twice, with weight 0; the pairs of the others are those of
    `preference_pairs`, with weight 1.

    Raises:
      ValueError: a reward is not finite, or a group id is out of range.
    """
    _, first = np.unique(group_ids, return_index=True)
    pairs, weights = np.stack([first, first], axis=1), np.zeros(len(first), np.float32)
    decided = preference_pairs(rewards, group_ids, num_groups)
    places = np.searchsorted(group_ids[first], group_ids[decided[:, 0]])
    pairs[places], weights[places] = decided, 1.0
    return pairs, weights
