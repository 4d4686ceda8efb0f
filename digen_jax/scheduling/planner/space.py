"""All placements and tactics there are for a number of devices."""

import dataclasses
from collections.abc import Iterator

from digen_jax.errors import ConfigError
from digen_jax.scheduling.planner.candidate import Candidate
from digen_jax.scheduling.planner.memory import device_bytes
from digen_jax.scheduling.planner.problem import Problem, divisors


def candidates(problem: Problem) -> list[Candidate]:
    """All that use every device and fit into the memory, the simplest first.

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
            "change config.trainer.micro_batch"
        )
    fitting = [c for c in found if fits_memory(problem, c)]
    if not fitting:
        raise ConfigError(
            f"no placement of {problem.devices} devices fits into {problem.device_memory / 2**30:g} GiB "
            "a device: use more devices, a smaller config.trainer.micro_batch, config.model.remat or lora"
        )
    return sorted(fitting, key=lambda c: (len(c.tactics), c.time, -c.worker_devices))


def fits_memory(problem: Problem, candidate: Candidate) -> bool:
    """Whether every device can hold what it has to."""
    if problem.footprint is None or problem.device_memory is None:
        return True
    return device_bytes(problem, candidate).largest <= problem.device_memory


def _meshes(problem: Problem, trainer: int) -> Iterator[Candidate]:
    """Every shape of a trainer mesh with every division of the remaining devices into workers."""
    rest = problem.devices - trainer
    times = [t for t in divisors(trainer) if t <= problem.transitions]
    shapes = [(trainer // t, t) for t in times if problem.trainer.fits(trainer // t)]
    sizes = [d for d in divisors(rest) if problem.worker.fits(d)] if rest else [0]
    for data, time in shapes:
        for size in sizes:
            yield Candidate(rest // size if rest else 0, size, data, time)


def _tactics(problem: Problem, mesh: Candidate) -> Iterator[Candidate]:
    if not mesh.workers:
        yield mesh
        return
    allowed = problem.settings
    for gap in (False, True)[: 1 + (not allowed.step_first)]:
        for tag in (False, True)[: 1 + (allowed.tag_fragments > 0)]:
            for asynchrony in (False, True)[: 1 + (allowed.stale_units > 0)]:
                yield dataclasses.replace(mesh, gap=gap, tag=tag, asynchrony=asynchrony)
