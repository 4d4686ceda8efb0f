"""The runtime's benchmark as text and as JSON."""

import dataclasses
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from digen_jax.benchmark.runtime import Measured, TimedRun
from digen_jax.benchmark.variants import COLOCATED, PLAIN, Work
from digen_jax.scheduling.planner.plan import describe_costs

LATE = 1 / 600  # wake-up delay, as a share of the bound, above which the machine counts as busy

HEAD = (
    "",
    "placement",
    "s/step",
    "img/dev/s",
    "of bound",
    "busy",
    f"/ {PLAIN}",
    f"/ {COLOCATED}",
    "predicted",
    "error",
)


def introduction(work: Work, run: TimedRun) -> str:
    """A text on what is measured, and how."""
    settings, steps = work.problem.settings, run.measured
    return (
        f"Waits in place of device work, drawn {run.jitter:.0%} around their means; driver, threads, scheduler and "
        f"reward pool are real.\n{work.devices} devices; a step is {work.groups} groups of {work.images} "
        f"images in {settings.fragments} fragments. Rollout workers have one device each. The trainer's\n"
        f"shorten its waits in proportion, as far as they can share them: a fragment has {work.fragment} images "
        f"to split, and\nunder TSP {work.transitions} time steps; {PLAIN} and {COLOCATED} are spared this limit. "
        f"Steps {steps[0] + 1} to {steps[-1] + 1} are measured.\nPredicted: by the simulator, from the averages that "
        f"the scheduler had after {run.learn} steps, and from the jitter."
    )


def table(work: Work, rows: Mapping[str, Measured]) -> str:
    """A ratio's waits and bound, and a line for every variant.

    Speed-ups are of images per device and second, over plain disaggregation and over colocated.
    """
    least = next(iter(rows.values())).bound
    title = (
        f"generate:train {work.generate:g}:{work.train:g}, bound (G + T)/N {least:.3f} s\n"
        f"waits {describe_costs(work.problem, ('score_latency',)).split(';')[0]}"
    )
    lines = [HEAD, *(_line(name, row, rows) for name, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([title, *(line.rstrip() for line in text)])


def _line(name: str, row: Measured, rows: Mapping[str, Measured]) -> tuple[str, ...]:
    return (
        name,
        row.proposal.describe(),
        f"{row.step_seconds:.3f}",
        f"{row.images_per_device_second:.2f}",
        f"{row.utilisation:.1%}",
        f"{row.busy:.1%}",
        *(f"{speed_up(row, rows[other]):.2f}x" for other in (PLAIN, COLOCATED)),
        f"{row.predicted:.3f}",
        f"{row.error:+.1%}",
    )


def speed_up(row: Measured, other: Measured) -> float:
    """Images per device and second, over another variant's of the same work and devices."""
    return other.step_seconds / row.step_seconds


def accuracy(rows: Mapping[str, Measured]) -> str:
    """The error of the predictions and the timer wake-up delay, in two sentences."""
    errors = sorted(abs(row.error) for row in rows.values())
    worst = max(row.late for row in rows.values())
    late = any(row.late > LATE * row.bound for row in rows.values())
    busy = ": the machine is too busy for these numbers to count" if late else ""
    within = sum(error <= 0.05 for error in errors)
    return (
        f"The simulator is within 5% of {within} of {len(errors)} measurements, "
        f"off by {errors[-1]:.1%} at most and {errors[len(errors) // 2]:.1%} in the median. "
        f"Timer wake-up delay: {1000 * fmean(row.late for row in rows.values()):.2g} ms on average, "
        f"{1000 * worst:.2g} ms in the worst row{busy}."
    )


def record(work: Work, rows: Mapping[str, Measured]) -> dict[str, Any]:
    """A ratio's numbers as JSON values."""
    return {
        "work": dataclasses.asdict(work),
        "variants": {
            name: {
                **dataclasses.asdict(row),
                "step_seconds": row.step_seconds,
                "images_per_device_second": row.images_per_device_second,
                "utilisation": row.utilisation,
                "speed_up_over_plain": speed_up(row, rows[PLAIN]),
                "speed_up_over_colocated": speed_up(row, rows[COLOCATED]),
                "error": row.error,
            }
            for name, row in rows.items()
        },
    }
