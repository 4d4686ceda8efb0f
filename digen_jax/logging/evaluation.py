"""Scored images and their statistics: an evaluation on a prompt file, and a step's best and worst images."""

import io
import pathlib
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt8

from digen_jax import rewards
from digen_jax.files import replace
from digen_jax.logging.image_statistics import Looks, diversity
from digen_jax.process.terminal import printable


class Sample(NamedTuple):
    """A few of a step's images, with the records of their prompts and their values."""

    records: list[dict[str, Any]]
    images: UInt8[np.ndarray, "k h w 3"]
    values: Float32[np.ndarray, "k"]


class Extremes(NamedTuple):
    """The best and the worst images of a step, the most extreme first; of equal ones, of several prompts."""

    best: Sample
    worst: Sample


class TaskScore(NamedTuple):
    """A mean reward and its standard error, which is None for a single image."""

    mean: float
    standard_error: float | None
    images: int


class Evaluation(NamedTuple):
    """One clip a prompt and its score, which for several rewards is their weighted sum.

    A run keeps those of the first clips that it shows, and of these only the middle frame where no picture is due.
    """

    records: list[dict[str, Any]]
    clips: UInt8[np.ndarray, "k t h w 3"]
    scores: Float[np.ndarray, "n"]
    # By name, NaN where the reward does not apply: see `rewards.each`.
    each: Mapping[str, Float[np.ndarray, "n"]] = MappingProxyType({})
    looks: Looks | None = None

    @classmethod
    def of(
        cls,
        records: list[dict[str, Any]],
        clips: Sequence[UInt8[np.ndarray, "_ t h w 3"]],
        scores: Sequence[rewards.Scores],
        names: tuple[str, ...],
        weights: Sequence[float],
    ) -> "Evaluation":
        """Builds the evaluation of batches; `names` and `weights` are those of the rewards."""
        found = rewards.joined(scores)
        total, each = rewards.total(found.columns, weights), rewards.each(names, found)
        return cls(records, np.concatenate(clips), total, each)

    @property
    def known(self) -> dict[str, Float[np.ndarray, "_"]]:
        """Each reward's scores of the images to which it applies; without rewards that apply to none."""
        found = {name: rewards.applicable(own) for name, own in self.each.items()}
        return {name: own for name, own in found.items() if len(own)}

    def metrics(self) -> dict[str, float]:
        """Mean reward over all prompts and for each task of the prompt file; if there are several, of each reward.

        Also the statistics of the images; their diversity is that between the prompts.
        """
        means = {f"reward_of/{name}": own.mean() for name, own in self.known.items()}
        found = {"reward": self.scores.mean(), **means, **by_tag(self.records, self.scores)}
        if self.looks is not None:
            several = len(self.records) > 1
            of_all = {"diversity": diversity(self.looks.thumbnails)} if several else {}
            images = self.looks.means() | of_all
            found |= {f"images/{name}": value for name, value in images.items()}
        return {f"evaluation/{name}": float(value) for name, value in found.items()}

    def by_task(self) -> dict[str, TaskScore]:
        """The score of all prompts as "all", of each task of the prompt file, and of each of several rewards."""
        found = {}
        tasks = _split_by_tag(self.records, self.scores)
        for name, scores in {"all": self.scores, **tasks, **self.known}.items():
            count = len(scores)
            error = float(scores.std(ddof=1) / np.sqrt(count)) if count > 1 else None
            found[name] = TaskScore(float(scores.mean()), error, count)
        return found


def by_tag(
    records: Sequence[dict[str, Any]],
    scores: Float[np.ndarray, "n"],
    statistic: Callable[[np.ndarray], Any] = np.mean,
) -> dict[str, float]:
    """A statistic of each task's scores; empty if the prompt file names no tasks."""
    return {tag: float(statistic(part)) for tag, part in _split_by_tag(records, scores).items()}


def _split_by_tag(
    records: Sequence[dict[str, Any]], scores: Float[np.ndarray, "n"]
) -> dict[str, Float[np.ndarray, "_"]]:
    """The scores of each task, in the order of their first records."""
    found = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        if "tag" in record:
            found[record["tag"]].append(float(score))
    return {tag: np.asarray(part) for tag, part in found.items()}


def score_table(columns: Mapping[str, Mapping[str, TaskScore]]) -> str:
    """A line for each task with mean and standard error in each column; `columns` maps heads to scores."""

    def cell(score: TaskScore) -> str:
        error = score.standard_error
        return f"{score.mean:.3f}" + ("" if error is None else f" ± {error:.3f}")

    rows = next(iter(columns.values()))
    lines = [f"{'':<24}{'images':>8}" + "".join(f"{head:>18}" for head in columns)]
    for name, first in rows.items():
        cells = (f"{cell(column[name]):>18}" for column in columns.values())
        lines.append(f"{printable(name):<24}{first.images:>8}" + "".join(cells))
    return "\n".join(lines)


def save_images(path: pathlib.Path, **arrays: Any) -> None:
    """Writes images, scores and prompts of an evaluation as .npz; a kill leaves the old file or the new one."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    replace(path, file.getvalue())


def saved_images(path: pathlib.Path) -> dict[str, np.ndarray] | None:
    """Reads a file of `save_images`, at least step, images and scores; None if it is missing or damaged."""
    try:
        with np.load(path) as found:
            needed = {name: found[name] for name in ("step", "images", "scores")}
            return needed | {name: found[name] for name in found.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
