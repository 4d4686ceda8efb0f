"""Draws the results of algorithms: families with their spread, and each algorithm's gain with its error."""

import pathlib
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure

from digen_jax.logging.images import label_axes

# Each evaluation of one run: the values on the horizontal axes, and the reward.
Curve = Sequence[Mapping[str, float]]

PANELS = {"images": "images seen", "seconds": "seconds of training"}


def draw(
    runs: Mapping[str, Sequence[Curve]],
    gains: Mapping[str, Mapping[str, tuple[float, float | None]]],
    path: pathlib.Path,
) -> None:
    """Draws into a PNG file the reward over images and over seconds, and the gains.

    Args:
      runs: for each family the curves of all its runs, with equally many points each; a point has "images",
        "seconds" and "reward". The picture shows their means with bars of one standard deviation.
      gains: for each family the (mean, standard error) of its algorithms, by name; a single run has no
        error.
      path: the file.
    """
    count = sum(map(len, gains.values()))
    figure = Figure(figsize=(15, max(4.5, 1.2 + 0.24 * count)), dpi=120, layout="constrained")
    *curves, dots = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    curves[1].sharey(curves[0])
    for axes, (entry, name) in zip(curves, PANELS.items(), strict=True):
        for number, (family, own) in enumerate(runs.items()):
            x, mean, deviation = _summary(own, entry)
            style = dict(color=f"C{number}", marker="os^D"[number % 4], capsize=4)
            axes.errorbar(x, mean, deviation, label=f"{family} ({len(own)} runs)", **style)
        label_axes(axes, name, "reward on held-out prompts")
    curves[0].legend(frameon=False, loc="upper left")
    curves[0].set_title("mean and standard deviation of a family's runs", fontsize=10, loc="left")
    _draw_gains(dots, gains)
    figure.savefig(path)


def _draw_gains(axes: Any, gains: Mapping[str, Mapping[str, tuple[float, float | None]]]) -> None:
    """Draws a row for each algorithm, the best of each family at the top."""
    names = []
    for number, own in enumerate(gains.values()):
        rows = sorted(own.items(), key=lambda row: -row[1][0])
        places = range(len(names), len(names) + len(rows))
        x, error = zip(*(gain for _, gain in rows), strict=True)
        style = dict(color=f"C{number}", fmt="os^D"[number % 4], capsize=3)
        axes.errorbar(x, places, xerr=[one or 0.0 for one in error], **style)
        names += [name for name, _ in rows]
    axes.axvline(0, color="0.7", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    label_axes(axes, "gain on held-out prompts", "")
    axes.set_title("mean over seeds and its standard error", fontsize=10, loc="left")


def _summary(runs: Sequence[Curve], entry: str) -> tuple[list[float], list[float], list[float]]:
    """At each point, over the runs: the mean of an entry, and mean and standard deviation of the reward."""
    columns = list(zip(*runs, strict=True))
    rewards = [[point["reward"] for point in column] for column in columns]
    return (
        [fmean(point[entry] for point in column) for column in columns],
        [fmean(values) for values in rewards],
        [stdev(values) if len(values) > 1 else 0.0 for values in rewards],
    )
