"""Pools that need no process, and the app called without a socket."""

import asyncio
from concurrent.futures import Future

import httpx
import numpy as np

from digen_jax.rewards import Scores
from digen_jax.rewards.pool import Scored
from digen_jax.rewards.service.server import Service, make_app
from digen_jax.rewards.service.wire import Limits, encode_request


def random_images(count=2, height=4, width=6, seed=0):
    shape = (count, height, width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def means(images):
    """The scores of `Pool`."""
    flat = images.reshape(len(images), -1).astype(np.float32) / 255
    return flat.mean(1).astype(np.float32)


class ScoringPool:
    """Scores at once, by `means`, and records the calls' sizes. A prompt "fail" or "nan" is obeyed."""

    def __init__(self, error=None):
        self.calls, self.error = [], error or KeyError("no /secret/place/weights.bin here")

    def submit(self, images, prompts, metadata):
        self.calls.append(len(prompts))
        future = Future()
        if "fail" in prompts:
            future.set_exception(self.error)
        else:
            scores = means(images)
            scores[[prompt == "nan" for prompt in prompts]] = np.nan
            future.set_result(Scored(Scores(scores[:, None], {"first": scores}), 0.0))
        return future


class HeldPool(ScoringPool):
    """Scores after `release`."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    def submit(self, *batch):
        future = Future()
        self.waiting.append((future, batch))
        return future

    def release(self):
        waiting, self.waiting = self.waiting, []
        for future, batch in waiting:
            done = super().submit(*batch)
            error = done.exception()
            future.set_exception(error) if error else future.set_result(done.result())

    async def release_until_done(self, tasks):
        while not all(task.done() for task in tasks):
            self.release()
            await asyncio.sleep(0.001)
        return await asyncio.gather(*tasks)


def run(test, pool=None, ready=True, at_once=1, token=None, groupwise=False, **limits):
    """Runs `test(client, service)` on an app."""

    async def run():
        given = pool or ScoringPool(), ("mean",), at_once, Limits(**limits), token, groupwise
        service = Service(*given)
        service.ready = ready
        transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await asyncio.wait_for(test(client, service), 30)

    asyncio.run(run())


async def post(client, images=None, prompts=None, id=None, **headers):
    """Returns the response to a request; keyword arguments are headers."""
    images = random_images() if images is None else images
    prompts = prompts or ["a cat"] * len(images)
    kind, body = encode_request(images, prompts, [{} for _ in prompts], id)
    headers = {"Content-Type": kind} | {k.replace("_", "-"): v for k, v in headers.items()}
    return await client.post("/v1/score", content=body, headers=headers)


def start(coroutine):
    return asyncio.ensure_future(coroutine)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)
