"""Pools that need no process, and the app asked without a socket."""

import asyncio
import contextlib
import json
from concurrent.futures import Future

import httpx
import numpy as np

from digen_jax.rewards.service.limits import Limits
from digen_jax.rewards.service.server import Service, make_app
from digen_jax.rewards.service.wire import encode_request

NAMES = ("mean",)


def pictures(count=2, height=4, width=6, seed=0):
    shape = (count, height, width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def means(images):
    """What `Pool` gives."""
    flat = images.reshape(len(images), -1).astype(np.float32) / 255
    return flat.mean(1).astype(np.float32)


class Pool:
    """Scores at once, by `means`; remembers the calls' sizes. A prompt "fail" or "nan" is followed."""

    def __init__(self):
        self.calls = []

    def submit(self, images, prompts, metadata):
        self.calls.append(len(prompts))
        future = Future()
        if "fail" in prompts:
            future.set_exception(KeyError("no /secret/place/weights.bin here"))
        else:
            scores = images.reshape(len(images), -1).mean(1, dtype=np.float32)
            scores[[prompt == "nan" for prompt in prompts]] = np.nan
            future.set_result(scores)
        return future


class Held(Pool):
    """Scores when told to."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    def submit(self, *batch):
        future = Future()
        self.waiting.append((future, batch))
        return future

    def go_on(self):
        waiting, self.waiting = self.waiting, []
        for future, batch in waiting:
            done = super().submit(*batch)
            error = done.exception()
            future.set_exception(error) if error else future.set_result(done.result())


@contextlib.asynccontextmanager
async def serving(pool=None, tried=True, at_once=1, token=None, **limits):
    """(client, service) of an app that has tried its reward."""
    service = Service(pool or Pool(), NAMES, at_once, Limits(**limits), token)
    if tried:
        service.tried = True
    transport = httpx.ASGITransport(make_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client, service
    service.decoders.shutdown()


async def post(client, images=None, prompts=None, metadata=None, id=None, **headers):
    """The response to a request; keyword arguments are headers."""
    images = pictures() if images is None else images
    prompts = prompts or ["a cat"] * len(images)
    metadata = metadata or [{} for _ in prompts]
    kind, body = encode_request(images, prompts, metadata, id)
    headers = {"Content-Type": kind} | {k.replace("_", "-"): v for k, v in headers.items()}
    return await client.post("/v1/score", content=body, headers=headers)


async def soon(condition):
    """Waits until something is so."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def sentence(response):
    return json.loads(response.content)["error"]


__all__ = [
    "NAMES",
    "Held",
    "Pool",
    "means",
    "pictures",
    "post",
    "sentence",
    "serving",
    "soon",
]
