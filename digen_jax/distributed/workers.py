"""The rollout workers of a run: starts them, waits for them, notices their loss, and starts lost ones again."""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import jax

from digen_jax.assemble import recipe_model
from digen_jax.config.recipe import Recipe
from digen_jax.distributed.engine import Actor, Engine, Lost, Resources, forwarded, python_path
from digen_jax.distributed.files import fingerprints
from digen_jax.distributed.transfer import Shares, TrainerLink
from digen_jax.distributed.worker_process import Opened, RolloutProcess
from digen_jax.distributed.worker_proxy import WorkerProxy
from digen_jax.engine.encoding import Rows, Stored
from digen_jax.errors import ConfigError
from digen_jax.process.ending import STOPPED, Stopped, last_word, leave
from digen_jax.process.launching import MEETING, Place
from digen_jax.prompt_store import stored
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.worker import Gone
from digen_jax.scheduling.commands import TRAINER

PING = 2.0  # seconds between two pings
PENDING = 30.0  # seconds between two lines about a cluster without resources for a worker
LOOK = 0.5  # seconds between two looks at signals while workers are waited for
OPENING = 1800.0  # seconds for a worker to open its model; then it is killed and started again
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a lost worker is started again
UNFINISHED = 5.0  # seconds at the run's end for the work in progress
CLOSING = 2.0  # seconds for a worker to end the processes of its rewards


class RolloutWorkers:
    """The rollout workers of a run, each kept alive by a thread.

    Args:
      recipe: placed on all devices of the run.
      engine: starts the workers.
      accelerator: the kind that workers have, such as GPU; "": virtual CPU devices.
      rows: reads precomputed prompt embeddings by their keys; None: workers encode.
      shares: which of the trainer's processes this is; None: it has one.
      job: the trainer's place in a job of JAX that the workers are part of; None: they are not.
      kind: the class of the workers' processes.

    Attributes:
      devices: of the trainer's mesh.
      link: the trainer's.
      step: the present one, from which a worker that starts draws the prompts.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        accelerator: str = "",
        rows: Callable[[Sequence[str]], list[Rows]] | None = None,
        shares: Shares | None = None,
        job: Place | None = None,
        kind: type[RolloutProcess] = RolloutProcess,
    ):
        self.devices: Sequence[jax.Device] = ()
        self.link, self.step = TrainerLink(engine, shares), 0
        self._recipe, self._engine, self._kind = recipe, engine, kind
        self._rows, self._files = rows, fingerprints(recipe)
        rollout = recipe.placement.meshes.rollout
        self._job = job
        self._resources = Resources(
            accelerator, rollout.devices // rollout.hosts if accelerator else 0
        )
        self._trainers = recipe.placement.meshes.trainer.hosts
        most = max(rollout.workers, rollout.max_workers)
        names = [f"rollout {number}" for number in range(most)]
        self._ready: dict[str, WorkerProxy] = {}
        self._actors: dict[str, list[Actor]] = {}
        self._failed: ConfigError | None = None  # no worker can work with this recipe
        self._driver: Driver | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._names, self._needed = names, rollout.workers  # the start waits for so many of them
        self._threads = [
            threading.Thread(target=self._keep, args=(name,), name=name, daemon=True)
            for name in names
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float = MEETING, stops: Callable[[], Any] = lambda: None) -> None:
        """Waits until `placement.rollout.workers` are ready; continues without those that are not in time.

        Args:
          seconds: the longest wait.
          stops: called from time to time; waiting ends when it returns something true.

        Raises:
          ConfigError: no worker is ready in time, or the recipe cannot work there.
        """
        begin, reported = time.monotonic(), False
        with self._changed:
            while not self._failed and not stops():
                missing = [name for name in self._names if name not in self._ready]
                missing = missing[: max(0, self._needed - len(self._ready))]
                if not missing:
                    return
                late = time.monotonic() - begin > seconds
                if late and not self._ready:
                    raise ConfigError(
                        f"no rollout worker is ready after {seconds:g} s: look at their output above, or ask for fewer "
                        "or smaller ones by config.placement.rollout"
                    )
                if late:
                    names = ", ".join(missing)
                    print(
                        f"{names} not ready after {seconds:g} s; starting without (can join later)",
                        flush=True,
                    )
                    return
                if not reported:
                    reported = True
                    print(f"waiting for {', '.join(missing)}, at most {seconds:g} s", flush=True)
                self._changed.wait(LOOK)
            if self._failed:
                raise self._failed

    @contextmanager
    def driving(
        self, make: Callable[[list[WorkerProxy]], Driver], stops: Callable[[], Any]
    ) -> Iterator[Driver]:
        """Waits for workers; the driver that `make` builds of them is notified of all others in this block.

        Args:
          make: Builds the driver.
          stops: As in `wait`.
        """
        self.wait(stops=stops)
        try:
            with self._changed:
                driver = self._driver = make(list(self._ready.values()))
            try:
                yield driver
            finally:
                with self._let_go():
                    driver.close()
        finally:
            with self._changed:
                self._driver = None

    def places(self) -> dict[str, dict[str, Any]]:
        """Where the ready workers are, and when each answered last: see `records.status.Status`."""
        with self._changed:
            ready = list(self._ready.values())
        found = {
            one.name: {
                "host": one.opened.host,
                "process": one.opened.pid,
                "processes": one.processes,
                "heard": one.heard,
            }
            for one in ready
        }
        return found | {TRAINER: {"processes": self._trainers}}

    @contextmanager
    def _let_go(self) -> Iterator[None]:
        """Limits how long this block, which ends the driver, waits for work that is in progress."""

        def over() -> None:
            with self._changed:
                ready = list(self._ready.values())
            for one in ready:
                one.let_go("is not waited for: the run ends")

        late = threading.Timer(UNFINISHED, over)
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()

    def end(self) -> None:
        """Ends all workers."""
        self._closed.set()
        with self._changed:
            actors = [one for started in self._actors.values() for one in started]
            self._changed.notify_all()
        closing = [self._engine.call(actor, "close", group="control") for actor in actors]
        until = time.monotonic() + CLOSING
        for one in closing:
            try:
                one.result(max(0.0, until - time.monotonic()))
            except Exception:  # a worker that is lost or hangs is killed below
                continue
        for actor in actors:
            self._engine.kill(actor)

    # ----------------------------------------------------------------------- in a worker's thread

    def _keep(self, name: str) -> None:
        """Starts a worker, and starts it again when it is lost; the pause doubles while it fails to start."""
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            try:
                proxy = self._start(name)
            except ConfigError as error:
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                    if self._driver is not None:
                        print(f"{name} cannot rejoin: {error}", file=sys.stderr, flush=True)
                return
            except Exception as error:
                why = f"did not start ({error})"
            else:
                pause = FIRST_PAUSE
                self._joined(proxy)
                why = self._watch(proxy)
            if self._closed.is_set():
                return
            self._lost(name, why)
            if self._job is not None:
                return self._end(f"{name} {why}")
            print(f"{name} {why}; starting it again in {pause:g} s", flush=True)
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _end(self, why: str) -> None:
        """Ends the run, because JAX ends all processes of a job that has lost one."""
        again = "the same command continues from the last checkpoint"
        error = Stopped(f"{why}, and all processes are one job of JAX (--one_job): {again}")
        with self._changed:
            driver = self._driver
        if driver is None:
            leave(last_word(str(error), STOPPED))
        driver.fail(error)

    def _start(self, name: str) -> WorkerProxy:
        environment = forwarded()
        if not self._resources.devices:
            environment["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
        given = name, environment, os.getcwd(), python_path()
        hosts = self._recipe.placement.meshes.rollout.hosts
        actors = self._engine.start(self._kind, [given] * hosts, self._resources)
        with self._changed:
            self._actors[name] = actors
        self._wait_for_resources(name, actors)
        place = None
        if self._job is not None:
            first = self._trainers + int(name.split()[-1]) * hosts
            place = self._job._replace(process=first, team=(first, hosts))
        elif hosts > 1:
            place = Place(*self._engine.coordinator_address(actors[0]).result(), hosts, 0)
        opening = [
            self._engine.call(
                actor,
                "open",
                self._recipe,
                self.step,
                place and place._replace(process=place.process + number),
                group="work",
            )
            for number, actor in enumerate(actors)
        ]
        late = wait(opening, OPENING, "FIRST_EXCEPTION").not_done
        opened: list[Opened] = [one.result() for one in opening if one not in late]
        if late:
            raise Lost(f"not ready after {OPENING:g} s")
        return WorkerProxy(name, opened[0], actors, self._engine, self.link, self._rows)

    def _wait_for_resources(self, name: str, actors: list[Actor]) -> None:
        """Waits until the processes run, which may take as long as other jobs run, and have checked their files."""
        checked = [
            self._engine.call(actor, "check_files", self._recipe, self._files, group="work")
            for actor in actors
        ]
        begin = time.monotonic()
        while wait(checked, PENDING).not_done and not self._closed.is_set():
            if len(self._ready) < self._needed:  # others join when a node is free
                seconds = time.monotonic() - begin
                print(
                    f"{name} has waited {seconds:.0f} s for a node with free resources: see `ray status`",
                    flush=True,
                )
        for one in checked:
            one.result(0)

    def _joined(self, proxy: WorkerProxy) -> None:
        proxy.end_step(self.step - 1)  # steps may have ended since it was started
        with self._changed:
            self._ready[proxy.name] = proxy
            driver = self._driver
            self._changed.notify_all()
            if driver is not None:
                print(f"{proxy.name} joins", flush=True)
                driver.join(proxy)

    def _watch(self, proxy: WorkerProxy) -> str:
        """Pings a worker until it is lost or was given up; returns why."""
        while not self._closed.is_set():
            try:
                proxy.ping()
            except (Gone, Lost) as error:
                return str(error).removeprefix(f"{proxy.name} ")
            if proxy.lost.wait(PING):
                return "was lost or given up"
        return "has ended"

    def _lost(self, name: str, why: str) -> None:
        with self._changed:
            proxy, driver = self._ready.pop(name, None), self._driver
            actors = self._actors.pop(name, [])
        for actor in actors:
            self._engine.kill(actor)
        if proxy is not None:
            if driver is None:
                proxy.give_up()
            else:
                driver.lost(name, why)


@contextmanager
def rollout_workers(
    recipe: Recipe,
    engine: Engine,
    accelerator: str,
    shares: Shares | None = None,
    job: Place | None = None,
) -> Iterator[RolloutWorkers]:
    """The rollout workers of a run in this block, after which they end; the arguments are those of the class."""

    @functools.cache
    def store() -> Stored:
        folder, family = recipe_model(recipe)  # not at once: JAX starts
        return stored(recipe, folder, family)

    workers = RolloutWorkers(
        recipe, engine, accelerator, lambda texts: store().read(texts), shares, job
    )
    try:
        yield workers
    finally:
        workers.end()
