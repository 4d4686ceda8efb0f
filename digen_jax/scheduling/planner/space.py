"""All placements and tactics for a number of devices."""

import dataclasses
from collections.abc import Iterator

from digen_jax.errors import ConfigError
from digen_jax.scheduling.planner.memory import device_bytes
from digen_jax.scheduling.planner.problem import Problem, divisors
from digen_jax.scheduling.planner.proposal import Proposal


def proposals(problem: Problem) -> list[Proposal]:
    """All proposals that use every device and fit into the memory, the simplest first.

    Rollout meshes are all of one size.

    Raises:
      ConfigError: there is none.
    """
    problem.check()
    meshes = [c for n in range(1, problem.devices + 1) for c in _meshes(problem, n)]
    found = [tactic for mesh in meshes for tactic in _tactics(problem, mesh)]
    if not found:
        raise ConfigError(
            f"no trainer mesh can be made of up to {problem.devices} devices for the micro-batch: "
            f"change config.trainer.micro_batch{_given(problem)}"
        )
    fitting = [c for c in found if fits_memory(problem, c)]
    if not fitting:
        raise ConfigError(
            f"no placement of {problem.devices} devices fits into {problem.device_memory / 2**30:g} GiB "
            "a device: use more devices, a smaller config.trainer.micro_batch, config.model.remat or lora"
        )
    return sorted(fitting, key=lambda c: (len(c.tactics), c.time, -c.worker_devices))


def _given(problem: Problem) -> str:
    tensor = max(problem.trainer_tensor, problem.worker_tensor) > 1
    sequence = max(problem.trainer_sequence, problem.worker_sequence) > 1
    names = " and ".join(["tensor"] * tensor + ["sequence"] * sequence)
    return f", or the axes {names} of config.placement" if names else ""


def fits_memory(problem: Problem, proposal: Proposal) -> bool:
    """Whether the proposal fits into the memory of every device."""
    if problem.footprint is None or problem.device_memory is None:
        return True
    return device_bytes(problem, proposal).largest <= problem.device_memory


def _meshes(problem: Problem, trainer: int) -> Iterator[Proposal]:
    """Every shape of a trainer mesh with every division of the remaining devices into workers."""
    axes = dict(
        tensor=problem.trainer_tensor,
        sequence=problem.trainer_sequence,
        worker_tensor=problem.worker_tensor,
        worker_sequence=problem.worker_sequence,
    )
    rest = problem.devices - trainer
    shared = axes["tensor"] * axes["sequence"]
    worker_shared = axes["worker_tensor"] * axes["worker_sequence"]
    if trainer % shared or rest % worker_shared:
        return
    parts = trainer // shared
    times = [t for t in divisors(parts) if t <= problem.transitions]
    shapes = [(parts // t, t) for t in times if problem.trainer.fits(parts // t)]
    splits = [n for n in divisors(rest // worker_shared) if problem.worker.fits(n)] if rest else [0]
    for data, time in shapes:
        for split in splits:
            size = split * worker_shared
            workers = rest // size if rest else 0
            yield Proposal(workers, size, data, time, **axes)


def _tactics(problem: Problem, mesh: Proposal) -> Iterator[Proposal]:
    if not mesh.workers:
        yield mesh
        return
    allowed = problem.settings
    for gap in (False, True)[: 1 + (not allowed.step_first)]:
        for tag in (False, True)[: 1 + (allowed.tag_fragments > 0)]:
            for asynchrony in (False, True)[: 1 + (allowed.stale_units > 0)]:
                yield dataclasses.replace(mesh, gap=gap, tag=tag, asynchrony=asynchrony)
