"""Who gives weights to whom: the policy, without processes and connections."""

import collections
import random

import pytest

from digen_jax.remote.fanout import Fanout, Taker
from digen_jax.remote.member import Gone
from digen_jax.scheduling.commands import TRAINER, Publication

ONE, TWO = Publication(1), Publication(2)


class Simulated:
    """Takers of publications, each of whose transfers takes a unit of time."""

    def __init__(self, count: int, most: int = 2, gives=lambda number: True):
        self.now = 0.0
        self.fanout = Fanout(most, lambda: self.now)
        self.takers = [Taker(f"rollout {i}", f"host:{i}" if gives(i) else "") for i in range(count)]
        self.running: dict = {}  # by slot: when it ends
        self.asked: dict = {}  # by (publication, taker): its future
        self.received: dict = {}  # by (publication, taker): when
        self.givers: collections.Counter = collections.Counter()
        for taker in self.takers:
            self.fanout.join(taker)

    def ask(self, publication: Publication, taker: Taker) -> None:
        self.asked[publication, taker] = self.fanout.ask(publication, taker)

    def tick(self, most: int = 2) -> None:
        """Begins what may begin, then completes a unit of time."""
        for key, future in list(self.asked.items()):
            if future.done():
                del self.asked[key]
                self.running[future.result()] = self.now + 1
        at_once = collections.Counter(slot.name for slot in self.running)
        assert not at_once or max(at_once.values()) <= most, at_once
        self.now += 1
        for slot in [slot for slot, end in self.running.items() if end <= self.now]:
            del self.running[slot]
            self.givers[slot.name] += 1
            self.received[slot.publication, slot.taker] = self.now
            self.fanout.ended(slot, True)


@pytest.mark.parametrize(
    ("count", "most", "rounds"),
    # Each round every holder and the trainer give to `most`: (most + 1)^rounds - 1 meshes have it.
    [
        (1, 2, 1),
        (2, 2, 1),
        (3, 2, 2),
        (8, 2, 2),
        (9, 2, 3),
        (26, 2, 3),
        (1024, 2, 7),
        (255, 1, 8),
    ],
)
def test_a_publication_reaches_all_meshes_in_logarithmic_time(count, most, rounds):
    of = Simulated(count, most)
    for taker in of.takers:
        of.ask(ONE, taker)
    for _ in range(rounds):
        assert len(of.received) < count
        of.tick(most)
    assert len(of.received) == count == of.givers.total()
    assert of.givers[TRAINER] <= most * rounds
    if count <= most:
        assert set(of.givers) == {TRAINER}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_or_fails_all_that_are_left_receive_what_is_not_dropped(seed):
    rng = random.Random(seed)
    of = Simulated(30, gives=lambda number: number % 5 > 0)
    left = set(of.takers)
    for taker in of.takers:
        of.ask(ONE, taker)
        if rng.random() < 0.3:
            of.ask(TWO, taker)
    asked = set(of.asked)
    for _ in range(100):
        of.tick(most=30)  # more than usual take from the trainer after failures
        for slot in rng.sample(list(of.running), min(2, len(of.running))):
            if slot.giver is not None:
                of.fanout.missed(slot.taker.name, slot.name, rng.random() < 0.5)
                assert slot.name == TRAINER
        if len(left) > 15 and rng.random() < 0.7:
            lost = rng.choice(sorted(left, key=lambda taker: taker.name))
            left.discard(lost)
            of.fanout.leave(lost)
            of.running = {s: end for s, end in of.running.items() if s.taker is not lost}
            for key in [key for key in of.asked if key[1] is lost]:
                future = of.asked.pop(key)
                slot = None if future.exception() else future.result()
                assert slot is not None or isinstance(future.exception(), Gone)
        if not of.asked and not of.running:
            break
    assert {key for key in asked if key[1] in left} <= set(of.received)
    assert not of.fanout._waiting and not of.fanout._slots and not of.fanout._busy
    for publication in (ONE, TWO):
        of.fanout.drop(publication)
    assert not of.fanout._holders and not of.fanout._first
