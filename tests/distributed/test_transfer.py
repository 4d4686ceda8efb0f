"""Trees of arrays on their way to another process, and when they are freed."""

import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.distributed.engine import ProcessDied
from digen_jax.distributed.transfer import (
    Mailbox,
    Shares,
    TrainerTransfer,
    WorkerTransfer,
    pack,
    received,
    unpack,
)
from digen_jax.distributed.worker_process import Member, RolloutProcess
from digen_jax.distributed.workers import WorkerProxy
from digen_jax.runtime.array_transfer import (
    ConditioningKey,
    EmbeddingsKey,
    ExactWeightsKey,
    SamplesKey,
    TransferError,
)
from digen_jax.scheduling.commands import TRAINER, Chunk, WeightsVersion
from tests.distributed.local_engine import LocalEngine

VERSION = WeightsVersion(3)
SAMPLES = SamplesKey("rollout 0", Chunk(0, 1))


def tree():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    split = NamedSharding(mesh, PartitionSpec("data"))
    return {
        "float": jax.device_put(jnp.arange(24.0).reshape(8, 3), split),
        "half": (jnp.arange(5) / 3).astype(jnp.bfloat16),
        "one": jnp.float32(2.5),
        "none": None,
        "keys": jax.random.split(jax.random.key(7), 4),
        "host": (np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1], "text", 5),
    }


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not isinstance(other, jax.Array | np.ndarray):
            assert one == other
            continue
        assert one.dtype == other.dtype and one.shape == other.shape
        if jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("piece", [2**28, 16, 8])
def test_a_tree_arrives_as_it_was_sent_in_pieces_of_any_size(piece):
    sent = tree()
    packed = pack(sent, piece)
    sizes = [sum(part.nbytes for part in parts) for parts in packed[1:]]
    assert max(sizes) <= piece
    assert_equal(unpack(pickle.loads(pickle.dumps(packed))), sent)


def test_a_version_is_stored_once_for_all_workers_until_it_is_dropped():
    engine = LocalEngine()
    transfer = TrainerTransfer(engine)
    assert transfer.stored(VERSION) is None  # it is not offered
    transfer.put(VERSION, tree())
    first, second = transfer.stored(VERSION), transfer.stored(VERSION)
    assert first == second
    assert_equal(unpack(map(engine.get, first)), tree())
    assert transfer.drain(VERSION)  # copies were sent: the arrays may be overwritten
    assert transfer.stored(VERSION) is None and not transfer._stored


def test_a_version_that_is_dropped_while_it_is_stored_is_not_kept(monkeypatch):
    engine, storing, go_on = LocalEngine(), threading.Event(), threading.Event()
    transfer, put = TrainerTransfer(engine), engine.put

    def slow(value):
        storing.set()
        assert go_on.wait(60)
        return put(value)

    monkeypatch.setattr(engine, "put", slow)
    transfer.put(VERSION, {"a": jnp.ones(3)})
    thread = threading.Thread(target=transfer.stored, args=(VERSION,))
    thread.start()
    assert storing.wait(60)
    transfer.delete(VERSION)
    go_on.set()
    thread.join(60)
    assert not thread.is_alive() and not transfer._stored


def test_samples_stay_on_their_worker_until_they_are_needed():
    engine = LocalEngine()
    transfer = TrainerTransfer(engine)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])

    def on_device(tree):
        return jax.tree.map(lambda _: sharding, tree)

    transfer.put_ref(SAMPLES, engine.put(pack({"x": jnp.arange(3)})))
    taken = transfer.get(SAMPLES, on_device, "trainer")["x"]
    assert taken.sharding == sharding and taken.tolist() == [0, 1, 2]
    transfer.delete(SAMPLES)
    assert transfer.get(SAMPLES, on_device, "trainer") is None
    transfer.put_ref(SAMPLES, engine.put(None))  # its chunk was dropped before it was decoded
    assert transfer.get(SAMPLES, on_device, "trainer") is None
    transfer.drop_peer("rollout 0")
    assert not transfer._refs


def test_the_trainers_other_processes_get_samples_from_the_first_one():
    engine = LocalEngine()
    (mailbox,) = engine.start(Mailbox, [()])
    first, *others = (TrainerTransfer(engine, Shares(mailbox, number, 3)) for number in range(3))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def take(transfer, key):
        found = transfer.get(key, lambda tree: jax.tree.map(lambda _: sharding, tree), "trainer")
        return None if found is None else found["x"].tolist()

    # Another worker's chunk comes first in the other processes, whose prompts are the same.
    prompts = [ConditioningKey(f"rollout {number}", 0) for number in range(2)]
    for key, value in {prompts[0]: 1, SAMPLES: 2}.items():
        first.put_ref(key, engine.put(pack({"x": jnp.full(2, value)})))
        assert take(first, key) == [value] * 2
    for other in others:
        assert take(other, prompts[1]) == [1, 1]
    assert take(others[0], SAMPLES) == [2, 2]
    others[1].delete(SAMPLES)  # it was dropped there
    assert take(others[0], SAMPLES) is None
    assert not mailbox.object._refs


def test_weights_of_several_processes_are_gathered_when_they_become_available():
    """Later only the first process is asked for them, and alone it cannot gather."""
    engine = LocalEngine()
    (mailbox,) = engine.start(Mailbox, [()])
    transfer = TrainerTransfer(engine, Shares(mailbox, 0, 2))
    weights = {"x": jnp.arange(3.0)}
    transfer.put(VERSION, weights)
    weights["x"].delete()
    assert unpack(map(engine.get, transfer.stored(VERSION)))["x"].tolist() == [0, 1, 2]
    transfer.delete(VERSION)
    assert transfer.stored(VERSION) is None


def test_other_workers_get_what_the_trainer_or_a_training_worker_has():
    """The trainer's arrays are stored once; those of others are fetched, and passed on as they are."""
    transfer, own = TrainerTransfer(engine := LocalEngine()), SamplesKey(TRAINER, Chunk(0, 0))
    transfer.put(own, tree())
    refs = transfer.stored(own)
    assert transfer.stored(own) == refs
    assert_equal(received([*map(engine.get, refs)]), tree())
    transfer.end_step(0)
    assert transfer.stored(own) is None and not transfer._stored

    fetched, other = [], SamplesKey("worker 1", Chunk(0, 1))

    def send(key):
        fetched.append(key)
        return engine.put(pack(tree()))

    transfer.sources["worker 1"] = send
    (ref,) = transfer.stored(other)
    assert fetched == [other]
    assert_equal(received([engine.get(ref)]), tree())
    transfer.drop_peer("worker 1")
    assert transfer.stored(other) is None and fetched == [other]
    assert received([]) is None and received([None]) is None


def test_a_call_that_lacks_trees_is_repeated_with_them():
    class Process(RolloutProcess):
        def __init__(self):
            super().__init__("worker 1", {}, "", [])
            self._transfer = WorkerTransfer()

        def read(self, key):
            found = self._transfer.get(key, lambda tree: jax.tree.map(on_first, tree), "worker 1")
            return None if found is None else float(found["x"].sum())

    def on_first(_):
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    transfer, weights = TrainerTransfer(engine := LocalEngine()), ExactWeightsKey(VERSION)
    transfer.sources[EmbeddingsKey.worker] = lambda key: engine.put(
        pack({"x": np.float32([len(prompt) for prompt in key.prompts])})
    )
    proxy = WorkerProxy(
        "worker 1", Member(1, "", 0, "cpu"), engine.start(Process, [()]), engine, transfer
    )
    transfer.put(weights, {"x": jnp.arange(3.0)})
    assert engine.get(proxy._work("read", weights)) == 3
    transfer.delete(weights)
    assert engine.get(proxy._work("read", weights)) is None
    assert engine.get(proxy._work("read", EmbeddingsKey(("a star", "a")))) == 7
    assert not engine.actors[0].object._transfer._trees and not transfer._refs


def test_a_lost_object_is_an_error_that_names_what_was_lost(monkeypatch):
    transfer = TrainerTransfer(engine := LocalEngine())
    transfer.put_ref(SAMPLES, engine.put(None))

    def lost(ref):
        raise ProcessDied("its node died")

    monkeypatch.setattr(engine, "get", lost)
    with pytest.raises(TransferError, match="rollout 0"):
        transfer.get(SAMPLES, lambda tree: tree, "trainer")
