"""Pictures of a plan: images per second by kind of layout, and timelines of the best layouts."""

import pathlib

from matplotlib.figure import Figure

from digen_jax.logging.timeline import draw_timeline
from digen_jax.scheduling.layouts import PoolLayout, Problem
from digen_jax.scheduling.planner import Plan, settings_of, workers_of
from digen_jax.scheduling.simulator import WARM_UP, Disturbance, names_of, simulate
from digen_jax.scheduling.timeline import Interval

DRAWN = 3  # layouts, and steps of each
ROWS = 16  # workers of a timeline


def draw_plan(plan: Plan, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes images_per_second.png, and timeline_1.png, ... of the fastest layouts, into a folder; returns the files.

    A timeline has the steps after the first ones, of at most `ROWS` workers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files, devices = [folder / "images_per_second.png"], plan.problem.devices
    rows = plan.best[::-1]  # a bar chart begins at the bottom
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    speeds = [row.images_per_device_second * devices for row in rows]
    names = [f"{row.layout.kind}{' *' * (row is plan.choice)}" for row in rows]
    bars = axes.barh(
        names, speeds, color=["#4c78a8" if row is plan.choice else "#b0c4d8" for row in rows]
    )
    axes.bar_label(
        bars, [f"{row.utilisation:.0%} of the bound" for row in rows], padding=3, fontsize=7
    )
    axes.set_xlabel(f"images per second on {devices} devices, by simulation; * is the choice")
    axes.set_xlim(0, 1.25 * max(speeds))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(files[0])
    for number, row in enumerate(plan.best[:DRAWN], start=1):
        files.append(folder / f"timeline_{number}.png")
        title = f"{row.layout.kind}: {row.layout.describe()}"
        draw_timeline(_steps(plan.problem, row.layout), files[-1], title)
    return files


def _steps(problem: Problem, layout: PoolLayout) -> list[Interval]:
    """What the workers of a layout do in some simulated steps."""
    workers, costs = workers_of(problem, layout)
    settings, steps = settings_of(problem, layout), WARM_UP + DRAWN + 1
    noise = Disturbance(scorers=problem.scorers)
    report = simulate(workers, costs, settings, steps, noise)
    begin, end = report.step_ends[WARM_UP - 1], report.step_ends[WARM_UP + DRAWN - 1]
    shown = {"reward", *names_of(workers)[:ROWS]}
    return [
        one._replace(start=max(one.start, begin), end=min(one.end, end))
        for one in report.intervals
        if one.worker in shown and one.end > begin and one.start < end
    ]
