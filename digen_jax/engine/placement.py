"""Which devices do what: rollout meshes, a trainer mesh, and how parameters and batches lie on each."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from digen_jax.errors import ConfigError

# Leaves smaller than this are replicated under "fsdp": gathering them costs more than they weigh.
FSDP_MIN_SIZE = 2**14

Rules = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """One mesh with the axes "data" (batch only) and "fsdp" (batch and parameters), and its sharding rules.

    A trainer mesh may have a first axis "time", which splits the denoising steps of a pass (`packing`).

    `rules` is a list of (regex over the "/"-joined parameter path, tactic); the first that matches decides.
    Tactics: "replicate", and "fsdp", which splits the largest divisible axis over the mesh axis "fsdp".
    """

    mesh: Mesh
    rules: Rules = ((".*", "replicate"),)

    @property
    def replicated(self) -> NamedSharding:
        """Everything everywhere."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The leading axis split over all devices, whole along "time"."""
        return NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))

    @property
    def batch_of_steps(self) -> NamedSharding:
        """Arrays [steps, images, ...]: the second axis split over all devices, whole along "time"."""
        return NamedSharding(self.mesh, PartitionSpec(None, ("data", "fsdp")))

    @property
    def time(self) -> int:
        """Parts into which the steps of a pass are split."""
        return self.mesh.shape.get("time", 1)

    @property
    def merged(self) -> NamedSharding:
        """The leading axis split over all devices, "time" first."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    @property
    def as_sampler(self) -> "DeviceGroup":
        """The same devices with the axes of a sampler: what splits steps here splits images there."""
        if self.time == 1:
            return self
        size = self.mesh.shape
        mesh = _mesh(self.time * size["data"], size["fsdp"], self.mesh.devices.ravel().tolist())
        return DeviceGroup(mesh, self.rules)

    def passes(self, leading: int) -> NamedSharding:
        """Arrays [..., steps, images, ...] with so many axes in front of the steps."""
        time = "time" if self.time > 1 else None
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * leading, time, ("data", "fsdp")))

    def holds_whole(self, tree: Any) -> bool:
        """Whether every device has all of a parameter tree."""
        return all(spec.is_fully_replicated for spec in jax.tree.leaves(self.params(tree)))

    def params(self, tree: Any) -> Any:
        """The sharding of every leaf of a parameter tree (arrays or shapes), by the rules.

        Raises:
          ConfigError: no rule matches a path.
        """
        return jax.tree.map_with_path(
            lambda path, leaf: NamedSharding(self.mesh, self._spec(path, leaf.shape)), tree
        )

    def _spec(self, path: tuple, shape: tuple[int, ...]) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, tactic in self.rules:
            if re.search(pattern, name):
                return TACTICS[tactic](shape, self.mesh.shape["fsdp"])
        raise ConfigError(
            f"config.placement.rules has no rule that matches the parameter {name}: end it with ('.*', 'replicate')"
        )


def fsdp_spec(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Split the largest axis that `devices` divides; small or indivisible leaves are replicated."""
    axes = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if devices == 1 or not axes or np.prod(shape) < FSDP_MIN_SIZE:
        return PartitionSpec()
    largest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*(None,) * largest, "fsdp")


TACTICS = {"replicate": lambda shape, devices: PartitionSpec(), "fsdp": fsdp_spec}


@dataclasses.dataclass(frozen=True)
class RolloutAxes:
    """The meshes that sample: how many, and the axes of each; `data` 0: sampling is on the trainer's devices."""

    data: int  # devices that share images; 0: sample on the trainer's devices, in turn with it
    fsdp: int = 1  # devices that share images and parameters
    workers: int = 1  # rollout meshes of this size


@dataclasses.dataclass(frozen=True)
class TrainerAxes:
    """The axes of the mesh that trains."""

    data: int  # devices that share images
    fsdp: int = 1  # devices that share images and parameters
    time: int = 1  # devices that share the denoising steps of a pass


class MeshSizes(NamedTuple):
    """How many devices each mesh has along its axes."""

    rollout: RolloutAxes
    trainer: TrainerAxes

    def plain(self) -> dict[str, dict[str, int]]:
        """{"rollout": {axis: size}, "trainer": ...}, as a config's section `placement` has them."""
        return {name: dataclasses.asdict(axes) for name, axes in self._asdict().items()}


# It samples and trains.
ONE_DEVICE = MeshSizes(RolloutAxes(data=0), TrainerAxes(data=1))


@dataclasses.dataclass(frozen=True)
class Placement:
    """The rollout meshes encode, sample and decode; the trainer mesh trains, and without them does all."""

    rollouts: tuple[DeviceGroup, ...]
    trainer: DeviceGroup

    @property
    def rollout(self) -> DeviceGroup:
        """The first mesh that samples."""
        return self.rollouts[0] if self.rollouts else self.trainer.as_sampler

    @property
    def colocated(self) -> bool:
        """Whether sampling and training share their devices."""
        return not self.rollouts

    def describe(self) -> str:
        """One line for the console."""
        kind = self.trainer.mesh.devices.flat[0].device_kind
        trainer, meshes = self.trainer.mesh.size, len(self.rollouts)
        processes = processes_of(self.trainer.mesh.devices.flat)
        rollout = meshes * self.rollout.mesh.size
        if self.colocated and trainer == 1:
            return f"colocated: the one device ({kind}) samples and trains in turn"
        if self.colocated:
            where = f" of {processes} processes" if processes > 1 else ""
            return f"colocated: {trainer} devices ({kind}){where} sample and train in turn"
        apart = f", on {meshes} meshes," if meshes > 1 else ""
        return f"disaggregated: of {rollout + trainer} devices ({kind}) {rollout} sample{apart} and {trainer} train"


def make_placement(sizes: MeshSizes, rules: Rules, devices: Sequence[jax.Device]) -> Placement:
    """Meshes of some sizes on the first of `devices`; with one device everything runs colocated on it.

    Raises:
      ConfigError: the devices do not suffice, or they belong to several processes and are not all the trainer's.
    """
    check_processes(sizes, devices)
    if len(devices) == 1:
        alone = DeviceGroup(_mesh(1, 1, devices), rules)
        return Placement((), alone)
    size, trainer = mesh_sizes(sizes, len(devices))
    sampler, axes = sizes.rollout, sizes.trainer
    starts = range(0, size * sampler.workers, size) if size else ()
    sampling = (_mesh(sampler.data, sampler.fsdp, devices[i : i + size]) for i in starts)
    first = size * len(starts)
    last = devices[first : first + trainer]
    training = DeviceGroup(_mesh(axes.data, axes.fsdp, last, axes.time), rules)
    return Placement(tuple(DeviceGroup(mesh, rules) for mesh in sampling), training)


def processes_of(devices: Iterable[jax.Device]) -> int:
    """How many processes some devices belong to."""
    return len({device.process_index for device in devices})


def check_processes(sizes: MeshSizes, devices: Sequence[jax.Device]) -> None:
    """Refuses what several processes cannot do yet: anything but sampling and training on all devices in turn."""
    processes = processes_of(devices)
    if processes == 1:
        return
    rollout, trainer = mesh_sizes(sizes, len(devices))
    if rollout:
        raise ConfigError(
            f"config.placement.rollout.data = {sizes.rollout.data} would sample apart from training, which "
            f"several processes (here {processes}) cannot do yet: set config.placement.rollout.data = 0, and "
            f"the axes of config.placement.trainer so that they take all {len(devices)} devices"
        )
    if trainer != len(devices):
        raise ConfigError(
            f"config.placement.trainer takes {trainer} of the {len(devices)} devices of {processes} processes, "
            "which work together on all: set its axes so that their product is the number of devices"
        )


def mesh_sizes(sizes: MeshSizes, devices: int) -> tuple[int, int]:
    """How many of `devices` (each rollout mesh, the trainer's) takes; 0: colocated.

    Raises:
      ConfigError: more than there are.
    """
    if devices == 1:
        return 0, 1
    rollout = sizes.rollout.data * sizes.rollout.fsdp
    trainer = sizes.trainer.data * sizes.trainer.fsdp * sizes.trainer.time
    total = rollout * sizes.rollout.workers
    if total + trainer > devices:
        raise ConfigError(
            f"config.placement.rollout wants {total} and config.placement.trainer {trainer} devices, but there "
            f"are {devices}: make the meshes smaller"
        )
    return rollout, trainer


def fitted(wanted: MeshSizes, devices: int) -> MeshSizes:
    """The sizes of the meshes on so many devices, smaller ones where these are too few.

    Each axis is split by a divisor, so that what divided a batch does so still. Both meshes keep as large a share
    of their size as there can be for both, then as many devices as possible work; the trainer comes first.
    """
    if devices == 1:
        return MeshSizes(dataclasses.replace(wanted.rollout, data=0), ONE_DEVICE.trainer)

    def smaller(axes: Any) -> list[Any]:
        choices = itertools.product(*(_divisors(size, devices) for size in vars(axes).values()))
        return [type(axes)(*choice) for choice in choices]

    def size(axes: RolloutAxes | TrainerAxes) -> int:
        return math.prod(vars(axes).values())

    def preferred(sizes: MeshSizes) -> tuple[float, ...]:
        rollout, trainer = sizes.rollout, sizes.trainer
        share = size(trainer) / max(1, size(wanted.trainer))
        if size(rollout):
            share = min(share, size(rollout) / max(1, size(wanted.rollout)))
        return share, size(rollout) + size(trainer), size(trainer), trainer.fsdp, rollout.fsdp

    pairs = itertools.product(smaller(wanted.rollout), smaller(wanted.trainer))
    found = (MeshSizes(*pair) for pair in pairs if sum(map(size, pair)) <= devices)
    return max(found, key=preferred)


def _divisors(number: int, most: int) -> list[int]:
    """Those up to `most`; of 0, which is colocated, 0 itself."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0] or [number]


def _mesh(data: int, fsdp: int, devices: Sequence[jax.Device], time: int = 1) -> Mesh:
    if time == 1:
        grid = np.asarray(devices).reshape(data, fsdp)
        return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    grid = np.asarray(devices).reshape(time, data, fsdp)
    return Mesh(grid, ("time", "data", "fsdp"), axis_types=(AxisType.Auto,) * 3)
