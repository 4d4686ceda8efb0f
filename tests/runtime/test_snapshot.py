"""What a driver says of its workers while they work, wait, and are lost; they only wait for a gate."""

import re
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from benchmarks.waits import WaitingExecutors, Waits
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.clock import remote_work
from digen_jax.runtime.driver import Driver
from digen_jax.scheduling.commands import TRAINER, Generate, SyncWeights, Train, Update
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout

COSTS = Costs(generate=0.01, train=0.01, decode=0.01, encode=0.01, score=0.01, update=0.01)
SETTINGS = Settings(steps=3, groups=2, images=2, chunk_images=2, max_policy_lag=0, ordered=True)
GENERATING = "generating chunk [01] of step 0"  # either of them, by whose weights came first


class Gates(WaitingExecutors):
    """Commands of some kinds wait for their gates."""

    def __init__(self):
        rollouts = (WorkerLayout(2, ("sample",)),) * 2
        super().__init__(Waits(COSTS, SETTINGS), (WorkerLayout(4, ("train",)), *rollouts))
        self.gates = {kind: threading.Event() for kind in (Generate, Train, Update, SyncWeights)}
        self.scores = threading.Event()
        self.gates[SyncWeights].set()

    def do(self, command):
        """Waits for a gate, which counts as a fixed time: the scheduler prefers faster workers."""
        if type(command) in self.gates:
            with remote_work(lambda: 0.01) as counts:
                assert self.gates[type(command)].wait(60)
                counts(0.01)

    def reward(self, images, prompts, metadata):
        assert self.scores.wait(60)
        return np.arange(len(images), dtype=np.float32)


@pytest.fixture
def gates():
    return Gates()


@pytest.fixture
def driver(gates):
    with (
        closing(RewardPool(alone("mine", gates.reward), 0)) as rewards,
        closing(Driver(gates, Scheduler(SETTINGS, COSTS), rewards)) as driver,
    ):
        yield driver
        for gate in (*gates.gates.values(), gates.scores):
            gate.set()


def awaited(driver, worker, does=".*", **fields):
    """The snapshot as soon as a worker's fields have these values, and its present command is such."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = driver.snapshot()
        own = found["workers"][worker]
        if fields.items() <= own.items() and re.fullmatch(does, own["does"] or ""):
            return found
        time.sleep(0.01)
    raise AssertionError(own)


def test_a_snapshot_says_what_each_worker_does_or_waits_for_and_since_when(gates, driver):
    begin = time.time()
    awaited(driver, TRAINER, waits="sampling")
    found = awaited(driver, "rollout 0", GENERATING)
    assert (found["step"], found["steps"], found["scoring"]) == (0, 3, 0)
    assert list(found["workers"]) == ["rollout 0", "rollout 1", TRAINER]
    first, trainer = found["workers"]["rollout 0"], found["workers"][TRAINER]
    assert first | {"since": 0, "does": 0} == {
        **dict(devices=2, lost=None, does=0, waits=None, since=0, holds=[0], arrives=[])
    }
    assert begin - 1 < first["since"] <= time.time()
    assert trainer | {"since": 0} == {
        **dict(devices=4, lost=None, does=None, waits="sampling", since=0, holds=[0], arrives=[])
    }
    again = driver.snapshot()["workers"][TRAINER]["since"]
    assert again == pytest.approx(trainer["since"], abs=1)

    gates.gates[Generate].set()
    found = awaited(driver, TRAINER, waits="reward")
    assert found["scoring"] == 2
    gates.scores.set()
    ended = threading.Event()
    thread = threading.Thread(target=lambda: [driver.step(), ended.set()], daemon=True)
    thread.start()
    awaited(driver, TRAINER, "training on chunk 0 of step 0", waits=None)
    gates.gates[Train].set()
    awaited(driver, TRAINER, "update 0 of step 0")
    awaited(driver, "rollout 1", waits="update")
    gates.gates[SyncWeights].clear()
    gates.gates[Generate].clear()
    gates.gates[Update].set()
    assert ended.wait(30)
    thread.join()
    assert awaited(driver, "rollout 0", arrives=[1], waits="weights")["step"] == 1
    gates.gates[SyncWeights].set()
    # Not what it generates: a worker that a busy machine slowed down in step 0 may leave all chunks to the other.
    awaited(driver, "rollout 0", holds=[1], arrives=[])
