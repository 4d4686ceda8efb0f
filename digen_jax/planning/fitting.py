"""Whether a recipe fits on a slice: the planner's layout with its compiled programs, or a smaller recipe."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict

from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.parallel.placement import check_processes
from digen_jax.planning.alternatives import smaller
from digen_jax.planning.assessment import Assessed
from digen_jax.planning.calibration import Calibration
from digen_jax.planning.chips import GB
from digen_jax.planning.footprint import model_footprint
from digen_jax.planning.plan import can_run, make_problem, meshes, suited
from digen_jax.planning.slices import Slice
from digen_jax.policies import on_devices
from digen_jax.scheduling.layouts import DeviceBytes, PoolLayout, Problem, Programs, device_bytes
from digen_jax.scheduling.planner import Plan, make_plan


class Verdict(NamedTuple):
    """Whether a recipe fits on a slice, and how.

    Attributes:
      plan: its choice has the memory of the compiled programs, other rows have it without these; None: no layout fits.
      problem: that was planned.
      reason: why no layout fits, or no other than the refused ones.
      refused: bytes on each device of the layouts that were compiled and did not fit, the best first.
    """

    plan: Plan | None
    problem: Problem
    reason: str
    refused: list[tuple[PoolLayout, DeviceBytes]]


def judged(
    recipe: TrainConfig, calibration: Calibration, where: Slice, own: list[Assessed]
) -> Verdict:
    """The best layout that fits, with its programs compiled on its own meshes.

    A layout that does not fit rules out all whose devices have larger shares of the images. `own` are the programs on
    the recipe's meshes.
    """
    problem = make_problem(
        recipe, len(where.devices), calibration, model_footprint(recipe), where.memory
    )
    ruled_out: list[Callable[[PoolLayout], bool]] = []
    known = {on_devices(recipe, len(where.devices)).placement.meshes: own}
    refused: list[tuple[PoolLayout, DeviceBytes]] = []

    def may(layout: PoolLayout) -> bool:
        return (
            can_run(recipe, problem, layout)
            and _one_process(problem, layout, where.devices)
            and not any(rule(layout) for rule in ruled_out)
        )

    def with_programs(given: Problem, layout: PoolLayout) -> Problem:
        sizes = meshes(given, layout)
        if sizes not in known:
            known[sizes] = where.assess(suited(recipe, given, layout))
        return _with_programs(problem, recipe, layout, known[sizes])

    while True:
        try:
            plan = make_plan(problem, may)
        except ConfigError as error:
            return Verdict(None, problem, str(error), refused)
        layout = plan.choice.layout
        full = with_programs(problem, layout)
        if meshes(full, layout) != meshes(problem, layout):
            # The axes fsdp are larger, because the programs need memory, too: these are other programs.
            full = with_programs(full, layout)
        held = device_bytes(full, layout)
        if where.memory is None or held.largest <= where.memory:
            return Verdict(_chosen(plan, full, held), full, "", refused)
        refused.append((layout, held))
        ruled_out.append(functools.partial(_no_smaller, layout, held, where.memory))


def compiled(
    recipe: TrainConfig, where: Slice, write: Callable[[str], None]
) -> tuple[TrainConfig, list[Assessed]]:
    """The recipe, or the first smaller one of which the compiler takes all programs, and these.

    Args:
      recipe: with a local folder for its model.
      where: the slice.
      write: called with what does not fit, and what is tried instead.

    Raises:
      ConfigError: the compiler takes none, the recipe's meshes do not fit the slice, or the model's folder cannot be
        used.
    """
    for changed in (recipe, *smaller(recipe, len(where.devices))):
        if changes := changed_fields(recipe, changed):
            write("tries " + ", ".join(f"config.{k}={v}" for k, v in changes.items()))
        found = where.assess(changed)
        refused = [one for one in found if not one.fits]
        for one in refused:
            write(
                f"the config does not fit, because {one.program.name} needs {one.answer.peak / GB:.1f} GB of a device "
                f"({where.how})"
            )
        if not refused:
            return changed, found
    raise ConfigError(
        f"{where.name} is too small for this config, also with the least memory that was tried: take a slice of more "
        "devices or larger ones"
    )


def proposed(
    recipe: TrainConfig,
    calibration: Calibration,
    where: Slice,
    own: list[Assessed],
    write: Callable[[str], None],
) -> tuple[Verdict, TrainConfig]:
    """The best layout that fits, with the recipe that it is for: the given one, or a smaller one.

    Args:
      recipe: with a local folder for its model.
      calibration: costs on one device.
      where: the slice.
      own: the programs on the recipe's meshes.
      write: called with what does not fit, and what is tried instead.

    Raises:
      ConfigError: nothing that was tried fits.
    """
    tried = []
    for changed in (recipe, *smaller(recipe, len(where.devices))):
        changes = ", ".join(f"config.{k}={v}" for k, v in changed_fields(recipe, changed).items())
        if changes:
            write(f"tries {changes}")
            own = where.assess(changed)
        verdict = judged(changed, calibration, where, own)
        for line in refusals(verdict.refused, where.memory, where.how):
            write(line)
        if verdict.plan is not None:
            write(f"it fits ({where.how})" + (f" with {changes}" if changes else ""))
            return verdict, changed
        if not verdict.refused:
            write(f"does not fit, because {verdict.reason}")
        tried.append(changes)
    also = "; ".join(filter(None, tried))
    raise ConfigError(
        f"{where.name} is too small for this config"
        + (f", also with {also}" if also else "")
        + ": take a slice of more devices or larger ones"
    )


def changed_fields(recipe: TrainConfig, other: TrainConfig) -> dict[str, Any]:
    """The fields of another recipe that differ, by dotted name, except the meshes."""
    now, then = (flatten_dict(one.as_json(), sep=".") for one in (recipe, other))
    return {name: value for name, value in then.items() if value != now[name]}


def refusals(
    refused: list[tuple[PoolLayout, DeviceBytes]], memory: float | None, how: str
) -> Iterator[str]:
    """The layouts whose compiled programs do not fit, and what takes the memory."""
    for layout, held in refused:
        devices = {
            "a device that trains": held.trainer,
            "a device that only samples": held.worker,
            "a device that encodes prompts first": held.ahead,
        }
        name, parts = max(devices.items(), key=lambda device: sum(device[1].values()))
        most = sorted(parts.items(), key=lambda part: -part[1])[:4]
        what = ", ".join(f"{what} {size / GB:.1f}" for what, size in most)
        yield (
            f"{layout.describe()} does not fit, because {name} needs {sum(parts.values()) / GB:.1f} GB of "
            f"{memory / GB:.1f} ({how}): {what}"
        )


def _chosen(plan: Plan, problem: Problem, held: DeviceBytes) -> Plan:
    """The plan with the memory of the choice's compiled programs."""
    choice = dataclasses.replace(plan.choice, memory=held)
    rows = tuple(choice if row is plan.choice else row for row in plan.best)
    return dataclasses.replace(plan, problem=problem, choice=choice, best=rows)


def _one_process(problem: Problem, layout: PoolLayout, devices: Sequence[jax.Device]) -> bool:
    """Whether the devices of several processes are divided as a run can."""
    try:
        check_processes(meshes(problem, layout), devices)
    except ConfigError:
        return False
    return True


def _no_smaller(failed: PoolLayout, held: DeviceBytes, limit: float, other: PoolLayout) -> bool:
    """Whether another layout's devices have at least the shares and the roles of the devices that were too full."""
    if max(sum(held.trainer.values()), sum(held.worker.values())) <= limit:
        return other.sampling_parts <= failed.sampling_parts  # the text encoders do not fit
    if failed.lag > other.lag:
        return False
    if sum(held.trainer.values()) <= limit:
        return other.rollout > 0 and other.rollout_images <= failed.rollout_images
    if failed.samples and not other.samples:
        return False
    return (
        other.workers <= failed.workers and other.data <= failed.data and other.time <= failed.time
    )


def _with_programs(
    problem: Problem, recipe: TrainConfig, layout: PoolLayout, found: list[Assessed]
) -> Problem:
    """The problem with the temporary memory of compiled programs, which holds for this layout alone."""
    # A program that was not compiled, because another does not fit, counts as nothing.
    beyond = Counter({one.program.name: one.answer.beyond for one in found})
    shape = problem.footprint.trajectory * -(-recipe.sampler.chunk // layout.sampling_parts)
    encoding = max(beyond["encode"], beyond["encode null"])
    decoding = max(beyond["decode"], beyond["decode evaluated"])
    scoring = max((size for name, size in beyond.items() if name.startswith("score")), default=0)
    sampling = {
        "encoding": encoding,
        # Without the trajectories, which are counted apart.
        "generating": max(0, beyond["generate"] - shape),
        "evaluating": beyond["evaluate"],
        "decoding": decoding,
        "scoring": scoring,
    }
    made = Programs(
        lambda data, time: beyond["train"],
        lambda tuned: beyond["update"],
        lambda *mesh: sampling,
    )
    return dataclasses.replace(
        problem, footprint=dataclasses.replace(problem.footprint, programs=made)
    )
