"""Which devices do what: a rollout mesh, a trainer mesh, and how parameters and batches lie on each."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Leaves smaller than this are replicated under "fsdp": gathering them costs more than they weigh.
FSDP_MIN_SIZE = 2**14

Rules = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """One mesh with the axes "data" (batch only) and "fsdp" (batch and parameters), and its sharding rules.

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
        """The leading axis split over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))

    @property
    def batch_of_steps(self) -> NamedSharding:
        """Arrays [steps, images, ...]: the second axis split over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(None, ("data", "fsdp")))

    def params(self, tree: Any) -> Any:
        """The sharding of every leaf of a parameter tree (arrays or shapes), by the rules.

        Raises ValueError where no rule matches a path.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(self.mesh, self._spec(path_name(path), leaf.shape)),
            tree,
        )

    def _spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        for pattern, tactic in self.rules:
            if re.search(pattern, name):
                return TACTICS[tactic](shape, self.mesh.shape["fsdp"])
        raise ValueError(f"no sharding rule matches the parameter {name}: end the rules with '.*'")


def fsdp_spec(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Split the largest axis that `devices` divides; small or indivisible leaves are replicated."""
    axes = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if devices == 1 or not axes or np.prod(shape) < FSDP_MIN_SIZE:
        return PartitionSpec()
    largest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*(None,) * largest, "fsdp")


TACTICS = {"replicate": lambda shape, devices: PartitionSpec(), "fsdp": fsdp_spec}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The rollout mesh samples, decodes and encodes; the trainer mesh trains. The same object where colocated."""

    rollout: DeviceGroup
    trainer: DeviceGroup

    @property
    def colocated(self) -> bool:
        """Whether sampling and training share their devices."""
        return self.rollout.mesh == self.trainer.mesh

    def describe(self) -> str:
        """One line for the console."""
        kind = self.trainer.mesh.devices.flat[0].device_kind
        if self.colocated:
            count = self.trainer.mesh.size
            return f"colocated: {count} device{'s' * (count > 1)} ({kind}) sample, then train"
        return (
            f"disaggregated: {self.rollout.mesh.size} devices ({kind}) sample, "
            f"{self.trainer.mesh.size} train"
        )


def make_placement(config: Any, devices: Sequence[jax.Device]) -> Placement:
    """Meshes from the config's `placement` section.

    With one device everything runs colocated on it, whatever the config asks for. Otherwise `rollout` and
    `trainer` are mappings {data: n, fsdp: m}; `rollout = None` means colocated on the trainer's devices. Raises
    ValueError where the devices do not suffice.
    """
    rules = [tuple(rule) for rule in config.rules]
    unknown = {tactic for _, tactic in rules} - set(TACTICS)
    if unknown:
        raise ValueError(
            f"config.placement.rules names the tactic {unknown.pop()!r}: choose from {sorted(TACTICS)}"
        )
    if len(devices) == 1:
        group = DeviceGroup(_mesh({"data": 1, "fsdp": 1}, devices), rules)
        return Placement(group, group)
    wanted = _size(config.trainer) + _size(config.rollout)
    if wanted > len(devices):
        raise ValueError(
            f"config.placement wants {wanted} devices (rollout {_size(config.rollout)}, trainer "
            f"{_size(config.trainer)}) and there are {len(devices)}: make its meshes smaller"
        )
    rollout_size = _size(config.rollout)
    trainer_devices = devices[rollout_size : rollout_size + _size(config.trainer)]
    trainer = DeviceGroup(_mesh(config.trainer, trainer_devices), rules)
    if not rollout_size:
        return Placement(trainer, trainer)
    return Placement(DeviceGroup(_mesh(config.rollout, devices[:rollout_size]), rules), trainer)


def path_name(path: tuple) -> str:
    """'a/b/kernel' for a key path of jax.tree_util."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def _size(axes: Mapping[str, int] | None) -> int:
    return 0 if axes is None else axes["data"] * axes["fsdp"]


def _mesh(axes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    shape = (axes["data"], axes["fsdp"])
    grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
