"""Reward section of the config."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from digen_jax.ranges import NonNegativeFloat


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """A reward; the config has a list of such sections. A name alone is a section with that name.

    On the command line, `--config.rewards[0].weight=0.5` sets a field of the first section in the config file.
    `--config.rewards`, repeated for several names, replaces the list.
    """

    name: str = "shapes_geneval"  # a built-in reward, or module:function
    # factor of its scores in the trained sum, or of its advantages (`advantages.combine`); for a reward that returns
    # several scores, a dict with a factor for each trained score. 0: logged, not trained
    weight: float | Mapping[str, float] = 1.0
    # the reward's own settings, by name
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # replaces the name in metrics and in the field "rewards" of prompts; "": the name. Sections with the same reward,
    # such as two of "served" with different servers, need different labels
    label: str = ""
    # time limit of a batch of images in seconds; 0: that of `runtime.deadline`
    limit: NonNegativeFloat = 0.0
    # largest absolute value of its advantages before weighting, if `advantages.combine` is "advantages"; 0: no limit
    clip: NonNegativeFloat = 0.0
    # where it is computed: "mesh": on the sampling devices, after decoding (clip_score, pickscore, hpsv2 and
    # aesthetic); "pool": in the processes of `reward_pool`; "": on the mesh if possible
    where: Literal["", "mesh", "pool"] = ""

    @property
    def title(self) -> str:
        """Label, or name if there is none; unique among the sections."""
        return self.label or self.name

    @property
    def entries(self) -> dict[str, str]:
        """Scores with a weight: maps keys of the reward's returned dict to score names.

        The key of a reward with a single weight is the reward's name, without its module.
        """
        if isinstance(self.weight, Mapping):
            return {entry: f"{self.title}/{entry}" for entry in self.weight}
        return {self.name.rpartition(":")[2]: self.title}

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each of `entries`."""
        weights = self.weight.values() if isinstance(self.weight, Mapping) else [self.weight]
        return tuple(map(float, weights))

    @property
    def clips(self) -> tuple[float, ...]:
        """Advantage clip limit of each of `entries`."""
        return (self.clip,) * len(self.entries)
