"""Calls a reward and checks what it returns."""

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from digen_jax.process.shutdown import exits_raise
from digen_jax.rewards.dry_run import Watched, watched
from digen_jax.rewards.errors import OURS, RewardError, blamed
from digen_jax.rewards.request_log import Exchange
from digen_jax.rewards.settings import RewardSettings

Reward = Callable[..., Any]
# The largest score: sums of squares of such numbers fit float32.
LARGEST = 1e15


class Answer(NamedTuple):
    """What a reward says of images."""

    columns: Float32[np.ndarray, "b c"]  # one for each of `RewardSettings.entries`
    shown: Mapping[str, Float32[np.ndarray, "b"]]  # by "reward/score", what else it returned
    seconds: float  # that it took
    exchanges: tuple[Exchange, ...] = ()  # with servers, before the answer: see `exchanges.taken`


def called(
    reward: Reward,
    settings: RewardSettings,
    images: UInt8[np.ndarray, "b ..."],
    prompts: list[str],
    metadata: list[dict],
) -> Answer:
    """The reward's scores as checked float32 numbers; errors say its name.

    The reward gets copies of its arguments: it may write into them, and other rewards and the run read them later.

    Raises:
      RewardFailed: the reward raises an exception.
      RewardError: its scores are not one finite number an image, or one that has a weight is missing.
    """

    def score(images: np.ndarray) -> Any:
        return reward(images.copy(), [*prompts], copy.deepcopy(metadata))

    begin, name = time.perf_counter(), settings.title
    with blamed(name, "raised", OURS), exits_raise():
        returned = watched(name, score, images) if isinstance(images, Watched) else score(images)
    seconds = time.perf_counter() - begin
    if not isinstance(returned, Mapping):
        if isinstance(settings.weight, Mapping):
            raise RewardError(
                f"reward {name!r} returned no dict, but its weight names the scores "
                f"{_listed(settings.weight)}: return {{name: scores}}, or give it one number as weight"
            )
        return Answer(_checked(returned, name, prompts)[:, None], {}, seconds)
    entries = settings.entries
    if missing := [entry for entry in entries if entry not in returned]:
        raise RewardError(
            f"reward {name!r} returned the scores {_listed(returned)}, but {missing[0]!r} is to be trained: "
            f"return that too, or give the reward a weight of the form {{name: factor}}"
        )
    found = {
        entry: _checked(scores, f"{name}/{entry}", prompts) for entry, scores in returned.items()
    }
    columns = np.stack([found[entry] for entry in entries], axis=1)
    shown = {f"{name}/{entry}": scores for entry, scores in found.items() if entry not in entries}
    return Answer(columns, shown, seconds)


def _listed(names: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, names)) or "of no name"


def _checked(returned: object, name: str, prompts: list[str]) -> Float32[np.ndarray, "b"]:
    """One reward's scores in float32."""
    scores, count = _as_array(returned, name), len(prompts)
    if scores.shape != (count,):
        raise RewardError(
            f"reward {name!r} returned shape {scores.shape} for {count} images: return one number "
            f"an image, shape {(count,)}"
        )
    if scores.dtype.kind not in "biuf":
        raise RewardError(f"reward {name!r} returned {scores.dtype} values: return numbers")
    for worst in map(int, np.flatnonzero(~(np.abs(scores.astype(np.float64)) <= LARGEST))):
        raise RewardError(
            f"reward {name!r} returned {scores[worst]} for image {worst} ({prompts[worst]!r}): "
            f"return finite numbers, at most {LARGEST:g}"
        )
    return scores.astype(np.float32)


def _as_array(scores: object, name: str) -> np.ndarray:
    if scores is None:
        raise RewardError(f"reward {name!r} returned None: return one number an image")
    try:
        return np.asarray(_readable(scores))
    # Lists of different lengths, and whatever the class of an object raises.
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise RewardError(
            f"reward {name!r} returned a {type(scores).__name__} that cannot be read as an array ({why}): return one "
            "number an image, such as a numpy array"
        ) from error


def _readable(scores: Any) -> Any:
    """Scores that numpy can read: tensors of torch from any device, of any dtype, with or without a gradient.

    Those of bfloat16 and other dtypes that numpy itself does not have are widened; lists are converted item by item.
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
