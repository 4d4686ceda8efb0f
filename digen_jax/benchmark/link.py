"""Control and link between two processes of this host: messages a second, round trips, bytes a second.

The other process is this module, too; both have one CPU device.
"""

import collections
import dataclasses
import functools
import os
import queue
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from digen_jax.errors import check_positive
from digen_jax.remote.identity import TOKEN, Identity, job_token
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.mesh import Mesh
from digen_jax.remote.opening import BYTES, TRANSFER, join, lead, open_pulls
from digen_jax.remote.outline import nodes
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.remote.serving import serve
from digen_jax.remote.wire import Wire
from digen_jax.runtime.link import ConditioningOf
from digen_jax.scheduling.commands import TRAINER, Command, Encode

HOST, NAME = "127.0.0.1", "rollout 0"
LONGEST = 60.0  # seconds for an answer, and for the other process to start
WINDOW = 256  # commands on their way
LORA = 300  # arrays: factors [1536, 16] and [16, 1536] in bfloat16
TREES = "one array", f"{LORA} arrays of a LoRA"  # what the other process offers
NOTHING = functools.partial(Encode, worker=NAME, step=0)  # a command that does nothing there


@dataclasses.dataclass(frozen=True)
class Speed:
    """The result: medians of the rounds.

    Attributes:
      round_trip: milliseconds from a command that does nothing to its event.
      rate: commands a second with their events, many at a time.
      seconds: of a tree's way, by transport and tree.
      mebibytes: of the trees.
    """

    round_trip: float
    rate: float
    seconds: dict[str, dict[str, float]]
    mebibytes: dict[str, float]

    def describe(self) -> str:
        """A few lines for the console."""
        lines = [
            f"a command and its event: {self.round_trip:.2f} ms there and back, {self.rate:,.0f} a second with many "
            "at a time"
        ]
        for transport, found in self.seconds.items():
            for tree, seconds in found.items():
                size = self.mebibytes[tree]
                lines.append(
                    f"{transport}: {tree}, {size:.0f} MiB in {1000 * seconds:.0f} ms, {size / seconds:.0f} MiB/s"
                )
        return "\n".join(lines)


def check(rounds: int, commands: int) -> None:
    """Before anything slow.

    Raises:
      ConfigError: names the option to change.
    """
    check_positive("--rounds", rounds)
    check_positive("--commands", commands)


def compare(rounds: int, commands: int) -> Speed:
    """Measures both transports; `commands` are sent at once for their rate.

    Raises:
      ConfigError: as `check`.
    """
    check(rounds, commands)
    os.environ[TOKEN] = secrets.token_hex(16)
    seconds = {}
    for transport in (BYTES, TRANSFER):
        with other_process(transport) as (mesh, link):
            if transport == BYTES:
                round_trip = _median(lambda: mesh.ask(NOTHING).result(LONGEST), 50 * rounds)
                rate = commands / _median(lambda: _many(mesh, commands), rounds)
            seconds[transport] = {
                name: _median(functools.partial(_take, link, number), rounds)
                for number, name in enumerate(TREES)
            }
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 2**20 for tree in trees()]
    return Speed(1000 * round_trip, rate, seconds, dict(zip(TREES, sizes, strict=True)))


def trees() -> tuple[Any, ...]:
    """What the other process offers, in the order of `TREES`."""
    big = np.arange(2**24, dtype=np.float32)
    factors = {
        str(i): np.full((1536, 16) if i % 2 else (16, 1536), i, jax.numpy.bfloat16)
        for i in range(LORA)
    }
    return big, factors


@contextmanager
def other_process(transport: str) -> Iterator[tuple[Mesh, RemoteLink]]:
    """A process that offers `trees` and does nothing for every command."""
    joined: queue.Queue[Mesh] = queue.Queue()
    wire, pulls = _wire(), open_pulls(transport, HOST)

    def ready(sampler: RemoteSampler) -> None:
        joined.put(sampler.mesh)

    with lead(wire, f"{HOST}:0", nodes(None), pulls, ready) as (_, link, address):
        command = [sys.executable, "-m", __name__, address, transport]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield joined.get(timeout=LONGEST), link
        finally:
            process.kill()
            process.wait()


class _DoesNothing:
    def do(self, command: Command) -> None:
        """See `serving.Executes`."""

    def drop(self, command: Command) -> None:
        """See `serving.Executes`."""


def main(leader: str, transport: str) -> None:
    """The other process."""
    pulls = open_pulls(transport, HOST)
    with join(_wire(), leader, NAME, 1, HOST, nodes(None), pulls, LONGEST) as (following, link):
        for number, tree in enumerate(trees()):
            link.offer(ConditioningOf(NAME, number), jax.device_put(tree))
        serve(following, _DoesNothing())


def _wire() -> Wire:
    return Wire(Identity.of({}, job_token()))


def _take(link: RemoteLink, number: int) -> None:
    here = SingleDeviceSharding(jax.devices()[0])
    key = ConditioningOf(NAME, number)
    link.take(key, lambda tree: jax.tree.map(lambda _: here, tree), TRAINER)


def _many(mesh: Mesh, count: int) -> None:
    """Sends commands, of which some are always on their way, and waits for their events."""
    asked: collections.deque = collections.deque()
    for number in range(count + WINDOW):
        if number >= WINDOW:
            asked.popleft().result(LONGEST)
        if number < count:
            asked.append(mesh.ask(NOTHING))


def _median(call: Callable[[], Any], count: int) -> float:
    """Seconds of a call, without the first one."""
    call()
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
