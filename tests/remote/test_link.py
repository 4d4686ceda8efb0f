"""The link between two processes, here two ends in one: the same trees as in one process, and limits on every wait."""

import contextlib
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from digen_jax.engine.packing import Endpoints
from digen_jax.engine.sampler import EncodedPrompts
from digen_jax.flow.sampling import Transitions
from digen_jax.process import ending
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote import frames, lending
from digen_jax.remote.identity import Identity
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.messages import write_key
from digen_jax.remote.outline import nodes
from digen_jax.remote.pull import Pulls
from digen_jax.remote.wire import Peer, PeerError, Wire
from digen_jax.rewards import Scores
from digen_jax.rewards.exchanges import Exchange
from digen_jax.runtime.image_statistics import look
from digen_jax.runtime.judging import Judged
from digen_jax.runtime.link import ConditioningOf, Link, LinkError, LocalLink, SamplesOf, ScoresOf
from digen_jax.runtime.scores import Kept
from digen_jax.scheduling.commands import TRAINER, Fragment, Publication
from tests.remote.mesh_process import IDENTITY

WEIGHTS, FRAGMENT = Publication(3), Fragment(1, 2)


class Conditioning(NamedTuple):
    context: jax.Array
    mask: jax.Array


def trees() -> dict:
    rng = np.random.default_rng(0)

    def drawn(*shape, dtype=np.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    steps = Transitions(drawn(2, 4, 8), drawn(2, 4, 8, dtype=jnp.bfloat16), *drawn(3, 2, 4), None)
    keys = jax.random.split(jax.random.key(3), 4)
    return {
        WEIGHTS: {"transformer": {"b": {"kernel": drawn(16, 8)}, "a": drawn(3), "scale": drawn()}},
        Publication(3, evaluated=True): {"none": None, "empty": drawn(0, 4), "list": [drawn(2)]},
        SamplesOf("rollout 0", FRAGMENT): (steps, drawn(5)),
        SamplesOf("rollout 0", Fragment(1, 3)): (Endpoints(drawn(4, 2), keys, drawn(5)), drawn(5)),
        ConditioningOf("rollout 0", 1): EncodedPrompts(
            Conditioning(drawn(4, 6, dtype=jnp.bfloat16), drawn(4, 6) > 0), None
        ),
        ConditioningOf("rollout 0", 2): {
            "numbers": (1, 2.5, True, float("inf"), np.float32(3)),
            "rbg": jax.random.key(5, impl="rbg"),
            "nan": jnp.asarray([np.nan, -0.0, np.inf]),
            "host": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T,
        },
    }


def onto(*numbers: int):
    """Shardings over some devices, of what can be split, else whole."""
    mesh = Mesh(np.array(jax.devices())[list(numbers)], ("fsdp",))

    def of(leaf):
        parts = getattr(leaf, "shape", ())
        split = parts and parts[0] and parts[0] % len(numbers) == 0
        return NamedSharding(mesh, PartitionSpec("fsdp") if split else PartitionSpec())

    return lambda tree: jax.tree.map(of, tree)


def bits(leaf) -> tuple:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.dtype, leaf.sharding, np.asarray(jax.random.key_data(leaf)).tobytes()
    kind = leaf.dtype, leaf.shape, getattr(leaf, "weak_type", False)
    return *kind, leaf.sharding, np.asarray(leaf).tobytes()


def assert_same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert bits(leaf) == bits(other)


def assert_same_on_host(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        leaf, other = np.asarray(leaf), np.asarray(other)
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        assert leaf.tobytes() == other.tobytes()


@contextlib.contextmanager
def ends(patience: float = 20.0):
    """(the trainer's link, the rollout's, their servers): each takes from the other."""
    found = [RemoteLink(Wire(IDENTITY), nodes(trees()), None, patience) for _ in range(2)]
    servers = [Wire(IDENTITY).server("localhost:0", [link.lending.service]) for link in found]
    trainer, rollout = found
    trainer.meet("rollout 0", f"localhost:{servers[1][1]}")
    rollout.meet(TRAINER, f"localhost:{servers[0][1]}")
    yield *found, servers
    for link, (server, _) in zip(found, servers, strict=True):
        link.close()
        server.stop(0)


@pytest.fixture
def pair():
    with ends() as found:
        yield found


@pytest.mark.parametrize("key", trees(), ids=str)
def test_every_tree_arrives_as_in_one_process(pair, key, monkeypatch):
    tree, local, taker = trees()[key], LocalLink(), "anyone"
    # Small frames, so that arrays are cut.
    monkeypatch.setattr(frames, "FRAME", 300)
    here, there = (pair[0], pair[1]) if isinstance(key, Publication) else (pair[1], pair[0])
    assert isinstance(here, Link)
    for link in (local, here):
        link.offer(key, tree)
    for shardings in (onto(1), onto(2, 3)):
        assert_same(there.take(key, shardings, taker), local.take(key, shardings, taker))
    there.withdraw(key)
    for _ in range(100):
        if (found := there.take(key, onto(1), taker)) is None:
            break
        time.sleep(0.02)
    assert found is None and here.settle(key)


def test_what_is_offered_here_is_taken_here(pair):
    """As TAG does: the trainer takes what it has made itself."""
    key, tree = SamplesOf(TRAINER, FRAGMENT), {"a": jnp.ones(3)}
    pair[0].offer(key, tree)
    assert_same(
        pair[0].take(key, onto(0), TRAINER), LocalLink.take(pair[0]._here, key, onto(0), "")
    )
    pair[0].withdraw(key)
    assert pair[0].take(key, onto(0), TRAINER) is None


def test_scores_are_fetched_to_the_host(pair):
    key, pictures = ScoresOf("rollout 0", FRAGMENT), np.arange(24, dtype=np.uint8)
    pictures = pictures.reshape(2, 2, 2, 3)
    scores = Scores(np.float32([[1, np.nan], [3, 4]]), {"mine/shown": np.float32([5, 6])})
    asked = Exchange("judge é", -2.5, -0.5, 2, None), Exchange("judge é", -4.0, -3.0, 2, "late")
    kept = Kept(np.array([1]), pictures[1:])
    sent = Judged(scores, np.float32([0.5, 7]), 0.25, asked, look(pictures), kept, pictures[:0])
    pair[1].offer(key, sent)
    found = pair[0].fetch(key, TRAINER)
    assert isinstance(found, Judged) and found.exchanges == asked and found.seconds == 0.25
    assert_same_on_host(found._replace(exchanges=()), sent._replace(exchanges=()))
    assert isinstance(found.clips, np.ndarray) and found.clips.shape == (0, 2, 2, 3)
    assert pair[0].fetch(ScoresOf("rollout 0", Fragment(9, 9)), TRAINER) is None


def test_a_giver_that_hangs_or_is_gone_is_an_error_in_time(monkeypatch):
    over = threading.Event()
    with ends(patience=0.5) as (trainer, rollout, servers):
        trainer.offer(WEIGHTS, {"a": jnp.ones(4)})
        monkeypatch.setattr(lending, "frame", lambda *_: over.wait(60) and b"")
        begin = time.monotonic()
        with pytest.raises(
            LinkError, match=r"version=3.* has not come from trainer: Deadline Exceeded"
        ):
            rollout.take(WEIGHTS, onto(1), "rollout 0")
        servers[0][0].stop(0).wait(5)
        with pytest.raises(LinkError, match="has not come from trainer"):
            rollout.take(WEIGHTS, onto(1), "rollout 0")
        assert time.monotonic() - begin < 50
        over.set()


def test_strangers_and_nonsense_are_refused(pair):
    trainer, _, servers = pair
    trainer.offer(WEIGHTS, {"a": jnp.ones(4)})
    where = f"localhost:{servers[0][1]}"
    stranger = Peer(Wire(Identity("another-token-of-16", "c", "v")), where)
    with pytest.raises(PeerError, match="its job token differs"):
        stranger.call("Open", pb.Ask(key=write_key(WEIGHTS)), pb.Lent, 5)
    peer = Peer(Wire(IDENTITY), where)
    lent = peer.call("Open", pb.Ask(key=write_key(WEIGHTS), taker="x"), pb.Lent, 5)
    for method, request, sentence in [
        ("Open", pb.Ask(key="x"), "a key that cannot be read"),
        ("Read", pb.Piece(ticket="x"), "this transfer has ended"),
        ("Read", pb.Piece(ticket=lent.ticket, number=7), "there is no such frame"),
        ("Stage", pb.Wanted(ticket=lent.ticket), "it offers bytes only"),
        ("Other", pb.Ask(), "Method not found"),
    ]:
        with pytest.raises(PeerError, match=sentence):
            peer.call(method, request, None, 5)
    assert trainer.lending.lends(WEIGHTS)
    peer.call("Close", pb.Piece(ticket=lent.ticket), pb.Nothing, 5)
    assert not trainer.lending.lends(WEIGHTS)
    for one in (peer, stranger):
        one.close()


def test_frames_are_bounded_and_checked():
    arrays = [jax.ShapeDtypeStruct((n,), np.float32) for n in (1000, 0, 3, 5)]
    planned = frames.plan(arrays, 1000)
    sizes = [sum(cut.stop - cut.start for cut in cuts) for cuts in planned]
    assert max(sizes) <= 1000 and sum(sizes) == 4 * 1008 and len(planned) > 3
    data = [np.arange(a.size, dtype=np.float32) for a in arrays]
    made = [frames.frame(cuts, lambda i: frames.to_bytes(data[i])) for cuts in planned]
    found = dict(frames.gathered(arrays, iter(made), 1000))
    assert all(np.array_equal(found[i], data[i]) for i in range(4))
    many = [jax.ShapeDtypeStruct((), np.float32)] * 5000
    assert max(map(len, frames.plan(many))) == frames.MOST
    for wrong in (made[1:], [made[-1], *made[1:]], [b"x" * 50, *made[1:]], made[:-1]):
        with pytest.raises(ValueError):
            list(frames.gathered(arrays, iter(wrong), 1000))


def test_a_transfer_between_devices_that_hangs_keeps_nobody_waiting():
    pulls = Pulls("127.0.0.1", 0.3)
    end = threading.Event()
    with pytest.raises(TimeoutError, match=r"from there: it has not ended in 0\.3 s"):
        pulls._in_time("there", lambda: end.wait(20))
    pulls._patience = 30.0
    given_up = threading.Timer(0.2, pulls.give_up, ("there",))
    given_up.start()
    with pytest.raises(TimeoutError, match="from there: it was given up"):
        pulls._in_time("there", lambda: end.wait(20))
    with pytest.raises(KeyError):
        pulls._in_time("there", lambda: {}["x"])
    end.set()
    assert pulls._in_time("there", lambda: 3) == 3 and not pulls._pulling
    ending._hung.clear()
