"""The loop of a mesh's process: executes the leader's commands with its own executor."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Protocol

from digen_jax.process.ending import Stopped, hangs, leave
from digen_jax.process.exhausted import out_of_memory
from digen_jax.remote.failures import failed
from digen_jax.remote.following import Following
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.relay import Relay
from digen_jax.rewards.exchanges import moved
from digen_jax.runtime.image_statistics import Looks
from digen_jax.runtime.judging import Judge, Judged, then
from digen_jax.runtime.link import LOSS, LinkError, ScoresOf, may_be_a_loss
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import Steps
from digen_jax.runtime.worker import Line
from digen_jax.scheduling.commands import (
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
from digen_jax.scheduling.events import Completed


class Executes(Protocol):
    """What a mesh's process does for the leader."""

    def do(self, command: Command) -> None:
        """Executes a command that is answered; returns when its work is done."""

    def score(self, fragment: Fragment) -> Future[tuple[float, ...]]:
        """Has a decoded fragment scored: the value of each image. Returns at once."""

    def drop(self, command: Command) -> None:
        """Executes a command that is not answered, at once, beside the others."""


class Sampling:
    """A `SamplingExecutor`, the steps of its process and its judge, as the leader's commands use them."""

    def __init__(
        self,
        executor: SamplingExecutor,
        steps: Steps,
        link: RemoteLink,
        judge: Judge | None,
        relay: Relay | None = None,
    ):
        """`judge` is None in all but the first of a mesh's processes: the first one scores.

        `relay` is the executor's link; None: it takes weights from the trainer alone.
        """
        self._executor, self._steps, self._link, self._judge = executor, steps, link, judge
        self._relay = relay
        self._receiving: set[Publication] = set()
        self._dropped: set[Publication] = set()  # while they were received
        self._lock = threading.Lock()

    def do(self, command: Command) -> None:
        """See `Executes`."""
        match command:
            case Encode():
                self._executor.encode(command.step)
            case Generate():
                self._executor.generate(command.fragment, command.publication)
            case Decode():
                self._executor.decode(command.fragment)
                if self._judge is None:
                    self._executor.scored(command.fragment)
            case Publish():
                self._receive(command.publication)

    def score(self, fragment: Fragment) -> Future[tuple[float, ...]]:
        """See `Executes`. The images stay here until the rewards have scored them."""
        judged = self._executor.score(fragment, self._judge)

        def seen(found: Judged) -> Future[tuple[float, ...]]:
            return then(found.looks, lambda looks: self._scored(fragment, found, looks))

        return then(judged, seen)

    def drop(self, command: Command) -> None:
        """See `Executes`."""
        match command:
            case DropVersion():
                with self._lock:
                    if command.publication in self._receiving:
                        self._dropped.add(command.publication)
                self._drop_weights(command.publication)
            case DropFragments():
                # First of all: a fragment in generation is then not kept.
                here = [f for f in command.fragments if self._steps.find(f) is not None]
                self._steps.drop(here)
                for fragment in command.fragments:
                    self._forget(fragment)
            case Update():
                self._steps.forget(command.step + 1)

    def _scored(self, fragment: Fragment, found: Judged, looks: Looks) -> tuple[float, ...]:
        """Offers what the leader needs of a fragment's images, which are freed."""
        self._executor.scored(fragment)
        if self._wanted(fragment):
            # The leader's clock is another one: times are before now.
            ago = moved(found.exchanges, -time.perf_counter())
            sent = found._replace(looks=looks, exchanges=ago)
            self._link.offer(ScoresOf(self._executor.name, fragment), sent)
        if not self._wanted(fragment):
            self._forget(fragment)
        return tuple(map(float, found.values))

    def _wanted(self, fragment: Fragment) -> bool:
        return fragment.evaluation or self._steps.find(fragment) is not None

    def _forget(self, fragment: Fragment) -> None:
        self._executor.drop_fragment(fragment)
        self._link.withdraw(ScoresOf(self._executor.name, fragment))

    def _receive(self, publication: Publication) -> None:
        with self._lock:
            self._receiving.add(publication)
        try:
            self._executor.receive(publication)
        finally:
            with self._lock:
                self._receiving.discard(publication)
                dropped = publication in self._dropped
                self._dropped.discard(publication)
            if dropped:
                self._drop_weights(publication)

    def _drop_weights(self, publication: Publication) -> None:
        self._executor.drop_weights(publication)
        if self._relay is not None:
            self._relay.drop(publication)


def serve(following: Following, executes: Executes, in_order: bool = False) -> None:
    """Executes commands until the leader says that the run ends: weights arrive beside the other work.

    `in_order`: what is dropped is dropped after the commands before, as all processes of a mesh must do the same.

    Raises:
      Stopped: the leader is lost. The work in progress is left alone.
    """
    lines = {name: Line(name) for name in (following.name, f"publish {following.name}")}
    main, publisher = lines.values()
    try:
        for command in following.commands():
            match command:
                case Publish():
                    publisher.submit(_answer, following, executes.do, command)
                case Encode() | Generate() | Decode():
                    main.submit(_answer, following, executes.do, command)
                case Score():
                    _answer_later(following, executes, command)
                case DropVersion() | DropFragments() | Update():
                    if in_order:
                        main.submit(_drop, executes, command)
                    else:
                        executes.drop(command)
                case _:
                    raise Stopped(
                        f"the leader sends {command.kind!r}, which is not for {following.name}"
                    )
    except BaseException:
        for line in lines.values():
            line.give_up()
        hangs(following.name)  # its work may take long, and the process is not to wait for it
        raise
    for line in lines.values():
        line.close()


def _drop(executes: Executes, command: Command) -> None:
    """Drops in a thread, where a mistake would not be seen."""
    try:
        executes.drop(command)
    except BaseException as error:
        traceback.print_exception(error)
        leave(1)


def _answer(following: Following, do: Callable[[Command], None], command: Command) -> None:
    """Executes a command, and reports what became of it."""
    try:
        with following.does(command) as stopwatch:
            do(command)
    except Exception as error:
        _fail(following, command, error)
    else:
        parts = stopwatch.parts_ago()
        following.report(Completed(time.monotonic(), command, stopwatch.seconds, parts=parts))


def _answer_later(following: Following, executes: Executes, command: Score) -> None:
    """Has a fragment scored, and reports what became of it when that is known."""
    began = time.monotonic()

    def scored(done: Future) -> None:
        try:
            values = done.result()
        except CancelledError:
            pass  # this process ends
        except BaseException as error:
            _fail(following, command, error)
        else:
            now = time.monotonic()
            following.report(Completed(now, command, now - began, values))

    try:
        executes.score(command.fragment).add_done_callback(scored)
    except Exception as error:
        _fail(following, command, error)


def _fail(following: Following, command: Command, error: BaseException) -> None:
    """Reports an error of any type: the leader decides, as it does where a mesh of its own process fails."""
    event = failed(command, error)
    if isinstance(error, LinkError):
        if not following.ends:  # else what others were to send does not come
            print(f"{following.name}: {error}", file=sys.stderr, flush=True)
    elif event.kind or out_of_memory(error):
        print(f"{following.name}: {event.reason}", file=sys.stderr, flush=True)
    elif following.several and may_be_a_loss(error):
        following.report(event)
        # Where another process of the mesh is lost, the leader ends this one, which says why.
        if not following.ends_within(LOSS):
            traceback.print_exception(error)
        return
    else:
        traceback.print_exception(error)
    following.report(event)
