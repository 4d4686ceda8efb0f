"""Field names and types of a config, and the known name closest to an unknown one."""

import difflib
from typing import Any

from ml_collections import ConfigDict

from digen_jax.errors import ConfigError

# Fields of older configs, and their new names.
MOVED = {
    "config.algorithm.advantage_std": "config.advantages.std",
    "config.evaluation.true_guidance": "config.evaluation.true_cfg_scale",
    "config.lora.start": "config.lora.path",
    "config.pictures": "config.images",
    "config.pictures.every": "config.images.every",
    "config.pictures.images": "config.images.count",
    "config.placement.sizes": "config.placement.mode",
    "config.precision.published": "config.precision.rollout",
    "config.prompts.store": "config.prompts.cache",
    "config.prompts.store_limit": "config.prompts.cache_limit",
    "config.runtime.ordered": "config.runtime.deterministic_order",
    "config.runtime.redundant_groups": "config.runtime.oversampled_groups",
    "config.sampler.true_guidance": "config.sampler.true_cfg_scale",
    "config.sampler.window.fraction": "config.sampler.window.timestep_fraction",
    "config.reward": "config.rewards, a list with a section or a name for each reward, and config.reward_pool",
    "config.reward.name": "config.rewards, of which the command line has one option for each reward,",
    "config.reward.weights": "config.rewards[0].weight, of the first reward,",
    "config.reward.processes": "config.reward_pool.processes",
    "config.reward.retries": "config.reward_pool.retries",
    "config.runtime.early_groups": "config.runtime.max_incomplete_groups",
    "config.runtime.stale_share": "config.runtime.max_off_policy_fraction",
    "config.runtime.staleness": "config.runtime.max_policy_lag",
    "config.sampler.fragment": "config.sampler.chunk",
}
KINDS: dict[type, tuple[str, tuple[Any, ...]]] = {
    bool: ("True or False", (bool,)),
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
    str: ("a text", (str,)),
    tuple: ("a tuple", (tuple, list)),
    list: ("a list", (tuple, list)),
}


def flat(config: ConfigDict, path: str = "config") -> dict[str, Any]:
    """Returns every dotted name of a config with its value, groups of fields included.

    Names of list sections include the index, such as config.rewards[0].
    """
    fields: dict[str, Any] = {}
    for name, value in config.items():
        listed = value if isinstance(value, tuple | list) else ()
        groups = {f"{path}.{name}[{i}]": one for i, one in enumerate(listed)}
        for place, one in {f"{path}.{name}": value, **groups}.items():
            if isinstance(one, ConfigDict):
                fields |= {place: one} | flat(one, place)
            elif place not in groups:
                fields[place] = one
    return fields


def check_known(name: str, fields: dict[str, Any]) -> None:
    """Refuses an unknown dotted name, and names its first unknown part; `fields` are the known ones, from `flat`."""
    if name in MOVED:
        raise ConfigError(f"{name} is not a field; it is {MOVED[name]} now")
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        parent, field = ".".join(parts[: end - 1]), ".".join(parts[:end])
        if parent != "config" and not isinstance(fields[parent], ConfigDict):
            raise ConfigError(f"{parent} is a single value without fields: {name} cannot be set")
        if field not in fields:
            raise ConfigError(f"{field} is not a field; {_nearest(field, fields)}")


def _nearest(name: str, fields: dict[str, Any]) -> str:
    """Returns a hint for an unknown field: a similar one in its section or elsewhere, or all fields of its section."""
    if name in MOVED:
        return f"it is {MOVED[name]} now"
    parent, field = name.rsplit(".", 1)
    listed = name.partition("[")[0]
    if isinstance(fields.get(listed), tuple | list) and name.endswith("]"):
        return (
            f"the config file has {len(fields[listed])} of {listed}: change these, or give the complete list by "
            f"one --{listed}=NAME for each or as --{listed}=\"({{'name': NAME, 'weight': 0.5}}, ...)\""
        )
    everywhere = {known.rsplit(".", 1)[1]: known for known in fields}
    siblings = {last: f"{parent}.{last}" for last in everywhere if f"{parent}.{last}" in fields}
    for known, cutoff in ((siblings, 0.6), (everywhere, 0.8)):
        if close := difflib.get_close_matches(field, known, n=1, cutoff=cutoff):
            return f"did you mean {known[close[0]]}?"
    if not siblings:
        return f"{parent} is empty: set its fields in the config file, or all as --{parent}=\"{{'{field}': ...}}\""
    return f"the fields of {parent} are {', '.join(sorted(siblings))}"
