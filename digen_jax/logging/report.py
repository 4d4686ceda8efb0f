"""HTML report of one or several runs: a self-contained file with charts, tables, images and timelines."""

import functools
import itertools
import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jinja2
import numpy as np
from bokeh.embed import components
from bokeh.models import HoverTool
from bokeh.plotting import figure
from bokeh.resources import Resources
from jaxtyping import Float, Int
from markupsafe import Markup

from digen_jax.files import write_output
from digen_jax.logging.images import is_dense, smoothed
from digen_jax.logging.metrics import CLOCK
from digen_jax.logging.report_run import (
    EVALUATION,
    MAX_INTERVALS,
    Run,
    differing,
    evaluated_prompts,
    image_grids,
    image_pairs,
    read_run,
    timeline,
)

COLORS = (
    "#1f77b4", "#d9730d", "#2f8f4e", "#8a55c7", "#c23b3b", "#7a5a4a", "#c75aa6", "#5f6a72", "#9a9a1f", "#1f9fb0"
)  # fmt: skip
MAX_NUMBERS = 24_000  # in all charts, to keep a page below 2 MB


class Chart(NamedTuple):
    """A chart: metrics by legend label."""

    title: str
    curves: dict[str, str]


class Line(NamedTuple):
    """A curve: mean, minimum and maximum over one or several runs."""

    steps: Int[np.ndarray, "n"]
    mean: Float[np.ndarray, "n"]
    low: Float[np.ndarray, "n"]
    high: Float[np.ndarray, "n"]
    raw: Float[np.ndarray, "n"] | None  # before smoothing, of a single run


def write_report(workdirs: Sequence[pathlib.Path], output: pathlib.Path) -> tuple[int, int]:
    """Writes the report of one run, or of several similar runs with min/max bands.

    Returns:
      The size of its images in bytes, and that of all else.

    Raises:
      ConfigError: A workdir has no run with metrics, or an invalid file.
      OSError: The report cannot be written.
    """
    text = render([read_run(workdir) for workdir in workdirs])
    urls = re.findall(r"data:image/webp;base64,[A-Za-z0-9+/=]*", text)
    write_output(output, content := text.encode())
    images = sum(map(len, urls))
    return images, len(content) - images


def render(runs: Sequence[Run]) -> str:
    """Returns the page's HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, elements = _draw(runs, charts(runs))
    # Bokeh's core script, without those for widgets, tables, WebGL and formulas.
    core = Resources(mode="inline", components=["bokeh"], minified=True).js_raw
    return environment.get_template("report.html.jinja").render(
        prompts=evaluated_prompts(runs),
        runs=[_run_content(run, MAX_INTERVALS // len(runs)) for run in runs],
        charts={part: list(map(Markup, charts)) for part, charts in elements.items()},
        chart_script=Markup(script),
        core_script=Markup("\n".join(core)),
        table=task_table(runs),
        times=time_table(runs),
        differing=differing(runs),
    )


def _run_content(run: Run, intervals: int) -> dict[str, Any]:
    """Returns the template variables of a single run."""
    spans = timeline(run, intervals)
    return {
        "name": str(run.workdir),
        "config": json.dumps(run.config, indent=1),
        "model": run.config["model"]["folder"],
        "algorithm": run.config["algorithm"]["name"],
        "rewards": [(name, name in run.trained) for name in run.weights],
        "step": run.step,
        "steps": run.config["steps"],
        "finished": run.finished,
        # Including pauses between starts.
        "minutes": (run.metrics[-1][CLOCK] - run.metrics[0][CLOCK]) / 60,
        "starts": run.starts,
        "command": "python " + shlex.join(run.starts[0]["command"]) if run.starts else "",
        "pairs": image_pairs(run),
        "shown": image_grids(run),
        # "<" could close the surrounding script element.
        "timeline": spans and Markup(json.dumps(spans).replace("<", "\\u003c")),
    }


def task_table(runs: Sequence[Run]) -> list[tuple[str, str, str, str, str]]:
    """Returns (name, before, after, gain, best) for all prompts and for each task.

    Numbers are "mean" or "mean (minimum to maximum)" over the runs. Empty if there are fewer than two evaluations.
    """
    evaluated = [run for run in runs if len(run.evaluations) > 1]
    if not evaluated:
        return []
    tasks = dict.fromkeys(tag for run in evaluated for tag in run.tasks)
    metrics = {"all": f"{EVALUATION}reward"} | {tag: EVALUATION + tag for tag in tasks}

    def spread(values: np.ndarray, form: str = ".3f") -> str:
        low, high = f"{values.min():{form}}", f"{values.max():{form}}"
        return f"{values.mean():{form}}" + (f" ({low} to {high})" if len(values) > 1 else "")

    rows = []
    for name, metric in metrics.items():
        found = [(steps, y) for steps, y in (run.curve(metric) for run in evaluated) if len(y)]
        first, last = (np.asarray([values[i] for _, values in found]) for i in (0, -1))
        best = np.asarray([values.max() for _, values in found])
        at = ", ".join(str(steps[values.argmax()]) for steps, values in found)
        gain = spread(last - first, "+.3f")
        rows.append((name, spread(first), spread(last), gain, f"{spread(best)} at step {at}"))
    return rows


def time_table(runs: Sequence[Run]) -> list[tuple[str, float, str]]:
    """Returns (work or wait, mean per step over the second half of each run, unit), longest first.

    Work is counted once for all devices of a worker; waits are counted per device.
    """
    timed = [[line for line in run.metrics if "utilisation" in line] for run in runs]
    lines = [line for own in timed for line in own[len(own) // 2 :]]
    names = {name for line in lines for name in line if name.startswith("seconds/")} - {CLOCK}
    rows = []
    for name in sorted(names):
        mean = sum(line.get(name, 0.0) for line in lines) / len(lines)
        label = name.removeprefix("seconds/").replace("wait_", "wait for ").replace("_", " ")
        unit = "device-seconds" if name.startswith("seconds/wait_") else "seconds"
        rows.append((label, mean, unit))
    return sorted(rows, key=lambda row: (row[2] != "seconds", -row[1]))


def charts(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Returns the charts of each part of a report, for metrics that any run has.

    An approximate KL that is always 0 (one update per step, on-policy) has no chart.
    """
    known = dict.fromkeys(name for run in runs for line in run.metrics for name in line)
    if not any(line.get("approx_kl") for run in runs for line in run.metrics):
        known.pop("approx_kl", None)
    trained = set().union(*(run.trained for run in runs))
    prompts = evaluated_prompts(runs)

    def both(title: str, metric: str) -> Chart:
        return Chart(title, {"training": metric, prompts: EVALUATION + metric})

    def single(title: str, metric: str) -> Chart:
        return Chart(title, {title: metric})

    plain = [name.removeprefix(EVALUATION) for name in known]
    rewards = dict.fromkeys(n.partition("/")[2] for n in plain if n.startswith("reward_of/"))
    titles = {one: f"{one} ({'trained' if one in trained else 'not trained'})" for one in rewards}
    stats = ("sharpness", "colourfulness", "edge_density", "diversity")
    parts = {
        "rewards": [
            both("reward (weighted sum)" if rewards else "reward", "reward"),
            *(both(title, f"reward_of/{name}") for name, title in titles.items()),
        ],
        "tasks": [
            Chart(
                f"{prompts} by task", {tag: EVALUATION + tag for run in runs for tag in run.tasks}
            )
        ],
        "images": [both(name.replace("_", " "), f"images/{name}") for name in stats],
        "speed": [
            single("utilisation of the devices", "utilisation"),
            single("model FLOPs utilisation of the devices", "mfu"),
            single("images per second", "images_per_second"),
        ],
        "training": [
            single("approximate KL", "approx_kl"),
            single("norm of the gradient", "gradient_norm"),
        ],
    }
    for chart in itertools.chain(*parts.values()):
        for label in [label for label, metric in chart.curves.items() if metric not in known]:
            del chart.curves[label]
    return {part: [chart for chart in charts if chart.curves] for part, charts in parts.items()}


def line_of(runs: Sequence[Run], metric: str) -> Line | None:
    """Returns a metric's curve over the common steps of all runs with it, or None if there are none."""
    found = [curve for run in runs if len((curve := run.curve(metric))[0])]
    if not found:
        return None
    steps = functools.reduce(np.intersect1d, (own for own, _ in found))
    if not len(steps):
        return None
    values = np.stack([own[np.isin(at, steps)] for at, own in found])
    raw = None
    if is_dense(steps):
        raw = values[0] if len(found) == 1 else None
        values = np.stack([*map(smoothed, values)])
    return Line(steps, values.mean(0), values.min(0), values.max(0), raw)


def _draw(runs: Sequence[Run], parts: Mapping[str, Sequence[Chart]]) -> tuple[str, dict[str, list]]:
    """Returns (script that renders all charts, HTML elements of each part's charts)."""
    count = sum(len(chart.curves) for charts in parts.values() for chart in charts)
    most = max(50, MAX_NUMBERS // max(1, 4 * count))
    figures = [_figure(runs, chart, most) for charts in parts.values() for chart in charts]
    script, elements = components(figures) if figures else ("", ())
    each = iter(elements)
    return script, {part: list(itertools.islice(each, len(parts[part]))) for part in parts}


def _figure(runs: Sequence[Run], chart: Chart, most: int) -> figure:
    """Builds a figure with at most `most` points per curve."""
    plot = figure(
        title=chart.title,
        height=260,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,reset",
        x_axis_label="step",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    plot.toolbar.logo = None  # it links to a web page
    plot.toolbar.autohide = True
    plot.grid.grid_line_alpha = 0.4
    lines = {name: line_of(runs, metric) for name, metric in chart.curves.items()}
    for (name, line), color in zip(lines.items(), itertools.cycle(COLORS), strict=False):
        if line is not None:
            _draw_line(plot, name, thinned(line, most), color, len(runs) > 1)
    if len(chart.curves) == 1:
        plot.legend.visible = False
    else:
        plot.legend.click_policy = "hide"
        plot.legend.label_text_font_size = "9pt"
        plot.add_layout(plot.legend[0], "below")
        plot.legend.orientation = "horizontal"
        plot.legend.ncols = 3
        plot.legend.border_line_color = None
        plot.legend.background_fill_color = None
    return plot


def _draw_line(plot: figure, name: str, line: Line, color: str, band: bool) -> None:
    steps, style = line.steps.astype(np.int32), {"color": color, "legend_label": name}
    if band:
        low, high = (one.astype(np.float32) for one in (line.low, line.high))
        plot.varea(steps, low, high, fill_alpha=0.2, **style)
    if line.raw is not None:
        plot.line(steps, line.raw.astype(np.float32), line_alpha=0.3, **style)
    mean = line.mean.astype(np.float32)
    shown = plot.line(steps, mean, line_width=2, **style)
    if not is_dense(line.steps):
        shown = plot.scatter(steps, mean, size=6, **style)
    tips = [("", name), ("step", "@x"), ("value", "@y{0.0000}")]
    plot.add_tools(HoverTool(renderers=[shown], tooltips=tips, visible=False))


def thinned(line: Line, most: int) -> Line:
    """Returns at most `most` evenly spaced points of a line, including the first and the last."""
    if len(line.steps) <= most:
        return line
    kept = np.unique(np.linspace(0, len(line.steps) - 1, most).round().astype(int))
    return Line(*cast(Any, (None if one is None else one[kept] for one in line)))
