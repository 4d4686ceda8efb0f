"""Charts of a report, drawn by bokeh in the browser."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from bokeh.embed import components
from bokeh.models import HoverTool
from bokeh.plotting import figure
from bokeh.resources import Resources
from jaxtyping import Float, Int

from digen_jax.logging.images import running_mean
from digen_jax.logging.report_reading import EVALUATION, Run, evaluated_prompts

COLOURS = (
    "#1f77b4", "#d9730d", "#2f8f4e", "#8a55c7", "#c23b3b", "#7a5a4a", "#c75aa6", "#5f6a72", "#9a9a1f", "#1f9fb0"
)  # fmt: skip
POINTS = 24_000  # numbers of all charts together, so that a page stays under 2 MB
SPARSE = 8  # a curve of fewer points is drawn with them


class Chart(NamedTuple):
    """A chart: metrics by their names in the legend."""

    title: str
    curves: Mapping[str, str]


class Line(NamedTuple):
    """A curve of one or several runs: their mean, and their smallest and largest value."""

    steps: Int[np.ndarray, "n"]
    mean: Float[np.ndarray, "n"]
    low: Float[np.ndarray, "n"]
    high: Float[np.ndarray, "n"]
    raw: Float[np.ndarray, "n"] | None  # before smoothing, of a single run


def charts(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """The charts of each part of a report, of metrics that any of the runs has.

    There is no chart of an approximate KL that is always 0, as where a step has one update of fresh samples.
    """
    known = dict.fromkeys(name for run in runs for line in run.metrics for name in line)
    if not any(line.get("approx_kl") for run in runs for line in run.metrics):
        known.pop("approx_kl", None)
    trained = set().union(*(run.trained for run in runs))
    tasks = dict.fromkeys(tag for run in runs for tag in run.tasks)
    prompts = evaluated_prompts(runs)

    def chart(title: str, metric: str) -> Chart:
        return Chart(title, {"training": metric, prompts: EVALUATION + metric})

    def rewards() -> list[Chart]:
        plain = [name.removeprefix(EVALUATION) for name in known]
        names = dict.fromkeys(n.partition("/")[2] for n in plain if n.startswith("reward_of/"))
        found = [chart("reward (weighted sum)" if names else "reward", "reward")]
        for name in names:
            kind = "trained" if name in trained else "not trained"
            found.append(chart(f"{name} ({kind})", f"reward_of/{name}"))
        return found

    looks = ("sharpness", "colourfulness", "edge_density", "diversity")
    single = {
        "speed": {
            "utilisation": "busy share of the devices",
            "images_per_second": "images a second",
        },
        "training": {"approx_kl": "approximate KL", "gradient_norm": "norm of the gradient"},
    }
    parts = {
        "rewards": rewards(),
        "tasks": [Chart(f"{prompts} by task", {tag: EVALUATION + tag for tag in tasks})],
        "images": [chart(name.replace("_", " "), f"images/{name}") for name in looks],
    } | {
        part: [Chart(title, {title: metric}) for metric, title in named.items()]
        for part, named in single.items()
    }

    def there(one: Chart) -> Chart:
        return Chart(one.title, {k: metric for k, metric in one.curves.items() if metric in known})

    found = {part: list(map(there, drawn)) for part, drawn in parts.items()}
    return {part: [one for one in drawn if one.curves] for part, drawn in found.items()}


def line_of(runs: Sequence[Run], metric: str) -> Line | None:
    """A metric's curve over the steps that all runs with this metric have; None where there are none."""
    found = [curve for run in runs if len((curve := run.curve(metric))[0])]
    if not found:
        return None
    steps = functools.reduce(np.intersect1d, (own for own, _ in found))
    if not len(steps):
        return None
    values = np.stack([own[np.isin(at, steps)] for at, own in found])
    raw = values[0] if len(found) == 1 and _dense(steps) else None
    if _dense(steps):
        width = max(3, len(steps) // 12)
        values = np.stack([running_mean(own, width) for own in values])
    return Line(steps, values.mean(0), values.min(0), values.max(0), raw)


def _dense(steps: Int[np.ndarray, "n"]) -> bool:
    """Whether nearly every step has a value, which is then smoothed."""
    return len(steps) >= SPARSE and bool(len(steps) > np.ptp(steps) / 2)


def draw(runs: Sequence[Run], parts: Mapping[str, Sequence[Chart]]) -> tuple[str, dict[str, list]]:
    """(the script that draws all charts, the elements that it draws each part's charts into)."""
    count = sum(len(chart.curves) for drawn in parts.values() for chart in drawn)
    most = max(50, POINTS // max(1, 4 * count))
    figures = {
        f"{part} {number}": _figure(runs, chart, most)
        for part, drawn in parts.items()
        for number, chart in enumerate(drawn)
    }
    script, elements = components(figures) if figures else ("", {})
    return script, {
        part: [elements[f"{part} {number}"] for number in range(len(drawn))]
        for part, drawn in parts.items()
    }


def core_script() -> str:
    """Bokeh's core script, without those for widgets, tables, WebGL and formulas."""
    return "\n".join(Resources(mode="inline", components=["bokeh"], minified=True).js_raw)


def _figure(runs: Sequence[Run], chart: Chart, most: int) -> figure:
    drawn = figure(
        title=chart.title,
        height=260,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,reset",
        x_axis_label="step",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    drawn.toolbar.logo = None  # it links to a web page
    drawn.toolbar.autohide = True
    drawn.grid.grid_line_alpha = 0.4
    lines = {name: line_of(runs, metric) for name, metric in chart.curves.items()}
    for (name, line), colour in zip(lines.items(), itertools.cycle(COLOURS), strict=False):
        if line is not None:
            _draw_line(drawn, name, _thinned(line, most), colour, len(runs) > 1)
    if len(chart.curves) == 1:
        drawn.legend.visible = False
    else:
        drawn.legend.click_policy = "hide"
        drawn.legend.label_text_font_size = "9pt"
        drawn.add_layout(drawn.legend[0], "below")
        drawn.legend.orientation = "horizontal"
        drawn.legend.ncols = 3
        drawn.legend.border_line_color = None
        drawn.legend.background_fill_color = None
    return drawn


def _draw_line(drawn: figure, name: str, line: Line, colour: str, several: bool) -> None:
    steps, style = line.steps.astype(np.int32), {"color": colour, "legend_label": name}
    if several:
        low, high = (one.astype(np.float32) for one in (line.low, line.high))
        drawn.varea(steps, low, high, fill_alpha=0.2, **style)
    if line.raw is not None:
        drawn.line(steps, line.raw.astype(np.float32), line_alpha=0.3, **style)
    mean = line.mean.astype(np.float32)
    shown = drawn.line(steps, mean, line_width=2, **style)
    if not _dense(line.steps):
        shown = drawn.scatter(steps, mean, size=6, **style)
    tips = [("", name), ("step", "@x"), ("value", "@y{0.0000}")]
    drawn.add_tools(HoverTool(renderers=[shown], tooltips=tips, visible=False))


def _thinned(line: Line, most: int) -> Line:
    """At most so many points, evenly chosen, with the first and the last."""
    if len(line.steps) <= most:
        return line
    kept = np.unique(np.linspace(0, len(line.steps) - 1, most).round().astype(int))
    return Line(*(None if one is None else one[kept] for one in line))
