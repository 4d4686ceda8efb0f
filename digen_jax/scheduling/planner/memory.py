"""Bytes on each device, from numbers of parameters, sizes of dtypes, meshes, sharding and compiled programs."""

import dataclasses
from collections.abc import Callable

from digen_jax.scheduling.planner.problem import Footprint, Problem, divisors
from digen_jax.scheduling.planner.proposal import Proposal


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes by purpose on a device of the trainer mesh and on one of a rollout mesh (if there is any).

    `ahead` are those on a device that encodes prompts before there is anything else.

    One program runs at a time on a mesh, so only the one with the largest temporary memory counts. It is not
    included if the footprint has no programs.
    """

    trainer: dict[str, float]
    worker: dict[str, float]
    trainer_fsdp: int
    worker_fsdp: int
    ahead: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def largest(self) -> float:
        """Bytes of the fullest device."""
        return _most(self.trainer, self.worker, self.ahead)


def device_bytes(problem: Problem, proposal: Proposal) -> DeviceBytes:
    """The bytes of a proposal, with the smallest axes fsdp that fit into the devices' memory.

    If none fits, the axes have the wanted sizes, and `largest` shows the excess.
    """
    wanted = problem.footprint

    def on_trainer(fsdp: int) -> float:
        ahead = {} if proposal.workers else _ahead_bytes(problem, proposal, fsdp)
        return _most(_trainer_bytes(problem, proposal, fsdp), ahead)

    def on_worker(fsdp: int) -> float:
        if not proposal.workers:
            return 0.0
        ahead = _ahead_bytes(problem, proposal, fsdp)
        return _most(_worker_bytes(problem, proposal, fsdp), ahead)

    limit = problem.device_memory
    trainer_fsdp = _smallest(proposal.data, wanted.trainer_fsdp, limit, on_trainer)
    worker_fsdp = _smallest(proposal.worker_images, wanted.worker_fsdp, limit, on_worker)
    return DeviceBytes(
        _trainer_bytes(problem, proposal, trainer_fsdp),
        _worker_bytes(problem, proposal, worker_fsdp),
        trainer_fsdp,
        worker_fsdp,
        _ahead_bytes(problem, proposal, worker_fsdp if proposal.workers else trainer_fsdp),
    )


def _smallest(devices: int, wanted: int, limit: float | None, held: Callable[[int], float]) -> int:
    """The smallest axis fsdp, at least `wanted`, with which the bytes fit; if none fits, the smallest of these."""
    sizes = [d for d in divisors(devices) if d >= min(wanted, devices)] if devices else [1]
    if limit is None:
        return sizes[0]
    return next((size for size in sizes if held(size) <= limit), sizes[0])


def _trainer_bytes(problem: Problem, proposal: Proposal, fsdp: int) -> dict[str, float]:
    """Gradient, moments and average are laid out like their parameters.

    All candidates of the step, and the begun part of the next one, may wait to be trained. A group that
    trains early has two gradients of its own.
    """
    foot, settings, axes = problem.footprint, problem.settings, (fsdp, proposal.tensor)
    tuned = foot.tuned(*axes)
    samples = proposal.tag or not proposal.workers
    ahead = settings.stale_share if proposal.asynchrony else 0.0
    groups = max(settings.groups, settings.max_candidates)
    images = groups * settings.images * (1 + ahead)
    early = 2 * settings.open_groups if proposal.gap else 0
    running = {}
    if foot.programs:
        running["the gradient"] = foot.programs.gradient(proposal.data, proposal.time)
        running["the update"] = foot.programs.update(tuned)
        if samples:
            parts = proposal.data * proposal.time
            running |= _sampling(foot, parts, *axes, proposal.sequence)
    return {
        "parameters": tuned + foot.base(*axes),
        "gradient": (1 + early) * tuned,
        "optimizer": (2 + foot.copies) * tuned,
        "kept versions": _versions(problem, proposal) * tuned,
        "frozen": foot.frozen(*axes) if samples else 0.0,
        **(_rewards(foot, *axes) if samples else {}),
        "trajectories": images * foot.trajectory / (proposal.data * proposal.time),
        "conditioning": (1 + (ahead > 0)) * float(foot.conditioning),
        **_largest(running),
    }


def _worker_bytes(problem: Problem, proposal: Proposal, fsdp: int) -> dict[str, float]:
    """Includes the trajectories of two fragments: one in generation, one in transfer to the trainer."""
    if not proposal.workers:
        return {}
    foot, axes = problem.footprint, (fsdp, proposal.worker_tensor)
    images = 2 * problem.settings.fragment_images / proposal.worker_images
    running = {}
    if foot.programs:
        sequence = proposal.worker_sequence
        running = _sampling(foot, proposal.worker_images, *axes, sequence)
    return {
        "parameters": foot.sampler_base(*axes),
        "kept versions": _versions(problem, proposal) * foot.published(*axes),
        "frozen": foot.frozen(*axes),
        **_rewards(foot, *axes),
        "trajectories": images * foot.trajectory,
        "conditioning": (1 + proposal.asynchrony) * float(foot.conditioning),
        **_largest(running),
    }


def _ahead_bytes(problem: Problem, proposal: Proposal, fsdp: int) -> dict[str, float]:
    """Of the text encoders, on the sampling devices before the weights of the run are there."""
    foot = problem.footprint
    if foot.ahead is None:
        return {}
    parts, tensor, sequence = proposal.data * proposal.time, proposal.tensor, proposal.sequence
    if proposal.workers:
        parts, tensor = proposal.worker_images, proposal.worker_tensor
        sequence = proposal.worker_sequence
    running = {}
    if foot.programs:
        found = foot.programs.sampling(parts, fsdp, tensor, sequence)
        running = {"encoding": found["encoding"]}
    held = {"text encoders": foot.ahead(fsdp, tensor), **_rewards(foot, fsdp, tensor)}
    return held | _largest(running)


def _rewards(foot: Footprint, fsdp: int, tensor: int) -> dict[str, float]:
    return {"rewards": foot.rewards(fsdp, tensor)} if foot.rewards else {}


def _sampling(
    foot: Footprint, parts: int, fsdp: int, tensor: int, sequence: int
) -> dict[str, float]:
    """The temporary memory of what a sampling mesh does in a step."""
    found = foot.programs.sampling(parts, fsdp, tensor, sequence)
    return {name: size for name, size in found.items() if not (foot.ahead and name == "encoding")}


def _most(*held: dict[str, float]) -> float:
    return max(sum(parts.values()) for parts in held)


def _largest(programs: dict[str, float]) -> dict[str, float]:
    """The program that needs most, alone."""
    return {f"temporaries of {n}": programs[n] for n in sorted(programs, key=programs.get)[-1:]}


def _versions(problem: Problem, proposal: Proposal) -> int:
    """Published versions that untrained fragments can refer to."""
    return 1 + problem.settings.staleness if proposal.asynchrony else 1
