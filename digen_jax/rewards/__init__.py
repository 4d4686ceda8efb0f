"""Rewards: functions from images, prompts and metadata to one score an image.

A reward is `f(images [b, h, w, 3] in [0, 1], prompts, metadata) -> scores [b]`, numpy on the host.
"""

import importlib
import os
import sys
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from digen_jax.settings import ConfigError

Reward = Callable[..., np.ndarray]

BUILT_IN = {"shapes_geneval": "digen_jax.rewards.shapes:shapes_geneval"}


def resolve(name: str) -> Reward:
    """The reward of a name: a built-in one, or the user's own as "module:function".

    The user's module is looked for in the current directory first, then wherever Python looks.

    Raises:
      ConfigError: there is no such reward, module or function.
    """
    module_name, colon, function = BUILT_IN.get(name, name).partition(":")
    if not (module_name and colon and function):
        raise ConfigError(
            f"unknown reward {name!r}: use one of {', '.join(BUILT_IN)}, or module:function for "
            "your own"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name, name)
    reward = getattr(module, function, None)
    if not callable(reward):
        raise ConfigError(f"reward {name!r}: module {module_name} has no function {function!r}")
    return reward


def call(
    reward: Reward,
    name: str,
    images: Float[np.ndarray, "b h w 3"],
    prompts: list[str],
    metadata: list[dict],
) -> Float[np.ndarray, "b"]:
    """The reward's scores as float32, checked; `name` is what errors call it.

    Raises:
      ConfigError: the scores are not one finite number an image. What the reward itself raises
        passes through.
    """
    scores = _as_array(reward(images, prompts, metadata), name)
    if scores.shape != (len(images),):
        raise ConfigError(
            f"reward {name!r} returned shape {scores.shape} for {len(images)} images: return one "
            f"number an image, shape ({len(images)},)"
        )
    if not np.issubdtype(scores.dtype, np.number) and scores.dtype != bool:
        raise ConfigError(f"reward {name!r} returned {scores.dtype} values: return numbers")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is refused
        scores = scores.astype(np.float32)
    if not np.isfinite(scores).all():
        worst = int(np.argmin(np.isfinite(scores)))
        raise ConfigError(
            f"reward {name!r} returned {scores[worst]} for image {worst} ({prompts[worst]!r}): "
            "return finite numbers"
        )
    return scores


def _as_array(scores: object, name: str) -> np.ndarray:
    try:
        return np.asarray(scores)
    except ValueError as error:  # lists of different lengths
        raise ConfigError(
            f"reward {name!r} returned what is no array ({error}): return one number an image"
        ) from error


def _import(module_name: str, name: str) -> object:
    """The module; an import error inside it is the user's own and passes through."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"reward {name!r}: there is no module {module_name!r} in {os.getcwd()} or among the "
            "installed packages"
        ) from error
