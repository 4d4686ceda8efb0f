"""An early stop: a reward in the evaluations, such as one that is not trained, has fallen for too long."""

import pathlib
from collections.abc import Sequence

from digen_jax.config.sections import StoppingSection
from digen_jax.records.metrics import read_metrics


def has_fallen(values: Sequence[float], margin: float, evaluations: int) -> bool:
    """Whether each of the last `evaluations` values lies more than `margin` below the best before them."""
    before, last = values[:-evaluations], values[-evaluations:]
    return bool(before) and all(value < max(before) - margin for value in last)


def reason_to_stop(asked: StoppingSection, workdir: pathlib.Path) -> str | None:
    """The sentence that ends the run in a workdir early, by the evaluations in its metrics; None: it goes on."""
    path = workdir / "metrics.jsonl"
    if not asked.reward or not path.exists():
        return None
    metric = f"evaluation/reward_of/{asked.reward}"
    found = [(line[metric], line["step"]) for line in read_metrics(path) if metric in line]
    values = [value for value, _ in found]
    if not has_fallen(values, asked.margin, asked.evaluations):
        return None
    best, at = max(found[: -asked.evaluations], key=lambda one: one[0])
    value, step = found[-1]
    times = "evaluation" if asked.evaluations == 1 else f"{asked.evaluations} evaluations"
    return (
        f"stopped early: {metric} was {best:.4g} after step {at}, is {value:.4g} after step {step}, "
        f"and was more than config.stopping.margin = {asked.margin:g} below its best in the last {times}; "
        "to continue, set config.stopping.reward to ''"
    )
