"""Published weights to several meshes on this host: all from the trainer, or as a tree.

The meshes are processes of this module, with one CPU device each.
"""

import dataclasses
import os
import queue
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from digen_jax.remote.fanout import MOST
from digen_jax.remote.identity import TOKEN, Identity, job_token
from digen_jax.remote.opening import join, lead
from digen_jax.remote.outline import nodes
from digen_jax.remote.relay import Relay
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.remote.serving import serve
from digen_jax.remote.wire import Wire
from digen_jax.scheduling.commands import Command, DropVersion, Publication, Publish

HOST = "127.0.0.1"
MESHES, MEBIBYTES = 4, 64
LONGEST = 120.0  # seconds for the processes to start
HERE = ((HOST, ()),) * MESHES


@dataclasses.dataclass(frozen=True)
class Fan:
    """Seconds until all meshes have the weights, by way; medians of the rounds."""

    meshes: int
    mebibytes: int
    seconds: dict[str, float]

    def describe(self) -> str:
        """Lines for the console."""
        return "\n".join(
            f"{self.mebibytes} MiB of weights to {self.meshes} meshes, {way}: {1000 * seconds:.0f} ms"
            for way, seconds in self.seconds.items()
        )


def measure(
    rounds: int, host: str = HOST, places: Sequence[tuple[str, tuple[str, ...]]] = HERE
) -> Fan:
    """Measures both ways.

    Args:
      rounds: of each.
      host: the address of this process.
      places: of each mesh, its address and the beginning of its command.
    """
    os.environ[TOKEN] = secrets.token_hex(16)
    ways = {"all from the trainer": len(places), "as a tree": MOST}
    seconds = {way: _seconds(rounds, host, places, most) for way, most in ways.items()}
    return Fan(len(places), MEBIBYTES, seconds)


def _seconds(
    rounds: int, host: str, places: Sequence[tuple[str, tuple[str, ...]]], most: int
) -> float:
    """Until all meshes have weights, of which the trainer gives to at most `most` at a time."""
    weights = {"a": jax.device_put(np.arange(MEBIBYTES * 2**18, dtype=np.float32))}
    joined: queue.Queue[RemoteSampler] = queue.Queue()
    with (
        lead(_wire(), f"{host}:0", nodes(None), joined=joined.put, most=most) as (_, link, address),
        _begun(address, places),
        ThreadPoolExecutor(len(places)) as threads,
    ):
        samplers = [joined.get(timeout=LONGEST) for _ in places]

        def give(number: int) -> float:
            publication = Publication(number)
            link.offer(publication, weights)
            begin = time.perf_counter()
            list(threads.map(lambda one: one.receive(publication), samplers))
            seconds = time.perf_counter() - begin
            link.withdraw(publication)
            for sampler in samplers:
                sampler.drop_weights(publication)
            return seconds

        return statistics.median([give(number) for number in range(1 + rounds)][1:])


@contextmanager
def _begun(address: str, places: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[None]:
    """The processes of the meshes."""
    begun = []
    try:
        for number, (host, before) in enumerate(places):
            command = [*before, sys.executable, "-m", __name__, address, f"rollout {number}", host]
            begun.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        yield
    finally:
        for process in begun:
            process.kill()
            process.wait()


class _Takes:
    """Takes weights, and has them given on."""

    def __init__(self, name: str, relay: Relay):
        self._name, self._relay = name, relay

    def do(self, command: Command) -> None:
        """See `serving.Executes`."""
        here = SingleDeviceSharding(jax.devices()[0])
        if isinstance(command, Publish):
            whole = self._relay.take(
                command.publication, lambda tree: jax.tree.map(lambda _: here, tree), self._name
            )
            assert whole is not None

    def drop(self, command: Command) -> None:
        """See `serving.Executes`."""
        if isinstance(command, DropVersion):
            self._relay.drop(command.publication)


def main(leader: str, name: str, host: str) -> None:
    """The process of a mesh."""
    with join(_wire(), leader, name, 1, host, nodes(None), seconds=LONGEST) as (following, link):
        serve(following, _Takes(name, Relay(link, link, following, gives=True)))


def _wire() -> Wire:
    return Wire(Identity.of({}, job_token()))


if __name__ == "__main__":
    main(*sys.argv[1:])
