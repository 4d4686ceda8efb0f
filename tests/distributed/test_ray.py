"""The engine on a real Ray instance, one for all tests: order, errors, loss, and the memory of stored arrays."""

import gc
import importlib.util
import os
import pathlib
import signal
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.config.sections import PlacementSection
from digen_jax.distributed.engine import LOCAL, ProcessDied, RayEngine
from digen_jax.distributed.launch import check_devices
from digen_jax.distributed.transfer import TrainerTransfer, unpack
from digen_jax.distributed.worker_process import CallFailed
from digen_jax.errors import ConfigError, DivergedError
from digen_jax.parallel.placement import RolloutAxes, TrainerAxes
from digen_jax.rewards.errors import RewardFailed
from digen_jax.rewards.pool import RewardTimeout
from digen_jax.scheduling.commands import WeightsVersion
from tests.pipelines import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray not installed"),
]

LONG = 120.0  # seconds in which everything ends
VERSION = WeightsVersion(3)

ERRORS = {
    "reward": RewardFailed("reward 'x' raised KeyError"),
    "late": RewardTimeout("reward 'x' took too long"),
    "config": ConfigError("config.steps must be positive"),
    "diverged": DivergedError("NaN"),
    "other": CallFailed("rollout 0: out of memory"),
}


class Process:
    def __init__(self, name):
        self.name, self.seen, self.release = name, [], threading.Event()

    def __repr__(self):
        return self.name

    def pid(self):
        return os.getpid()

    def niceness(self):
        return os.getpriority(os.PRIO_PROCESS, 0)

    def note(self, number):
        self.seen.append(number)

    def noted(self):
        return self.seen

    def wait(self):
        assert self.release.wait(LONG)

    def let_go(self):
        self.release.set()

    def fail(self, kind):
        raise ERRORS[kind]

    def pair(self, size):
        return size, np.arange(size)

    def keep(self, *packed):
        """Holds an array on a JAX device, which may share the store's memory, and returns its sum plus one."""
        self.kept = jax.device_put(unpack(packed)["x"])
        donated = jax.device_put(unpack(packed)["x"])
        return float(jax.jit(lambda x: x + 1, donate_argnums=0)(donated).sum())

    def forget(self):
        del self.kept
        gc.collect()  # JAX's array and the store's view of it are a cycle


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # for the actors
        found = RayEngine(LOCAL, cpus=8)
        yield found
        found.close()


def test_a_cluster_that_does_not_answer_is_refused():
    with pytest.raises(ConfigError, match=r"--ray=127\.0\.0\.1:1"):
        RayEngine("127.0.0.1:1")


@pytest.fixture(scope="module")
def actor(engine):
    (made,) = engine.start(Process, [("one",)])
    return made


def done(future):
    return future.result(LONG)


def test_calls_of_a_group_are_executed_in_order_beside_those_of_others(engine, actor):
    blocked = engine.call(actor, "wait", group="work")
    calls = [engine.call(actor, "note", number, group="control") for number in range(500)]
    for call in calls:
        done(call)
    assert done(engine.call(actor, "noted", group="ping")) == list(range(500))
    assert not blocked.done()
    done(engine.call(actor, "let_go", group="sync"))
    done(blocked)


def test_an_actor_has_the_priority_of_the_process_that_starts_ray(engine, actor):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert done(engine.call(actor, "niceness", group="work")) == own


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_keeps_its_type_and_text(engine, actor, kind):
    with pytest.raises(type(ERRORS[kind])) as caught:
        done(engine.call(actor, "fail", kind, group="work"))
    assert type(caught.value) is type(ERRORS[kind]) and str(caught.value) == str(ERRORS[kind])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_calls_of_a_dead_process_fail(engine, number):
    (made,) = engine.start(Process, [("lost",)])
    pid = done(engine.call(made, "pid", group="work"))
    waiting = engine.call(made, "wait", group="work")
    os.kill(pid, number)
    if number == signal.SIGSTOP:  # a ping that is not answered tells the driver, who kills it
        engine.kill(made)
    with pytest.raises(ProcessDied):
        done(waiting)
    with pytest.raises(ProcessDied):
        done(engine.call(made, "pid", group="ping"))
    until(lambda: not pathlib.Path(f"/proc/{pid}").exists())


def test_the_second_of_a_pair_stays_until_it_is_asked_for(engine, actor):
    size, ref = engine.call_pair(actor, "pair", 10**6, group="work")
    assert done(size) == 10**6
    found = engine.get(ref)
    assert found[-1] == 10**6 - 1 and not found.flags.writeable


def test_donating_a_stored_array_does_not_change_the_store(engine, actor):
    """On CPUs JAX may use the store's read-only memory in place."""
    transfer = TrainerTransfer(engine)
    transfer.put(VERSION, {"x": jnp.ones(10**6)})
    for _ in range(2):
        total = done(engine.call(actor, "keep", *transfer.stored(VERSION), group="work"))
        assert total == 2e6
    found = unpack(map(engine.get, transfer.stored(VERSION)))
    np.testing.assert_array_equal(found["x"], np.ones(10**6))


def used(engine) -> int:
    """Bytes of the object store that are in use."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(engine.address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_dropped_version_is_freed_once_no_worker_has_its_arrays(engine, actor):
    size, transfer = 10**8, TrainerTransfer(engine)
    before = used(engine)
    transfer.put(VERSION, {"x": jnp.ones(size // 4)})
    done(engine.call(actor, "keep", *transfer.stored(VERSION), group="work"))
    assert used(engine) > before + size // 2
    transfer.delete(VERSION)
    done(engine.call(actor, "forget", group="work"))
    until(lambda: used(engine) < before + size // 2)


def test_gpus_that_an_autoscaler_may_add_are_waited_for(engine):
    """The config is written as an autoscaler does: up to 2 nodes with 4 GPUs each."""
    from ray.core.generated.autoscaler_pb2 import ClusterConfig, NodeGroupConfig
    from ray.experimental.internal_kv import _internal_kv_put

    def recipe(workers):
        axes = RolloutAxes(data=4, fsdp=1, workers=workers), TrainerAxes(data=4, fsdp=1, time=1)
        return SimpleNamespace(placement=PlacementSection("given", *axes))

    assert engine.most("GPU") == 0
    config = ClusterConfig(node_group_configs=[NodeGroupConfig(max_count=2)])
    config.node_group_configs[0].resources["GPU"] = 4
    key, namespace = b"__autoscaler_cluster_config", b"__autoscaler"
    _internal_kv_put(key, config.SerializeToString(), namespace=namespace)
    assert engine.most("GPU") == 8
    check_devices(recipe(1), engine, "GPU")
    with pytest.raises(ConfigError, match=r"needs 12 GPUs and the cluster has at most 8"):
        check_devices(recipe(2), engine, "GPU")
