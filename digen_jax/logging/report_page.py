"""The page of a report: one HTML file that needs no other and asks for none."""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from digen_jax.files import write_output
from digen_jax.logging import report_curves, report_images
from digen_jax.logging.metrics import CLOCK
from digen_jax.logging.report_reading import EVALUATION, Run, differing, evaluated_prompts, read_run
from digen_jax.logging.report_timeline import MOST, timeline

TEMPLATE = "page.html.jinja"


class Row(NamedTuple):
    """A line of the task table, of each run's evaluation prompts: "mean" or "mean (lowest to highest)"."""

    name: str
    before: str
    after: str
    gain: str
    best: str


class Size(NamedTuple):
    """What a report takes, in bytes."""

    whole: int
    without_pictures: int


def write_report(workdirs: Sequence[pathlib.Path], output: pathlib.Path) -> Size:
    """Writes the report of a run, or of several of the same kind with bands over them.

    Raises:
      ConfigError: a workdir has no run that has begun, or a file of it cannot be read.
      OSError: the report cannot be written.
    """
    text = render([read_run(workdir) for workdir in workdirs])
    bare = re.sub(r"data:image/webp;base64,[A-Za-z0-9+/=]*", "", text)
    write_output(output, text.encode())
    return Size(len(text.encode()), len(bare.encode()))


def render(runs: Sequence[Run]) -> str:
    """The page's HTML."""
    places = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(
        loader=places, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    script, charts = report_curves.draw(runs, report_curves.charts(runs))
    return environment.get_template(TEMPLATE).render(
        prompts=evaluated_prompts(runs),
        runs=[_of_run(run, MOST // len(runs)) for run in runs],
        charts={part: list(map(Markup, drawn)) for part, drawn in charts.items()},
        chart_script=Markup(script),
        core_script=Markup(report_curves.core_script()),
        table=task_table(runs),
        times=time_table(runs),
        differing=differing(runs),
    )


def _of_run(run: Run, intervals: int) -> dict[str, Any]:
    """What the template shows of a single run, with at most so many intervals of its timeline."""
    drawn = timeline(run, intervals)
    return {
        "name": str(run.workdir),
        "config": json.dumps(run.config, indent=1),
        "model": run.config["model"]["folder"],
        "algorithm": run.config["algorithm"]["name"],
        "rewards": [(name, name in run.trained) for name in run.weights],
        "step": run.step,
        "steps": run.config["steps"],
        "finished": run.finished,
        "minutes": run.seconds / 60,
        "starts": run.starts,
        "command": run.command,
        "pairs": report_images.pairs(run),
        "shown": report_images.shown(run),
        # "<" could end the script that this stands in
        "timeline": drawn and Markup(json.dumps(drawn).replace("<", "\\u003c")),
    }


def task_table(runs: Sequence[Run]) -> list[Row]:
    """The evaluations' reward of all prompts and of each task; empty before there are two evaluations."""
    told = [run for run in runs if len(run.evaluations) > 1]
    if not told:
        return []
    tasks = dict.fromkeys(tag for run in told for tag in run.tasks)
    metrics = {"all": f"{EVALUATION}reward"} | {tag: EVALUATION + tag for tag in tasks}
    return [_row(name, [run.curve(metric) for run in told]) for name, metric in metrics.items()]


def _row(name: str, found: Sequence[tuple[np.ndarray, np.ndarray]]) -> Row:
    each = [values for _, values in found if len(values)]
    first, last = (np.asarray([values[i] for values in each]) for i in (0, -1))
    best = np.asarray([values.max() for values in each])
    at = ", ".join(str(steps[values.argmax()]) for steps, values in found if len(values))
    gain = _spread(last - first, "+.3f")
    return Row(name, _spread(first), _spread(last), gain, f"{_spread(best)} at step {at}")


def _spread(values: np.ndarray, form: str = ".3f") -> str:
    mean = f"{values.mean():{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} ({values.min():{form}} to {values.max():{form}})"


def time_table(runs: Sequence[Run]) -> list[tuple[str, float, str]]:
    """(work or wait, what a step has of it, its unit) over the later half of each run's steps, the most first.

    Work is counted once, however many devices do it; a wait counts for each device that waits.
    """
    timed = [[line for line in run.metrics if "utilisation" in line] for run in runs]
    lines = [line for own in timed for line in own[len(own) // 2 :]]
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("seconds/"))
    sums = {
        name.removeprefix("seconds/"): sum(line.get(name, 0.0) for line in lines) / len(lines)
        for name in names
        if name != CLOCK
    }
    rows = []
    for name, spent in sorted(sums.items(), key=lambda item: (item[0][:5] == "wait_", -item[1])):
        words = name.replace("wait_", "wait for ").replace("_", " ")
        rows.append((words, spent, "device-seconds" if words != name else "seconds"))
    return rows
