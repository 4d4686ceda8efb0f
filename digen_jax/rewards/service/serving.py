"""The process of a reward server: its socket, its trial, slow senders, and its end."""

import asyncio
import contextlib
import functools
import ipaddress
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.rewards.service.limits import Refused
from digen_jax.rewards.service.server import Service, make_app
from digen_jax.rewards.service.wire import Asked

HEADERS = 10.0  # seconds in which the head of a request must come
IDLE = 75  # seconds that an open connection without a request is kept
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Protocol(H11Protocol):
    """HTTP/1.1, with a time limit for the head of a request."""

    slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A new connection must send a request in time."""
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        """The first bytes of another request have the limit, too."""
        super().data_received(data)
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals ask the server to stop; they are not raised again, so that the exit code is 0."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
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
        return socket.create_server((host, port), family=family, backlog=1024)
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


def trial(records: Sequence[dict[str, Any]], side: int = 64) -> Asked:
    """Grey pictures with these records, as a request."""
    grey = np.full((len(records), side, side, 3), 128, np.uint8)
    return Asked(None, [record["prompt"] for record in records], list(records), grey, b"")


def serve(service: Service, place: socket.socket, asked: Asked, patience: float) -> None:
    """Serves until a signal comes, then finishes what was accepted.

    Args:
      service: what is served.
      place: see `listen`.
      asked: is scored first; requests are refused until then.
      patience: seconds to finish, after which the rest is dropped.

    Raises:
      ConfigError: the reward fails on `asked`.
    """
    config = uvicorn.Config(
        make_app(service),
        http=Protocol,
        ws="none",
        lifespan="on",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=service.limits.connections,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=max(1, round(patience)),
    )
    server = Server(config, service)
    failed = asyncio.run(_serve(server, service, place, asked))
    if failed is not None:
        raise ConfigError(
            f"{failed}: it was tried on grey pictures; if it needs fields of a prompt file, give one by --prompts"
        )


async def _serve(
    server: Server, service: Service, place: socket.socket, asked: Asked
) -> Refused | None:
    async def begin() -> Refused | None:
        try:
            await service.try_out(asked)
        except Refused as error:
            stopped, server.should_exit = server.should_exit, True
            return None if stopped else error
        host, port = place.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        label = rewards.label(service.names)
        print(f"reward {label!r} is served at http://{host}:{port}", flush=True)
        return None

    begun = asyncio.ensure_future(begin())
    await server.serve(sockets=[place])
    if not begun.done():  # stopped in the trial
        begun.cancel()
        return None
    return begun.result()


def warn(host: str, token: str | None) -> None:
    """A line where everyone in the network can ask."""
    if not is_loopback(host) and not token:
        print(
            f"warning: --host={host} is open to the network, and there is no token: set DIGEN_REWARD_TOKEN",
            file=sys.stderr,
            flush=True,
        )


grey = functools.partial(trial, [{"prompt": "a photo of a cat"}])
