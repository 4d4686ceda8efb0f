"""The driver with a mesh in another process, whose work is pretended: what it fails by, and what takes too long."""

import contextlib
import dataclasses
import threading
import time

import pytest

from digen_jax.benchmark.waits import WaitingExecutors, Waits, score
from digen_jax.remote import serving
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.remote.wire import Wire
from digen_jax.rewards import alone
from digen_jax.rewards.mistakes import RewardMistake
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime import driver as driving
from digen_jax.runtime.clock import part
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.watch import Watch
from digen_jax.scheduling.commands import (
    TRAINER,
    Decode,
    Deliver,
    Generate,
    Publish,
)
from digen_jax.scheduling.deadlines import Deadline
from digen_jax.scheduling.planner.simulate import Layout, Mesh
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from tests.remote.mesh_process import IDENTITY
from tests.remote.rooms import mesh

NAME = "rollout 0"
SETTINGS = Settings(steps=3, groups=2, images=2, fragment_images=2, staleness=0)
COSTS = Costs(generate=0.005, train=0.005, decode=0.002, score=0.001)
WAITS = Waits(COSTS, 2, 2, 0.0, 0)


class Beyond(WaitingExecutors):
    """Waits, but for what is the remote mesh's."""

    def __init__(self, sampler: RemoteSampler):
        super().__init__(WAITS, Layout(Mesh(), (Mesh(),)))
        self.sampler, self.gone = sampler, []

    def do(self, command):
        if getattr(command, "worker", TRAINER) == TRAINER or isinstance(command, Deliver):
            return super().do(command)
        return self.sampler._do(lambda serial: dataclasses.replace(command, serial=serial))

    def give_up(self, worker):
        self.gone.append((worker, time.monotonic()))
        self.sampler.give_up()


class Works:
    """A mesh that does `arranged` for its first command of a kind, and else nothing."""

    def __init__(self, kind, arranged):
        self._kind, self._arranged, self.began = kind, [arranged], 0.0

    def do(self, command):
        if isinstance(command, self._kind) and self._arranged:
            self.began = time.monotonic()
            self._arranged.pop()()

    def drop(self, command):
        pass


@contextlib.contextmanager
def driven(room, works, **options):
    with (
        mesh(room, executes=works),
        contextlib.closing(RewardPool(alone("waits", score), 0)) as rewards,
    ):
        link = RemoteLink(Wire(IDENTITY), {})
        sampler = RemoteSampler(room.joined(NAME), link)
        made = Driver(Beyond(sampler), Scheduler(SETTINGS, COSTS), rewards, **options)
        with contextlib.closing(made):
            yield made


def test_a_mistake_of_a_reward_there_ends_the_run_and_costs_no_mesh(room):
    def returns_nonsense():
        raise RewardMistake("reward 'mine' returned 3 values\n  for 4 images")

    with driven(room, Works(Decode, returns_nonsense)) as driver:
        with pytest.raises(RewardMistake, match="returned 3 values\n  for 4 images"):
            driver.step()
        assert not driver.executor.gone and NAME in room.leader.meshes


def test_a_reward_on_the_mesh_there_is_shown_apart(room):
    def scores():
        time.sleep(0.02)
        with part("score"):
            time.sleep(0.05)

    with driven(room, Works(Decode, scores)) as driver:
        driver.step()
    first = next(i for i in driver.intervals if i.worker == NAME and i.kind == "score")
    assert first.seconds >= 0.05 and first.start > 0


@pytest.fixture
def end():
    """Set at a test's end, so that its hung threads do not hang in others."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("kind", [Generate, Publish])
def test_a_command_that_hangs_there_costs_its_mesh_in_time(room, kind, end, monkeypatch, capfd):
    noted = []
    monkeypatch.setattr(driving, "hangs", noted.append)
    monkeypatch.setattr(serving, "hangs", noted.append)
    with contextlib.closing(Watch(Deadline(0.7))) as watch:
        works = Works(kind, lambda: end.wait(60))
        with driven(room, works, watch=watch) as driver:
            driver.step()  # by the trainer
            ((name, when),) = driver.executor.gone
    assert name == NAME == noted[0] and 0.7 < when - works.began < 50
    assert "rollout 0 hangs: " in capfd.readouterr().err
