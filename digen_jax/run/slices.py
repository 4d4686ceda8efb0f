"""What a recipe's programs take on a slice, and the split that the planner proposes for it."""

import dataclasses
import functools
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict

from digen_jax.accelerators.answers import Answers
from digen_jax.accelerators.calibration import shares
from digen_jax.accelerators.chips import CHIPS, GB, Chip, chip_of
from digen_jax.accelerators.costs import COMPILER, LINK_SHARE, estimate_answer
from digen_jax.accelerators.topology import compiler_version, slice_devices
from digen_jax.config.recipe import Recipe
from digen_jax.engine.placement import check_processes
from digen_jax.errors import ConfigError
from digen_jax.models.published import published_folder, published_models
from digen_jax.process.launching import CACHE, prepare
from digen_jax.run.alternatives import smaller
from digen_jax.run.assessment import Assessed, assess, assess_here, timed
from digen_jax.run.compiled import on_devices
from digen_jax.run.footprint import model_footprint
from digen_jax.run.planning import can_run, make_problem, meshes, suited
from digen_jax.run.step_costs import on_one_device
from digen_jax.scheduling.planner.calibration import Calibration
from digen_jax.scheduling.planner.memory import DeviceBytes, device_bytes
from digen_jax.scheduling.planner.plan import Plan, make_plan
from digen_jax.scheduling.planner.problem import Problem, Programs
from digen_jax.scheduling.planner.proposal import Proposal
from digen_jax.scheduling.settings import Costs

# The share of a chip's memory that is left to its runtime.
RESERVE = 0.03
LOCAL = "local"
UNKNOWN = ("score", "score_latency", "evaluate", "switch")


class Slice(NamedTuple):
    """Devices to plan for.

    Attributes:
      name: of the slice.
      devices: all of them.
      chip: what each is; None: nothing is known of it.
      memory: bytes of each that a run may take; None: any number.
      assess: compiles a recipe's programs for them; see `assessment`.
      answers: of the compiler; None: the programs are run here.
    """

    name: str
    devices: Sequence[jax.Device]
    chip: Chip | None
    memory: float | None
    assess: Callable[[Recipe], list[Assessed]]
    answers: Answers | None = None

    @property
    def how(self) -> str:
        """Where the numbers come from, in a word that stands beside each of them."""
        return "estimated" if self.answers else "measured"


class Verdict(NamedTuple):
    """Whether a recipe fits on a slice, and how.

    Attributes:
      plan: of the best split; its choice has the memory of the compiled programs, other rows have it without these.
        None: no split fits.
      problem: that was planned.
      reason: why no split fits, or no other than the refused ones.
      refused: bytes on each device of the splits that were compiled and did not fit, the best first.
    """

    plan: Plan | None
    problem: Problem
    reason: str
    refused: list[tuple[Proposal, DeviceBytes]]


def open_slice(name: str, cpu_devices: int, note: Callable[[str], None]) -> Slice:
    """The devices of a TPU slice such as "v5p:2x2x1", or, by the name `LOCAL`, those of this machine.

    Must be called before JAX starts.

    Args:
      name: of the slice.
      cpu_devices: virtual devices for `LOCAL` where there is no accelerator.
      note: called with what is compiled, and how long it took.

    Raises:
      ConfigError: there is no such slice, nothing is known of its chip, or the TPU compiler is missing.
    """
    prepare(cpu_devices)
    if name == LOCAL:
        devices = jax.devices()
        chip = CHIPS.get(devices[0].device_kind)
        told = devices[0].memory_stats() or {}
        memory = told.get("bytes_limit")
        return Slice(name, devices, chip, memory, lambda recipe: assess_here(recipe, devices, note))
    devices = slice_devices(name)
    chip = chip_of(devices[0].device_kind)
    versions = f"jax {jax.__version__} libtpu {compiler_version()}"
    answers = Answers(f"{name} {versions}", CACHE.with_name("slices"), note)
    return Slice(
        name,
        devices,
        chip,
        (1 - RESERVE) * chip.memory,
        lambda recipe: assess(recipe, devices, chip, answers),
        answers,
    )


def configured(recipe: Recipe) -> Recipe:
    """The recipe with the shipped configuration of its model if `model.folder` is a hub id; a local folder stays.

    Raises:
      ConfigError: it is neither a local folder nor a hub id whose configuration is shipped.
    """
    name = recipe.model.folder
    if pathlib.Path(name).expanduser().is_dir():
        return recipe
    folder = published_folder(name)
    if folder is None:
        raise ConfigError(
            f"config.model.folder = {name!r} is neither a local folder nor a model whose configuration is shipped "
            f"({', '.join(published_models())}): download it and give its folder"
        )
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, folder=str(folder)))


def plain_shares(where: Slice, width: int) -> dict[tuple[int, int, int], float]:
    """Shares of the chip's peak that plain products of a width reach: see `calibration.shares`."""

    def seconds(lowered: jax.stages.Lowered) -> float:
        if where.answers is None:
            return timed(lowered, lowered.compile())
        answer = where.answers("a plain product", lowered)
        return estimate_answer(answer, where.chip).of(COMPILER)

    return shares(where.devices[0], where.chip, width, seconds)


def calibrated(
    recipe: Recipe, found: list[Assessed], chip: Chip | None, source: str
) -> Calibration:
    """Costs of a step's commands on one device, from those of its programs on the recipe's meshes.

    Weights and trajectories that go from one mesh to another take one link to each worker.
    """
    seconds: Counter[str] = Counter()
    for one in found:
        seconds[one.program.command] += one.seconds
    sizes = {one.program.name: one.program.devices for one in found}
    images, footprint, missing = recipe.sampler.fragment, model_footprint(recipe), UNKNOWN
    link = chip and LINK_SHARE * chip.link
    if not link:
        missing += ("deliver",)
    costs = Costs(
        generate=seconds["generate"] / images,
        train=seconds["train"] / images,
        decode=seconds["decode"] / images,
        encode=seconds["encode"],
        update=seconds["update"],
        publish=seconds["publish"] + (footprint.published(1, 1) / link if link else 0.0),
        deliver=footprint.trajectory / link if link else 0.0,
    )
    return on_one_device(costs, (sizes["generate"], sizes["train"]), source, missing, (0.0, 0.0))


def judged(recipe: Recipe, calibration: Calibration, where: Slice, own: list[Assessed]) -> Verdict:
    """The best split that fits, with its programs compiled on its own meshes.

    A split that does not fit rules out all whose devices have larger shares of the images. `own` are the programs on
    the recipe's meshes.
    """
    problem = make_problem(
        recipe, len(where.devices), calibration, model_footprint(recipe), where.memory
    )
    ruled_out: list[Callable[[Proposal], bool]] = []
    known = {on_devices(recipe, len(where.devices)).placement.meshes: own}
    refused: list[tuple[Proposal, DeviceBytes]] = []

    def may(proposal: Proposal) -> bool:
        return (
            can_run(recipe, problem, proposal)
            and _one_process(problem, proposal, where.devices)
            and not any(rule(proposal) for rule in ruled_out)
        )

    def with_programs(given: Problem, proposal: Proposal) -> Problem:
        mesh = meshes(given, proposal)
        if mesh not in known:
            known[mesh] = where.assess(suited(recipe, given, proposal))
        return _with_programs(problem, recipe, proposal, known[mesh])

    while True:
        try:
            plan = make_plan(problem, may)
        except ConfigError as error:
            return Verdict(None, problem, str(error), refused)
        proposal = plan.choice.proposal
        full = with_programs(problem, proposal)
        if meshes(full, proposal) != meshes(problem, proposal):
            # The axes fsdp are larger, because the programs need memory, too: these are other programs.
            full = with_programs(full, proposal)
        held = device_bytes(full, proposal)
        if where.memory is None or held.largest <= where.memory:
            return Verdict(_chosen(plan, full, held), full, "", refused)
        refused.append((proposal, held))
        ruled_out.append(functools.partial(_no_smaller, proposal, held, where.memory))


def proposed(
    recipe: Recipe,
    calibration: Calibration,
    where: Slice,
    own: list[Assessed],
    write: Callable[[str], None],
) -> tuple[Verdict, Recipe]:
    """The best split that fits, with the recipe that it is for: the given one, or a smaller one.

    Args:
      recipe: with a local folder for its model.
      calibration: costs on one device.
      where: the slice.
      own: the programs on the recipe's meshes.
      write: is told what does not fit, and what is tried instead.

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


def changed_fields(recipe: Recipe, other: Recipe) -> dict[str, Any]:
    """The fields of another recipe that differ, by dotted name, except the meshes."""
    now, then = (flatten_dict(one.as_json(), sep=".") for one in (recipe, other))
    return {name: value for name, value in then.items() if value != now[name]}


def refusals(
    refused: list[tuple[Proposal, DeviceBytes]], memory: float | None, how: str
) -> Iterator[str]:
    """The splits whose compiled programs do not fit, and what takes the memory."""
    for proposal, held in refused:
        meshes = {"trainer": held.trainer, "rollout": held.worker}
        name, parts = max(meshes.items(), key=lambda mesh: sum(mesh[1].values()))
        most = sorted(parts.items(), key=lambda part: -part[1])[:4]
        what = ", ".join(f"{what} {size / GB:.1f}" for what, size in most)
        yield (
            f"{proposal.describe()} does not fit, because a {name} device needs {sum(parts.values()) / GB:.1f} GB of "
            f"{memory / GB:.1f} ({how}): {what}"
        )


def _chosen(plan: Plan, problem: Problem, held: DeviceBytes) -> Plan:
    """The plan with the memory of the choice's compiled programs."""
    choice = dataclasses.replace(plan.choice, memory=held)
    rows = tuple(choice if row is plan.choice else row for row in plan.best)
    return dataclasses.replace(plan, problem=problem, choice=choice, best=rows)


def _one_process(problem: Problem, proposal: Proposal, devices: Sequence[jax.Device]) -> bool:
    """Whether the devices of several processes are split as a run can."""
    try:
        check_processes(meshes(problem, proposal), devices)
    except ConfigError:
        return False
    return True


def _no_smaller(failed: Proposal, held: DeviceBytes, limit: float, other: Proposal) -> bool:
    """Whether another split's devices have at least the shares and the duties of the mesh that was too full."""
    if failed.asynchrony and not other.asynchrony:
        return False
    if sum(held.trainer.values()) <= limit:
        return bool(other.workers) and other.worker_images <= failed.worker_images
    if (_samples(failed) and not _samples(other)) or (failed.gap and not other.gap):
        return False
    return other.data <= failed.data and other.time <= failed.time


def _samples(proposal: Proposal) -> bool:
    """Whether the trainer's devices sample, too."""
    return proposal.tag or not proposal.workers


def _with_programs(
    problem: Problem, recipe: Recipe, proposal: Proposal, found: list[Assessed]
) -> Problem:
    """The problem with the temporary memory of compiled programs, which holds for this split alone."""
    beyond = {one.program.name: one.answer.beyond for one in found}
    parts = proposal.worker_images or proposal.data * proposal.time
    shape = problem.footprint.trajectory * -(-recipe.sampler.fragment // parts)
    encoding = max(beyond["encode"], beyond.get("encode null", 0))
    decoding = max(beyond["decode"], beyond.get("decode evaluated", 0))
    sampling = {
        "encoding": encoding,
        # Without the trajectories, which are counted apart.
        "generating": max(0, beyond["generate"] - shape),
        "evaluating": beyond["evaluate"],
        "decoding": decoding,
    }
    made = Programs(
        lambda data, time: beyond["train"],
        lambda tuned: beyond["update"],
        lambda *mesh: sampling,
    )
    return dataclasses.replace(
        problem, footprint=dataclasses.replace(problem.footprint, programs=made)
    )
