"""The fields of a config: their names and types, and the known name closest to an unknown one."""

import difflib
from typing import Any

from ml_collections import ConfigDict

from digen_jax.errors import ConfigError

# Fields of older configs, and where they have moved.
MOVED = {
    "config.algorithm.advantage_std": "config.advantages.std",
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
KINDS = {
    bool: ("True or False", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a text", (str,)),
    tuple: ("a tuple", (tuple, list)),
    list: ("a list", (tuple, list)),
}


def flat(config: ConfigDict, path: str = "config") -> dict[str, Any]:
    """Every dotted name of a config with its value, groups of fields included.

    The sections of a list have its name with their number, such as config.rewards[0].
    """
    fields = {}
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
    """Refuses a dotted name and names its first part that is no field; `fields` are the known ones, from `flat`."""
    if name in MOVED:
        raise ConfigError(f"{name} is not a field; it is {MOVED[name]} now")
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        parent, field = ".".join(parts[: end - 1]), ".".join(parts[:end])
        if parent != "config" and not isinstance(fields[parent], ConfigDict):
            raise ConfigError(f"{parent} is one value and has no fields: {name} cannot be set")
        if field not in fields:
            raise ConfigError(f"{field} is not a field; {_nearest(field, fields)}")


def _nearest(name: str, fields: dict[str, Any]) -> str:
    """A hint for an unknown field: a similar one in its section, or elsewhere, or all fields of its section."""
    if name in MOVED:
        return f"it is {MOVED[name]} now"
    parent, field = name.rsplit(".", 1)
    whole = name.partition("[")[0]
    if isinstance(fields.get(whole), tuple | list) and name.endswith("]"):
        return (
            f"the config file has {len(fields[whole])} of {whole}: change what is there, or give the whole list, by "
            f"one --{whole}=NAME for each or as --{whole}=\"({{'name': NAME, 'weight': 0.5}}, ...)\""
        )
    everywhere = {known.rsplit(".", 1)[1]: known for known in fields}
    siblings = {last: f"{parent}.{last}" for last in everywhere if f"{parent}.{last}" in fields}
    for known, cutoff in ((siblings, 0.6), (everywhere, 0.8)):
        if close := difflib.get_close_matches(field, known, n=1, cutoff=cutoff):
            return f"did you mean {known[close[0]]}?"
    if not siblings:
        return f"{parent} is empty: set its fields in the config file, or all as --{parent}=\"{{'{field}': ...}}\""
    return f"the fields of {parent} are {', '.join(sorted(siblings))}"


def check_fields(config: ConfigDict, reference: ConfigDict) -> None:
    """Checks that a config has exactly the fields of a reference config.

    Raises:
      ConfigError: names the first unknown field and the closest known one, or the first missing.
    """
    known, given = flat(reference), flat(config)
    for name in given:
        check_known(name, known)
    for name, value in known.items():
        if name not in given:
            raise ConfigError(f"{name} is missing: add it to the config, for example as {value!r}")


def check_types(config: ConfigDict, reference: ConfigDict, path: str = "config") -> None:
    """Checks the type of every value of a config against the reference's; call `check_fields` first.

    A whole number passes for a number and a list for a tuple. Where the reference holds None,
    anything passes; where it is a placeholder, None and values of its type pass.

    Raises:
      ConfigError: names the first field whose value has another type, and the type it needs.
    """
    for name, value in reference.items():
        given, kind = config[name], reference.get_type(name)
        if isinstance(value, ConfigDict):
            if not isinstance(given, ConfigDict):
                raise ConfigError(f"{path}.{name} must be a group of fields, not {given!r}")
            check_types(given, value, f"{path}.{name}")
        elif name == "rewards":
            for number, (one, other) in enumerate(zip(given, value, strict=True)):
                check_types(one, other, f"{path}.{name}[{number}]")
        elif kind in KINDS and not (value is None and given is None):
            words, accepted = KINDS[kind]
            if not isinstance(given, accepted) or (isinstance(given, bool) and kind is not bool):
                raise ConfigError(f"{path}.{name} must be {words}, not {given!r}")
