"""A sampling mesh in another process, with the interface of its executor."""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8

from digen_jax import rewards
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.member import Member
from digen_jax.runtime.clock import elsewhere
from digen_jax.runtime.link import ImagesOf
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
    Update,
)


class RemoteSampler:
    """As `SamplingExecutor`: every method returns when its work is done.

    A call ends with an error as soon as the process is lost or `give_up` was called, so that no thread waits for it.

    Attributes:
      images: of decoded fragments, not yet scored.
      answers: what the rewards on its mesh have said of them.
      devices: of its mesh.
      member: its process.

    Raises (every method that works):
      NotDone: the work failed there; or a `RewardMistake` or the like, as in one process (`failures`).
      Gone: the process is lost, or was given up.
    """

    def __init__(self, member: Member, link: RemoteLink, give_up: Callable[[str, str], None]):
        """`give_up` ends a process's stream, by its name: `Leader.give_up`."""
        self.name, self.devices = member.name, member.devices
        self.images: dict[Fragment, UInt8[np.ndarray, "b t h w 3"]] = {}
        self.answers: dict[Fragment, rewards.Answers] = {}
        self.given_up = False
        self.member, self._link, self._give_up = member, link, give_up

    def receive(self, publication: Publication) -> None:
        """Has published weights taken."""
        self._do(functools.partial(Publish, worker=self.name, publication=publication))

    def encode(self, number: int) -> None:
        """Has a step's prompts encoded."""
        self._do(functools.partial(Encode, worker=self.name, step=number))

    def generate(self, fragment: Fragment, publication: Publication) -> None:
        """Has a fragment's trajectories generated."""
        of = dict(worker=self.name, fragment=fragment, publication=publication)
        self._do(functools.partial(Generate, **of))

    def decode(self, fragment: Fragment) -> None:
        """Has a fragment's images decoded, and fetches them; those of a dropped one are not there."""
        self._do(functools.partial(Decode, worker=self.name, fragment=fragment))
        key = ImagesOf(self.name, fragment)
        found = self._link.fetch(key, TRAINER)
        if found is not None and not self.given_up:
            self.images[fragment], self.answers[fragment] = found
        self._link.withdraw(key)

    def drop_fragment(self, fragment: Fragment) -> None:
        """Frees all data of a fragment."""
        self.images.pop(fragment, None)
        self.answers.pop(fragment, None)
        self.member.tell(functools.partial(DropFragments, fragments=(fragment,)))

    def drop_weights(self, publication: Publication) -> None:
        """Frees published weights."""
        self.member.tell(functools.partial(DropVersion, publication=publication))

    def end_step(self, step: int) -> None:
        """The step has ended: its process forgets it and those before it, too."""
        self.member.tell(functools.partial(Update, worker=TRAINER, step=step, update=0))

    def give_up(self) -> None:
        """Another mesh repeats its work; whoever waits for it gets an error."""
        self.given_up = True
        self._give_up(self.name, "was given up")

    def _do(self, make: Callable[[int], Command]) -> None:
        asked = self.member.ask(make)
        # There it may compile, or pause.
        with elsewhere(asked.so_far) as counts:
            done = asked.result()  # it ends with the member at the latest
            counts(done.seconds, done.parts)
