"""The leader's view of sampling meshes in other processes: they come before a run begins or later, and may go."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from digen_jax.assemble import recipe_model
from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError
from digen_jax.process.ending import STOPPED, Stopped, last_word, leave
from digen_jax.process.launching import MEETING, Place
from digen_jax.process.ports import free_port
from digen_jax.prompt_store import is_ahead, stored
from digen_jax.remote.meeting import Meeting
from digen_jax.remote.mesh import Mesh
from digen_jax.remote.opening import lead, open_pulls
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.remote.sharing import TrainerLink
from digen_jax.run.joining import job_of, join_own, make_wire
from digen_jax.run.own_mesh import known_nodes
from digen_jax.run.roles import Apart, Trains, own_devices
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.link import RowsOf
from digen_jax.scheduling.commands import TRAINER

LOOK = 0.5  # seconds between two looks at signals while meshes are waited for
UNFINISHED = 5.0  # seconds at the run's end for the work that meshes have begun
AGAIN = "start the same command on all again, which continues from the last checkpoint"


class Meshes:
    """Sampling meshes by name, until a driver has them; from then on it is told who joins and who is lost.

    Attributes:
      own: the trainer's mesh.
    """

    def __init__(self, names: list[str], one_job: bool = False, trainers: int = 1):
        """`names` are those that the config has, `trainers` the processes that train; `one_job`: see `Apart`."""
        self.own: Trains | None = None
        self.step = 0  # the present one, at which a mesh that joins begins
        self._names, self._one_job, self._trainers = names, one_job, trainers
        self._there: dict[str, RemoteSampler] = {}
        self._driver: Driver | None = None
        self._changed = threading.Condition()

    def open(self, own: Trains) -> None:
        """The trainer's mesh is there."""
        self.own = own

    def wait(self, seconds: float = MEETING, stops: Callable[[], Any] = lambda: None) -> None:
        """Waits until the config's meshes are ready for commands; goes on without those that do not come in time.

        `stops` is called from time to time, and true where waiting is to end.

        Raises:
          ConfigError: none has come.
        """
        begin, said = time.monotonic(), False
        with self._changed:
            while (
                missing := [name for name in self._names if name not in self._there]
            ) and not stops():
                if time.monotonic() - begin > seconds:
                    self._go_on_without(missing, seconds)
                    return
                if not said:
                    said = True
                    print(f"waiting for {', '.join(missing)}, at most {seconds:g} s", flush=True)
                self._changed.wait(LOOK)

    def _go_on_without(self, missing: list[str], seconds: float) -> None:
        late = f"{', '.join(missing)} not ready in {seconds:g} s"
        if not self._there:
            raise ConfigError(
                f"{late}, and no other rollout mesh is: look at what their processes printed, and start the same "
                "command on all again"
            )
        print(f"{late}: the run begins without, and they may join later", flush=True)

    def begin(self, make: Callable[[list[RemoteSampler]], Driver]) -> Driver:
        """The driver that `make` makes of the meshes that are there; it is told of all others."""
        with self._changed:
            self._driver = make(list(self._there.values()))
            return self._driver

    @property
    def asked(self) -> int:
        """The signal by which a process of this one's job was asked to stop, which ends the job; 0: none."""
        with self._changed:
            asked = [one.mesh.asked for one in self._there.values() if self._one_job]
        return max(asked, default=0)

    def step_ended(self, done: int) -> None:
        """`done` steps are done: meshes whose processes were asked to stop leave, unless all end."""
        self.step = done
        if self._one_job:
            return
        with self._changed:
            # Another mesh cannot take the name of one that leaves before the driver has given that up.
            for one in [one for one in self._there.values() if one.mesh.asked]:
                del self._there[one.name]
                # First, so that giving it up does not end its stream, and with it the process as one that is lost.
                one.mesh.dismiss("it was asked to stop")
                self._driver.lost(one.name, "leaves, because it was asked to stop")

    def places(self) -> dict[str, dict[str, Any]]:
        """Where the meshes are that are there, and when each was heard: see `Status`."""
        with self._changed:
            meshes = [one.mesh for one in self._there.values()]
        clock = time.time() - time.monotonic()
        found = {
            one.name: {
                "host": one.first.address.rpartition(":")[0],
                "process": one.first.pid,
                "processes": one.processes,
                "heard": clock + one.heard,
            }
            for one in meshes
        }
        return found | {TRAINER: {"processes": self._trainers}}

    @staticmethod
    def _end(driver: Driver | None, why: str) -> None:
        """A process of this one's job is lost, and JAX would end all others of it."""
        error = Stopped(f"{why}, and all meshes are one job of JAX: {AGAIN}")
        if driver is None:
            leave(last_word(str(error), STOPPED))
        driver.fail(error)

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Limits how long this block, which ends the driver, waits for the work that meshes have begun.

        A mesh may generate what nobody will train, or take weights that it will not need, for minutes.
        """

        def over() -> None:
            with self._changed:
                samplers = list(self._there.values())
            for one in samplers:
                one.let_go()

        late = threading.Timer(UNFINISHED, over)
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()

    def close(self) -> None:
        """The driver has ended."""
        with self._changed:
            self._driver = None

    # -------------------------------------------------------------------- in the leader's thread

    def joined(self, sampler: RemoteSampler) -> None:
        """See `Leader`."""
        with self._changed:
            self._there[sampler.name] = sampler
            driver = self._driver
            self._changed.notify_all()
            if driver is not None:
                driver.join(sampler)

    def lost(self, mesh: Mesh, why: str) -> None:
        """See `Leader`."""
        with self._changed:
            sampler, driver = self._there.pop(mesh.name, None), self._driver
        if sampler is not None and driver is None:
            sampler.give_up()
        if mesh.name == TRAINER:
            # This process may wait for it in common work, and a checkpoint needs its part of the state.
            leave(last_word(f"{mesh.name} {why}: {AGAIN}", STOPPED))
        elif self._one_job:
            self._end(driver, f"{mesh.name} {why}")
        elif driver is not None:
            driver.lost(mesh.name, why)
        else:
            print(f"{mesh.name} {why}: it is given up", flush=True)


@contextmanager
def led(recipe: Recipe, apart: Apart) -> Iterator[Meshes]:
    """Lets the processes of sampling meshes join this one; before anything slow, so that mistakes show early.

    Raises:
      ConfigError: the token is missing, the address cannot be used, or the model's folder.
    """
    wire, role = make_wire(recipe, apart), apart.role
    folder, family = recipe_model(recipe)
    workers = recipe.placement.rollout.workers
    names = [f"rollout {number}" for number in range(workers)]
    meshes = Meshes(names, apart.one_job, role.processes)
    meeting, known = Meeting(wire.identity), {}
    with lead(
        wire,
        apart.bound,
        known,
        open_pulls(apart.link, apart.host),
        joined=meshes.joined,
        lost=meshes.lost,
        ended=meeting.forget,
        step=lambda: meshes.step,
        others=[meeting.service],
        trainers=role.processes,
    ) as (_, link, _):
        print(f"leads at {apart.place.address}: sampling meshes may join", flush=True)
        name, processes, _ = job_of(apart)
        if processes > 1:
            job = Place(apart.host, free_port(), processes, 0, apart.place.devices)
            meeting.note(name, job.address)
            join_own(job, apart)
        # Not before: it may start JAX.
        known.update(known_nodes(recipe, family))
        if is_ahead(recipe, family):
            encoded = stored(recipe, folder, family)
            link.make(RowsOf, lambda key: encoded.read(key.texts))
        own = TrainerLink(link, 0, role.processes) if role.processes > 1 else link
        meshes.open(Trains(own_devices(role), own))
        yield meshes
