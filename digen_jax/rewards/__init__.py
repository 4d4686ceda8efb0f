"""Rewards: functions from images, prompts and metadata to one score an image.

A reward is `f(images [b, h, w, 3] in [0, 1], prompts, metadata) -> scores [b]`, numpy on the host.
Several rewards are one function with a column of scores for each, [b, k]; their weighted sum (`total`) is the
single number of an image. Rewards are named by a tuple of names.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Float32

from digen_jax.errors import ConfigError
from digen_jax.rewards.mistakes import RewardMistake, blamed, check_callable

Reward = Callable[..., np.ndarray]

BUILT_IN = {"shapes_geneval": "digen_jax.shapes.reward:shapes_geneval"}


@dataclasses.dataclass(frozen=True)
class Several:
    """Rewards that score the same images, one after the other."""

    rewards: tuple[Reward, ...]
    names: tuple[str, ...]

    def __call__(
        self, images: Float[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b k"]:
        """A column for each reward; an error names the reward that it is about."""
        pairs = zip(self.rewards, self.names, strict=True)
        columns = [call(reward, (name,), images, prompts, metadata) for reward, name in pairs]
        return np.stack(columns, axis=1)


def label(names: tuple[str, ...]) -> str:
    """The name of rewards in errors."""
    return ", ".join(names)


def resolve(names: tuple[str, ...]) -> Reward:
    """The reward of a name, built-in or the user's own as "module:function"; for several names `Several`.

    The user's module is searched in the current directory first, then on Python's path.

    Raises:
      ConfigError: there is no such reward, module or function, it cannot be imported or called, or a reward is
        named twice.
    """
    twice = [one for one in names if names.count(one) > 1]
    if twice:
        raise ConfigError(
            f"reward {twice[0]!r} is named twice: name it once, with the sum of weights"
        )
    if len(names) > 1:
        return Several(tuple(map(_resolve, names)), names)
    return _resolve(names[0])


def total(
    scores: Float[np.ndarray, "b"] | Float[np.ndarray, "b k"], weights: Sequence[float]
) -> Float32[np.ndarray, "b"]:
    """The weighted sum of each image's scores: the number that is shown and compared."""
    columns = scores.reshape(len(scores), len(weights)).astype(np.float64)
    # no matrix product: it may add up the rows of equal images in different orders
    return (columns * np.asarray(weights)).sum(axis=1).astype(np.float32)


def each(
    names: tuple[str, ...], scores: Float[np.ndarray, "b"] | Float[np.ndarray, "b k"]
) -> dict[str, Float[np.ndarray, "b"]]:
    """The scores of several rewards by their names; empty for a single reward, whose score is the total."""
    return dict(zip(names, scores.T, strict=True)) if len(names) > 1 else {}


def _resolve(name: str) -> Reward:
    module_name, colon, function = BUILT_IN.get(name, name).partition(":")
    if not (module_name and colon and function):
        raise ConfigError(
            f"unknown reward {name!r}: use one of {', '.join(BUILT_IN)}, or module:function for "
            "your own"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name, name)
    if not hasattr(module, function):
        raise ConfigError(f"reward {name!r}: module {module_name} has no function {function!r}")
    reward = getattr(module, function)
    check_callable(reward, name)
    return reward


def call(
    reward: Reward,
    names: tuple[str, ...],
    images: Float[np.ndarray, "b h w 3"],
    prompts: list[str],
    metadata: list[dict],
) -> Float32[np.ndarray, "b"] | Float32[np.ndarray, "b k"]:
    """The reward's scores as checked float32 numbers, [b], or [b, k] for k rewards; errors say the names.

    Raises:
      RewardFailed: the reward raises an exception.
      RewardMistake: its scores are not one finite number an image and reward.
    """
    name, count = label(names), len(names)
    with blamed(name, "raised"):
        returned = reward(images, prompts, metadata)
    scores = _as_array(returned, name)
    shape = (len(images),) if count == 1 else (len(images), count)
    if scores.shape != shape:
        numbers = "one number" if count == 1 else f"{count} numbers"
        raise RewardMistake(
            f"reward {name!r} returned shape {scores.shape} for {len(images)} images: return {numbers} "
            f"an image, shape {shape}"
        )
    if scores.dtype.kind not in "biuf":
        raise RewardMistake(f"reward {name!r} returned {scores.dtype} values: return numbers")
    with np.errstate(
        over="ignore"
    ):  # numbers too large for float32 become infinite and are refused
        scores = scores.astype(np.float32)
    if not np.isfinite(scores).all():
        where = tuple(np.argwhere(~np.isfinite(scores))[0])
        worst = int(where[0])
        raise RewardMistake(
            f"reward {name!r} returned {scores[where]} for image {worst} ({prompts[worst]!r}): "
            "return finite numbers"
        )
    return scores


def _as_array(scores: object, name: str) -> np.ndarray:
    if scores is None:
        raise RewardMistake(f"reward {name!r} returned None: return one number an image")
    try:
        return np.asarray(scores)
    except ValueError as error:  # lists of different lengths
        raise RewardMistake(
            f"reward {name!r} returned what is no array ({error}): return one number an image"
        ) from error


def _import(module_name: str, name: str) -> object:
    """The module; a ConfigError says that it is missing, or where in the user's own code it fails."""
    with blamed(name, "cannot be imported:"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"reward {name!r}: there is no module {module_name!r} in {os.getcwd()} or among the "
                "installed packages"
            ) from error
