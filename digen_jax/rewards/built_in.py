"""Resolves the rewards of a config: built-in rewards and user functions."""

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from digen_jax.errors import ConfigError
from digen_jax.files import make_examples_importable
from digen_jax.rewards import NamedReward, Reward, Rewards, RewardSettings
from digen_jax.rewards.errors import user_code

# Where a reward is computed: "pool" is a process or thread of the host, which requires a picklable function; "server"
# is a process of launch/reward_server.py only, because the reward imports torch; "mesh" is the rollout devices, unless
# a config or a server computes it in the pool.
Where = Literal["pool", "server", "mesh"]
ARGUMENTS = ("images", "prompts", "metadata")  # of a reward
KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Setting types that are validated.
TYPES = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}


@dataclasses.dataclass(frozen=True)
class BuiltIn:
    """A built-in reward: a module that is imported lazily and fast, and names in it.

    Weights are read at the first call.
    """

    module: str
    factory: str  # returns the reward; its keyword arguments are the reward's settings
    # Returns a `SanityCheck`; "module:name" if it is in another module. Empty means none.
    sanity_check: str = ""
    where: Where = "pool"  # where the reward is computed
    # Maps a record and the reward's settings to a description of the missing input, such as "quotes no text", or None.
    # Empty means that there are no required inputs.
    needs: str = ""


LEARNED, PAIRS = "digen_jax.learned_rewards", "digen_jax.learned_rewards.sanity_checks"
JPEG, GENEVAL = "digen_jax.rewards.jpeg", "digen_jax.rewards.geneval"
BUILT_IN = {
    "aesthetic": BuiltIn(LEARNED, "AestheticScore", f"{PAIRS}:image_pairs", "mesh"),
    "clip_score": BuiltIn(LEARNED, "ClipScore", f"{PAIRS}:prompt_pairs", "mesh"),
    "geneval": BuiltIn(GENEVAL, "GenEval", f"{PAIRS}:object_pairs", "server", "needs"),
    "hpsv2": BuiltIn(LEARNED, "Hpsv2", f"{PAIRS}:prompt_pairs", "mesh"),
    "jpeg_compressibility": BuiltIn(JPEG, "jpeg_compressibility", "known_compressibility"),
    "jpeg_incompressibility": BuiltIn(JPEG, "jpeg_incompressibility", "known_incompressibility"),
    # Scores depend on the user's judge model, so there is no sanity check.
    "judge": BuiltIn("digen_jax.rewards.judge", "Judge", needs="needs"),
    "ocr": BuiltIn("digen_jax.rewards.ocr", "Ocr", "sanity_check", needs="needs"),
    "pickscore": BuiltIn(LEARNED, "PickScore", f"{PAIRS}:prompt_pairs", "mesh"),
    # The reward server runs the sanity checks.
    "served": BuiltIn("digen_jax.rewards.service.client", "Served"),
    "shapes_geneval": BuiltIn("examples.shapes.reward", "make", "sanity_check"),
    "shapes_motion": BuiltIn("examples.shapes.reward", "make_motion", "motion_sanity_check"),
}


def resolve(
    sections: Sequence[RewardSettings],
    field: str = "config.rewards",
    serving: bool = False,
    meshes: bool = False,
) -> Rewards:
    """Returns the rewards of config sections: built-in names, or user functions as "module:function".

    User modules are searched in the current directory first, then on Python's path. Error messages name the list
    `field`, or only the reward if it is empty. The rewards are for a reward server if `serving`, and for a run, which
    computes some of them on its meshes, if `meshes`.

    Raises:
      ConfigError: A reward, module or function does not exist, cannot be imported or called, has invalid settings, or
        is only available in a server; or two sections have the same title.
    """
    found, titles = [], [one.title for one in sections]
    for number, one in enumerate(sections):
        try:
            if "/" in one.label:
                raise ConfigError(f"label = {one.label!r} must not contain '/', as metrics do")
            if one.title in titles[:number]:
                label = f", or give one of them another label than {one.title!r}" if field else ""
                twice = f"reward {one.title!r} is named twice"
                raise ConfigError(f"{twice}: name it once, with the sum of weights{label}")
            if not serving and one.name in BUILT_IN and BUILT_IN[one.name].where == "server":
                raise ConfigError(
                    f"reward {one.name!r} imports torch, which a run must not: start launch/reward_server.py with "
                    f"--reward={one.name}, and name the reward 'served' with its address here"
                )
            scores_on_mesh = _on_mesh(one) and meshes
            found.append(NamedReward(one, _function(one), scores_on_mesh))
        except ConfigError as error:
            where = f"{field}[{number}]: " if field else ""
            raise type(error)(f"{where}{error}") from error
    return Rewards(tuple(found))


def on_mesh(sections: Sequence[RewardSettings]) -> dict[int, RewardSettings]:
    """Returns the rewards that a run computes on its rollout meshes, by index. Raises like `resolve`."""
    return {number: one for number, one in enumerate(sections) if _on_mesh(one)}


def mesh_rewards(
    sections: Sequence[RewardSettings], scorers: Sequence[Reward]
) -> dict[int, NamedReward]:
    """Returns the rewards `on_mesh` with their scorers as functions, by index in the config's list."""
    pairs = zip(on_mesh(sections).items(), scorers, strict=True)
    return {number: NamedReward(settings, scorer) for (number, settings), scorer in pairs}


def _on_mesh(section: RewardSettings) -> bool:
    possible = section.name in BUILT_IN and BUILT_IN[section.name].where == "mesh"
    if section.where == "mesh" and not possible:
        raise ConfigError(f"reward {section.name!r} cannot be on a mesh: set its 'where' to ''")
    found = possible and section.where != "pool"
    if found and section.limit:
        raise ConfigError(
            f"reward {section.name!r} has no time limit on the mesh: set its field 'limit' to 0, or 'where' to 'pool'"
        )
    return found


def find_sanity_check(reward: NamedReward) -> Callable[[], Any] | None:
    """Returns the function that creates a reward's `SanityCheck`, or None if there is none.

    User functions provide it as the attribute `sanity_check`.

    Raises:
      ConfigError: The function uses the old attribute name, `canary`.
    """
    name = reward.settings.name
    if name in BUILT_IN:
        return _import_of(name, BUILT_IN[name].sanity_check)
    function = getattr(reward.function, "func", reward.function)
    if hasattr(function, "canary"):
        raise ConfigError(f"reward {name!r}: its attribute 'canary' is now named 'sanity_check'")
    return getattr(function, "sanity_check", None)


def find_needs(section: RewardSettings) -> Callable[[dict[str, Any]], str | None] | None:
    """Returns the check of required inputs of a built-in reward, with its settings: see `BuiltIn.needs`."""
    needs = BUILT_IN[section.name].needs if section.name in BUILT_IN else ""
    function = _import_of(section.name, needs)
    return function and (lambda record: function(record, section.settings))


def _import_of(name: str, attribute: str) -> Any:
    """Imports an attribute of a built-in reward's module, or "module:name". Returns None if it is empty."""
    if not attribute:
        return None
    return _import(attribute if ":" in attribute else f"{BUILT_IN[name].module}:{attribute}", name)


def _function(section: RewardSettings) -> Callable[..., Any]:
    """Returns the function of a section with bound settings."""
    name, settings = section.name, dict(section.settings)
    if name in BUILT_IN:
        factory = _import_of(name, BUILT_IN[name].factory)
        _check_settings(factory, name, settings, 0)
        return factory(**settings)
    function = _import(name, name)
    if isinstance(function, type):
        raise ConfigError(f"reward {name!r} is a class: name a function or an instance of it")
    if not callable(function):
        raise ConfigError(f"reward {name!r} is a {type(function).__name__}: name a function")
    _check_settings(function, name, settings, len(ARGUMENTS))
    return functools.partial(function, **settings) if settings else function


def _import(place: str, name: str) -> Any:
    """Imports the object "module:name" for a reward.

    Raises:
      ConfigError: The object is missing, or its import fails; shows the failing line of the user's code.
    """
    module_name, _, attribute = place.partition(":")
    if not (module_name and attribute):
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"unknown reward {name!r}: use one of {known}, or your module:function")
    if module_name.startswith(("benchmarks.", "examples.")):
        make_examples_importable()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with user_code(name, "cannot be imported:"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            missing = f"there is no module {module_name!r} in {os.getcwd()} or installed"
            raise ConfigError(f"reward {name!r}: {missing}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"reward {name!r}: module {module_name} has no function {attribute!r}")
    return getattr(module, attribute)


def _check_settings(function: Any, name: str, settings: Mapping[str, Any], first: int) -> None:
    """Checks that settings are keywords of a function, from argument `first` on, with the types of the defaults.

    The arguments before, if any, must be those of a reward.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no signature for some C functions
        return
    parameters = list(signature.parameters.values())[first:]
    known = {one.name: one.default for one in parameters if one.kind in KEYWORDS}
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        for setting, value in settings.items():
            _check_setting(setting, value, name, known)
    try:
        signature.bind(*ARGUMENTS[:first], **settings)
    except TypeError as error:
        what = f"takes {signature}: it must take ({', '.join(ARGUMENTS)})"
        what = what if first else f"is {error}: add it to its settings"
        raise ConfigError(f"reward {name!r} {what}") from error


def _check_setting(setting: str, value: Any, name: str, known: Mapping[str, Any]) -> None:
    """Checks a setting of a reward against the `known` ones, by name with their defaults."""
    if setting not in known:
        close = difflib.get_close_matches(setting, known, n=1)
        names = ", ".join(known) or "none"
        hint = f"did you mean {close[0]!r}?" if close else f"it has {names}"
        raise ConfigError(f"reward {name!r} has no setting {setting!r}; {hint}")
    kind = type(known[setting])
    accepted = (int, float) if kind is float else kind
    fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    if kind in TYPES and not fits:
        what = f"the setting {setting!r} of reward {name!r} is {value!r}"
        raise ConfigError(f"{what}: give it {TYPES[kind]}, such as {known[setting]!r}")
