"""A plan as text: costs, the table of layouts, the memory of the choice and the reason for it."""

import dataclasses
import itertools
import textwrap
from collections.abc import Sequence

from digen_jax.scheduling.layouts import Problem
from digen_jax.scheduling.planner import Plan, Prediction

WIDTH = 100  # columns

LEGEND = (
    "A line is the best simulated layout of its kind; * is the choice. of bound: (G + T)/N over s/step, where G and T "
    "are a step's seconds of generation and training on one of N devices.",
    "sample: workers that only sample x devices of each. train: workers that train x devices of each.",
    "colocated: one worker of all devices. pool: several workers that sample and train. disaggregated: no worker does "
    "both. rollout + pool: workers that only sample, next to workers that do both.",
    "lag: workers that would wait start the next step with weights that are this number of versions old.",
)


def wrapped(text: str, indent: str = "") -> str:
    """Lines of at most `WIDTH` columns; continuation lines are indented."""
    options = {"subsequent_indent": indent, "break_long_words": False}
    lines = (textwrap.wrap(line, WIDTH, **options) or [""] for line in text.split("\n"))
    return "\n".join(itertools.chain.from_iterable(lines))


def table(plan: Plan) -> str:
    """A line of at most `WIDTH` columns for the best layout of every kind."""
    head = ["", "kind", "sample", "train", "chunk", "s/step", "img/dev/s", "of bound"]
    rows = [[*head, *(["GiB"] if plan.problem.footprint else []), "waits most for"]]
    for made in plan.best:
        one = made.layout
        sample = f"{one.rollout} x {one.rollout_devices}" if one.rollout else "-"
        cells = ["*" * (made is plan.choice), one.kind, sample, f"{one.workers} x {one.devices}"]
        cells += [f"{one.chunk}", f"{made.step_seconds:.4g}"]
        cells += [f"{made.images_per_device_second:.4g}", f"{made.utilisation:.1%}"]
        cells += [f"{made.memory.largest / 2**30:.2f}"] if made.memory else []
        rows.append([*cells, longest_wait(made) or "-"])
    columns = []
    for place, column in enumerate(zip(*rows, strict=True)):
        align = "<" if place in (0, 1, 2, 3, len(rows[0]) - 1) else ">"
        columns.append([f"{cell:{align}{max(map(len, column))}}" for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def longest_wait(made: Prediction) -> str:
    """The largest idle share of all devices' time, with its cause; empty if nothing waits."""
    share, cause = max(((share, cause) for cause, share in made.bubbles.items()), default=(0, ""))
    return f"{share:.1%} {cause}" if share >= 5e-4 else ""


def memory_table(plan: Plan) -> str:
    """The bytes by purpose on a device of each kind of worker of the choice."""
    lines, memory = [], plan.choice.memory
    names = "the home worker", "a worker that only samples", "a worker that encodes prompts first"
    for name, held in zip(names, (memory.trainer, memory.worker, memory.ahead), strict=True):
        parts = ", ".join(f"{what} {size / 2**20:,.1f}" for what, size in held.items() if size)
        lines += (
            [f"a device of {name}, MiB: {sum(held.values()) / 2**20:,.1f} = {parts}"]
            if held
            else []
        )
    if plan.problem.footprint.programs is None:
        lines.append("without temporaries of programs: --memory=GIB compiles and counts them")
    return "\n".join(lines)


def why(plan: Plan) -> str:
    """The choice and what other kinds of layout take, in one sentence."""
    choice = plan.choice
    parts = [
        f"{choice.layout.kind} ({choice.layout.describe()}) reaches {choice.utilisation:.1%} of the bound"
    ]
    if waiting := longest_wait(choice):
        parts.append(f"its devices wait most for: {waiting}")
    for row in plan.best:
        more = row.step_seconds / choice.step_seconds - 1
        text = f"{row.layout.kind} takes {abs(more):.1%} {'longer' if more >= 0 else 'less'}"
        parts += [text] if row is not choice else []
    if plan.problem.settings.chunks == 1:
        parts.append(
            "a step is a single chunk and nothing can overlap: make config.sampler.chunk smaller"
        )
    return f"{'; '.join(parts)}."


def describe_costs(problem: Problem, missing: Sequence[str]) -> str:
    """The costs of a plan, each on one device."""
    per_image = {"generate", "train", "decode", "score", "deliver"}
    costs = dataclasses.asdict(problem.costs).items()
    known = [(name, seconds) for name, seconds in costs if seconds or name not in missing]
    parts = [f"{n} {seconds:.4g} s{' an image' * (n in per_image)}" for n, seconds in known]
    text = f"on one device: {', '.join(parts)}"
    if missing:
        text += f"; not known and left out: {', '.join(missing)}"
    text += f"; share that more devices do not shorten: training {problem.trainer.serial:.1%}"
    return f"{text}, generation {problem.worker.serial:.1%}"
