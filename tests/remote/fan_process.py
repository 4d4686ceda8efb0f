"""A mesh that takes published weights and gives them on, and what tests share.

`LEADER=host:port NAME=mesh SLOW=seconds python -m tests.remote.fan_process`: so many seconds it needs to give a frame.
"""

import functools
import hashlib
import os
import sys
import time
import types

import jax
import numpy as np

from digen_jax.config.command_line import run_main
from digen_jax.remote import frames, lending
from digen_jax.remote.following import Following
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.opening import join
from digen_jax.remote.outline import nodes
from digen_jax.remote.relay import Relay
from digen_jax.remote.serving import Sampling, serve
from digen_jax.remote.wire import Wire
from digen_jax.scheduling.commands import Publication
from tests.remote.mesh_process import IDENTITY

SMALL = 300  # bytes of a frame


def tree() -> dict:
    """Weights of two types, of which frames of SMALL bytes have parts."""
    rng = np.random.default_rng(7)
    return {
        "kernel": jax.numpy.asarray(rng.normal(size=(16, 64)), np.float32),
        "factors": [jax.numpy.asarray(rng.normal(size=(8, 8)), jax.numpy.bfloat16)] * 3,
        "scale": jax.numpy.float32(0.5),
    }


def digest(found: dict) -> str:
    return hashlib.sha256(
        b"".join(np.asarray(a).tobytes() for a in jax.tree.leaves(found))
    ).hexdigest()


class Receives:
    """In place of a `SamplingExecutor`: takes weights, and does nothing with them."""

    def __init__(self, name: str, link: Relay, shardings):
        self.name, self.weights = name, {}
        self._link, self._shardings = link, shardings

    def receive(self, publication: Publication) -> None:
        found = self._link.take(publication, self._shardings, self.name)
        if found is not None:
            self.weights[publication] = found

    def drop_weights(self, publication: Publication) -> None:
        self.weights.pop(publication, None)


def takes(following: Following, link: RemoteLink, shardings) -> tuple[Sampling, Receives]:
    """What a mesh's process executes."""
    relay = Relay(link, link, following, gives=True)
    executor = Receives(following.name, relay, shardings)
    steps = types.SimpleNamespace(forget=lambda step: None)
    return Sampling(executor, steps, link, None, relay), executor


def main() -> None:
    frames.FRAME = SMALL
    slow, real = float(os.environ["SLOW"]), lending.frame

    def frame(*arguments):
        sys.stdout.write("gives\n")  # one write: several threads give
        sys.stdout.flush()
        time.sleep(slow)
        return real(*arguments)

    lending.frame = frame
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    opened = functools.partial(join, Wire(IDENTITY), os.environ["LEADER"], os.environ["NAME"])
    with opened(1, "127.0.0.1", nodes(None)) as (following, link):
        sampling, executor = takes(following, link, lambda t: jax.tree.map(lambda _: where, t))
        receive = executor.receive

        def received(publication):
            receive(publication)
            print(f"has {digest(executor.weights[publication])}", flush=True)

        executor.receive = received
        serve(following, sampling)


if __name__ == "__main__":
    run_main(main)
