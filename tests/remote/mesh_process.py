"""A mesh's process whose work is pretended, and what tests share.

`LEADER=host:port python -m tests.remote.mesh_process` is the mesh, without LEADER it is a leader.
"""

import functools
import os
import threading
import time
from collections.abc import Sequence

from digen_jax.config.command_line import run_main
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.following import Following
from digen_jax.remote.identity import Identity
from digen_jax.remote.leader import Leader
from digen_jax.remote.member import Keepalive
from digen_jax.remote.serving import serve
from digen_jax.remote.wire import Wire
from digen_jax.runtime.clock import part, paused
from digen_jax.scheduling.commands import Command, Encode

TOKEN = "the-token-of-the-tests"
IDENTITY = Identity(TOKEN, "c", "v")
FAST = Keepalive(ping=0.2, silence=2.0)  # a busy machine may be silent for a second
COMPILES = 98  # a step for which nothing but 0.3 seconds of compilation are needed
PARTS = 97  # a step in whose 0.2 seconds a reward scores for 0.1, in the middle
WAITS = 99  # a step whose prompts are encoded when the test allows it


class Pretends:
    """Notes the steps that it was to encode; a negative one fails, by these errors if there are any left."""

    def __init__(self, free: threading.Event | None = None, errors: Sequence[Exception] = ()):
        self.steps: list[int] = []
        self.dropped: list[Command] = []
        self._free, self._errors = free or threading.Event(), list(errors)

    def do(self, command):
        if not isinstance(command, Encode):
            return
        self.steps.append(command.step)
        if command.step < 0:
            if self._errors:
                raise self._errors.pop(0)
            raise ValueError(f"step {-command.step} cannot be encoded")
        if command.step == PARTS:
            time.sleep(0.05)
            with part("score"):
                time.sleep(0.1)
            time.sleep(0.05)
        if command.step == COMPILES:
            with paused():
                time.sleep(0.3)
        if command.step == WAITS:
            assert self._free.wait(60)

    def drop(self, command):
        self.dropped.append(command)


def encode(step: int):
    return functools.partial(Encode, worker="rollout 0", step=step)


def main() -> None:
    stream = Following(Wire(IDENTITY), os.environ["LEADER"], pb.Hello(mesh="rollout 0"), 30)
    serve(stream, Pretends())
    stream.close("the run has ended")


def lead() -> None:
    """A leader that prints its address and what happens to its member, until it is killed."""
    leader = Leader(
        IDENTITY,
        lambda member: print("joined", flush=True),
        lambda member, why: print(why, flush=True),
        FAST,
    )
    _server, port = Wire(IDENTITY).server("localhost:0", [leader.service])
    print(f"localhost:{port}", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    run_main(lead if "LEADER" not in os.environ else main)
