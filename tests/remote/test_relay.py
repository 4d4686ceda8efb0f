"""Weights fan out as a tree: meshes that take from one another, and givers that fail."""

import contextlib
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from digen_jax.process.ending import Stopped
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote import frames, lending
from digen_jax.remote.opening import join, lead
from digen_jax.remote.outline import nodes
from digen_jax.remote.relay import Relay
from digen_jax.remote.serving import serve
from digen_jax.remote.wire import Wire
from digen_jax.runtime.link import CopyOf, Link
from digen_jax.scheduling.commands import Publication
from tests.processes import begin  # noqa: F401
from tests.remote.fan_process import SMALL, takes, tree
from tests.remote.mesh_process import FAST, IDENTITY
from tests.remote.test_link import WEIGHTS, assert_same, ends, onto

ONE, TWO = Publication(1), Publication(2)


class Fan:
    """A leader and meshes in threads of this process, each with a server of its own.

    Attributes:
      read: (giver's service, taker, start, end) of each frame.
    """

    def __init__(self, monkeypatch, stack: contextlib.ExitStack, count: int, frame: float):
        self.read, self._lock = [], threading.Lock()
        self._watch(monkeypatch, frame)
        monkeypatch.setattr(frames, "FRAME", SMALL)
        joined, known = queue.Queue(), nodes(None)
        options = dict(joined=joined.put, keepalive=FAST)
        _, self.link, address = stack.enter_context(
            lead(Wire(IDENTITY), "127.0.0.1:0", known, **options)
        )
        self.samplers, self.executors, self.links = [], [], []
        for number in range(count):
            following, link = stack.enter_context(
                join(Wire(IDENTITY), address, f"rollout {number}", 1, "127.0.0.1", known)
            )
            sampling, executor = takes(following, link, onto(number, number + 1))
            threading.Thread(target=self._serve, args=(following, sampling), daemon=True).start()
            self.samplers.append(joined.get(timeout=20))
            self.executors.append(executor)
            self.links.append(link)

    def _serve(self, following, sampling) -> None:
        with contextlib.suppress(Stopped):
            serve(following, sampling)

    def _watch(self, monkeypatch, frame: float) -> None:
        real = lending.Lending._read

        def read(service, piece, context):
            start, found = time.monotonic(), service._tickets.get(piece.ticket)
            time.sleep(frame)
            answer = real(service, piece, context)
            with self._lock:
                self.read.append((service, found.taker, start, time.monotonic()))
            return answer

        monkeypatch.setattr(lending.Lending, "_read", read)

    def receive(self, publication: Publication) -> None:
        """Has all meshes take a publication at the same time."""
        with ThreadPoolExecutor(len(self.samplers)) as threads:
            taking = [threads.submit(sampler.receive, publication) for sampler in self.samplers]
            for one in taking:
                one.result(30)

    def spans(self, link) -> list[tuple[float, float]]:
        """From the first to the last frame of each transfer that a link has given."""
        found: dict = {}
        for service, taker, start, end in self.read:
            if service is link.lending:
                first, last = found.get(taker, (start, end))
                found[taker] = min(first, start), max(last, end)
        return [*found.values()]


def test_meshes_take_from_one_another_the_same_bits(monkeypatch):
    with contextlib.ExitStack() as stack:
        fan, weights = Fan(monkeypatch, stack, 4, 0.005), tree()
        fan.link.offer(ONE, weights)
        fan.receive(ONE)
        for number, executor in enumerate(fan.executors):
            placed = jax.device_put(weights, onto(number, number + 1)(weights))
            assert_same(executor.weights[ONE], placed)
        spans = [fan.spans(link) for link in (fan.link, *fan.links)]
        assert sum(map(len, spans)) == 4 and len(spans[0]) < 4
        for its in spans:
            assert all(sum(a <= start < b for a, b in its) <= 2 for start, _ in its)
        # A drop ends all offers, and whoever asks a mesh turns to the trainer.
        fan.link.withdraw(ONE)
        for sampler in fan.samplers:
            sampler.drop_weights(ONE)
        fan.receive(TWO)  # not offered: nobody gets it
        assert not any(executor.weights for executor in fan.executors)
        assert not any(link._here._offered for link in fan.links)


class Stream:
    """In place of `Following`: names a giver once."""

    name, ends = "rollout 1", False

    def __init__(self, address: str, seconds: float = 5.0):
        giver = pb.Giver(mesh="rollout 0", address=address, seconds=seconds)
        self.givers, self.said = {WEIGHTS: giver}, []

    def missed(self, giver: str, failed: bool) -> None:
        self.said.append((giver, failed))


@pytest.mark.parametrize("how", ["gives", "has it not", "is gone", "is slow"])
def test_where_a_giver_fails_the_trainer_gives(how, monkeypatch, capfd):
    """Within the same command, in time; the leader hears of it."""
    late, real = [], lending.Lending._read

    def read(service, *arguments):
        if service in late:
            return time.sleep(0.5) or b""
        return real(service, *arguments)

    monkeypatch.setattr(lending.Lending, "_read", read)
    with ends() as (trainer, taker, _), ends() as (giver, _, servers):
        weights = {"a": jnp.ones(4)}
        if how != "gives":
            trainer.offer(WEIGHTS, weights)
        if how != "has it not":
            giver.offer(CopyOf("rollout 0", WEIGHTS), weights)
        if how == "is gone":
            servers[0][0].stop(0).wait(5)
        if how == "is slow":
            late.append(giver.lending)
        stream = Stream(f"localhost:{servers[0][1]}", 0.2 if how == "is slow" else 5.0)
        relay = Relay(taker, taker, stream, gives=True)
        assert isinstance(relay, Link)
        start = time.monotonic()
        found = relay.take(WEIGHTS, onto(1), stream.name)
        assert found["a"].tolist() == [1] * 4 and time.monotonic() - start < 50
        said = capfd.readouterr().err
        sentence = "rollout 1 takes version 3 from the trainer, not from rollout 0: "
        failed = how.startswith("is")
        assert stream.said == ([] if how == "gives" else [("rollout 0", failed)])
        assert (sentence in said) == failed
        # It gives itself what it has got, until that is dropped.
        own = CopyOf("rollout 1", WEIGHTS)
        assert taker._here.lend(own, "x") is found
        relay.drop(WEIGHTS)
        assert taker._here.lend(own, "x") is None
        # Nobody is named for the next one: it comes from the trainer.
        again = relay.take(WEIGHTS, onto(1), stream.name)
        assert (again is None) == (how == "gives") and len(stream.said) < 2
