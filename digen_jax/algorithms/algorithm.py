"""Algorithm interface: the properties by which the rest of the package handles each algorithm.

An algorithm is a frozen dataclass of its settings, which are the fields of the config's section `algorithm`. It
trains either the transitions of sampled trajectories or final images at noise levels of the forward process
("matching"). `config.train_config.ALGORITHMS` lists all algorithms.

Slow copies of the trained parameters (DiffusionNFT's old policy, and averages for evaluation) follow by
copy <- decay copy + (1 - decay) current, with a decay that depends on the number of optimizer updates.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.diffusion.noising import Times
from digen_jax.errors import DERIVED, Count, Decay, NonNegativeFloat

EmaUnit = Literal["update", "step"]


@dataclasses.dataclass(frozen=True)
class LinearDecay:
    """Decay that is `first` for `start` updates, then rises by `slope` per update, up to `largest`."""

    start: Count  # updates before the decay increases
    slope: NonNegativeFloat  # increase of the decay per update
    largest: Decay  # maximum decay, below 1
    first: Decay = 0.0  # decay before it increases

    def at(self, updates: int) -> float:
        """Returns the decay after `updates` updates, including those of the current step."""
        return min(self.first + max(updates - self.start, 0) * self.slope, self.largest)


# DiffusionNFT's `decay_type` (arXiv 2509.16117, eta; values of its public code). 0 is on-policy: the old
# policy is the trained one at the end of the step. Applied once per step, after all its updates.
OLD_POLICY_DECAYS = {
    0: LinearDecay(start=0, slope=0.0, largest=0.0),
    1: LinearDecay(start=0, slope=0.001, largest=0.5),
    2: LinearDecay(start=75, slope=0.0075, largest=0.999),
}


@dataclasses.dataclass(frozen=True)
class EmaDecay:
    """Decay of an average: constant, or with a warm-up during which it averages all parameters so far.

    The average is mixed when n + 1 is a multiple of `every`. With warm-up the decay is min(decay, (1 + n) / (10 + n)).
    n is the argument of `step` in the code that Flow-GRPO, DiffusionNFT, AWM and Flow-Factory share:

    - unit "update": the number of updates so far, including the last one, so that with `every` 8 the average is mixed
      after updates 7, 15, ... Flow-GRPO's scripts (yifan123/flow_grpo, scripts/train_sd3.py, ac4c86e) mix after every
      micro-batch, so that each mixing is repeated once per micro-batch of an update: `repeats`.
      DiffusionNFT's (NVlabs/DiffusionNFT, scripts/train_nft_sd3.py, 24af555) mixes once per update.
    - unit "step": the number of training steps before this one, at whose end the average is mixed, so that with `every`
      4 and two updates per step it is mixed after updates 8, 16, ... As in Flow-Factory (X-GenGroup/Flow-Factory,
      src/flow_factory/trainers, 3e615ee), AWM (scxue/advantage_weighted_matching, scripts/train_sd3_awm.py, be51372)
      and, without a warm-up, DanceGRPO (XueZeyue/DanceGRPO, fastvideo/train_grpo_flux.py, 15cc71d).
    """

    decay: float
    warm_up: bool = False
    every: int = 1  # units between two mixings
    repeats: int = 1  # applications at each mixing, which raises the decay to this power
    unit: EmaUnit = "update"
    step_updates: int = 1  # optimizer updates of a training step

    def at(self, updates: int | Int[Array, ""]) -> float | Float[Array, ""]:
        """Returns the decay after `updates` updates; between two mixings 1, which leaves the average unchanged."""
        parts = self.step_updates if self.unit == "step" else 1
        n = updates // parts - 1 if self.unit == "step" else updates
        decay: float | Array = self.decay
        if self.warm_up:
            decay = jnp.minimum(decay, (1 + n) / (10 + n))
        decay = decay**self.repeats
        if self.every * parts > 1:
            mixed = ((n + 1) % self.every == 0) & (updates % parts == 0)
            decay = jnp.where(mixed, decay, 1.0)
        return decay

    @property
    def first_step(self) -> int:
        """First training step, counted from 1, that mixes the average."""
        if self.unit == "step":
            return self.every
        return -(-max(self.every - 1, 1) // self.step_updates)


def update_average(copy: Any, current: Any, decay: Float[ArrayLike, ""]) -> Any:
    """Mixes every leaf of two equal trees: decay copy + (1 - decay) current, in the copy's dtype.

    The computation is float32. Decay 0 gives exactly `current`, and 1 gives `copy`.
    """
    decay = jnp.asarray(decay, jnp.float32)

    def leaf(old, new):
        mixed = decay * old.astype(jnp.float32) + (1 - decay) * new.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(leaf, copy, current)


class PreparedChunk(NamedTuple):
    """The trained part of a chunk.

    Attributes:
      members: Images of each training sample; of a pair, the preferred one first. None means one image per sample.
      advantages: One number per sample, or per image of a sample; the algorithm defines its meaning.
      weight: Weight of each sample; 0 means that it is not trained.
    """

    members: Int[np.ndarray, "n k"] | None
    advantages: Float[np.ndarray, "n *k"]
    weight: Float32[np.ndarray, "n"]


class Algorithm:
    """Properties that other packages read, with the most frequent values as defaults."""

    name: ClassVar[str]  # in a config
    objective: ClassVar[Literal["transitions", "matching"]]  # the program that trains it
    # config defaults that differ from the published values
    config_defaults: ClassVar[Mapping[str, Any]] = {}

    ranks: ClassVar[bool] = False  # reads only the order of images
    supports_early_training: ClassVar[bool] = False  # its loss can be linear in the advantages
    differentiates_rewards: ClassVar[bool] = False  # needs networks as rewards; has no advantages
    # with differentiable rewards: velocities of an image that have a gradient
    gradient_steps: int = 0
    detach_unconditional: bool = False  # the guidance's unconditional pass has no gradient
    stores_means: bool = False  # the sampler must store the means of x_next
    # one call of the loss needs all trained steps of an image
    needs_full_trajectories: bool = False
    # fields of a prompt record that name the image files of its group, the best first, which train instead of sampled
    # images; empty: images are sampled
    given_images: tuple[str, ...] = ()
    set_steps: int = 0  # of a fixed set that the policy before tuning samples; 0: no set
    times: Times | None = None  # noise levels of "matching"

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms, whose means over the samples are metrics."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError for incompatible settings; types define the range of each field."""

    def check_kind(self, kind: str) -> None:
        """Raises ValueError if samples from steps of this kind (`diffusion.steps.KINDS`) cannot be trained."""

    def check_steps(self, steps: int) -> None:
        """Raises ValueError for a number of sampling steps that cannot be trained."""

    def stored_latents(self, steps: int) -> range:
        """Returns which latents before steps 0, 1, ..., `steps` the trainer reads; empty means the final ones."""
        return range(0)

    def check_early_training(self, advantages: AdvantageSettings, images: int, groups: int) -> None:
        """Raises ValueError if training before a group is complete is not exact."""
        raise NotImplementedError

    def needs(self, advantages: AdvantageSettings) -> Literal["group", "step"]:
        """Returns the unit that must be scored before any part of it can train."""
        return advantages.ranking_needs if self.ranks else advantages.needs

    def prepare(
        self,
        advantages: Float[np.ndarray, "b *s"],
        weight: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> PreparedChunk:
        """Returns the trained part of a chunk.

        Args:
          advantages: Advantage of each image, or of each of its transitions; if the algorithm `ranks`, any numbers in
            the same order.
          weight: Weight of each image; 0 means excluded.
          rows: Group number of each image.
        """
        return PreparedChunk(None, advantages, weight)

    @property
    def images_per_sample(self) -> int:
        """Number of images in one training sample: 1, 2 for a pair, or those of a group."""
        return 1

    @property
    def guidances(self) -> tuple[float, float] | None:
        """Guidance of training and of the reference. None means the sampler's."""
        return None

    @property
    def ratio_bound(self) -> float | None:
        """Distance of a ratio from 1 at which the loss bounds it. None means that the first update has no such ratios.

        If it is not None, `terms` include "ratio_spread" and "over_spread_limit".
        """
        return None

    @property
    def reads_reference(self) -> bool:
        """Whether training reads the initial policy, which is then kept."""
        raise NotImplementedError

    @property
    def reads_behavior(self) -> bool:
        """Whether training reads the parameters that generated the samples."""
        return False

    @property
    def reads_start(self) -> bool:
        """Whether training reads the parameters at the start of its step, even after updates."""
        return False

    @property
    def slow_copy(self) -> LinearDecay | None:
        """Decay of a slow copy that follows the trained parameters, updated once per step. None means no copy."""
        return None

    @property
    def sampling_copy(self) -> LinearDecay | None:
        """Decay of a second slow copy, which is the behavior policy. None means that there is none."""
        return None

    @property
    def copy_samples_from(self) -> int | None:
        """Number of updates from which the slow copy is the behavior policy. None means never."""
        return None

    @property
    def reads_copy(self) -> bool:
        """Whether the loss reads the slow copy, other than as the behavior policy."""
        return self.slow_copy is not None and self.copy_samples_from is None


class Samples(NamedTuple):
    """Inputs of a policy gradient's loss for n transitions.

    `log_prob`, `mean` and `kl` belong to the policy being trained and have a gradient. The old policy is the
    denominator of the ratio: the behavior policy or, if the algorithm is `decoupled`, the policy at the start
    of the step. Inputs that the algorithm does not need may be None.
    """

    log_prob: Float[Array, "n"]
    old_log_prob: Float[Array, "n"]
    stored_log_prob: Float[Array, "n"]  # computed by the sampler
    advantages: Float[Array, "n"]  # before clipping
    weight: Float[Array, "n"]  # 1, or 0 for padding
    sigma: Float[Array, "n"]  # at the start of the steps
    dt: Float[Array, "n"]  # length of the steps, negative
    mean: Float[Array, "n ..."] | None = None  # of x_next
    old_mean: Float[Array, "n ..."] | None = None
    std: Float[Array, "n"] | None = None
    kl: Float[Array, "n"] | None = None  # to the reference
    behavior_log_prob: Float[Array, "n"] | None = None  # of the behavior policy, if decoupled
    trajectory: Int[Array, "n"] | None = None  # in [0, n), for ratios of trajectories


class MatchingSamples(NamedTuple):
    """Network inputs and targets for final images; for k images per sample each image-like array is [n, k, ...]."""

    x0: Float[Array, "n *shape"]  # latents of the sampled images
    x: Float[Array, "n *shape"]  # x0 at noise level sigma
    target: Float[Array, "n *shape"]  # eps - x0
    sigma: Float[Array, "n"]  # noise levels
    advantages: Float[Array, "n *k"]  # from `PreparedChunk`
    trained: Bool[Array, "n"]  # False for padding, whose terms and gradient are 0 for any values


class Velocities(NamedTuple):
    """Velocities of each policy at the same images and noise levels. None means that the algorithm does not read it."""

    trained: Float[Array, "n *shape"]  # with gradient
    behavior: Float[Array, "n *shape"] | None
    copy: Float[Array, "n *shape"] | None
    reference: Float[Array, "n *shape"] | None


class Matching(Algorithm):
    """Trains final images at noise levels of the forward process; any policy may have sampled them.

    The loss reads velocities v = v(null) + guidance (v(prompt) - v(null)) (arXiv 2207.12598), or v(prompt) alone if
    guidance is at most 1. This guidance may differ from the sampler's. The trained policy, the behavior policy and the
    slow copy share one value; the reference has another. If the model takes guidance as an input, these values are that
    input; if it also has an unconditional pass, every velocity uses the sampler's `true_cfg_scale`.

    Policy gradients always replay with the sampler's guidance, also for the reference, because their ratio is to the
    sampled policy (yifan123/flow_grpo, scripts/train_sd3.py, 74db691, `train.cfg`). Both passes have a gradient, as in
    that script. Commit ac4c86e stops the gradient of the unconditional pass, which is another objective: a step's
    gradient differs by more than its largest element.

    Public code of the matching algorithms:

    - yifan123/flow_grpo, scripts/train_sd3_dpo.py, ac4c86e: DPO samples at 4.5 and trains v(prompt), with the
      reference's v(prompt).
    - NVlabs/DiffusionNFT, scripts/train_nft_sd3.py, 24af555: samples at 1 and trains v(prompt). Above 1 it would add
      empty prompts to the texts without doubling the images, so that the batch sizes would differ.
    - scxue/advantage_weighted_matching, advantage_weighted_matching/scripts/train_sd3_awm.py, be51372: AWM trains
      v(prompt) by default (`train.cfg` False), else policy, old policy, reference and slow copy at the sampler's
      guidance.
    - X-GenGroup/Flow-Factory, src/flow_factory/trainers, a0b2bc5: dpo.py, nft.py and awm.py evaluate all policies at
      the sampler's guidance, 1 in their examples for Stable Diffusion 3.5; dgpo.py trains v(prompt), with its
      reference at 1 (`kl_cfg`).
    - verl-project/verl-omni, verl_omni/pipelines/sd3_dpo, a1139ba: DPO and its reference at one guidance, 4 in the
      example.
    """

    objective: ClassVar[Literal["matching"]] = "matching"
    shares_noise: ClassVar[bool] = True  # the images of a sample get the same noise
    guidance: float  # of training; in a config 0: the sampler's
    reference_guidance: float  # in a config 0, its default: as `guidance`

    @property
    def guidances(self) -> tuple[float, float]:
        """Guidance of training and of the reference."""
        return self.guidance, self.reference_guidance

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """Returns the `terms` of each sample; "loss" is minimized."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError if a reference guidance is set, but the reference is not evaluated."""
        if self.reference_guidance != self.guidance and not self.reads_reference:
            raise ValueError(
                f"reference_guidance is {self.reference_guidance} and guidance {self.guidance}, but with "
                "kl_coefficient 0 no reference is evaluated: set reference_guidance to 0, or set "
                "kl_coefficient"
            )


@dataclasses.dataclass(frozen=True)
class GroupMatching(Matching):
    """Trains complete groups: each is a sample, whose images have one noise level."""

    # Of the config's batch: images of a group.
    images_per_sample: int = dataclasses.field(default=2, metadata=DERIVED)

    def prepare(
        self,
        advantages: Float[np.ndarray, "b"],
        weight: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> PreparedChunk:
        """Makes each group of the chunk a sample."""
        members = np.stack([np.flatnonzero(rows == row) for row in np.unique(rows)])
        return PreparedChunk(members, advantages[members], weight[members[:, 0]])


def choose_guidance(guidance: float, reference: float, sampler: float) -> tuple[float, float]:
    """Resolves a config's (guidance, reference guidance): 0 means the sampler's and `guidance`, respectively."""
    guidance = guidance or sampler
    return guidance, reference or guidance
