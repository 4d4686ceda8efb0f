"""The tables of a recipe's programs on a slice; every number says whether it is estimated or measured."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from digen_jax.assemble import recipe_model
from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import TrainConfig
from digen_jax.parallel.placement import MeshSizes
from digen_jax.planning import costs
from digen_jax.planning.assessment import Assessed
from digen_jax.planning.calibration import Calibration
from digen_jax.planning.chips import GB, Chip
from digen_jax.planning.layers import module_of
from digen_jax.planning.slices import Slice, calibrated, plain_shares
from digen_jax.policies import trained_of

TERA = 1e12
SLOWEST, MODULES = 10, 20


def report(
    recipe: TrainConfig, found: list[Assessed], where: Slice, write: Callable[[str], None]
) -> Calibration:
    """Writes the tables of a recipe's programs, and returns the costs that follow."""
    write(f"\n{programs_table(found, where)}\n\n{streams_table(found)}\n")
    if where.answers:
        write(f"{spent_table(found)}\n\n{collectives_table(found)}\n")
        for one in found:
            if one.program.work:
                write(f"{slowest_table(one)}\n\n{modules_table(one)}\n")
    # The CUDA compiler estimates no products, so all would reach the stated share.
    if where.chip and (where.chip.clock or not where.answers):
        _, family = recipe_model(recipe)
        width = width_of(trained_of(family, family.shapes()))
        write(f"{calibration_table(plain_shares(where, width), where)}\n")
    source = f"the programs of the config on {where.name} ({where.how})"
    return calibrated(recipe, found, where.chip, source)


def heading(recipe: TrainConfig, where: Slice) -> str:
    """The model, the slice, and where the numbers come from."""
    chip, count = where.chip, len(where.devices)
    kind = where.devices[0].device_kind
    about = f"model {recipe.model.folder}, {recipe.model.height} x {recipe.model.width}, meshes: "
    about += _meshes(recipe)
    facts = ""
    if chip is not None:
        facts = f" ({chip.flops / TERA:.0f} bfloat16 TFLOP/s and {chip.memory / GB:.3g} GB each)"
    lines = [about, f"{where.name}: {count} devices of the kind {kind}{facts}"]
    if where.answers:
        lines += [
            f"all numbers are estimated: compiled for {where.answers.target}, nothing has run",
            f"kernels at the shares of the peak in docs/performance.md, collectives over one link at "
            f"{costs.LINK_SHARE:.0%} of {chip.link / GB:g} GB/s, transfers at {costs.MEMORY_SHARE:.0%} of "
            f"{chip.bandwidth / GB:g} GB/s; as if nothing ran at the same time",
        ]
    else:
        lines.append("seconds are measured on these devices; FLOPs are counted")
    return "\n".join(lines)


def _meshes(recipe: TrainConfig) -> str:
    if recipe.placement.mode == AUTO:
        return "as the planner chooses"
    return describe_meshes(recipe.placement.meshes)


def describe_meshes(sizes: MeshSizes) -> str:
    """The axes of each mesh that are larger than 1."""

    def axes(of: object) -> str:
        large = [f"{name} {size}" for name, size in vars(of).items() if size > 1]
        return ", ".join(large) or "one device"

    rollout = "in turn with the trainer" if not sizes.rollout.data else axes(sizes.rollout)
    return f"trainer {axes(sizes.trainer)}; rollout {rollout}"


def programs_table(found: Sequence[Assessed], where: Slice) -> str:
    """A line for each program: memory, seconds, FLOPs on one device and shares of the peak."""
    chip, how = where.chip, where.how
    head = ["program", "devices", "peak GB", f"s ({how})", "TFLOP", "done"]
    head += ["of peak", "with remat"] if chip else []
    rows = [head]
    for one in found:
        cells = [one.program.name, str(one.program.devices), f"{one.answer.peak / GB:.3g}"]
        cells += [f"{one.seconds:.4g}", _tera(one.needed), _tera(one.flops)]
        rows.append([*cells, *(_shares(one, chip) if chip else ())])
    lines = [aligned(rows), *(f"{one.program.name}: {one.program.what}" for one in found), ""]
    if where.memory:
        limit = f" ({where.memory / chip.memory:.0%} of its memory)" if chip else ""
        lines.append(f"memory of a device: {where.memory / GB:.1f} GB may be taken{limit}")
    lines.append(
        f"TFLOP: what a device needs for it; done: all products, convolutions and kernels of the program, counted; "
        f"of peak: the needed ones over seconds ({how}) and peak, with remat: with those that it repeats"
    )
    return "\n".join(lines)


def _tera(flops: float | None) -> str:
    if flops is None or math.isnan(flops):
        return "-"
    return f"{flops / TERA:.4g}"


def _shares(one: Assessed, chip: Chip) -> tuple[str, str]:
    needed = one.flops - one.repeated if one.needed is None else one.needed
    possible = one.seconds * chip.flops
    if not possible or math.isnan(needed):
        return "-", "-"
    return f"{needed / possible:.1%}", f"{(needed + one.repeated) / possible:.1%}"


def streams_table(found: Iterable[Assessed]) -> str:
    """The needed FLOPs of each program on a device, by the streams of its model."""
    known = [one for one in found if one.program.work]
    streams = sorted({stream for one in known for stream in one.program.work})
    rows = [["TFLOP by stream", *streams, "all"]]
    for one in known:
        work, devices = one.program.work, one.program.devices
        each = [work.get(stream, 0.0) / devices for stream in streams]
        rows.append([one.program.name, *map(_tera, each), _tera(sum(each))])
    return aligned(rows)


def spent_table(found: Iterable[Assessed]) -> str:
    """The estimated seconds of each program by kind, then those that the compiler does not estimate, one by one."""
    known = [one for one in found if one.estimate]
    rows = [["estimated s", *costs.KINDS, "all"]]
    for one in known:
        parts = [f"{one.estimate.of(kind):.3g}" for kind in costs.KINDS]
        rows.append([one.program.name, *parts, f"{one.seconds:.4g}"])
    lines = [aligned(rows)]
    for one in known:
        lines += _not_by_compiler(one)
    return "\n".join(lines)


def _not_by_compiler(one: Assessed) -> Iterator[str]:
    for kind in costs.KINDS[1:]:
        for what, (runs, moved, seconds) in one.estimate.by_what(kind).items():
            # Shorter ones are in the totals.
            if seconds >= 1e-3 * one.seconds or kind == costs.COLLECTIVES:
                size = f", {moved / GB:.4g} GB" if moved else ""
                yield (
                    f"{one.program.name}: {kind}: {what} x {runs}{size}: {seconds:.3g} s (estimated)"
                )
    for loop in one.estimate.unknown_loops:
        yield f"{one.program.name}: the loop {loop} does not tell how often it runs, and counts once"


def collectives_table(found: Iterable[Assessed]) -> str:
    """The collectives of each program with their bytes, by the layers that they come from."""
    rows = [["collective", "program", "runs", "GB", "s (estimated)", "from"]]
    for one in found:
        total: Counter[tuple[str, str]] = Counter()
        for item in one.estimate.items if one.estimate else ():
            if item.kind == costs.COLLECTIVES:
                total[item.what, item.layer] += item.total
        for what, layer in [key for key, _ in total.most_common(SLOWEST)]:
            same = [i for i in one.estimate.items if (i.what, i.layer) == (what, layer)]
            moved = sum(i.times * i.bytes for i in same) / GB
            runs = sum(i.times for i in same)
            cells = [str(runs), f"{moved:.4g}", f"{total[what, layer]:.3g}"]
            rows.append([what, one.program.name, *cells, layer])
    return aligned(rows, left=2) if len(rows) > 1 else "no program has collectives"


def slowest_table(one: Assessed) -> str:
    """The slowest operations of a program by the layer that they come from."""
    rows = [["operation", "runs", "s (estimated)", "share", "from"]]
    for item in one.estimate.slowest(SLOWEST, costs.COMPILER, costs.KERNELS, costs.OTHERS):
        share = f"{item.total / one.seconds:.1%}"
        rows.append([item.name, str(item.times), f"{item.total:.4g}", share, item.layer])
    return f"the slowest operations of {one.program.name}\n{aligned(rows)}"


def modules_table(one: Assessed) -> str:
    """The seconds of a program by the module of a block that they come from, of all blocks and passes together."""
    total: Counter[str] = Counter()
    for item in one.estimate.items:
        total[module_of(item.layer)] += item.total
    rows = [["module", "s (estimated)", "share"]]
    for module, seconds in total.most_common(MODULES):
        rows.append([module, f"{seconds:.4g}", f"{seconds / one.seconds:.1%}"])
    return f"where {one.program.name} spends its seconds\n{aligned(rows)}"


def calibration_table(shares: dict[tuple[int, int, int], float], where: Slice) -> str:
    """What plain products of the model's width reach by the same estimate."""
    parts = (f"[{m} {k}] [{k} {n}] {share:.1%}" for (m, k, n), share in shares.items())
    return f"plain bfloat16 products reach, of the peak of {where.chip.name} ({where.how}): {', '.join(parts)}"


def width_of(params: object) -> int:
    """The width of a network: the commonest size of its matrices' sides, by their number of elements."""
    sides: Counter[int] = Counter()
    for leaf in jax.tree.leaves(params):
        for side in leaf.shape[-2:] if len(leaf.shape) > 1 else ():
            sides[side] += math.prod(leaf.shape)
    return sides.most_common(1)[0][0]


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns; the first ones and the last one are flush left if that is text."""
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
