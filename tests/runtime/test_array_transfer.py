"""The transfer of one process: who takes what was offered, and when its arrays may be overwritten."""

import gc
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from digen_jax.runtime import array_transfer as links
from digen_jax.runtime.array_transfer import ArrayTransfer, ConditioningKey, SamplesKey
from digen_jax.scheduling.commands import Chunk, WeightsVersion

WEIGHTS = WeightsVersion(3)


def on(number):
    """Shardings on one device."""
    place = SingleDeviceSharding(jax.devices()[number])
    return lambda tree: jax.tree.map(lambda _: place, tree)


def tree():
    return {"a": jnp.arange(4.0), "b": jnp.ones(2)}


@pytest.fixture
def held(monkeypatch):
    """A transfer that has begun and ends when the event is set: (transfer, its thread, the event)."""
    transfer, begun, end, real = (
        ArrayTransfer(),
        threading.Event(),
        threading.Event(),
        links.resharded,
    )

    def slow(*arguments):
        begun.set()
        assert end.wait(60)
        return real(*arguments)

    monkeypatch.setattr(links, "resharded", slow)
    transfer.put(WEIGHTS, tree())
    thread = threading.Thread(target=transfer.get, args=(WEIGHTS, on(1), "rollout 0"))
    thread.start()
    assert begun.wait(60)
    yield transfer, thread, end
    end.set()
    thread.join(60)


def test_a_tree_is_available_on_a_receivers_devices_until_it_is_deleted():
    transfer, given = ArrayTransfer(), tree()
    assert transfer.get(WEIGHTS, on(1), "rollout 0") is None
    transfer.put(WEIGHTS, given)
    found = transfer.get(WEIGHTS, on(1), "rollout 0")
    jax.tree.map(np.testing.assert_array_equal, found, given)
    assert {leaf.sharding for leaf in jax.tree.leaves(found)} == {on(1)(given)["a"]}
    here = transfer.get(WEIGHTS, on(0), "trainer")
    assert here["a"].unsafe_buffer_pointer() == given["a"].unsafe_buffer_pointer()
    transfer.delete(WEIGHTS)
    assert transfer.get(WEIGHTS, on(1), "rollout 0") is None


def test_draining_waits_for_transfers_in_progress(held):
    transfer, _, end = held
    settled = []
    waiting = threading.Thread(target=lambda: settled.append(transfer.drain(WEIGHTS)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not settled
    end.set()
    waiting.join(60)
    assert settled == [True]


def test_arrays_that_a_removed_worker_may_still_read_are_not_overwritten(held):
    transfer, thread, _ = held
    transfer.drop_peer("rollout 0")
    assert transfer.drain(WEIGHTS) is False and thread.is_alive()


def test_the_trees_of_a_removed_worker_are_deleted():
    transfer, chunk = ArrayTransfer(), Chunk(0, 1)
    keys = [
        key(worker, place)
        for worker in ("rollout 0", "rollout 1")
        for key, place in ((SamplesKey, chunk), (ConditioningKey, 0))
    ]
    for key in (*keys, WEIGHTS):
        transfer.put(key, tree())
    transfer.drop_peer("rollout 0")
    found = [transfer.get(key, on(0), "trainer") is not None for key in (*keys, WEIGHTS)]
    assert found == [False, False, True, True, True]


def test_several_threads_may_read_a_tree_at_once():
    """JAX lists an array's shards at their first use, twice where two threads come together."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    arrays = [jax.device_put(np.float32([n, 1]), sharding) for n in range(200)]
    ArrayTransfer().put(WeightsVersion(1), {"weights": arrays})
    together, found = threading.Barrier(2), []
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()

    def read():
        for array in arrays:
            together.wait()
            found.append(len(array.addressable_shards))

    # Threads that meet so often change turns in the middle of it.
    gc.set_threshold(1)
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert found == [1] * 400
