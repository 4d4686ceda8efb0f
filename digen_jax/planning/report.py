"""Plans as text and figures: programs with memory and seconds, the table of layouts, the choice and its reason."""

import dataclasses
import itertools
import math
import pathlib
import textwrap
from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import TrainConfig
from digen_jax.logging.timeline import draw_timeline
from digen_jax.parallel.placement import MeshSizes
from digen_jax.planning.costs import Calibration
from digen_jax.planning.estimate import EFFICIENCY, LINK_SHARE, MEMORY_SHARE, ProgramCost, Topology
from digen_jax.planning.hardware import GB, Chip
from digen_jax.scheduling.commands import Interval
from digen_jax.scheduling.layouts import PoolLayout, Problem
from digen_jax.scheduling.planner import Plan, Prediction, settings_of, workers_of
from digen_jax.scheduling.simulator import WARM_UP, Disturbance, names_of, simulate

TERA = 1e12
WIDTH = 100  # columns
DRAWN = 3  # layouts, and steps of each
ROWS = 16  # maximum workers in a timeline

LEGEND = (
    "A line is the best simulated layout of its kind; * is the choice. of bound: (G + T)/N over s/step, where G and T "
    "are a step's seconds of generation and training on one of N devices.",
    "sample: workers that only sample x devices of each. train: workers that train x devices of each.",
    "colocated: one worker of all devices. pool: several workers that sample and train. disaggregated: no worker does "
    "both. rollout + pool: workers that only sample, next to workers that do both.",
    "lag: workers that would wait start the next step with weights that are this number of versions old.",
)


def wrapped(text: str, indent: str = "") -> str:
    """Returns lines of at most `WIDTH` columns; continuation lines are indented."""
    options: dict = {"subsequent_indent": indent, "break_long_words": False}
    lines = (textwrap.wrap(line, WIDTH, **options) or [""] for line in text.split("\n"))
    return "\n".join(itertools.chain.from_iterable(lines))


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns aligned columns; the first `left` ones, and the last one if it is text, are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = len(rows) > 1 and any(row[-1][:1].isalpha() for row in rows[1:])
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < left or (text and i == len(row) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ programs


def heading(config: TrainConfig, target: Topology) -> str:
    """Returns the model, the devices, and the source of the numbers."""
    chip, model = target.chip, config.model
    sizes = "as the planner chooses"
    if config.placement.mode != AUTO:
        sizes = describe_meshes(config.placement.meshes)
    facts = ""
    if chip is not None:
        facts = f" ({chip.flops / TERA:.0f} bfloat16 TFLOP/s and {chip.memory / GB:.3g} GB each)"
    lines = [
        f"model {model.folder}, {model.height} x {model.width}, meshes: {sizes}",
        f"{target.name}: {len(target.devices)} devices of the kind {target.devices[0].device_kind}{facts}",
    ]
    if target.compiler and chip:
        network, others = EFFICIENCY[target.devices[0].platform]
        lines += [
            f"all numbers are estimated: compiled for {target.compiler.target}, not run",
            f"seconds: FLOPs at {network:.0%} of the bfloat16 peak ({others:.0%} for encoders, decoder, rewards), or "
            f"bytes of arguments and results at {MEMORY_SHARE:.0%} of {chip.bandwidth / GB:g} GB/s; between meshes at "
            f"{LINK_SHARE:.0%} of {chip.link / GB:g} GB/s",
        ]
    else:
        lines.append("seconds are measured on these devices; FLOPs are counted")
    return "\n".join(lines)


def describe_meshes(sizes: MeshSizes) -> str:
    """Returns the axes of each mesh that are larger than 1."""

    def axes(of: object) -> str:
        large = [f"{name} {size}" for name, size in vars(of).items() if size > 1]
        return ", ".join(large) or "one device"

    rollout = "colocated with the trainer" if not sizes.rollout.data else axes(sizes.rollout)
    return f"trainer {axes(sizes.trainer)}; rollout {rollout}"


def program_tables(found: Sequence[ProgramCost], target: Topology) -> str:
    """Returns memory, seconds, FLOPs per device and shares of the peak of each program, and its FLOPs by stream."""
    chip, how = target.chip, target.how
    head = ["program", "devices", "peak GB", f"s ({how})", "TFLOP", "done"]
    rows = [[*head, *(["of peak", "with remat"] if chip else [])]]
    for one in found:
        cells = [one.program.name, str(one.program.devices), f"{one.compiled.peak / GB:.3g}"]
        cells += [f"{one.seconds:.4g}", _tera(one.needed), _tera(one.flops)]
        if chip:
            cells += [_share(one.needed, one.seconds, chip), _share(one.flops, one.seconds, chip)]
        rows.append(cells)
    lines = [aligned(rows), *(f"{one.program.name}: {one.program.what}" for one in found), ""]
    if target.memory:
        limit = f" ({target.memory / chip.memory:.0%} of its memory)" if chip else ""
        lines.append(f"memory of a device: {target.memory / GB:.1f} GB may be taken{limit}")
    lines.append(
        f"TFLOP: what a device needs for it; done: all products, convolutions and kernels of the program, counted; "
        f"of peak: the needed ones over seconds ({how}) and the bfloat16 peak; with remat: those done"
    )
    return "\n".join([*lines, "", _streams_table(found)])


def _tera(flops: float | None) -> str:
    return "-" if flops is None or math.isnan(flops) else f"{flops / TERA:.4g}"


def _share(flops: float | None, seconds: float, chip: Chip) -> str:
    return "-" if flops is None or not seconds else f"{flops / (seconds * chip.flops):.1%}"


def _streams_table(found: Iterable[ProgramCost]) -> str:
    """Returns the needed FLOPs per device of each program, by the streams of its model."""
    known = [(one.program, one.program.work) for one in found if one.program.work]
    streams = sorted({stream for _, work in known for stream in work})
    rows = [["TFLOP by stream", *streams, "all"]]
    for program, work in known:
        each = [work.get(stream, 0.0) / program.devices for stream in streams]
        rows.append([program.name, *map(_tera, each), _tera(sum(each))])
    return aligned(rows)


# ------------------------------------------------------------------------------------ layouts


def describe_costs(problem: Problem, missing: Sequence[str]) -> str:
    """Returns the costs of a plan, each on one device."""
    per_image = {"generate", "train", "decode", "score", "deliver"}
    costs = dataclasses.asdict(problem.costs).items()
    known = [(name, seconds) for name, seconds in costs if seconds or name not in missing]
    parts = [f"{n} {seconds:.4g} s{' per image' * (n in per_image)}" for n, seconds in known]
    text = f"on one device: {', '.join(parts)}"
    if missing:
        text += f"; not known and left out: {', '.join(missing)}"
    text += f"; share that more devices do not shorten: training {problem.trainer.serial:.1%}"
    return f"{text}, generation {problem.worker.serial:.1%}"


def table(plan: Plan) -> str:
    """Returns a line of at most `WIDTH` columns for the best layout of every kind."""
    head = ["", "kind", "sample", "train", "s/step", "img/dev/s", "of bound"]
    rows = [[*head, *(["GiB"] if plan.problem.footprint else []), "waits most for"]]
    for row in plan.best:
        one = row.layout
        sample = f"{one.rollout} x {one.rollout_devices}" if one.rollout else "-"
        cells = ["*" * (row is plan.choice), one.kind, sample, f"{one.workers} x {one.devices}"]
        cells += [
            f"{row.step_seconds:.4g}",
            f"{row.images_per_device_second:.4g}",
            f"{row.utilisation:.1%}",
        ]
        cells += [f"{row.memory.largest / 2**30:.2f}"] if row.memory else []
        rows.append([*cells, longest_wait(row) or "-"])
    return aligned(rows, left=4)


def longest_wait(row: Prediction) -> str:
    """Returns the largest idle share of all devices' time, with its cause, or "" without idle time."""
    share, cause = max(((share, cause) for cause, share in row.bubbles.items()), default=(0, ""))
    return f"{share:.1%} {cause}" if share >= 5e-4 else ""


def memory_table(plan: Plan) -> str:
    """Returns the bytes by purpose on a device of each kind of worker in the choice."""
    lines, memory, footprint = [], plan.choice.memory, plan.problem.footprint
    if memory is None or footprint is None:
        return "memory is not known"
    names = "the home worker", "a worker that only samples", "a worker that encodes prompts first"
    for name, held in zip(names, (memory.trainer, memory.worker, memory.encode), strict=True):
        parts = ", ".join(f"{what} {size / 2**20:,.1f}" for what, size in held.items() if size)
        if held:
            total = sum(held.values()) / 2**20
            lines.append(f"a device of {name}, MiB: {total:,.1f} = {parts}")
    if footprint.programs is None:
        lines.append("without temporaries of programs: --memory=GIB compiles and counts them")
    return "\n".join(lines)


def why(plan: Plan) -> str:
    """Returns the choice and the relative step times of other kinds of layout, in one line."""
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


def plan_report(plan: Plan, calibration: Calibration) -> str:
    """Returns the costs, the table with its legend, the choice's memory and its reason."""
    problem, settings = plan.problem, plan.problem.settings
    facts = (
        f"costs from {calibration.source}",
        describe_costs(problem, calibration.missing),
        f"a step: {settings.groups * settings.images} images in {settings.chunks} chunks on "
        f"{problem.devices} devices; bound (G + T)/N {problem.bound:.4g} s",
    )
    parts = ["\n".join(facts), "\n".join(LEGEND), memory_table(plan)]
    costs, legend, memory = (wrapped(part, "  ") for part in parts)
    count = f"{plan.simulated} of {plan.layouts} layouts were simulated"
    return "\n\n".join([costs, table(plan), legend, memory, f"{wrapped(why(plan))}\n{count}"])


def draw_plan(plan: Plan, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes images_per_second.png, and timeline_1.png, ... of the fastest layouts, to a folder; returns the files.

    A timeline shows the steps after the first ones, for at most `ROWS` workers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files, devices = [folder / "images_per_second.png"], plan.problem.devices
    rows = plan.best[::-1]  # a bar chart starts at the bottom
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    speeds = [row.images_per_device_second * devices for row in rows]
    names = [f"{row.layout.kind}{' *' * (row is plan.choice)}" for row in rows]
    colors = ["#4c78a8" if row is plan.choice else "#b0c4d8" for row in rows]
    bars = axes.barh(names, speeds, color=colors)
    labels = [f"{row.utilisation:.0%} of the bound" for row in rows]
    axes.bar_label(bars, labels, padding=3, fontsize=7)
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
    """Returns the intervals of a layout's workers in some simulated steps."""
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
