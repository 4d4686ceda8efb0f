"""Which mesh of a run a process has, where sampling and training are in different processes."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import jax

from digen_jax.config.sections import AUTO, PlacementSection
from digen_jax.engine.placement import MeshSizes, OwnMesh
from digen_jax.errors import ConfigError
from digen_jax.process.clusters import on_tpus
from digen_jax.process.launching import (
    MEETING,
    Place,
    detected,
    ip_address,
    listen_at,
    own_address,
    reach,
)
from digen_jax.remote.identity import job_token
from digen_jax.remote.opening import TRANSFER
from digen_jax.remote.wire import Tls
from digen_jax.runtime.link import Link
from digen_jax.scheduling.commands import TRAINER


@dataclasses.dataclass(frozen=True)
class Role:
    """A process's part in a mesh.

    Attributes:
      mesh: the worker's name.
      kind: which of the config's meshes it is.
      devices: of the whole mesh.
      process: its number within the mesh.
      processes: of the mesh, each with the same number of devices.
      offset: the number of the mesh's first process within its job of JAX.
    """

    mesh: str
    kind: OwnMesh
    devices: int
    process: int = 0
    processes: int = 1
    offset: int = 0

    @property
    def own(self) -> int:
        """The devices of this process."""
        return self.devices // self.processes


@dataclasses.dataclass(frozen=True)
class Apart:
    """How a process takes part in a run whose meshes have processes of their own.

    Attributes:
      role: its mesh.
      place: which of the processes it is, and where the trainer's process listens for the others.
      bound: where the trainer's process binds; the others do not read it.
      host: this host's address for the other processes.
      link: how arrays come to this process, "bytes" or "transfer".
      tls: files; None: connections are not encrypted.
      one_job: all meshes share a job of JAX, as on a TPU slice; else each has one of its own.
    """

    role: Role
    place: Place
    bound: str
    host: str
    link: str
    tls: Tls | None = None
    one_job: bool = False


@dataclasses.dataclass(frozen=True)
class Told:
    """What the command line says of the other processes; None: nothing.

    `tls` has files by `Tls`'s names, and `one_job` is that of `Apart`.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    mesh: str | None = None
    host: str | None = None
    link: str = "bytes"
    tls: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    one_job: bool | None = None


def take_part(placement: PlacementSection, told: Told) -> Apart | None:
    """How this process takes part in a run; None: alone, or with others that sample and train in turn with it.

    What is wrong at every process shows here, before any waits for another one.

    Raises:
      ConfigError: names the option or the field to change.
    """
    sizes = placement.meshes
    if told.mesh is not None:
        if told.coordinator in (None, "auto") or (told.processes, told.process) != (None, None):
            raise ConfigError(
                "--mesh joins a run that another process leads: give that one's address as --coordinator=host:port, "
                "and neither --processes nor --process"
            )
        _check_given(placement)
        if told.mesh == TRAINER:
            raise ConfigError(
                f"--mesh: {TRAINER!r} is the name of the mesh that trains: give a rollout mesh another one"
            )
        role, place = sampling(sizes, told.mesh), detected(told.coordinator, 2, 1)
    else:
        place = detected(told.coordinator, told.processes, told.process)
        if place is None or place.processes == 1 or not sizes.rollout.data:
            return None
        _check_given(placement)
        role = cast(sizes, place.processes, place.process)
    one_job = on_tpus() if told.one_job is None else told.one_job
    if one_job:
        if told.mesh is not None:
            raise ConfigError(
                "--mesh adds a mesh to a run whose meshes are jobs of JAX of their own: where all are one job, as on "
                "TPUs, give --processes and --process at the start"
            )
        role = dataclasses.replace(role, offset=place.process - role.process)
    if told.link == TRANSFER and (
        told.mesh is None and place.processes != 1 + sizes.rollout.workers
    ):
        raise ConfigError(
            "--link=transfer moves arrays between meshes of one process each: leave it out, or start one process a mesh"
        )
    tls = _tls(told.tls)
    job_token()
    if place.process:  # the leader's name may not be known before it has started
        reach(place.host, place.port, MEETING)
    host = told.host or own_address(place.host, place.port)
    if told.link == TRANSFER:
        host = ip_address(host)
    bound = listen_at(place.host, place.port)
    return Apart(role, place, bound, host, told.link, tls, one_job)


def _check_given(placement: PlacementSection) -> None:
    if placement.sizes == AUTO:
        raise ConfigError(
            "config.placement = 'auto' plans for one process only: give config.placement.rollout and "
            "config.placement.trainer their sizes"
        )


def _tls(files: Mapping[str, str | None]) -> Tls | None:
    given = {name: pathlib.Path(path) for name, path in files.items() if path}
    if not given:
        return None
    if missing := [name for name in files if name not in given]:
        raise ConfigError(
            f"--tls_{next(iter(given))} needs --tls_{' and --tls_'.join(missing)}, too"
        )
    found = Tls(**given)
    found.read()
    return found


@dataclasses.dataclass(frozen=True)
class Trains:
    """A process of the trainer's mesh where other processes sample: the mesh's devices, and the way to the others."""

    devices: Sequence[jax.Device]
    link: Link


def own_devices(role: Role) -> list[jax.Device]:
    """The devices of a process's mesh, after its processes have become one job of JAX.

    Raises:
      ConfigError: a process has too few, or the platform counts the processes in another way.
    """
    found, number = [], role.offset + role.process
    if jax.process_index() != number:
        raise ConfigError(
            f"this process is number {number}, but {jax.process_index()} in the platform's order: give each process "
            "that number by --process, or set --coordinator=auto"
        )
    for process in range(role.processes):
        its = [d for d in jax.devices() if d.process_index == role.offset + process]
        if len(its) < role.own:
            raise ConfigError(
                f"config.placement.{role.kind} has {role.devices} devices, so that each process of {role.mesh} needs "
                f"{role.own}, and process {process} of it has {len(its)}: make it smaller, or start the processes "
                "where they have more"
            )
        found += its[: role.own]
    return found


def cast(sizes: MeshSizes, processes: int, process: int) -> Role:
    """The role of a process by its number: first come those of the trainer's mesh, then those of each rollout mesh.

    With as many processes as meshes, each has one. Else all processes have equally many devices.

    Raises:
      ConfigError: the meshes cannot be divided so.
    """
    workers, trainer, rollout = sizes.rollout.workers, sizes.trainer.devices, sizes.rollout.devices
    first, each = 1, 1
    if processes != 1 + workers:
        total = trainer + workers * rollout
        own = total // processes
        if not own or total % processes or trainer % own or rollout % own:
            raise ConfigError(
                f"{processes} processes cannot share the meshes of config.placement, {_words(workers, rollout)} and "
                f"one of {trainer} that trains: start {1 + workers}, one for each mesh, or so many that every one "
                "has the same number of devices and all of them in one mesh; or set config.placement.rollout.data = "
                "0, and all processes sample and train in turn"
            )
        first, each = trainer // own, rollout // own
    if process < first:
        return Role(TRAINER, "trainer", trainer, process, first)
    number, within = divmod(process - first, each)
    return sampling(sizes, f"rollout {number}", within, each)


def _words(workers: int, devices: int) -> str:
    return (
        f"{workers} of {devices} devices that sample"
        if workers > 1
        else f"one of {devices} that samples"
    )


def sampling(sizes: MeshSizes, name: str, process: int = 0, processes: int = 1) -> Role:
    """A part in a rollout mesh; `name` is any that no other mesh of the run has.

    Raises:
      ConfigError: the config has no rollout meshes.
    """
    if not sizes.rollout.data:
        raise ConfigError(
            "config.placement.rollout.data = 0, so that the trainer's devices sample: there is no rollout mesh to "
            "start apart; set it to 1 or more"
        )
    return Role(name, "rollout", sizes.rollout.devices, process, processes)
