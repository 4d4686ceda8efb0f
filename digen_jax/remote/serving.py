"""The loop of a mesh's process: executes the leader's commands with its own executor."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from digen_jax.process.ending import Stopped, hangs
from digen_jax.process.exhausted import out_of_memory
from digen_jax.remote.failures import failed
from digen_jax.remote.following import Following
from digen_jax.remote.link import RemoteLink
from digen_jax.rewards.calling import Answer
from digen_jax.runtime.link import ImagesOf
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
    Update,
)
from digen_jax.scheduling.events import Completed


class Executes(Protocol):
    """What a mesh's process does for the leader."""

    def do(self, command: Command) -> None:
        """Executes a command that is answered; returns when its work is done."""

    def drop(self, command: Command) -> None:
        """Executes a command that is not answered, at once, beside the others."""


class Sampling:
    """A `SamplingExecutor` and the steps of its process, as the leader's commands use them."""

    def __init__(self, executor: SamplingExecutor, steps: Steps, link: RemoteLink):
        self._executor, self._steps, self._link = executor, steps, link
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
                self._decode(command.fragment)
            case Publish():
                self._receive(command.publication)

    def drop(self, command: Command) -> None:
        """See `Executes`."""
        match command:
            case DropVersion():
                with self._lock:
                    if command.publication in self._receiving:
                        self._dropped.add(command.publication)
                self._executor.drop_weights(command.publication)
            case DropFragments():
                # First of all: a fragment in generation is then not kept.
                here = [f for f in command.fragments if self._steps.find(f) is not None]
                self._steps.drop(here)
                for fragment in command.fragments:
                    self._forget(fragment)
            case Update():
                self._steps.forget(command.step + 1)

    def _decode(self, fragment: Fragment) -> None:
        self._executor.decode(fragment)
        images = self._executor.images.pop(fragment, None)
        answers = self._executor.answers.pop(fragment, ())
        if images is None:
            return
        sent = images, [(*of, _sent(answer)) for *of, answer in answers]
        self._link.offer(ImagesOf(self._executor.name, fragment), sent)
        if not fragment.evaluation and self._steps.find(fragment) is None:
            self._forget(fragment)

    def _forget(self, fragment: Fragment) -> None:
        self._executor.drop_fragment(fragment)
        self._link.withdraw(ImagesOf(self._executor.name, fragment))

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
                self._executor.drop_weights(publication)


def _sent(answer: Answer) -> Answer:
    """What a reward says as a tree that can be sent; one that runs on a mesh has asked no servers."""
    return answer._replace(shown=dict(answer.shown), exchanges=())


def serve(following: Following, executes: Executes) -> None:
    """Executes commands until the leader says that the run ends: weights arrive beside the other work.

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
                case DropVersion() | DropFragments() | Update():
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


def _answer(following: Following, do: Callable[[Command], None], command: Command) -> None:
    """Executes a command, and reports what became of it."""
    try:
        with following.does(command) as stopwatch:
            do(command)
    # Any error: the leader decides, as it does where a mesh of its own process fails.
    except Exception as error:
        event = failed(command, error)
        if event.kind or out_of_memory(error):
            print(f"{following.name}: {event.reason}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        following.report(event)
    else:
        parts = stopwatch.parts_ago()
        following.report(Completed(time.monotonic(), command, stopwatch.seconds, parts=parts))
