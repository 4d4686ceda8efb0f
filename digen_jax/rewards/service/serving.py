"""The process of a reward server: its socket, its trial, slow senders, and its end."""

import asyncio
import contextlib
import ipaddress
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import SIGNALS
from digen_jax.rewards.service.server import Service, make_app

HEADERS = 10.0  # seconds in which the head of a request must come
IDLE = 75  # seconds that an open connection without a request is kept
# Connections that wait to be accepted, and those that asyncio accepts before it looks at any of them. It logs each that
# it has no descriptor for, in a loop.
BACKLOG, ACCEPTED = 1024, 16
# Descriptors that are no connection's: of connections on their way in and out, files and processes that start.
SPARE = 6 * ACCEPTED
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Protocol(H11Protocol):
    """HTTP/1.1, with a time limit for the head of a request; idle connections make place for new ones."""

    slow: asyncio.TimerHandle | None = None
    used = 0.0  # when the connection was made or a request came last, by the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A new connection must send a request in time, and ends the oldest idle one where there are too many."""
        super().connection_made(transport)
        self.used = self.loop.time()
        self._limit()
        if len(self.connections) >= self.limit_concurrency:
            idle = [one for one in self.connections if one is not self and one.is_idle]
            if idle:
                oldest = min(idle, key=lambda one: one.used)
                self.connections.discard(oldest)
                oldest.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, and the connection is not ending."""
        answering = self.cycle is not None and not self.cycle.response_complete
        return not answering and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """The first bytes of another request have the limit, too."""
        super().data_received(data)
        self.used = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self._whole()
        elif self.slow is None:
            self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the limit."""
        self._whole()
        super().connection_lost(exc)

    def _limit(self) -> None:
        self.slow = self.loop.call_later(HEADERS, self._end)

    def _whole(self) -> None:
        if self.slow is not None:
            self.slow.cancel()
            self.slow = None

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()


class Server(uvicorn.Server):
    """A server that ends well after SIGTERM or Ctrl-C; a second one ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections; see `BACKLOG`."""
        await super().startup(sockets)
        for place in sockets or ():
            place.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals ask the server to stop; they are not raised again, so that the exit code is 0."""
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """New requests are refused; those that were accepted are finished."""
        self._service.stopping = True
        self.force_exit = self.should_exit
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that a server can listen at; 0 is any free port.

    Raises:
      ConfigError: it is in use, or there is no such address.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OverflowError as error:
        raise ConfigError(f"--port={port} must be 0 to 65535") from error
    except OSError as error:
        raise ConfigError(
            f"--host={host} --port={port} cannot be listened at ({error.strerror or error}): give another one"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(
    service: Service, place: socket.socket, trial: Callable[[], Any], patience: float
) -> None:
    """Serves until a signal comes, then finishes what was accepted.

    Args:
      service: what is served.
      place: see `listen`.
      trial: of the reward, in a thread; requests are refused until it returns.
      patience: seconds to finish, after which the rest is dropped.

    Raises:
      ConfigError: the process may open too few files for the connections.
      Exception: what the trial raises.
    """
    connections = min(service.limits.connections, _affordable())
    config = uvicorn.Config(
        make_app(service),
        http=Protocol,
        ws="none",
        lifespan="on",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=connections,
        backlog=ACCEPTED,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=max(1, round(patience)),
    )
    asyncio.run(_serve(Server(config, service), service, place, trial))


def _affordable() -> int:
    """The number of connections that this process has descriptors for."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    found = most - len(os.listdir("/dev/fd")) - SPARE
    if found < 1:
        raise ConfigError(
            f"this process may open {most} files: allow {most - found + 1} or more (ulimit -n)"
        )
    return found


async def _serve(
    server: Server, service: Service, place: socket.socket, trial: Callable[[], Any]
) -> None:
    tried = asyncio.wrap_future(_in_thread(trial))

    def begin(_: asyncio.Future) -> None:
        if tried.cancelled() or tried.exception() is not None:
            server.should_exit = True
            return
        service.tried = True
        host, port = place.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"reward {', '.join(service.names)!r} is served at http://{host}:{port}", flush=True)

    tried.add_done_callback(begin)
    await server.serve(sockets=[place])
    if tried.done() and not service.stopping:
        tried.result()


def _in_thread(work: Callable[[], Any]) -> Future:
    """The result of a call in a thread that this process does not wait for at its end."""
    future: Future = Future()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)

    threading.Thread(target=run, name="trial", daemon=True).start()
    return future


def warn(host: str, token: str | None) -> None:
    """A line where everyone in the network can ask."""
    if not is_loopback(host) and not token:
        print(
            f"warning: --host={host} is open to the network, and there is no token: set DIGEN_REWARD_TOKEN",
            file=sys.stderr,
            flush=True,
        )
