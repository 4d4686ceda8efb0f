"""The runtime's benchmark as text and as JSON."""

import dataclasses
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from benchmarks.runtime import Measured, TimedRun
from benchmarks.variants import Work
from digen_jax.planning.plan_text import describe_costs
from digen_jax.planning.tables import aligned

LATE = 1 / 600  # wake-up delay, as a share of the bound, above which the machine counts as busy
NEAR = 0.03  # error of a prediction that is good enough
HEAD = ["", "workers", "s/step", "of bound", "predicted", "error", "age"]
UNUSED = "score_latency", "deliver", "evaluate", "switch"  # costs


def introduction(work: Work, run: TimedRun) -> str:
    """A text on what is measured, and how."""
    return (
        f"Waits instead of device work, with a jitter of {run.jitter:.0%} for each command and device; driver, "
        "threads, scheduler and reward pool are real.\n"
        f"{work.devices} devices; a step is {work.groups} groups of {work.images} images. A worker of n devices takes "
        "1/n of the seconds, times the largest of n random factors.\n"
        f"Each row is the planner's best layout of its kind; s/step is the median of steps {run.warm_up + 1} to "
        f"{run.measured[-1] + 1}.\npredicted: the share of the bound by the simulator, at the same costs. age: of the "
        "trained samples, in versions."
    )


def table(work: Work, rows: Mapping[str, Measured]) -> str:
    """A ratio's waits and bound, and a line for every kind of layout."""
    waits = describe_costs(work.problem, UNUSED).split(";")[0]
    lines = [
        [
            kind,
            row.layout.describe(),
            f"{row.step_seconds:.3f}",
            f"{row.utilisation:.1%}",
            f"{row.bound / row.predicted:.1%}",
            f"{row.error:+.1%}",
            f"{row.policy_lag:.2f}",
        ]
        for kind, row in rows.items()
    ]
    return (
        f"generate:train {work.generate:g}:{work.train:g}, bound (G + T)/N {work.seconds:.3f} s\n"
        f"waits {waits}\n{aligned([HEAD, *lines], left=2)}"
    )


def accuracy(rows: Iterable[Measured]) -> str:
    """The error of the predictions and the timer wake-up delay, in two sentences."""
    rows = list(rows)
    errors = sorted(abs(row.error) for row in rows)
    late = any(row.late > LATE * row.bound for row in rows)
    busy = ": the machine is too busy for these numbers to count" if late else ""
    within = sum(error <= NEAR for error in errors)
    return (
        f"The simulator is within {NEAR:.0%} of {within} of {len(errors)} measurements, "
        f"off by {errors[-1]:.1%} at most and {errors[len(errors) // 2]:.1%} in the median. "
        f"Timer wake-up delay: {1000 * fmean(row.late for row in rows):.2g} ms on average, "
        f"{1000 * max(row.late for row in rows):.2g} ms in the worst row{busy}."
    )


def record(work: Work, rows: Mapping[str, Measured]) -> dict[str, Any]:
    """A ratio's numbers as JSON values."""
    names = "step_seconds", "utilisation", "error"
    shares = {kind: {name: getattr(row, name) for name in names} for kind, row in rows.items()}
    found = {kind: dataclasses.asdict(row) | shares[kind] for kind, row in rows.items()}
    return {"work": dataclasses.asdict(work), "kinds": found}
