"""Several training workers in one process: the same updates as of one, also where a worker is lost."""

import functools
import json
import threading

import jax
import numpy as np
import pytest

from digen_jax.runtime.checkpointing import InFlight
from digen_jax.runtime.training import GradientExecutor, OtherTrainingExecutor
from digen_jax.scheduling.commands import TRAINER, Train
from tests.cases import quick
from tests.distributed.test_algorithms import assert_same, replayed, run
from tests.distributed.test_algorithms import config as of_algorithm
from tests.parallel import toy
from tests.runtime.test_workers import intercept

pytestmark = pytest.mark.usefixtures("exact_and_split")

GROUPS = 6
# Three training workers of one device: they sample, too, or two rollout workers sample.
POOL = toy.meshes((0, 1), (1, 1), trainers=3)
APART = toy.meshes((1, 1), (1, 1), 2, trainers=3)
STALE = dict(runtime__max_policy_lag=1, runtime__max_off_policy_fraction=0.5)
LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets="inside|outside")


def config(layout, **fields):
    return toy.config(
        **layout,
        batch__groups=GROUPS,
        batch__images=4,
        sampler__chunk=4,
        trainer__micro_batch=2,
        trainer__learning_rate=3.0,
        trainer__eps=1.0,
        trainer__clip_norm=1e3,
        **fields,
    )


def trained_by(log):
    return {c.worker for c in log if isinstance(c, Train)}


def equal_bits(one, two):
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (one, two)))


@pytest.fixture(scope="module")
def alone(exact_and_split):
    """The change of what is tuned by three steps on one device."""
    c = config(toy.meshes((0, 1), (1, 1)))
    system = toy.system(c, 1)
    state, history, _ = toy.drive(system, c, 3)
    return changed(system, state), history


def changed(system, state):
    start = jax.device_get(system.start)
    return jax.tree.map(np.subtract, jax.device_get(state.tuned), start)


# Of each kind of samples, and of each kind of weights that are read.
NAMES = ("flow_grpo", "diffusion_nft", "flow_dppo", "dpo_offline")


@pytest.mark.parametrize("name", quick([(name,) for name in NAMES], 1))
def test_an_algorithm_trains_on_two_workers_as_on_one(name):
    c, pool = of_algorithm(name), of_algorithm(name)
    for one in (c, pool):
        one.trainer.micro_batch = one.trainer.micro_batch * 4 // one.sampler.chunk
        one.sampler.chunk = 4
        one.placement.rollout.data = 0
        one.runtime.max_policy_lag = 0
    pool.placement.trainer.workers = 2
    expected = run(toy.drive, toy.system(c, 1), c)
    found = run(toy.drive, toy.system(pool, 2), pool)
    assert_same(found, expected, rounding=1e-5)
    assert trained_by(found[3]) == {TRAINER, "worker 1"}


def test_all_devices_share_the_state_of_all_weights_and_the_home_worker_has_a_loras():
    pool = toy.meshes((0, 1), (1, 1), trainers=2)
    state = toy.fresh(toy.system(config(pool), 2))
    held = {}
    for leaf in jax.tree.leaves((state.tuned, state.optimizer)):
        assert len(leaf.sharding.device_set) == 2
        held.setdefault(leaf.size < 16, set()).add(leaf.addressable_shards[0].data.size / leaf.size)
    assert held == {True: {1}, False: {0.5}}
    lora = toy.fresh(toy.system(config(pool, **LORA), 2))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(lora)} == {1}


def test_with_a_policy_lag_each_chunk_is_trained_by_its_own_version():
    """The log, executed by one thread, gives the same sums; each ratio is to the version that sampled."""
    c = config(APART, algorithm__old_log_probs="recomputed", **STALE)
    system = toy.system(c, 5)
    found = run(toy.drive, system, c)
    assert max(metrics["policy_lag"] for metrics in found[2]) > 0
    assert len(trained_by(found[3])) > 1
    moved = replayed(system, c, found[3])
    assert toy.difference(found[1], moved) <= 1e-5


def test_equal_runs_give_equal_bits_also_where_one_is_continued():
    c = config(POOL, trainer__updates=2)
    system = toy.system(c, 5)
    state, history, log = toy.drive(system, c, 3)
    again, _, _ = toy.drive(system, c, 3)
    equal_bits(again.tuned, state.tuned)
    assert trained_by(log) == {TRAINER, "worker 1", "worker 2"}

    with toy.driver(system, c) as driver:
        driver.step()
        saved = jax.device_get((driver.executor.state, driver.in_flight.kept))
        scheduler = json.loads(json.dumps(driver.in_flight.scheduler))
    resumed = jax.device_put(saved[0], jax.tree.map(lambda a: a.sharding, toy.fresh(system)))
    steps = toy.batches(GROUPS)
    next(steps)
    options = dict(state=resumed, batches=steps, first=1, in_flight=InFlight(scheduler, {}))
    after, of_later, _ = toy.drive(system, c, 2, **options)
    equal_bits(after.tuned, state.tuned)
    assert [line["reward"] for line in of_later] == [line["reward"] for line in history[1:]]


# ------------------------------------------------------------------------------------ workers that are lost


@pytest.fixture(scope="module")
def systems(exact_and_split):
    """The system of a layout, whose programs all tests here use."""
    return functools.cache(lambda apart: toy.system(config(APART if apart else POOL), 5))


# A step has 6 chunks of 2 passes; each of three workers trains two chunks in it.
MOMENTS = {
    "its last piece of a step": (False, OtherTrainingExecutor, "train", 2),
    "a transfer to it": (True, GradientExecutor, "deliver", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_training_worker_that_fails_changes_nothing(alone, systems, monkeypatch, moment):
    apart, cls, method, first = MOMENTS[moment]
    expected, history = alone

    def fail(name, call):
        if call >= first:
            raise RuntimeError("it broke")

    calls = intercept(monkeypatch, method, fail, "worker 1", of=cls)
    c, system = config(APART if apart else POOL), systems(apart)
    state, found, log = toy.drive(system, c, 3)
    assert toy.difference(changed(system, state), expected) < 1e-4
    assert [m["reward"] for m in found] == pytest.approx([m["reward"] for m in history], abs=1e-5)
    last = [c for c in log if isinstance(c, Train)][-GROUPS:]
    assert calls["worker 1"] >= first and "worker 1" not in {c.worker for c in last}


def test_a_training_worker_that_hangs_is_removed(alone, systems, monkeypatch, capfd):
    released = threading.Event()
    intercept(
        monkeypatch,
        "train",
        lambda name, call: call < 3 or released.wait(),
        "worker 2",
        of=OtherTrainingExecutor,
    )
    c, system = config(POOL, runtime__deadline=4.0), systems(False)
    state, _, log = toy.drive(system, c, 3)
    released.set()
    expected, _ = alone
    assert toy.difference(changed(system, state), expected) < 1e-4
    assert "worker 2 hangs: training on chunk" in capfd.readouterr().err
    assert "worker 2" not in {c.worker for c in log if isinstance(c, Train) and c.chunk.step == 2}
