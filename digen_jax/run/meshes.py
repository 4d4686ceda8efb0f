"""The leader's view of sampling meshes in other processes: they come before a run begins or later, and may go."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from digen_jax.assemble import recipe_model
from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError
from digen_jax.process.launching import MEETING
from digen_jax.prompt_store import is_ahead, stored
from digen_jax.remote.identity import Identity, job_token
from digen_jax.remote.leader import Leader, Member
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.opening import lead, open_pulls
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.remote.wire import Wire
from digen_jax.run.own_mesh import known_nodes
from digen_jax.run.roles import Apart
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.link import RowsOf

LOOK = 0.5  # seconds between two looks at signals while meshes are waited for


class Meshes:
    """Sampling meshes by name, until a driver has them; from then on it is told who joins and who is lost.

    Attributes:
      link: to their processes.
    """

    def __init__(self, names: list[str]):
        self.link: RemoteLink | None = None
        self.step = 0  # the present one, at which a mesh that joins begins
        self._leader: Leader | None = None
        self._names = names  # that the config has
        self._there: dict[str, RemoteSampler] = {}
        self._driver: Driver | None = None
        self._changed = threading.Condition()

    def open(self, leader: Leader, link: RemoteLink) -> None:
        """From now on meshes may join."""
        self._leader, self.link = leader, link

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

    def step_ended(self, done: int) -> None:
        """`done` steps are done: meshes whose processes were asked to stop leave."""
        self.step = done
        with self._changed:
            leaving = [name for name, one in self._there.items() if one.member.asked]
            for name in leaving:
                del self._there[name]
        for name in leaving:
            self._driver.lost(name, "leaves, because it was asked to stop")
            self._leader.dismiss(name, "it was asked to stop")

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

    def lost(self, member: Member, why: str) -> None:
        """See `Leader`."""
        with self._changed:
            self._there.pop(member.name, None)
            driver = self._driver
        if driver is not None:
            driver.lost(member.name, why)
        else:
            print(f"{member.name} {why}: it is given up", flush=True)


@contextmanager
def led(recipe: Recipe, apart: Apart) -> Iterator[Meshes]:
    """Lets the processes of sampling meshes join this one; before anything slow, so that mistakes show early.

    Raises:
      ConfigError: the token is missing, the address cannot be used, or the model's folder.
    """
    wire = Wire(Identity.of(recipe.as_json(), job_token()), apart.tls)
    folder, family = recipe_model(recipe)
    pulls = open_pulls(apart.link, apart.host)
    workers = recipe.placement.rollout.workers
    meshes = Meshes([f"rollout {number}" for number in range(workers)])
    with lead(
        wire,
        apart.bound,
        known_nodes(recipe, family),
        pulls,
        joined=meshes.joined,
        lost=meshes.lost,
        step=lambda: meshes.step,
    ) as (leader, link, address):
        meshes.open(leader, link)
        if is_ahead(recipe, family):
            encoded = stored(recipe, folder, family)
            link.make(RowsOf, lambda key: encoded.read(key.texts))
        print(f"leads at {address}: sampling meshes may join", flush=True)
        yield meshes
