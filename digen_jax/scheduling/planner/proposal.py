"""A placement with its tactics, and its layout, costs and settings for the scheduler and the simulator."""

import dataclasses

from digen_jax.scheduling.planner.problem import Problem
from digen_jax.scheduling.planner.simulate import Layout, Mesh
from digen_jax.scheduling.settings import Costs, Settings


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A placement, and the tactics that are on.

    Attributes:
      workers: rollout meshes; 0: colocated.
      worker_devices: devices of each of them.
      data: devices of the trainer mesh that split images: the product of its axes data and fsdp.
      time: devices that split the steps of a trajectory; above 1 this is TSP.
      gap: fragments are trained while others are generated; otherwise all are generated and scored first.
        A colocated run always generates all fragments first, and trains them as they are scored.
      tag: the trainer may generate.
      asynchrony: idle workers may begin the next step.
      worker_tensor: devices of a rollout mesh that share parameters and work on the same images.
      tensor: the same for the trainer mesh.
      worker_sequence: devices of a rollout mesh that share the tokens of the same images.
      sequence: the same for the trainer mesh.
    """

    workers: int
    worker_devices: int
    data: int
    time: int = 1
    gap: bool = False
    tag: bool = False
    asynchrony: bool = False
    worker_tensor: int = 1
    tensor: int = 1
    worker_sequence: int = 1
    sequence: int = 1

    @property
    def trainer(self) -> int:
        """Devices of the trainer mesh."""
        return self.data * self.time * self.shared

    @property
    def shared(self) -> int:
        """Devices of the trainer mesh that work on the same images."""
        return self.tensor * self.sequence

    @property
    def worker_images(self) -> int:
        """Parts into which a rollout mesh splits images."""
        return self.worker_devices // (self.worker_tensor * self.worker_sequence)

    @property
    def tactics(self) -> tuple[str, ...]:
        """The names of the tactics that are on."""
        on = {"GAP": self.gap, "TSP": self.time > 1, "TAG": self.tag, "asynchrony": self.asynchrony}
        return tuple(name for name, value in on.items() if value)

    @property
    def kind(self) -> str:
        """The tactics that are on, "plain" (disaggregation without tactics) or "colocated"."""
        return " + ".join(self.tactics) or "plain" if self.workers else "colocated"

    def describe(self) -> str:
        """The placement in words."""
        others = {"time": self.time, "tensor": self.tensor, "sequence": self.sequence}
        mesh = " x ".join(
            [f"{self.data}", *(f"{n} ({axis})" for axis, n in others.items() if n > 1)]
        )
        if not self.workers:
            return f"{mesh} devices in turn"
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{workers} of {self.worker_devices}, trainer of {mesh}"


def layout(problem: Problem, proposal: Proposal) -> Layout:
    """The meshes with their speeds; a trainer samples with as many of its devices as possible."""
    trainer, size = proposal.trainer, proposal.worker_devices
    shared = proposal.shared
    sampling = problem.worker.seconds(problem.worker.used(trainer // shared) * shared)
    speed = 1 / problem.worker.seconds(size) if size else 1.0
    return Layout(Mesh(trainer, 1 / sampling), (Mesh(size, speed),) * proposal.workers)


def costs(problem: Problem, proposal: Proposal) -> Costs:
    """Seconds of commands with the proposal's trainer mesh.

    If `time` does not divide the steps, they are padded, so each device has ceil(s / time) of s steps. In a
    colocated run the weights and samples need no transfer: nothing is published or delivered.
    """
    longest = -(-problem.transitions // proposal.time)
    devices = proposal.data * proposal.shared * problem.transitions / longest
    seconds = problem.costs.train * problem.trainer.seconds(devices)
    transfers = {} if proposal.workers else {"publish": 0.0, "deliver": 0.0}
    return dataclasses.replace(problem.costs, train=seconds, **transfers)


def settings(problem: Problem, proposal: Proposal) -> Settings:
    """The scheduler's settings of the problem, with the proposal's tactics on and the others off.

    Without GAP no config gives these settings; they are the baseline of GAP.
    """
    whole = proposal.workers > 0 and not proposal.gap
    changes = {"readiness": "step", "open_groups": 0} if whole else {}
    if not proposal.asynchrony:
        changes |= {"staleness": 0, "ordered": whole or not problem.settings.early}
    if not proposal.tag:
        changes["tag_fragments"] = 0
    return dataclasses.replace(problem.settings, **changes)
