"""The app of a reward server: it reads, checks and answers requests; what it accepts is in `limits`.

No request names a file, and nothing is unpickled. Every refusal is a sentence, `{"error": "..."}`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from digen_jax.rewards.service import HEALTH, REWARDS, SCORE, VERSION
from digen_jax.rewards.service.answers import Answers
from digen_jax.rewards.service.batching import Batcher
from digen_jax.rewards.service.limits import Limits, Refused
from digen_jax.rewards.service.multipart import check_type
from digen_jax.rewards.service.scoring import Pool, Scorer
from digen_jax.rewards.service.wire import decode_request, encode_answer

DECODERS = 4  # requests whose pictures are decoded at the same time
# Seconds in which the rest of a refused body is read, so that its sender reads the answer.
DRAINED = 2.0
GONE = 499  # of a sender that went away; nobody gets it


@dataclasses.dataclass
class Service:
    """The state of a server.

    Args:
      pool: see `scoring.Pool`.
      names: of the reward.
      at_once: calls that the pool makes at the same time.
      token: that requests must have, or None.
    """

    pool: Pool
    names: tuple[str, ...]
    at_once: int = 1
    limits: Limits = dataclasses.field(default_factory=Limits)
    token: str | None = None

    def __post_init__(self):
        self.scorer = Scorer(self.pool, self.names, self.limits.score)
        self.batcher = Batcher(self.scorer, self.at_once, self.limits)
        self.answers = Answers(self.limits.remembered, self.limits.answers)
        self.decoders = ThreadPoolExecutor(DECODERS, "decode")
        self.held = 0  # bytes of requests
        self.tried = False  # the trial has passed; requests are refused before
        self.stopping = False
        self.asked = self.repeated = 0  # requests that got scores

    async def score(self, request: Request) -> Response:
        """`POST /v1/score`."""
        self.check(request)
        with Room(self) as room:
            body = await read_body(request, self.limits, room)
            kind = request.headers.get("content-type", "")
            decode = functools.partial(decode_request, kind, body, self.limits)
            asked = await asyncio.get_running_loop().run_in_executor(self.decoders, decode)
            del body, decode
            room.resize(asked.images.nbytes)
            (scores, seconds), repeated = await self.answers.once(
                asked.id, asked.digest, functools.partial(self.batcher, asked)
            )
        self.asked += 1
        self.repeated += repeated
        return Response(encode_answer(scores, seconds), media_type="application/json")

    def check(self, request: Request) -> None:
        """Refuses a request by its headers."""
        self.authorise(request)
        if self.stopping or not self.tried:
            what = "stops" if self.stopping else "has not tried its reward yet"
            raise Refused(503, f"the server {what}", 1.0)
        if self.scorer.hung:
            raise Refused(504, self.scorer.hung)
        check_type(request.headers.get("content-type", ""))
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, "the body must not be compressed")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.body:
            raise Refused(413, f"the body has more than {self.limits.body} bytes")

    def authorise(self, request: Request) -> None:
        """Refuses a request without the server's token, and those that a web page makes a browser send."""
        if "origin" in request.headers:
            raise Refused(403, "requests of web pages are not answered")
        given = request.headers.get("authorization", "").encode()
        if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise Refused(401, "the request needs the server's token: Authorization: Bearer TOKEN")

    def health(self) -> dict[str, Any]:
        """What `GET /health` answers: 200 if `ok`, else 503."""
        return {
            "ok": self.tried and self.scorer.alive and not self.stopping,
            "tried": self.tried,
            "alive": self.scorer.alive,
            "stopping": self.stopping,
            "queued": self.batcher.queued,
            "calls": self.batcher.busy,
        }

    def rewards(self) -> dict[str, Any]:
        """What `GET /rewards` answers."""
        return {"version": VERSION, "rewards": list(self.names), "limits": self.limits.told()}


class Room:
    """The bytes that a request has in memory, of what the server has for all."""

    def __init__(self, service: Service):
        self._service, self._bytes = service, 0

    def __enter__(self) -> "Room":
        return self

    def resize(self, size: int) -> None:
        """Raises Refused, 503, if all requests together would have too many bytes."""
        held = self._service.held - self._bytes + size
        if size > self._bytes and held > self._service.limits.memory:
            raise Refused(503, "the server has no memory left", self._service.batcher.after())
        self._service.held, self._bytes = held, size

    def grow(self, size: int) -> None:
        """Makes room for at least `size` bytes."""
        self.resize(max(size, self._bytes))

    def __exit__(self, *_: Any) -> None:
        self.resize(0)


async def read_body(request: Request, limits: Limits, room: Room) -> bytearray:
    """A body, with or without a length, within the limits.

    Raises:
      Refused: 413, it is too long; 408, it comes too slowly; 503, there is no memory for it.
    """
    room.resize(int(request.headers.get("content-length", "0")))
    body = bytearray()
    try:
        async with asyncio.timeout(limits.upload):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limits.body:
                    raise Refused(413, f"the body has more than {limits.body} bytes")
                room.grow(len(body) + len(chunk))
                body += chunk
    except TimeoutError:
        raise Refused(408, f"the body has not come in {limits.upload:g} seconds") from None
    request.state.whole = True
    return body


class Refusal(Response):
    """An error as JSON.

    Args:
      whole: the request's body has been read; otherwise it is dropped for a moment, then the connection ends.
    """

    def __init__(self, status: int, sentence: str, after: float | None = None, whole: bool = False):
        self._whole = whole
        headers = {} if whole else {"Connection": "close"}
        if after is not None:
            headers["Retry-After"] = str(math.ceil(after))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        content = json.dumps({"error": sentence}).encode()
        super().__init__(content, status, headers, "application/json")

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable], send: Callable) -> None:
        """Sends the whole answer before the rest of the body is read, and its end after that."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if not self._whole:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAINED):
                    while (await receive()).get("more_body"):
                        pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def make_app(service: Service) -> FastAPI:
    """The app of a service, whose trial is the caller's to make."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.decoders.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="Rewards", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )

    @app.post(SCORE)
    async def score(request: Request) -> Response:
        return await service.score(request)

    @app.get(HEALTH)
    async def health() -> Response:
        told = service.health()
        return Response(json.dumps(told), 200 if told["ok"] else 503, media_type="application/json")

    @app.get(REWARDS)
    async def rewards(request: Request) -> Response:
        service.authorise(request)
        return Response(json.dumps(service.rewards()), media_type="application/json")

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        whole = getattr(request.state, "whole", False)
        return Refusal(error.status, str(error), error.after, whole)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return Refusal(
            error.status_code, f"there is {SCORE} to POST, {HEALTH} and {REWARDS} to GET"
        )

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=GONE)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return Refusal(500, "the server has failed")

    return app
