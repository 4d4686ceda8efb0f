"""Calls a reward and validates its scores."""

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from digen_jax.process.shutdown import exits_raise
from digen_jax.rewards.dry_run import Watched, call_watched
from digen_jax.rewards.errors import DELIBERATE, RewardError, user_code
from digen_jax.rewards.request_log import Exchange
from digen_jax.rewards.settings import RewardSettings

Reward = Callable[..., Any]
LARGEST = 1e15  # maximum absolute score; sums of squares still fit float32


class Answer(NamedTuple):
    """Scores of images by one reward."""

    columns: Float32[np.ndarray, "b c"]  # one per entry of `RewardSettings.entries`
    shown: Mapping[str, Float32[np.ndarray, "b"]]  # other scores, by "reward/score"
    seconds: float  # duration of the call
    exchanges: tuple[Exchange, ...] = ()  # server requests: see `request_log.take_exchanges`


def call_reward(
    reward: Reward,
    settings: RewardSettings,
    images: UInt8[np.ndarray, "b ..."],
    prompts: list[str],
    metadata: list[dict],
) -> Answer:
    """Returns the reward's scores as validated float32 values.

    The reward gets copies of its arguments, because it may modify them.

    Raises:
      RewardFailed: The reward raises an exception.
      RewardError: There is not one finite score per image, or a score with a weight is missing.
    """

    def score(images: np.ndarray) -> Any:
        return reward(images.copy(), [*prompts], copy.deepcopy(metadata))

    start, name = time.perf_counter(), settings.title
    with user_code(name, "raised", DELIBERATE), exits_raise():
        watched = isinstance(images, Watched)
        returned = call_watched(name, score, images) if watched else score(images)
    seconds = time.perf_counter() - start
    if not isinstance(returned, Mapping):
        if isinstance(settings.weight, Mapping):
            raise RewardError(
                f"reward {name!r} returned no dict, but its weight names the scores "
                f"{_list(settings.weight)}: return {{name: scores}}, or give it a number as weight"
            )
        return Answer(_check(returned, name, prompts)[:, None], {}, seconds)
    entries = settings.entries
    if missing := [entry for entry in entries if entry not in returned]:
        raise RewardError(
            f"reward {name!r} returned the scores {_list(returned)}, but {missing[0]!r} is to be "
            "trained: return that too, or give the reward a weight of the form {name: factor}"
        )
    found = {entry: _check(one, f"{name}/{entry}", prompts) for entry, one in returned.items()}
    columns = np.stack([found[entry] for entry in entries], axis=1)
    shown = {f"{name}/{entry}": scores for entry, scores in found.items() if entry not in entries}
    return Answer(columns, shown, seconds)


def _list(names: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, names)) or "of no name"


def _check(returned: object, name: str, prompts: list[str]) -> Float32[np.ndarray, "b"]:
    """Returns one float32 score per prompt."""
    if returned is None:
        raise RewardError(f"reward {name!r} returned None: return one number per image")
    try:
        scores = np.asarray(_readable(returned))
    # Ragged lists raise this, and custom classes may raise anything.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RewardError(
            f"reward {name!r} returned a {type(returned).__name__} that cannot be read as an array "
            f"({reason}): return one number per image, such as a numpy array"
        ) from error
    if scores.shape != (len(prompts),):
        raise RewardError(
            f"reward {name!r} returned shape {scores.shape} for {len(prompts)} images: return one "
            f"number per image, shape {(len(prompts),)}"
        )
    if scores.dtype.kind not in "biuf":
        raise RewardError(f"reward {name!r} returned {scores.dtype} values: return numbers")
    invalid = np.flatnonzero(~(np.abs(scores.astype(np.float64)) <= LARGEST))
    if len(invalid):
        i = int(invalid[0])
        raise RewardError(
            f"reward {name!r} returned {scores[i]} for image {i} ({prompts[i]!r}): return finite "
            f"numbers, at most {LARGEST:g}"
        )
    return scores.astype(np.float32)


def _readable(scores: Any) -> Any:
    """Converts scores for numpy, including torch tensors on any device, with or without gradients.

    bfloat16 and other dtypes without numpy equivalent are widened; lists are converted per item.
    """
    if isinstance(scores, list | tuple):
        return [_readable(one) for one in scores]
    if hasattr(scores, "detach") and hasattr(scores, "cpu"):
        scores = scores.detach().cpu()
        scores = scores.double() if scores.is_floating_point() else scores
    if not hasattr(scores, "__array__"):
        return scores
    found = np.asarray(scores)
    extended = found.dtype.kind == "V" and np.can_cast(found.dtype, np.float32)
    return found.astype(np.float32) if extended else found
