"""A sampling mesh in another process, with the interface of its executor."""

import functools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.failures import NotDone
from digen_jax.remote.fanout import Fanout, Slot, Taker
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.mesh import Mesh
from digen_jax.rewards.exchanges import moved
from digen_jax.runtime.clock import elsewhere, paused
from digen_jax.runtime.judging import Judge, Judged, failed, ready
from digen_jax.runtime.link import LinkError, ScoresOf
from digen_jax.runtime.worker import Gone
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Decode,
    DropFragments,
    DropVersion,
    Encode,
    Fragment,
    Generate,
    Publication,
    Publish,
    Score,
    Update,
)

UNNEEDED = "is not waited for: the run ends"
PAUSE = 1.0  # seconds before scores that have not come are asked for again


class RemoteSampler:
    """As `SamplingExecutor`: every method returns when its work is done.

    A call ends with an error as soon as the process is lost or `give_up` was called, so that no thread waits for it.

    Attributes:
      devices: of its mesh.
      mesh: its processes.

    Raises (every method that works):
      NotDone: the work failed there; or a `RewardMistake` or the like, as in one process (`failures`).
      Gone: the process is lost, or was given up.
    """

    def __init__(self, mesh: Mesh, link: RemoteLink, fanout: Fanout | None = None):
        """`fanout` names who gives it weights; None: always the trainer."""
        self.name, self.devices = mesh.name, mesh.devices
        self.given_up = self._let_go = False
        self.mesh, self._link, self._fanout = mesh, link, fanout
        # The parts of several processes cannot be given by one.
        self._taker = Taker(self.name, mesh.first.address if mesh.processes == 1 else "")
        if fanout is not None:
            fanout.join(self._taker)

    def receive(self, publication: Publication) -> None:
        """Has published weights taken, as soon as a giver is free."""
        make = functools.partial(Publish, worker=self.name, publication=publication)
        if self._fanout is None:
            self._do(make)
            return
        with paused():  # it is not this mesh that is late
            slot = self._fanout.ask(publication, self._taker).result()
        received = False
        try:
            self._do(make, _giver(slot))
            received = True
        finally:
            self._fanout.ended(slot, received)

    def encode(self, number: int) -> None:
        """Has a step's prompts encoded."""
        self._do(functools.partial(Encode, worker=self.name, step=number))

    def generate(self, fragment: Fragment, publication: Publication) -> None:
        """Has a fragment's trajectories generated."""
        of = dict(worker=self.name, fragment=fragment, publication=publication)
        self._do(functools.partial(Generate, **of))

    def decode(self, fragment: Fragment) -> None:
        """Has a fragment's images decoded, which stay there."""
        self._do(functools.partial(Decode, worker=self.name, fragment=fragment))

    def score(self, fragment: Fragment, judge: Judge | None = None) -> Future[Judged | None]:
        """Has a decoded fragment scored by the rewards of its process, beside its other work; returns at once.

        The future has None for a fragment that was dropped. It raises the errors of the rewards there as
        `Judge.submit`'s does; Gone, if the process is lost.
        """
        found: Future = Future()
        make = functools.partial(Score, fragment=fragment, maker=self.name)
        try:
            asked = self.mesh.ask_first(make)
        except Gone as error:
            return failed(error)
        asked.add_done_callback(lambda done: self._answered(found, fragment, done))
        return found

    def scored(self, fragment: Fragment) -> None:
        """The scores are here: the process has freed the images when it sent them."""

    def drop_fragment(self, fragment: Fragment) -> None:
        """Frees all data of a fragment."""
        self.mesh.tell(functools.partial(DropFragments, fragments=(fragment,)))

    def drop_weights(self, publication: Publication) -> None:
        """Frees published weights."""
        self.mesh.tell(functools.partial(DropVersion, publication=publication))
        if self._fanout is not None:
            self._fanout.drop(publication)  # the others drop it, too

    def end_step(self, step: int) -> None:
        """The step has ended: its process forgets it and those before it, too."""
        self.mesh.tell(functools.partial(Update, worker=TRAINER, step=step, update=0))

    def give_up(self) -> None:
        """Another mesh repeats its work; whoever waits for it gets an error."""
        self.given_up = True
        if self._fanout is not None:
            self._fanout.leave(self._taker)
        # Not by its name, which another mesh may have by now.
        self.mesh.give_up("was given up")

    def let_go(self) -> None:
        """Ends all waits for its work, also those that begin later: the run ends, and nobody needs the results."""
        self._let_go = True
        if self._fanout is not None:
            self._fanout.leave(self._taker)
        self.mesh.let_go(UNNEEDED)

    def _do(self, make: Callable[[int], Command], giver: pb.Giver | None = None) -> None:
        asked = self.mesh.ask(make, giver)
        if self._let_go:  # perhaps before it was asked
            raise Gone(f"{self.name} {UNNEEDED}")
        # There it may compile, or pause.
        with elsewhere(asked.so_far) as counts:
            done = asked.result()  # it ends with the member at the latest
            counts(done.seconds, done.parts)

    def _answered(self, found: Future, fragment: Fragment, done: Future) -> None:
        """Completes a future of scores in a thread of its own: this one may be gRPC's."""
        arrived = time.perf_counter()

        def complete() -> None:
            try:
                found.set_result(self._taken(fragment, done, arrived))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=complete, name=f"scores {self.name}", daemon=True).start()

    def _taken(self, fragment: Fragment, done: Future, arrived: float) -> Judged | None:
        """What the process has offered before its answer, which came at `arrived`.

        Where its rewards could not work for a reason of its own, the mesh is lost: another one scores.
        """
        try:
            done.result()
        except NotDone as error:
            self.mesh.lose(f"cannot score ({error})")
            raise Gone(str(error)) from error
        key = ScoresOf(self.name, fragment)
        found: Judged | None = self._fetched(key)
        if found is None:
            return None
        self._link.withdraw(key)
        exchanges = moved(found.exchanges, arrived)
        return found._replace(looks=ready(found.looks), exchanges=exchanges)

    def _fetched(self, key: ScoresOf) -> Judged | None:
        """An offered tree; a process that does not give it twice in a row is lost."""
        try:
            return self._link.fetch(key, TRAINER)
        except LinkError:
            time.sleep(PAUSE)
        try:
            return self._link.fetch(key, TRAINER)
        except LinkError as error:
            print(f"{self.name} is given up: {error}", file=sys.stderr, flush=True)
            self.mesh.lose("does not give its scores")
            raise Gone(str(error)) from error


def _giver(slot: Slot) -> pb.Giver | None:
    if slot.giver is None:
        return None
    return pb.Giver(mesh=slot.giver.name, address=slot.giver.address, seconds=slot.seconds)
