"""A leader and rollout meshes in processes of their own that wait in place of device work.

The leader has a run's driver, scheduler, control and link, and every rollout mesh is a process of its own, this module,
too. Weights, encoded prompts, samples and scores really travel, as small trees; a transfer ends when its wait does,
which stands for a tree of a model's size.
"""

import dataclasses
import io
import itertools
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from digen_jax.benchmark.waits import (
    WaitingExecutors,
    WaitingJudge,
    WaitingSampler,
    Waits,
    score,
)
from digen_jax.engine.draws import Drawn
from digen_jax.errors import ConfigError
from digen_jax.remote.identity import TOKEN, Identity, job_token
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.opening import join, lead
from digen_jax.remote.outline import nodes
from digen_jax.remote.relay import Relay
from digen_jax.remote.serving import Sampling, serve
from digen_jax.remote.wire import Wire
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.run.meshes import Meshes
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.executors import Samples
from digen_jax.runtime.link import ConditioningOf, SamplesOf
from digen_jax.runtime.steps import Steps
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Deliver,
    DropVersion,
    Encode,
    Fragment,
    Publication,
    Publish,
    Update,
)
from digen_jax.scheduling.planner.simulate import Layout, Mesh
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings

HOST = "127.0.0.1"
LONGEST = 300.0  # seconds for all processes to start
# Bytes of the trees that really travel.
WEIGHTS, SAMPLES, PROMPTS = 2**20, 2**18, 2**16


@contextmanager
def driving(
    layout: Layout, waits: Waits, settings: Settings
) -> Iterator[tuple[Driver, list[subprocess.Popen]]]:
    """The driver of a run whose rollout meshes are processes of their own: these, too."""
    os.environ.setdefault(TOKEN, secrets.token_hex(16))
    names = [f"rollout {number}" for number in range(len(layout.rollout))]
    meshes = Meshes(names)
    with (
        ExitStack() as stack,
        redirect_stdout(io.StringIO()),  # a line for each mesh
        lead(_wire(), f"{HOST}:0", nodes(None), joined=meshes.joined, lost=meshes.lost) as (
            _,
            link,
            address,
        ),
    ):
        pairs = zip(names, layout.rollout, strict=True)
        processes = [_begin(stack, address, *pair, waits, settings) for pair in pairs]
        meshes.wait(LONGEST)
        if missing := set(names) - set(meshes.places()):
            raise ConfigError(f"{', '.join(sorted(missing))} did not start in {LONGEST:g} s")
        rewards = stack.enter_context(closing(RewardPool(alone("waits", score), 0)))

        def make(samplers: list[Samples]) -> Driver:
            # In the order in which they join in the simulator, whoever started first.
            samplers.sort(key=lambda one: names.index(one.name))
            executors = LinkedExecutors(waits, layout, samplers, link)
            return Driver(executors, Scheduler(settings, waits.costs), rewards)

        with closing(meshes), closing(meshes.begin(make)) as driver:
            yield driver, processes


class LinkedExecutors(WaitingExecutors):
    """Waits of the trainer, during which it takes what rollout meshes in other processes offer."""

    def __init__(self, waits: Waits, layout: Layout, rollouts: list[Samples], link: RemoteLink):
        super().__init__(waits, layout, rollouts)
        self._link, self._step = link, 0
        self._prompts: set[int] = set()  # steps
        self._taking = threading.Lock()
        link.offer(Publication(0), _tree(WEIGHTS))

    def do(self, command: Command) -> None:
        """See `WaitingExecutors`."""
        match command:
            case Deliver() if command.worker != TRAINER:
                with self.working(command):
                    self._deliver(command)
            case Update():
                super().do(command)
                self._link.offer(Publication(command.step + 1), _tree(WEIGHTS))
            case DropVersion():
                super().do(command)
                self._link.withdraw(command.publication)
            case _:
                super().do(command)

    def end_step(self) -> dict[str, float]:
        """See `WaitingExecutors`."""
        for one in list(self.samplers.values()):
            one.end_step(self._step)
        self._step += 1
        return super().end_step()

    def give_up(self, worker: str) -> None:
        """See `WaitingExecutors`."""
        super().give_up(worker)
        self._link.give_up(worker)

    def _deliver(self, command: Deliver) -> None:
        """Takes a fragment's samples, and with the first ones of a step its prompts."""
        key = SamplesOf(command.worker, command.fragment)
        with self._taking:
            if command.fragment.step not in self._prompts:
                self._link.fetch(ConditioningOf(command.worker, command.fragment.step), TRAINER)
                self._prompts.add(command.fragment.step)
        if self._link.fetch(key, TRAINER) is None:
            raise RuntimeError(f"{command.worker} has no samples of {command.fragment}")
        self._link.withdraw(key)


def _begin(
    stack: ExitStack, address: str, name: str, mesh: Mesh, waits: Waits, settings: Settings
) -> subprocess.Popen:
    what = json.dumps([dataclasses.asdict(one) for one in (mesh, waits, settings)])
    command = [sys.executable, "-m", __name__, address, name, what]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def _wire() -> Wire:
    return Wire(Identity.of({}, job_token()))


def _tree(size: int) -> dict[str, np.ndarray]:
    return {"numbers": np.zeros(size, np.uint8)}


# ------------------------------------------------------------------- in the process of a rollout mesh


class LinkedSampler(WaitingSampler):
    """Waits of a rollout mesh, during which it takes weights, and after which it offers what it has made."""

    def __init__(
        self, name: str, mesh: Mesh, waits: Waits, steps: Steps, link: RemoteLink, relay: Relay
    ):
        super().__init__(name, mesh, waits)
        self._steps, self._link, self._relay = steps, link, relay
        self._prompts: set[int] = set()  # steps

    def receive(self, publication: Publication) -> None:
        """See `SamplingExecutor`."""
        with self.lasting(Publish(0, self.name, publication)):
            here = SingleDeviceSharding(jax.devices()[0])
            self._relay.take(
                publication, lambda tree: jax.tree.map(lambda _: here, tree), self.name
            )

    def encode(self, number: int) -> None:
        """See `SamplingExecutor`."""
        with self.lasting(Encode(0, self.name, number)):
            _ = self._steps[number]
        self._link.offer(ConditioningOf(self.name, number), _tree(PROMPTS))
        self._prompts.add(number)
        for old in [old for old in self._prompts if old < self._steps.first]:
            self._prompts.remove(old)
            self._link.withdraw(ConditioningOf(self.name, old))

    def decode(self, fragment: Fragment) -> None:
        """See `SamplingExecutor`."""
        super().decode(fragment)
        self._link.offer(SamplesOf(self.name, fragment), _tree(SAMPLES))

    def drop_fragment(self, fragment: Fragment) -> None:
        """See `SamplingExecutor`."""
        self._link.withdraw(SamplesOf(self.name, fragment))


class _NoDraws:
    """In place of `engine.draws.Draws`: nothing is drawn, and nothing compiled."""

    def of(self, step: int, serials: np.ndarray, images: np.ndarray) -> Drawn:
        """Zeros."""
        return Drawn(np.zeros(len(serials), np.uint32), None, 0, None)


def main(leader: str, name: str, what: str) -> None:
    """A rollout mesh."""
    mesh, waits, settings = json.loads(what)
    settings = Settings(**settings)
    waits = Waits(**waits | {"costs": Costs(**waits["costs"])})
    joining = join(_wire(), leader, name, mesh["devices"], HOST, nodes(None), None, LONGEST)
    with (
        closing(RewardPool(alone("waits", score), 0)) as pool,
        joining as (following, link),
    ):
        first = following.welcome.step
        shape = settings.images, settings.fragment_images
        steps = Steps(_records(settings.groups, first), *shape, _NoDraws(), first)
        relay = Relay(link, link, following, gives=True)
        sampler = LinkedSampler(name, Mesh(**mesh), waits, steps, link, relay)
        serve(following, Sampling(sampler, steps, link, WaitingJudge(waits, pool), relay))


def _records(groups: int, first: int) -> Iterator[list[dict[str, Any]]]:
    """The prompts of every step."""
    for step in itertools.count(first):
        yield [{"prompt": "", "serial": step * groups + number} for number in range(groups)]


if __name__ == "__main__":
    main(*sys.argv[1:])
