"""Who gives weights to whom: the policy, without processes and connections."""

import collections
import math
import random

import pytest

from digen_jax.remote.fanout import LEAST, REST, Fanout, Taker
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


def test_meshes_that_do_not_give_take_from_the_others():
    of = Simulated(9, gives=lambda number: number == 0)
    for taker in of.takers:
        of.ask(ONE, taker)
    while len(of.received) < 9:
        of.tick()
    assert set(of.givers) == {TRAINER, "rollout 0"} and of.now == 3


def test_nobody_is_overtaken_at_the_trainer():
    """One whose version no mesh has comes before those that have asked later, and a busy trainer comes free."""
    of = Simulated(40)
    for taker in of.takers[:20]:
        of.ask(ONE, taker)
    of.tick()
    alone = of.takers[20]
    of.ask(TWO, alone)
    for taker in of.takers[21:]:
        of.ask(ONE, taker)
    while of.asked or of.running:
        of.tick()
    assert of.received[TWO, alone] <= 4 and len(of.received) == 40


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


def test_a_giver_that_failed_rests_ever_longer_until_it_gives_again():
    of = Simulated(0, most=1)
    fanout, takers = of.fanout, [Taker(name, f"{name}:1") for name in ("giver", "taker", "other")]
    giver, taker, other = takers
    for one in takers:
        fanout.join(one)

    def look():  # as at any change
        fanout.leave(Taker("nobody"))

    first = fanout.ask(ONE, giver).result(0)
    of.now += 5
    fanout.ended(first, True)
    assert first.giver is None and first.seconds == math.inf
    assert fanout.ask(TWO, other).result(0).giver is None  # the trainer's only place
    waiting = fanout.ask(ONE, taker)
    for rests in (REST[0], 2 * REST[0], 4 * REST[0]):
        slot = waiting.result(0)
        assert slot.giver is giver and slot.seconds == 20 > LEAST
        fanout.missed("taker", "giver", failed=True)
        assert slot.giver is None
        fanout.missed("taker", "giver", failed=True)  # once more from another process of the mesh
        fanout.ended(slot, False)
        waiting = fanout.ask(ONE, taker)
        of.now += rests - 1
        look()
        assert not waiting.done()
        of.now += 1
        look()
    fanout.ended(waiting.result(0), True)
    assert not fanout._rests and [*fanout._holders[ONE]] == [giver, taker]


def test_who_is_lost_neither_waits_nor_gives():
    of = Simulated(3, most=1)
    first, second, third = of.takers
    slot = of.fanout.ask(ONE, first).result(0)
    waiting = of.fanout.ask(ONE, second)
    of.fanout.leave(second)
    with pytest.raises(Gone, match="rollout 1 is lost"):
        waiting.result(0)
    of.fanout.ended(slot, True)
    of.fanout.join(again := Taker("rollout 1", "host:9"))
    of.fanout.leave(first)
    assert of.fanout.ask(TWO, again).result(0).giver is None
    waiting = of.fanout.ask(ONE, third)
    assert not waiting.done()
    of.fanout.leave(again)
    assert waiting.result(0).giver is None
    with pytest.raises(Gone):
        of.fanout.ask(ONE, first).result(0)


def test_a_mesh_that_has_weights_no_longer_gives_others():
    of = Simulated(3, most=1)
    first, second, third = of.takers
    of.fanout.ended(of.fanout.ask(ONE, first).result(0), True)
    of.fanout.ended(of.fanout.ask(TWO, first).result(0), True)
    of.fanout.ask(Publication(3), third).result(0)  # the trainer's only place
    slot = of.fanout.ask(ONE, second).result(0)
    assert slot.giver is first
    of.fanout.missed(second.name, first.name, failed=False)
    of.fanout.ended(slot, True)
    assert of.fanout.ask(TWO, second).result(0).giver is first
    assert first not in of.fanout._holders[ONE]


def test_whoever_waits_for_what_is_dropped_finds_that_out_at_once():
    of = Simulated(4, most=1)
    first, *others = (of.fanout.ask(ONE, taker) for taker in of.takers)
    assert not any(one.done() for one in others)
    of.fanout.drop(ONE)
    assert [one.result(0).giver for one in others] == [None] * 3
    for one in (first, *others):
        of.fanout.ended(one.result(0), False)
    assert not of.fanout._busy
