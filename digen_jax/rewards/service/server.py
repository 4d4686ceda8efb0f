"""Reward server: an ASGI app that validates, batches and answers requests, and its process.

Requests contain no file paths, and nothing is unpickled. Error responses are JSON, {"error": "..."}.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import ipaddress
import math
import os
import re
import resource
import socket
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import numpy as np
import uvicorn
from jaxtyping import Float32, UInt8
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from digen_jax.errors import ConfigError
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.pool import RewardHung, RewardProcessDied, RewardTimeout
from digen_jax.rewards.service import wire
from digen_jax.rewards.service.wire import Limits, Refused, ScoreRequest

Columns = dict[str, Float32[np.ndarray, "b"]]  # scores by name

DECODERS = 4  # maximum concurrently decoded requests
DRAIN = 2.0  # seconds to read the rest of a rejected body
GRACE = 2.0  # seconds past its limit after which a call that the pool did not kill is abandoned
FAILURES = 3  # consecutive failed calls after which the server is unhealthy
LONGEST_WAIT = 60.0  # maximum seconds of a Retry-After header
REASON = 200  # maximum characters of a failure's reason
PATH = re.compile(r"\S*[/\\]\S*")
HEAD = 10.0  # timeout in seconds for the head of a request
IDLE = 75  # keep-alive timeout in seconds
# Pending connections, and connections that asyncio accepts at once. Without free file descriptors, asyncio logs every
# connection in a loop.
BACKLOG, ACCEPTED = 1024, 16
SPARE = 6 * ACCEPTED  # file descriptors for other purposes
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def reason(error: BaseException) -> str:
    """Returns the first line of an error for clients, short and without paths."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return PATH.sub("(a path)", line)[:REASON]


class Batcher:
    """Queue that batches requests for `score`, which takes images of one size. For one event loop.

    Requests are never split. At most `at_once` calls are in progress.
    """

    def __init__(self, score: Callable[..., Awaitable[Columns]], at_once: int, limits: Limits):
        self._score, self._at_once, self._limits = score, at_once, limits
        self._waiting: deque[tuple[ScoreRequest, asyncio.Future]] = deque()
        self.calls: set[asyncio.Task] = set()  # in progress
        self.scored, self.seconds = 0, 0.0  # total images and call seconds

    @property
    def queued(self) -> int:
        """Number of queued images."""
        return sum(len(request.prompts) for request, _ in self._waiting)

    async def __call__(self, request: ScoreRequest) -> tuple[Columns, float]:
        """Returns (scores, seconds of the call).

        Raises:
          Refused: The queue is full, or `score` rejects this request.
        """
        if (queued := self.queued) + len(request.prompts) > self._limits.queue:
            raise Refused(503, f"{queued} images wait already", self.retry_after())
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._start()
        return await future

    def retry_after(self) -> float:
        """Returns the estimated seconds until half of the queue is scored."""
        each = self.seconds / self.scored if self.scored else 0.0
        return min(LONGEST_WAIT, max(1.0, self.queued * each / self._at_once / 2))

    def _start(self, done: asyncio.Task | None = None) -> None:
        """Starts calls; also the callback of a finished call."""
        self.calls.discard(done)
        while self._waiting and len(self.calls) < self._at_once:
            call = asyncio.ensure_future(self._call(self._next_batch()))
            self.calls.add(call)
            call.add_done_callback(self._start)

    def _next_batch(self) -> list[tuple[ScoreRequest, asyncio.Future]]:
        """Removes the oldest request, and later ones of the same image size that fit into the batch."""
        left, free = deque[tuple[ScoreRequest, asyncio.Future]](), self._limits.batch
        batch: list[tuple[ScoreRequest, asyncio.Future]] = []
        for one in self._waiting:
            images, first = one[0].images, (batch or [one])[0][0].images
            same_size = images[0].shape == first[0].shape
            fits = not batch or (same_size and len(images) <= free)
            (batch if fits else left).append(one)
            free -= len(images) if fits else 0
        self._waiting = left
        return batch

    async def _call(self, batch: list[tuple[ScoreRequest, asyncio.Future]]) -> None:
        """Scores a batch. After a failure, scores each request separately."""
        requests = [request for request, _ in batch]
        images = [request.images for request in requests]
        prompts = [prompt for request in requests for prompt in request.prompts]
        metadata = [record for request in requests for record in request.metadata]
        start = time.perf_counter()
        try:
            joined = images[0] if len(images) == 1 else np.concatenate(images)
            columns = await self._score(joined, prompts, metadata)
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    await self._call([one])
            elif not batch[0][1].done():
                batch[0][1].set_exception(error)
            return
        seconds = time.perf_counter() - start
        self.scored += len(prompts)
        self.seconds += seconds
        for request, future in batch:
            count = len(request.prompts)
            scores = {name: column[:count] for name, column in columns.items()}
            columns = {name: column[count:] for name, column in columns.items()}
            if not future.done():
                future.set_result((scores, seconds))


class Answers:
    """Deduplicates requests by id: a repeated request waits for, or gets, the first answer.

    Answers are kept for some seconds, and at most `most` of them; the oldest are dropped first.
    """

    def __init__(self, seconds: float, most: int, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._most, self._clock = seconds, most, clock
        self._tasks: dict[str, tuple[bytes, asyncio.Task]] = {}  # (content digest, answer)
        self._expires: OrderedDict[str, float] = OrderedDict()  # expiration times of kept answers

    def __len__(self) -> int:
        return len(self._expires)

    async def once(
        self, id: str | None, digest: bytes, answer: Callable[[], Awaitable[Any]]
    ) -> tuple[Any, bool]:
        """Returns (answer, whether it is a repeat). Failures are not kept.

        The answer is completed even if the client disconnects, because the client will retry.

        Raises:
          Refused: The id was used with other content.
        """
        while self._expires and next(iter(self._expires.values())) <= self._clock():
            del self._tasks[self._expires.popitem(last=False)[0]]
        if repeated := id in self._tasks:
            known, task = self._tasks[id]
            if known != digest:
                raise Refused(422, "id belongs to a request with other content: use a new one")
        else:
            task = asyncio.ensure_future(answer())
            if id is not None:
                self._tasks[id] = digest, task
                task.add_done_callback(functools.partial(self._keep, id))
        return await asyncio.shield(task), repeated

    def _keep(self, id: str, task: asyncio.Task) -> None:
        if task.cancelled() or task.exception() is not None:
            del self._tasks[id]
            return
        self._expires[id] = self._clock() + self._seconds
        if len(self._expires) > self._most:
            del self._tasks[self._expires.popitem(last=False)[0]]


class Service:
    """State and endpoints of a server.

    Args:
      pool: `RewardPool` that scores batches.
      names: Names of the reward's scores.
      at_once: Maximum concurrent calls of the pool.
      limits: Limits of requests.
      token: Required bearer token. None means that none is required.
      groupwise: Whether a reward needs complete groups, which are requests then: each is scored in its own call.
    """

    def __init__(
        self,
        pool: Any,
        names: tuple[str, ...],
        at_once: int = 1,
        limits: Limits | None = None,
        token: str | None = None,
        groupwise: bool = False,
    ):
        self.names, self.limits, self.token = names, limits or Limits(), token
        if groupwise:
            self.limits = dataclasses.replace(self.limits, batch=1)
        self.groupwise = groupwise
        self.batcher = Batcher(self._score, at_once, self.limits)
        self.answers = Answers(self.limits.remembered, self.limits.answers)
        self._pool = pool
        self.hung = ""  # message, if the reward hangs in a thread of the server
        self.failures = 0  # consecutive failed calls
        self.held = 0  # request bytes in memory
        self.ready = False  # whether the dry run passed; requests are rejected before
        self.stopping = False
        self._decoding = asyncio.Semaphore(DECODERS)

    async def score(self, request: Request) -> Response:
        """Handles `POST /v1/score`."""
        self._authorize(request)
        if self.stopping or not self.ready:
            state = "is stopping" if self.stopping else "has not finished its dry run"
            raise Refused(503, f"the server {state}", 1.0)
        if self.hung:
            raise Refused(504, self.hung)
        content_type = request.headers.get("content-type", "")
        wire.boundary_of(content_type)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, "the body must not be compressed")
        length = request.headers.get("content-length", str(self.limits.body))
        if not length.isdecimal() or int(length) > self.limits.body:
            raise Refused(413, f"the body has more than {self.limits.body} bytes")
        with self._memory(int(length)):
            body = b"".join([chunk async for chunk in request.stream()])
            async with self._decoding:
                given = content_type, body, self.limits
                found = await asyncio.to_thread(wire.decode_request, *given)
            del body, given
        with self._memory(found.images.nbytes):
            answer = functools.partial(self.batcher, found)
            (scores, seconds), _ = await self.answers.once(found.id, found.digest, answer)
        return Response(wire.encode_answer(scores, seconds), media_type="application/json")

    async def _score(
        self, images: UInt8[np.ndarray, "b ..."], prompts: list[str], metadata: list[dict]
    ) -> Columns:
        """Calls the pool, which should kill calls after `limits.score` seconds; returns the scores.

        Raises:
          Refused: 500; 504 after a timeout; 422 if the metadata lacks an input of the reward.
        """
        seconds = self.limits.score
        try:
            future = asyncio.wrap_future(self._pool.submit(images, prompts, metadata))
            scores = (await asyncio.wait_for(future, seconds + GRACE)).scores
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if isinstance(error, ConfigError) and not isinstance(error, RewardError):
                raise Refused(422, reason(error)) from error
            reward = f"reward {', '.join(self.names)!r}"
            self.failures += 1
            if isinstance(error, RewardHung):
                self.hung = f"{reward} hangs in a thread of the server: restart it"
            if isinstance(error, RewardTimeout | RewardHung | TimeoutError):
                raise Refused(504, f"{reward} took more than {seconds:g} seconds") from error
            died = isinstance(error, RewardProcessDied)
            raise Refused(500, f"{reward} died" if died else reason(error)) from error
        self.failures = 0
        return dict(zip(self.names, scores.columns.T, strict=True)) | dict(scores.shown)

    async def health(self, request: Request) -> Response:
        """Handles `GET /health`."""
        alive = not self.hung and self.failures < FAILURES
        ok = self.ready and alive and not self.stopping
        state = dict(ok=ok, ready=self.ready, alive=alive, stopping=self.stopping)
        load = dict(queued=self.batcher.queued, calls=len(self.batcher.calls))
        return JSONResponse(state | load, 200 if ok else 503)

    async def rewards(self, request: Request) -> Response:
        """Handles `GET /rewards`."""
        self._authorize(request)
        names = ("body", "text", "images", "side", "frames", "pixels", "queue", "upload", "score")
        limits = {name: getattr(self.limits, name) for name in names}
        found = {"version": wire.VERSION, "rewards": list(self.names), "limits": limits}
        return JSONResponse(found | {"groupwise": self.groupwise})

    def _authorize(self, request: Request) -> None:
        """Rejects requests without the token, and those with an Origin header, which web pages send."""
        if "origin" in request.headers:
            raise Refused(403, "requests of web pages are not answered")
        given = request.headers.get("authorization", "").encode()
        if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise Refused(401, "the request needs the server's token: Authorization: Bearer TOKEN")

    @contextlib.contextmanager
    def _memory(self, size: int) -> Iterator[None]:
        """Reserves bytes of the memory limit for requests."""
        if self.held + size > self.limits.memory:
            raise Refused(503, "the server has no memory left", self.batcher.retry_after())
        self.held += size
        try:
            yield
        finally:
            self.held -= size


class BodyLimits:
    """ASGI middleware that limits the size and upload time of request bodies.

    After an early response, the rest of the body is read for up to `DRAIN` seconds: a client that is still sending
    would otherwise lose the response.
    """

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        unread, size = scope["method"] not in ("GET", "HEAD"), 0
        deadline = asyncio.get_running_loop().time() + self._limits.upload

        async def limited_receive() -> Message:
            nonlocal unread, size
            try:
                async with asyncio.timeout_at(deadline if unread else None):
                    message = await receive()
            except TimeoutError:
                seconds = f"{self._limits.upload:g} seconds"
                raise Refused(408, f"the body did not arrive within {seconds}") from None
            unread = message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._limits.body:
                raise Refused(413, f"the body has more than {self._limits.body} bytes")
            return message

        async def draining_send(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            elif unread and message["type"] == "http.response.body":
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN):
                        while (await receive()).get("more_body"):
                            pass
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, limited_receive, draining_send)


def make_app(service: Service) -> Starlette:
    """Returns the ASGI app of a service."""

    def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        if error.after is not None:
            headers["Retry-After"] = str(math.ceil(error.after))
        return JSONResponse({"error": str(error)}, error.status, headers)

    def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        paths = f"use POST {wire.SCORE}, GET {wire.HEALTH} or GET {wire.REWARDS}"
        return JSONResponse({"error": paths}, error.status_code)

    def fail(request: Request, error: Exception) -> Response:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return JSONResponse({"error": "the server has failed"}, 500)

    return Starlette(
        routes=[
            Route(wire.SCORE, service.score, methods=["POST"]),
            Route(wire.HEALTH, service.health),
            Route(wire.REWARDS, service.rewards),
        ],
        middleware=[Middleware(BodyLimits, service.limits)],
        exception_handlers={
            Refused: refuse,
            HTTPException: unknown,
            ClientDisconnect: lambda request, error: Response(status_code=499),
            Exception: fail,
        },
    )


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 protocol with a timeout for request heads. New connections evict the oldest idle one."""

    used = 0.0  # time of the last received data

    def connection_made(self, transport: Any) -> None:
        """Starts the timeout, and closes the oldest idle connection if there are too many."""
        super().connection_made(transport)
        self.used = self.loop.time()
        self._timer = self.loop.call_later(HEAD, self._end)
        if len(self.connections) >= (self.limit_concurrency or math.inf):
            idle = [one for one in cast(Any, self.connections) if one is not self and one.is_idle]
            if idle:
                oldest = min(idle, key=lambda one: one.used)
                self.connections.discard(oldest)
                oldest.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Returns whether the connection is open without a request in progress."""
        answering = self.cycle is not None and not self.cycle.response_complete
        return not answering and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """Stops the timeout after a complete head; the first bytes of the next request restart it."""
        super().data_received(data)
        self.used = self.loop.time()
        if not self.is_idle:
            self._timer.cancel()
        elif self._timer.cancelled():
            self._timer = self.loop.call_later(HEAD, self._end)

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()


class Server(uvicorn.Server):
    """Server that finishes accepted requests after SIGTERM or Ctrl-C. A second signal exits immediately."""

    service: Service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts accepting connections; see `BACKLOG`."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Rejects new requests. Unlike uvicorn, does not re-raise the signal, so the exit code is 0."""
        self.service.stopping = True
        self.force_exit = self.should_exit
        self.should_exit = True


def listen(host: str, port: int, token: str | None = None) -> socket.socket:
    """Returns a listening socket; port 0 means any free port. Warns about public addresses without a token.

    Raises:
      ConfigError: The address is in use or invalid.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OverflowError as error:
        raise ConfigError(f"--port={port} must be 0 to 65535") from error
    except OSError as error:
        raise ConfigError(
            f"--host={host} --port={port} cannot be used ({error.strerror or error}): choose others"
        ) from error
    if not ipaddress.ip_address(address[0]).is_loopback and not token:
        text = f"warning: --host={host} is open to the network, and there is no token: set {wire.TOKEN}"
        print(text, file=sys.stderr, flush=True)
    return listener


def serve(
    service: Service, listener: socket.socket, dry_run: Callable[[], Any], patience: float
) -> None:
    """Serves on a listening socket until a signal, then finishes accepted requests for at most `patience` seconds.

    `dry_run` checks the reward, in a thread. Requests are rejected until it returns.

    Raises:
      ConfigError: The process may open too few files for the connections.
      Exception: Any exception of the dry run.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = sys.maxsize
    needed = len(os.listdir("/dev/fd")) + SPARE
    if descriptors <= needed:
        may = f"this process may open {descriptors} files"
        raise ConfigError(f"{may}: allow more than {needed} (ulimit -n)")
    config = uvicorn.Config(
        make_app(service),
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=min(service.limits.connections, descriptors - needed),
        backlog=ACCEPTED,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=max(1, round(patience)),
    )
    server, failures = Server(config), list[BaseException]()
    server.service = service

    def check() -> None:
        try:
            dry_run()
        except BaseException as error:
            failures.append(error)
            server.should_exit = True
            return
        service.ready = True
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"reward {', '.join(service.names)!r} is served at http://{host}:{port}", flush=True)

    # A daemon thread, so that a hung reward does not block process exit.
    threading.Thread(target=check, name="dry run", daemon=True).start()
    asyncio.run(server.serve(sockets=[listener]))
    if failures and not service.stopping:
        raise failures[0]
