"""Which mesh of a run a process has, where sampling and training are in different processes."""

import dataclasses
import pathlib
from collections.abc import Mapping

from digen_jax.engine.placement import MeshSizes, OwnMesh
from digen_jax.errors import ConfigError
from digen_jax.process.launching import (
    MEETING,
    Place,
    detected,
    listen_at,
    own_address,
    reach,
)
from digen_jax.remote.wire import Tls
from digen_jax.scheduling.commands import TRAINER


@dataclasses.dataclass(frozen=True)
class Role:
    """A process's mesh: its worker's name, which of the config's meshes it is, and its number of devices."""

    mesh: str
    kind: OwnMesh
    devices: int


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
    """

    role: Role
    place: Place
    bound: str
    host: str
    link: str
    tls: Tls | None = None


@dataclasses.dataclass(frozen=True)
class Told:
    """What the command line says of the other processes; None: nothing."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    mesh: str | None = None
    host: str | None = None
    link: str = "bytes"
    tls: Mapping[str, str | None] = dataclasses.field(
        default_factory=dict
    )  # files by `Tls`'s names


def take_part(sizes: MeshSizes, told: Told) -> Apart | None:
    """How this process takes part in a run; None: alone, or with others that sample and train in turn with it.

    Raises:
      ConfigError: names the option or the field to change.
    """
    if told.mesh is not None:
        if told.coordinator in (None, "auto") or (told.processes, told.process) != (None, None):
            raise ConfigError(
                "--mesh joins a run that another process leads: give that one's address as --coordinator=host:port, "
                "and neither --processes nor --process"
            )
        role, place = sampling(sizes, told.mesh), detected(told.coordinator, 2, 1)
    else:
        place = detected(told.coordinator, told.processes, told.process)
        if place is None or place.processes == 1 or not sizes.rollout.data:
            return None
        role = cast(sizes, place.processes, place.process)
    tls = _tls(told.tls)
    if role.kind == "rollout":  # the leader's name may not be known before it has started
        reach(place.host, place.port, MEETING)
    host = told.host or own_address(place.host, place.port)
    bound = listen_at(place.host, place.port)
    return Apart(role, place, bound, host, told.link, tls)


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


def cast(sizes: MeshSizes, processes: int, process: int) -> Role:
    """The role of a process by its number: the first one trains and leads, each of the others has a rollout mesh.

    Raises:
      ConfigError: there are more or fewer processes than meshes.
    """
    workers = sizes.rollout.workers
    if processes != 1 + workers:
        raise ConfigError(
            f"config.placement.rollout.workers = {workers}: start {1 + workers} processes, one that trains and one for "
            f"each rollout mesh, not {processes}; or set config.placement.rollout.data = 0, and all processes sample "
            "and train in turn"
        )
    if not process:
        return Role(TRAINER, "trainer", sizes.trainer.devices)
    return sampling(sizes, f"rollout {process - 1}")


def sampling(sizes: MeshSizes, name: str) -> Role:
    """The role of a rollout mesh; `name` is any that no other mesh of the run has.

    Raises:
      ConfigError: the config has no rollout meshes.
    """
    if not sizes.rollout.data:
        raise ConfigError(
            "config.placement.rollout.data = 0, so that the trainer's devices sample: there is no rollout mesh to "
            "start apart; set it to 1 or more"
        )
    return Role(name, "rollout", sizes.rollout.devices)
