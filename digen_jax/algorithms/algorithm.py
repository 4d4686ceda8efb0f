"""What an algorithm answers for itself, so that nobody else has to ask which one it is.

An algorithm is a frozen dataclass of its settings, which are the fields of the config's section `algorithm`. It
trains either the transitions of sampled trajectories or final images at noise levels of the forward process
("matching"). `config.algorithm_section.CLASSES` lists those there are.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.algorithms.decay import LinearDecay
from digen_jax.flow.noising import Times


class Prepared(NamedTuple):
    """What of a fragment is trained.

    Attributes:
      pairs: the images that each training sample holds, the preferred one first; None: one image each.
      advantages: a number for each sample, in the algorithm's own sense.
      weight: of each sample; 0: it is not trained.
    """

    pairs: Int[np.ndarray, "n 2"] | None
    advantages: Float[np.ndarray, "n"]
    weight: Float32[np.ndarray, "n"]


class Algorithm:
    """The questions that engine, runtime, config and planner ask, with the most frequent answers."""

    name: ClassVar[str]  # in a config
    objective: ClassVar[Literal["transitions", "matching"]]  # of the engine, by which it is trained
    config_defaults: ClassVar[
        Mapping[str, Any]
    ] = {}  # where a config's differ from the published values

    images_of_sample: ClassVar[int] = 1  # that one training sample holds
    ranks: ClassVar[bool] = False  # reads in which order images are, and not how much better one is
    may_train_early: ClassVar[bool] = False  # its loss can be linear in the advantages
    publishes_copy: ClassVar[bool] = False  # its slow copy is the behaviour policy
    stores_means: bool = False  # the sampler has to store the means of x_next
    of_trajectories: bool = False  # one call of the loss needs all trained steps of an image
    set_steps: int = (
        0  # of a fixed set that the policy before tuning samples; 0: what is published samples anew
    )
    times: Times | None = None  # the noise levels of "matching"

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss's terms, whose means over the samples are metrics."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError for a setting that cannot work, and says what to change."""
        raise NotImplementedError

    def check_kind(self, kind: str) -> None:
        """Raises ValueError where images that are sampled by steps of a kind (`flow.steps.KINDS`) cannot be trained."""

    def check_early(self, advantages: AdvantageSettings, images: int, groups: int) -> None:
        """Raises ValueError where training before a group is complete is not exact; asked if `may_train_early`."""
        raise NotImplementedError

    def needs(self, advantages: AdvantageSettings) -> Literal["group", "step"]:
        """What must be scored before any of it can train."""
        return advantages.ranking_needs if self.ranks else advantages.needs

    def prepare(
        self,
        advantages: Float[np.ndarray, "b"],
        weight: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> Prepared:
        """What of a fragment is trained.

        Args:
          advantages: of each image; where the algorithm `ranks`, any numbers of the images' order.
          weight: 0 for images that are left out.
          rows: the number of each image's group.
        """
        return Prepared(None, advantages, weight)

    @property
    def guidances(self) -> tuple[float, float] | None:
        """Of training, and of the reference; None: the sampler's."""
        return None

    @property
    def ratio_bound(self) -> float | None:
        """How far from 1 a ratio may go before the loss bounds it; None: the first update has no such ratios.

        Where there is one, "ratio_spread" and "over_spread_limit" are among the `terms`.
        """
        return None

    @property
    def reads_reference(self) -> bool:
        """Whether training reads the policy before tuning, which is then kept."""
        raise NotImplementedError

    @property
    def reads_behaviour(self) -> bool:
        """Whether training reads the parameters that sampled."""
        return False

    @property
    def reads_start(self) -> bool:
        """Whether training reads the parameters that its step began with, updates later."""
        return False

    @property
    def slow_copy(self) -> LinearDecay | None:
        """How a slow copy of the trained parameters follows, once a step; None where none is kept."""
        return None


class MatchingSamples(NamedTuple):
    """Final images as the network is given them, and what it should answer; of pairs each array is [n, 2, ...].

    Attributes:
      x0: sampled images' latents.
      x: x0 at noise level sigma.
      target: eps - x0.
      sigma: the noise levels.
      advantages: of `Prepared`.
      trained: False for padding: such a sample's terms and gradient are 0, whatever its values.
    """

    x0: Float[Array, "n *shape"]
    x: Float[Array, "n *shape"]
    target: Float[Array, "n *shape"]
    sigma: Float[Array, "n"]
    advantages: Float[Array, "n"]
    trained: Bool[Array, "n"]


class Velocities(NamedTuple):
    """Of each policy at the same images and noise levels; None: of one that the algorithm does not read."""

    trained: Float[Array, "n *shape"]  # with gradient
    behaviour: Float[Array, "n *shape"] | None
    copy: Float[Array, "n *shape"] | None
    reference: Float[Array, "n *shape"] | None


class Matching(Algorithm):
    """Trains final images at noise levels of the forward process, whatever sampled them."""

    objective: ClassVar[Literal["matching"]] = "matching"
    guidance: float  # of training, see `guidance.py`; in a config 0: the sampler's
    reference_guidance: float  # in a config 0, its default: as `guidance`

    @property
    def guidances(self) -> tuple[float, float]:
        """Of training, and of the reference."""
        return self.guidance, self.reference_guidance

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """The `terms` of each sample; "loss" is what is minimised."""
        raise NotImplementedError
