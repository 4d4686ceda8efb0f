"""A worker that takes published weights and sends them on."""

import types

import jax
import numpy as np

from digen_jax.remote.following import Following
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.relay import Relay
from digen_jax.remote.serving import Sampling
from digen_jax.scheduling.commands import Publication

SMALL = 300  # bytes of a frame


def tree() -> dict:
    """Weights of two types, of which frames of SMALL bytes have parts."""
    rng = np.random.default_rng(7)
    return {
        "kernel": jax.numpy.asarray(rng.normal(size=(16, 64)), np.float32),
        "factors": [jax.numpy.asarray(rng.normal(size=(8, 8)), jax.numpy.bfloat16)] * 3,
        "scale": jax.numpy.float32(0.5),
    }


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
