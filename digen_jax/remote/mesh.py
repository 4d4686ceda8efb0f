"""A mesh, as the leader sees it: its processes, which get the same commands in the same order."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress

from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.member import Asked, Gone, Member
from digen_jax.remote.server import loop
from digen_jax.scheduling.commands import TRAINER, Command


class Mesh:
    """The processes of a mesh, from the first one's hello to the end of all. For any thread.

    Of the trainer's mesh those that do not lead: what they do is told to them within their job of JAX.

    Attributes:
      name: the worker's.
      members: its processes that have joined, by number.
      processes: that it has when it is whole.
      dismissed: it gets no more commands, for this reason.
      why: it has ended.
      began: when its first hello came, by `time.monotonic`.
    """

    def __init__(
        self, name: str, processes: int, silence: float, lose: Callable[["Mesh", str], None]
    ):
        """`lose` ends it, for a reason; where it hears nothing for `silence` seconds it does so itself."""
        self.name, self.processes = name, processes
        self.members: dict[int, Member] = {}
        self.dismissed: str | None = None
        self.why: str | None = None
        self.began = time.monotonic()
        self._silence, self._lose = silence, lose
        self._serials = itertools.count()
        self._lock = threading.Lock()

    @property
    def first(self) -> Member:
        """The process from which its arrays are taken, and which scores."""
        return self.members[0]

    @property
    def devices(self) -> int:
        """Of the whole mesh."""
        return self.first.devices

    @property
    def sessions(self) -> frozenset[str]:
        """Of its processes."""
        return frozenset(member.session for member in list(self.members.values()))

    @property
    def ready(self) -> bool:
        """Whether all its processes are ready for commands."""
        joined = self.processes - (self.name == TRAINER)
        return len(self.members) == joined and all(m.ready for m in self.members.values())

    @property
    def asked(self) -> int:
        """The signal by which one of its processes is asked to end; 0: none is."""
        return max(member.asked for member in list(self.members.values()))

    @property
    def heard(self) -> float:
        """When the process that has been silent longest said something, by `time.monotonic`."""
        return min(member.heard for member in list(self.members.values()))

    def lose(self, why: str) -> None:
        """Ends it: its work is done again elsewhere."""
        self._lose(self, why)

    def give_up(self, why: str) -> None:
        """As `lose`, by somebody who needs not be told. One that was dismissed ends its work and leaves by itself."""
        if self.dismissed is None:
            self._lose(self, why, True)

    def ask(self, make: Callable[[int], Command], giver: pb.Giver | None = None) -> Asked:
        """Sends the command that `make` makes of its serial to all processes; the future has a `Completed`.

        `giver` goes with a command that publishes; None: the trainer.

        The future has an error as soon as the command has failed (see `failures`) or the mesh is lost (`Gone`). A mesh
        of which some processes fail and the others do not answer is lost.
        """
        with self._lock:
            command = make(next(self._serials))
            asked = [member.ask(command, giver) for member in self._all()]
        return asked[0] if len(asked) == 1 else _Together(asked, self._silence, self.lose)

    def ask_first(self, make: Callable[[int], Command]) -> Asked:
        """As `ask`, of the first process alone."""
        with self._lock:
            return self._all()[0].ask(make(next(self._serials)))

    def tell(self, make: Callable[[int], Command]) -> None:
        """As `ask` for a command that is not answered; a mesh that is lost gets none."""
        with suppress(Gone), self._lock:
            command = make(next(self._serials))
            for member in self._all():
                member.tell(command)

    def dismiss(self, reason: str) -> None:
        """Sends, after all commands, that there are no more."""
        with self._lock:
            self.dismissed = reason
            for member in list(self.members.values()):
                member.dismiss(reason)

    def let_go(self, why: str) -> None:
        """Ends whatever waits for an answer to a command; its processes go on with it."""
        for member in list(self.members.values()):
            member.let_go(why)

    def end(self, why: str) -> None:
        """Ends its streams, and whatever waits for an answer, unless it has ended before."""
        self.why = self.why or why
        for member in list(self.members.values()):
            member.end(self.why)

    def _all(self) -> list[Member]:
        """Its processes in order; raises Gone where it has ended."""
        if self.why is not None or not self.members:
            raise Gone(f"{self.name} {self.why or 'has not joined'}")
        return [member for _, member in sorted(self.members.items())]


class _Together(Asked):
    """The coming answer of all processes of a mesh; its seconds are those of the slowest one."""

    def __init__(self, asked: list[Asked], silence: float, lose: Callable[[str], None]):
        super().__init__(silence)
        self._parts, self._lose = asked, lose
        self._left, self._failed = len(asked), False
        self._count = threading.Lock()
        for part in asked:
            part.add_done_callback(self._answered)

    def so_far(self) -> float:
        """See `Asked`."""
        return max(part.so_far() for part in self._parts)

    def _answered(self, part: Asked) -> None:
        with self._count:
            self._left -= 1
            left = self._left
            first = part.exception() is not None and not self._failed
            self._failed |= first
        if left and first:  # the others may wait for it in common work
            later = loop().call_soon_threadsafe
            later(loop().call_later, self._silence, self._give_up, part.exception())
        if not left:
            self._settle()

    def _settle(self) -> None:
        errors = [error for part in self._parts if (error := part.exception()) is not None]
        gone = [error for error in errors if isinstance(error, Gone)]
        with suppress(InvalidStateError):
            if errors:
                self.set_exception((gone or errors)[0])
            else:
                self.set_result(max((p.result() for p in self._parts), key=lambda e: e.seconds))

    def _give_up(self, error: BaseException) -> None:
        if self._left:
            threading.Thread(
                target=self._lose,
                args=(f"has failed in one of its processes ({error})",),
                daemon=True,
            ).start()
