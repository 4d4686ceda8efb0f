"""A reward that a run asks for: one section of the config's list `rewards`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from digen_jax.ranges import NonNegativeFloat


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """A reward; the config has a list of such sections, in which a name alone stands for a section with that name.

    On the command line `--config.rewards[0].weight=0.5` sets a field of the first section that the config file has.
    One option `--config.rewards` with a name for each reward replaces the whole list.
    """

    name: str = "shapes_geneval"  # a built-in reward, or module:function
    # factor of its scores in the sum that is trained, or of its advantages (`advantages.combine`); for a reward that
    # returns several scores a dict with a factor for each score that is trained. 0: shown, not trained
    weight: float | Mapping[str, float] = 1.0
    # the reward's own settings, by name
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # by which metrics and the "rewards" of a prompt know it, instead of its name; "": the name. Sections
    # with the same reward, such as two of "served" with different servers, need different ones
    label: str = ""
    # seconds that a batch of images may take; 0: as `runtime.deadline` says
    limit: NonNegativeFloat = 0.0
    # bound of the size of its advantages before they are weighted, if `advantages.combine` is "advantages"; 0: none
    clip: NonNegativeFloat = 0.0
    # what computes it: "mesh": the devices that sample, once they have decoded a chunk, possible for clip_score,
    # pickscore, hpsv2 and aesthetic; "pool": the processes of `reward_pool`; "": the mesh where possible
    where: Literal["", "mesh", "pool"] = ""

    @property
    def title(self) -> str:
        """The label, or else the name: of all sections another one."""
        return self.label or self.name

    @property
    def entries(self) -> dict[str, str]:
        """The scores that have a weight: by the entry of what the reward returns, the score's name.

        The entry of a reward with a single weight has the reward's name, without its module.
        """
        if isinstance(self.weight, Mapping):
            return {entry: f"{self.title}/{entry}" for entry in self.weight}
        return {self.name.rpartition(":")[2]: self.title}

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each of `entries`."""
        weighed = self.weight.values() if isinstance(self.weight, Mapping) else [self.weight]
        return tuple(map(float, weighed))

    @property
    def clips(self) -> tuple[float, ...]:
        """The bound of each of `entries`."""
        return (self.clip,) * len(self.entries)
