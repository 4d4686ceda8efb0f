"""Registry of workers in other processes: starts them, waits for them, notices their loss, and restarts them."""

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
from digen_jax.config.train_config import TrainConfig
from digen_jax.distributed.engine import (
    POLL,
    Actor,
    ProcessLost,
    RayEngine,
    Resources,
    surroundings,
    wait_for_resources,
)
from digen_jax.distributed.files import fingerprints
from digen_jax.distributed.transfer import Shares, TrainerLink
from digen_jax.distributed.worker_process import RolloutProcess, TrainingProcess
from digen_jax.distributed.worker_proxy import TrainingProxy, WorkerProxy
from digen_jax.errors import ConfigError
from digen_jax.parallel.encoding import Stored
from digen_jax.process.job import MEETING, Place
from digen_jax.process.shutdown import STOPPED, Stopped, last_word, leave
from digen_jax.prompt_store import stored
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.worker import Gone
from digen_jax.scheduling.commands import TRAINER, trainer_names

PING = 2.0  # seconds between two pings
OPEN_TIMEOUT = 1800.0  # seconds for a worker to open its model; then it is killed and restarted
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a lost worker is restarted
FINISH_TIMEOUT = 5.0  # seconds at the run's end for the work in progress
CLOSE_TIMEOUT = 2.0  # seconds for a worker to end the processes of its rewards


class RemoteWorkers:
    """The rollout workers of a run, and its training workers but the home worker, each kept alive by a thread.

    Args:
      recipe: Config of the run, placed on all its devices.
      engine: Starts the workers.
      accelerator: Kind that workers have, such as GPU. "" means virtual CPU devices.
      shares: Number of this process among the trainer's. None means that it has one.
      job: The trainer's place in a JAX job that the workers are part of. None means that they are not.
      kind: Class of the processes of rollout workers.
      training_kind: Class of the processes of training workers.

    Attributes:
      devices: Devices of the trainer's mesh.
      link: The trainer's link.
      step: The present step, from which a worker that starts draws the prompts.
    """

    def __init__(
        self,
        recipe: TrainConfig,
        engine: RayEngine,
        accelerator: str = "",
        shares: Shares | None = None,
        job: Place | None = None,
        kind: type[RolloutProcess] = RolloutProcess,
        training_kind: type[TrainingProcess] = TrainingProcess,
    ):
        self.devices: Sequence[jax.Device] = ()
        self.link, self.step = TrainerLink(engine, shares), 0
        self._recipe, self._engine, self._job = recipe, engine, job
        self._kinds, self._accelerator = (kind, training_kind), accelerator
        self._files = fingerprints(recipe)
        rollout, trainer = recipe.placement.meshes
        self._hosts = trainer.hosts
        most = max(rollout.workers, rollout.max_workers) if rollout.data else 0
        self._rollouts = [f"rollout {number}" for number in range(most)]
        self._training = trainer_names(trainer.workers)[1:]
        self._names = [*self._rollouts, *self._training]
        self._extra = len(self._rollouts) - rollout.workers  # for which the start does not wait
        self._ready: dict[str, WorkerProxy] = {}
        self._actors: dict[str, list[Actor]] = {}
        self._failed: ConfigError | None = None  # no worker can work with this config
        self._driver: Driver | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        for name in self._names:
            threading.Thread(target=self._keep, args=(name,), name=name, daemon=True).start()

    def wait(self, seconds: float = MEETING, stops: Callable[[], Any] = lambda: None) -> None:
        """Waits for `placement.rollout.workers` and the training workers; continues without those that are not in time.

        Args:
          seconds: The longest wait.
          stops: Called from time to time; waiting ends when it returns something true.

        Raises:
          ConfigError: No worker is ready in time, or the config cannot work there.
        """
        end = time.monotonic() + seconds
        with self._changed:
            if missing := self._missing():
                print(f"waiting for {', '.join(missing)}, at most {seconds:g} s", flush=True)
            while (missing := self._missing()) and not self._failed and not stops():
                if time.monotonic() > end:
                    if not self._ready.keys() & {*(self._rollouts or self._training)}:
                        section = "rollout" if self._rollouts else "trainer"
                        raise ConfigError(
                            f"no {section} worker is ready after {seconds:g} s: look at their output above, or ask for "
                            f"fewer or smaller ones by config.placement.{section}"
                        )
                    text = f"not ready after {seconds:g} s; starting without (can join later)"
                    print(f"{', '.join(missing)} {text}", flush=True)
                    break
                self._changed.wait(POLL)
            if self._failed:
                raise self._failed

    def _missing(self) -> list[str]:
        """The workers that the start waits for."""
        rollouts, training = (
            [name for name in names if name not in self._ready]
            for names in (self._rollouts, self._training)
        )
        return [*rollouts[: max(0, len(rollouts) - self._extra)], *training]

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
        with self._changed:
            ready = [self._ready[name] for name in self._names if name in self._ready]
            driver = self._driver = make(ready)
        try:
            yield driver
        finally:
            late = threading.Timer(FINISH_TIMEOUT, self._end_calls)
            late.daemon = True
            late.start()
            driver.close()
            late.cancel()
            with self._changed:
                self._driver = None

    def _end_calls(self) -> None:
        """Ends the wait for work that is in progress at the run's end."""
        for one in self._workers():
            one.end_calls("is not waited for: the run ends")

    def _workers(self) -> list[WorkerProxy]:
        with self._changed:
            return list(self._ready.values())

    def places(self) -> dict[str, dict[str, Any]]:
        """Where the ready workers are, and when each answered last: see `records.status.Status`."""
        found = {
            one.name: {
                "host": one.opened.host,
                "process": one.opened.pid,
                "processes": one.processes,
                "heard": one.heard,
            }
            for one in self._workers()
        }
        return found | {TRAINER: {"processes": self._hosts}}

    def close(self) -> None:
        """Ends all workers."""
        self._closed.set()
        with self._changed:
            actors = [one for started in self._actors.values() for one in started]
            self._changed.notify_all()
        closing = [self._engine.call(actor, "close", group="control") for actor in actors]
        wait(closing, CLOSE_TIMEOUT)
        for actor in actors:
            self._engine.kill(actor)

    # ----------------------------------------------------------------------- in a worker's thread

    def _keep(self, name: str) -> None:
        """Starts a worker, and restarts it when it is lost; the pause doubles while it fails to start."""
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
                self._join(proxy)
                why = self._watch(proxy)
            if self._closed.is_set():
                return
            self._lost(name, why)
            if self._job is not None:
                return self._end(f"{name} {why}")
            print(f"{name} {why}; starting it again in {pause:g} s", flush=True)
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _start(self, name: str) -> WorkerProxy:
        """Starts a worker's processes and has them open the model."""
        (environment, *folders), trains = surroundings(), name in self._training
        axes = self._recipe.placement.meshes[trains]
        hosts, devices = axes.hosts, axes.devices // axes.hosts if self._accelerator else 0
        if not devices:
            environment["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
        given = [(name, environment, *folders)] * hosts
        resources = Resources(self._accelerator, devices)
        actors = self._engine.start(self._kinds[trains], given, resources)
        with self._changed:
            self._actors[name] = actors

        def call(actor: Actor, method: str, *arguments: Any) -> Any:
            return self._engine.call(actor, method, self._recipe, *arguments, group="work")

        checked = [call(actor, "check_files", self._files) for actor in actors]
        needed, stops = "a node with free resources", self._closed.is_set
        # Workers in addition to those that are needed join when a node is free.
        wait_for_resources(checked, name, needed, stops, lambda: not self._missing())
        for one in checked:
            one.result(0)
        if self._job is not None:
            first = self._hosts + int(name.split()[-1]) * hosts
            place = self._job._replace(process=first, team=(first, hosts))
        elif hosts > 1:
            place = Place(*self._engine.coordinator_address(actors[0]).result(), hosts, 0)
        else:
            place = None
        places = [place and place._replace(process=place.process + n) for n in range(hosts)]
        opening = [
            call(actor, "open", self.step, own) for actor, own in zip(actors, places, strict=True)
        ]
        late = wait(opening, OPEN_TIMEOUT, "FIRST_EXCEPTION").not_done
        opened = [one.result() for one in opening if one not in late]
        if late:
            raise ProcessLost(f"not ready after {OPEN_TIMEOUT:g} s")
        proxy = TrainingProxy if trains else WorkerProxy
        return proxy(
            name, opened[0], actors, self._engine, self.link, lambda keys: self._stored.read(keys)
        )

    @functools.cached_property
    def _stored(self) -> Stored:
        """Precomputed prompt embeddings."""
        folder, family = recipe_model(self._recipe)  # not at once: JAX starts
        return stored(self._recipe, folder, family)

    def _join(self, proxy: WorkerProxy) -> None:
        """Registers a worker that is ready, and adds it to the run."""
        proxy.end_step(self.step - 1)  # steps may have ended since it was started
        with self._changed:
            self._ready[proxy.name] = proxy
            self._changed.notify_all()
            if self._driver is not None:
                print(f"{proxy.name} joins", flush=True)
                self._driver.join(proxy)

    def _watch(self, proxy: WorkerProxy) -> str:
        """Pings a worker until it is lost or was given up; returns why."""
        while not self._closed.is_set():
            try:
                proxy.ping()
            except Gone as error:
                return str(error).removeprefix(f"{proxy.name} ")
            if proxy.lost.wait(PING):
                return "was lost or given up"
        return "has ended"

    def _lost(self, name: str, why: str) -> None:
        """Kills a worker's processes and removes it from the run."""
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

    def _end(self, why: str) -> None:
        """Ends the run, because JAX ends all processes of a job that has lost one."""
        again = "the same command continues from the last checkpoint"
        error = Stopped(f"{why}, and all processes are one job of JAX (--one_job): {again}")
        with self._changed:
            driver = self._driver
        if driver is None:
            leave(last_word(str(error), STOPPED))
        driver.fail(error)
