"""The config's section `algorithm`: its name chooses a settings class, and the class's fields are the section's.

A field that holds settings itself, such as the noise levels `times`, is a nested section.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.algorithms.awm import AWM
from digen_jax.algorithms.diffusion_nft import DiffusionNFT
from digen_jax.algorithms.guidance import choose_guidance
from digen_jax.algorithms.old_log_probs import choose_old_log_probs
from digen_jax.algorithms.policy_gradient import PolicyGradient
from digen_jax.algorithms.preference import DiffusionDPO
from digen_jax.config.sections import PrecisionSection, SamplerSection
from digen_jax.errors import ConfigError, check_choice

# All algorithms, by name.
CLASSES = {kind.name: kind for kind in (PolicyGradient, DiffusionNFT, AWM, DiffusionDPO)}


def chosen(config: ConfigDict) -> str:
    """The name of a config's algorithm, or the default where the config has none.

    Raises:
      ConfigError: there is no algorithm of that name.
    """
    given = config.get("algorithm")
    name = given.get("name", "policy_gradient") if isinstance(given, ConfigDict) else None
    if name is not None:
        check_choice("config.algorithm.name", name, CLASSES)
    return name or "policy_gradient"


def kind(config: ConfigDict) -> type[Algorithm]:
    """The class of a complete config's algorithm."""
    return CLASSES[config.algorithm.name]


def section(name: str) -> dict[str, Any]:
    """The section of an algorithm with every field at its default."""
    return {"name": name, **dataclasses.asdict(CLASSES[name]()), **CLASSES[name].config_defaults}


def check_own(config: ConfigDict) -> None:
    """Refuses fields of another algorithm than the chosen one; `check_fields` refuses unknown fields.

    Raises:
      ConfigError: names the first such field, and the algorithms that have it.
    """
    name = chosen(config)
    own, given = section(name), config.get("algorithm")
    for field in given if isinstance(given, ConfigDict) else ():
        others = [other for other in CLASSES if field in section(other)]
        if field not in own and others:
            raise ConfigError(
                f"config.algorithm.{field} is a field of {' and '.join(others)}, but config.algorithm.name "
                f"is {name!r}: leave it out of the config file, or where only the name was given on the "
                f"command line, start from a recipe for {name}"
            )


def settled(
    given: Mapping[str, Any],
    precision: PrecisionSection,
    sampler: SamplerSection,
    stale: bool,
    updates: int,
) -> Algorithm:
    """The settings of a complete section; "auto" and 0 are replaced by what the other sections imply.

    Args:
      given: the section.
      precision: the config's section of that name.
      sampler: the config's section of that name.
      stale: whether asynchrony is on.
      updates: optimizer updates a step.
    """
    algorithm = CLASSES[given["name"]]
    fields = {field: value for field, value in given.items() if field != "name"}
    for field, default in vars(algorithm()).items():
        if dataclasses.is_dataclass(default):
            fields[field] = dataclasses.replace(default, **fields[field])
    if fields.get("old_log_probs") == "auto":
        fields["old_log_probs"] = choose_old_log_probs(
            "auto",
            # An importance weight to the sampler's policy also corrects for its rounding.
            float32=precision.exact_ratios or fields.get("importance_cap", 0) > 0,
            stale=stale,
            updates=updates,
            stored=algorithm.objective == "transitions",
        )
    if "guidance" in fields:
        own = fields["guidance"], fields["reference_guidance"]
        guidances = choose_guidance(*own, sampler.guidance)
        fields["guidance"], fields["reference_guidance"] = guidances
    return algorithm(**fields)
