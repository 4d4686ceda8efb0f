"""Who gives published weights to which mesh: a tree, from the trainer over meshes that have received them already.

Nothing here knows processes or connections: the leader asks, and tells what became of it.
"""

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from digen_jax.runtime.worker import Gone
from digen_jax.scheduling.commands import TRAINER, Publication

MOST = 2  # takers at a time from one giver
LEAST = 10.0  # seconds that a mesh has to give weights
FACTOR = 4  # times the seconds of the publication's first transfer, if these are more
REST = 30.0, 600.0  # seconds for which a giver that failed is not named: after one failure, at most


@dataclasses.dataclass(eq=False)
class Taker:
    """A mesh, from its joining to its loss; another one of the same name is another taker.

    `address` is where it gives what it has received; "": it does not give.
    """

    name: str
    address: str = ""


@dataclasses.dataclass(eq=False)
class Slot:
    """A transfer of published weights that may begin; `giver` is None for the trainer, `seconds` its limit."""

    publication: Publication
    taker: Taker
    giver: Taker | None
    seconds: float
    began: float

    @property
    def name(self) -> str:
        """The giver's."""
        return TRAINER if self.giver is None else self.giver.name


class Fanout:
    """Names a giver for each transfer: at most `most` takers at a time have the same one. For any thread.

    With `most` or fewer meshes the trainer gives to all. It has every publication, so that whoever waits longest does
    so at most until it has a free place.

    Args:
      most: takers at a time from one giver.
      clock: seconds.
    """

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic):
        self._most, self._clock = most, clock
        self._takers: set[Taker] = set()
        # In the order in which they have received it.
        self._holders: dict[Publication, dict[Taker, None]] = {}
        self._first: dict[Publication, float] = {}  # seconds of its first transfer
        self._waiting: dict[Future[Slot], tuple[Publication, Taker]] = {}
        self._slots: set[Slot] = set()
        self._busy: collections.Counter[Taker | None] = collections.Counter()
        self._rests: dict[Taker, tuple[float, float]] = {}  # until when, for how long
        self._lock = threading.Lock()

    def join(self, taker: Taker) -> None:
        """A mesh is there."""
        with self._lock:
            self._takers.add(taker)

    def leave(self, taker: Taker) -> None:
        """A mesh is lost: it gives and takes no longer, and its waiting ends with `Gone`."""
        with self._lock:
            self._takers.discard(taker)
            self._rests.pop(taker, None)
            for holders in self._holders.values():
                holders.pop(taker, None)
            for slot in [slot for slot in self._slots if slot.taker is taker]:
                self._free(slot)
            for future in [f for f, (_, one) in self._waiting.items() if one is taker]:
                del self._waiting[future]
                future.set_exception(Gone(f"{taker.name} is lost"))
            self._grant()

    def ask(self, publication: Publication, taker: Taker) -> Future[Slot]:
        """A place at a giver, as soon as one is free; then `ended` is to be called."""
        future: Future[Slot] = Future()
        with self._lock:
            if taker not in self._takers:
                future.set_exception(Gone(f"{taker.name} is lost"))
                return future
            self._holders.get(publication, {}).pop(taker, None)
            self._waiting[future] = publication, taker
            self._grant()
        return future

    def missed(self, taker: str, giver: str, failed: bool) -> None:
        """A taker takes from the trainer now: its giver has failed, or else has these weights no longer. By name."""
        with self._lock:
            names = taker, giver
            of = (one for one in self._slots if (one.taker.name, one.name) == names)
            slot = next(of, None)
            if slot is None or slot.giver is None:
                return
            if not failed:
                self._holders.get(slot.publication, {}).pop(slot.giver, None)
            elif slot.giver in self._takers:
                _, seconds = self._rests.get(slot.giver, (0.0, 0.0))
                seconds = min(max(REST[0], 2 * seconds), REST[1])
                self._rests[slot.giver] = self._clock() + seconds, seconds
            self._free(slot)
            slot.giver = None
            self._use(slot)  # the trainer has perhaps one too many now
            self._grant()

    def ended(self, slot: Slot, received: bool) -> None:
        """A transfer is over; nothing changes where its taker is lost."""
        with self._lock:
            if slot not in self._slots:
                return
            self._free(slot)
            if received:
                self._first.setdefault(slot.publication, self._clock() - slot.began)
                self._rests.pop(slot.giver, None)
                if slot.taker.address:
                    self._holders.setdefault(slot.publication, {})[slot.taker] = None
            self._grant()

    def drop(self, publication: Publication) -> None:
        """Nobody needs these weights any longer. Whoever waits for them finds that out from the trainer, at once."""
        with self._lock:
            self._holders.pop(publication, None)
            self._first.pop(publication, None)
            for future in [f for f, (one, _) in self._waiting.items() if one == publication]:
                self._begin(future, None)

    def _grant(self) -> None:
        """Names givers as long as there are free ones, in the order in which they were asked for."""
        none_free: set[Publication] = set()
        for future, (publication, _) in list(self._waiting.items()):
            if publication in none_free:
                continue
            try:
                self._begin(future, self._giver(publication))
            except LookupError:
                none_free.add(publication)

    def _giver(self, publication: Publication) -> Taker | None:
        """The free giver with the fewest takers, of equals the trainer; LookupError: there is none."""
        now = self._clock()
        givers: list[Taker | None] = [None]
        if len(self._takers) > self._most:
            holders = self._holders.get(publication, ())
            givers += [one for one in holders if self._rests.get(one, (now, 0))[0] <= now]
        free = [one for one in givers if self._busy[one] < self._most]
        if not free:
            raise LookupError(publication)
        return min(free, key=self._busy.__getitem__)

    def _begin(self, future: Future[Slot], giver: Taker | None) -> None:
        publication, taker = self._waiting.pop(future)
        seconds = math.inf
        if giver is not None:
            seconds = max(LEAST, FACTOR * self._first[publication])
        slot = Slot(publication, taker, giver, seconds, self._clock())
        self._use(slot)
        future.set_result(slot)

    def _use(self, slot: Slot) -> None:
        self._slots.add(slot)
        self._busy[slot.giver] += 1

    def _free(self, slot: Slot) -> None:
        self._slots.discard(slot)
        self._busy[slot.giver] -= 1
        if not self._busy[slot.giver]:
            del self._busy[slot.giver]
