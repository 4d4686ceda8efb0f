"""Meshes of the rollout workers and trainers, and shardings of parameters and batches on them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from digen_jax.attention.kernels import AUTO
from digen_jax.errors import ConfigError, Count, PositiveInt
from digen_jax.parallel.mesh import (
    ALL,
    BATCH,
    DATA,
    FSDP,
    MODEL,
    SAMPLES,
    SEQUENCE,
    TIME,
    ShardingRules,
    make_mesh,
    parameter_name,
    parts,
)

MeshRole = Literal["trainer", "rollout"]  # role of a process's only mesh
PROCESS_FIELDS = ("hosts", "max_workers")  # fields that do not change a mesh's number of devices


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """A mesh (`mesh.make_mesh`), the layout of parameters on it, and the configured attention kernel."""

    mesh: Mesh
    layout: ShardingRules = dataclasses.field(default_factory=ShardingRules)
    attention: str = AUTO

    @property
    def replicated(self) -> NamedSharding:
        """Sharding that replicates on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Sharding of images on the leading axis, over the batch axes."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH))

    @property
    def batch_of_steps(self) -> NamedSharding:
        """Sharding of arrays [steps, images, ...], with images split as in `batch`."""
        return NamedSharding(self.mesh, PartitionSpec(None, BATCH))

    def clips(self, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of clips [n, t, h, w, c] or their latents: split as in `batch`, and over `sequence`.

        That axis splits the height if it divides it, else the width, else neither.
        """
        sides = [side for side in (-3, -2) if shape[side] % self.mesh.shape[SEQUENCE] == 0]
        spec: list[Any] = [BATCH, *[None] * (len(shape) - 1)]
        if sides:
            spec[sides[0]] = SEQUENCE
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def images(self) -> int:
        """Number of shards of a batch's images."""
        return parts(self.mesh, BATCH)

    @property
    def time(self) -> int:
        """Number of shards of a pass's steps."""
        return self.mesh.shape[TIME]

    @property
    def merged(self) -> NamedSharding:
        """Sharding of samples at any steps on the leading axis, over time and images."""
        return NamedSharding(self.mesh, PartitionSpec(SAMPLES))

    @property
    def as_sampler(self) -> "DeviceGroup":
        """Device group for sampling on the same devices: axes that split steps split images instead."""
        if self.time == 1:
            return self
        size = dict(self.mesh.shape)
        size[DATA] *= size.pop(TIME)
        return self._with_axes(**size)

    @property
    def gathered(self) -> "DeviceGroup":
        """Device group for sampling on the same devices with parameters unsharded except over the model axes."""
        kept = {axis: self.mesh.shape[axis] for axis in MODEL}
        return self._with_axes(data=parts(self.mesh, SAMPLES), **kept)

    @property
    def as_scorer(self) -> "DeviceGroup":
        """Device group for networks that are small compared with the model: each device scores separate images.

        The axis fsdp keeps its size because rules may split parameters over it.
        """
        fsdp = self.mesh.shape[FSDP]
        return self._with_axes(data=self.mesh.size // fsdp, fsdp=fsdp)

    def _with_axes(self, **sizes: int) -> "DeviceGroup":
        mesh = make_mesh(self.mesh.devices.ravel().tolist(), **sizes)
        return dataclasses.replace(self, mesh=mesh)

    def passes(self, leading: int) -> NamedSharding:
        """Returns the sharding of arrays [..., steps, images, ...] with `leading` axes before the steps."""
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * leading, TIME, BATCH))

    def is_replicated(self, tree: Any) -> bool:
        """Returns whether every device stores a full copy of a parameter tree."""
        return all(spec.is_fully_replicated for spec in jax.tree.leaves(self.params(tree)))

    def params(self, tree: Any) -> Any:
        """Returns the sharding of every leaf of a tree by component (arrays or shapes), by the layout's rules.

        Raises:
          ConfigError: no rule matches a parameter.
        """

        def sharding(path: tuple, leaf: Any) -> NamedSharding:
            spec = self.layout.spec(parameter_name(path), leaf.shape, self.mesh.shape)
            return NamedSharding(self.mesh, spec)

        return jax.tree.map_with_path(sharding, tree)


def chunked_map(
    function: Callable[[Any], Any], batch: Any, max_rows: int, group: DeviceGroup
) -> Any:
    """Applies a function to a batch in sequential chunks, so that memory does not grow with the batch.

    Must be called while tracing. Every chunk contains the same number of rows of each device, so that no row moves to
    another device. With several chunks this number is a power of two, or `max_rows`: on a TPU the decoder takes 2.4
    times as long for seven images as for eight (estimated: docs/performance.md). If the rows do not fill the chunks,
    each device repeats its last row.

    Args:
      function: Maps arrays [n, ...] to arrays [n, ...]; rows must be independent.
      batch: Arrays [b, ...] with b a multiple of the number of devices that split images.
      max_rows: Maximum rows per chunk and device. If all rows fit, there is one chunk.
      group: The mesh.

    Returns:
      Arrays [b, ...].
    """
    constrain = jax.lax.with_sharding_constraint

    def run(rows: Any) -> Any:
        # Otherwise XLA follows the split parameters, and every device computes all rows.
        return constrain(function(constrain(rows, group.batch)), group.batch)

    devices, count = group.images, len(jax.tree.leaves(batch)[0])
    share = count // devices
    rounds = -(-share // max_rows)
    if rounds <= 1:
        return run(batch)
    rows = min(max_rows, 1 << (-(-share // rounds) - 1).bit_length())

    def split(a: Shaped[Array, "b ..."]) -> Shaped[Array, "rounds n ..."]:
        shape = a.shape[1:]
        pad = [(0, 0), (0, rounds * rows - share), *[(0, 0)] * len(shape)]
        a = jnp.pad(a.reshape(devices, share, *shape), pad, mode="edge")
        a = a.reshape(devices, rounds, rows, *shape).swapaxes(0, 1)
        return constrain(a.reshape(rounds, devices * rows, *shape), group.batch_of_steps)

    def join(a: Shaped[Array, "rounds n ..."]) -> Shaped[Array, "b ..."]:
        shape = a.shape[2:]
        a = a.reshape(rounds, devices, rows, *shape).swapaxes(0, 1)
        a = a.reshape(devices, rounds * rows, *shape)[:, :share]
        return constrain(a.reshape(count, *shape), group.batch)

    return jax.tree.map(join, jax.lax.map(run, jax.tree.map(split, batch)))


class MeshAxes:
    """Axis sizes of a mesh: those fields of a subclass that name an axis."""

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis."""
        return {name: size for name, size in vars(self).items() if name in ALL}

    @property
    def images(self) -> int:
        """Number of shards of a batch's images."""
        return self.axes[DATA] * self.axes[FSDP]

    @property
    def devices(self) -> int:
        """Number of devices per mesh."""
        return math.prod(self.axes.values())


@dataclasses.dataclass(frozen=True)
class RolloutAxes(MeshAxes):
    """Number and axes of the rollout workers' meshes. If `data` is 0, the trainer's devices sample."""

    # data-parallel size: devices that split the images; 0 means that the trainer's devices sample, alternating with
    # training
    data: Count
    fsdp: PositiveInt = 1  # devices that split the images and shard the parameters
    workers: PositiveInt = 1  # number of rollout workers of this size
    hosts: PositiveInt = 1  # processes per rollout worker with --ray, with equal numbers of devices
    # with --ray: maximum number of workers, which join when nodes become available
    max_workers: Count = 0
    tensor: PositiveInt = 1  # tensor-parallel size; must divide the number of heads
    # sequence-parallel size: devices that split the tokens of an image; tensor * sequence must divide the number of
    # heads
    sequence: PositiveInt = 1


@dataclasses.dataclass(frozen=True)
class TrainerAxes(MeshAxes):
    """Number and axes of the training meshes."""

    data: PositiveInt  # data-parallel size: devices that split the images
    fsdp: PositiveInt = 1  # devices that split the images and shard the parameters
    time: PositiveInt = 1  # devices that split the denoising steps of a pass
    tensor: PositiveInt = 1  # tensor-parallel size; must divide the number of heads
    # sequence-parallel size: devices that split the tokens of an image; tensor * sequence must divide the number of
    # heads
    sequence: PositiveInt = 1
    hosts: PositiveInt = 1  # processes of the mesh with --ray, with equal numbers of devices
    # number of training workers of this size, each of which trains a part of a step; the first one applies the update
    workers: PositiveInt = 1
    # with rollout workers: whether training workers sample when they would otherwise wait (trainer-assisted
    # generation)
    samples: bool = False


class MeshSizes(NamedTuple):
    """Sizes of each mesh's axes, in devices."""

    rollout: RolloutAxes
    trainer: TrainerAxes

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Returns {"rollout": {axis: size}, "trainer": ...}, as in a config's section `placement`."""
        return {name: dataclasses.asdict(axes) for name, axes in self._asdict().items()}


ONE_DEVICE = MeshSizes(RolloutAxes(data=0), TrainerAxes(data=1))  # samples and trains


@dataclasses.dataclass(frozen=True)
class Placement:
    """Meshes of one process. Without rollout workers the trainer mesh does everything.

    Attributes:
      rollouts: Meshes of the rollout workers in this process.
      home: Mesh that trains and updates, the `trainer`. None means that it is in another process.
      remote_rollouts: Configured number of rollout workers in other processes; more may join.
      others: Further training meshes of this process.
      remote_trainers: Number of further training meshes in other processes.
    """

    rollouts: tuple[DeviceGroup, ...]
    home: DeviceGroup | None
    remote_rollouts: int = 0
    others: tuple[DeviceGroup, ...] = ()
    remote_trainers: int = 0

    @property
    def trainer(self) -> DeviceGroup:
        """Mesh that trains and updates. Raises ValueError if it is in another process."""
        if self.home is None:
            raise ValueError("this process has no mesh that trains")
        return self.home

    @property
    def rollout(self) -> DeviceGroup:
        """First mesh of this process that samples."""
        return self.rollouts[0] if self.rollouts else self.trainer.as_sampler

    @property
    def training(self) -> DeviceGroup:
        """One mesh of all training devices of this process, with large parameters sharded over it."""
        groups = (self.trainer, *self.others)
        devices = [device for group in groups for device in group.mesh.devices.flat]
        layout = dataclasses.replace(self.trainer.layout, rules=((".*", FSDP),))
        return DeviceGroup(make_mesh(devices, fsdp=len(devices)), layout)

    @property
    def colocated(self) -> bool:
        """Whether sampling and training share devices."""
        return not (self.rollouts or self.remote_rollouts)

    def describe(self) -> str:
        """Returns a one-line description for the console."""
        group = self.home or self.rollout
        kind = group.mesh.devices.flat[0].device_kind
        kind = "CPU" if kind == "cpu" else kind
        if self.home is None:
            return f"{_counted(group.mesh.size, kind)} for rollout"
        meshes, training = len(self.rollouts), 1 + len(self.others) + self.remote_trainers
        trainer = training * self.trainer.mesh.size
        if self.remote_rollouts:
            return f"{_counted(trainer, kind)} for training; rollout on {self.remote_rollouts} other workers"
        if self.colocated:
            processes = processes_of(self.trainer.mesh.devices.flat)
            where = f" of {processes} processes" if processes > 1 else ""
            if training > 1:
                return f"{_counted(trainer, kind)}: {training} workers that sample and train"
            return f"{_counted(trainer, kind)}{where} for rollout and training alternately"
        rollout = meshes * self.rollout.mesh.size
        first, second = (f" ({n} workers)" if n > 1 else "" for n in (meshes, training))
        total = _counted(rollout + trainer, kind)
        return f"{total}: {rollout} for rollout{first}, {trainer} for training{second}"


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind} device{'s' * (count > 1)}"


def make_placement(
    sizes: MeshSizes, layout: ShardingRules, devices: Sequence[jax.Device], attention: str = AUTO
) -> Placement:
    """Creates meshes of the given sizes on the first of `devices`; a single device both samples and trains.

    `attention` is the configured kernel.

    Raises:
      ConfigError: there are too few devices, or they span several processes and the trainer does not use all of them.
    """
    check_processes(sizes, devices)
    if len(devices) == 1:
        sizes = ONE_DEVICE
    size, trainer = devices_per_mesh(sizes, len(devices))

    def group(axes: RolloutAxes | TrainerAxes, first: int) -> DeviceGroup:
        mesh = make_mesh(devices[first : first + axes.devices], **axes.axes)
        return DeviceGroup(mesh, layout, attention)

    first = size * sizes.rollout.workers
    rollouts = tuple(group(sizes.rollout, i) for i in range(0, first, size or 1))
    last = first + trainer * sizes.trainer.workers
    home, *others = (group(sizes.trainer, i) for i in range(first, last, trainer))
    return Placement(rollouts, home, others=tuple(others))


def make_process_placement(
    sizes: MeshSizes,
    layout: ShardingRules,
    devices: Sequence[jax.Device],
    attention: str,
    mesh: MeshRole,
) -> Placement:
    """Creates the placement of a process with a single mesh, on the first of its `devices`.

    Raises:
      ConfigError: there are too few devices.
    """
    axes = getattr(sizes, mesh)
    if axes.devices > len(devices):
        raise ConfigError(
            f"config.placement.{mesh} has {axes.devices} devices, but its process has {len(devices)}: reduce "
            "it, or start the process with more devices"
        )
    group = DeviceGroup(make_mesh(devices[: axes.devices], **axes.axes), layout, attention)
    if mesh == "rollout":
        return Placement((group,), None)
    sampling = sizes.rollout.workers if sizes.rollout.data else 0
    return Placement((), group, sampling, remote_trainers=sizes.trainer.workers - 1)


def processes_of(devices: Iterable[jax.Device]) -> int:
    """Returns the number of processes that some devices belong to."""
    return len({device.process_index for device in devices})


def check_processes(sizes: MeshSizes, devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError if devices span several processes and do not all sample and train alternately."""
    processes = processes_of(devices)
    if processes == 1:
        return
    rollout, trainer = devices_per_mesh(sizes, len(devices))
    if rollout:
        raise ConfigError(
            f"config.placement.rollout.data = {sizes.rollout.data}, but with --coordinator the {processes} processes "
            "sample and train together: start rollout workers by --ray, or set config.placement.rollout.data = 0, and "
            f"the axes of config.placement.trainer so that they take all {len(devices)} devices"
        )
    if sizes.trainer.workers > 1:
        raise ConfigError(
            f"config.placement.trainer.workers = {sizes.trainer.workers} is for one process or --ray, not for several "
            "processes that sample and train together: set it to 1, and the mesh's axes to all devices"
        )
    if trainer != len(devices):
        raise ConfigError(
            f"config.placement.trainer takes {trainer} of the {len(devices)} devices of {processes} processes, "
            "which work together on all: set its axes so that their product is the number of devices"
        )


def devices_per_mesh(sizes: MeshSizes, devices: int) -> tuple[int, int]:
    """Returns the numbers of devices of (each rollout worker, each training mesh); 0 means colocated.

    Raises:
      ConfigError: there are too few devices.
    """
    if devices == 1:
        return 0, 1
    rollout, trainer = sizes.rollout.devices, sizes.trainer.devices
    total, training = rollout * sizes.rollout.workers, trainer * sizes.trainer.workers
    if total + training > devices:
        raise ConfigError(
            f"config.placement.rollout wants {total} and config.placement.trainer {training} devices, but there "
            f"are {devices}: make the meshes smaller"
        )
    return rollout, trainer


def fit_mesh_sizes(wanted: MeshSizes, devices: int) -> MeshSizes:
    """Returns the mesh sizes for `devices` devices, reduced if these are too few.

    Each axis is reduced by a divisor, so that it still divides batches. Both meshes keep the largest share of
    their size that both can keep. Ties are resolved by the number of used devices, then by the trainer's size.
    """
    if devices == 1:
        return MeshSizes(dataclasses.replace(wanted.rollout, data=0), ONE_DEVICE.trainer)

    def divisors(number: int) -> list[int]:  # for 0 (colocated): 0
        return [d for d in range(1, min(number, devices) + 1) if number % d == 0] or [number]

    def smaller(axes: Any) -> list[Any]:
        names = [name for name in vars(axes) if name in (*axes.axes, "workers")]
        choices = itertools.product(*(divisors(getattr(axes, name)) for name in names))
        return [dataclasses.replace(axes, **dict(zip(names, one, strict=True))) for one in choices]

    def size(axes: RolloutAxes | TrainerAxes) -> int:
        return axes.devices * axes.workers

    def preferred(sizes: MeshSizes) -> tuple[float | int, ...]:
        rollout, trainer = sizes.rollout, sizes.trainer
        share = size(trainer) / max(1, size(wanted.trainer))
        if size(rollout):
            share = min(share, size(rollout) / max(1, size(wanted.rollout)))
        memory = trainer.tensor, rollout.tensor, trainer.fsdp, rollout.fsdp
        return share, size(rollout) + size(trainer), size(trainer), *memory

    pairs = itertools.product(smaller(wanted.rollout), smaller(wanted.trainer))
    found = (MeshSizes(*pair) for pair in pairs if sum(map(size, pair)) <= devices)
    return max(found, key=preferred)
