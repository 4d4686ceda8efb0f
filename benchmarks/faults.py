"""A proxy on this machine that delays, breaks and spoils what passes between a client and a server of HTTP."""

import asyncio
import dataclasses
import random
import threading
from collections import Counter

HEAD = 2**16  # bytes of a message's head, at most


@dataclasses.dataclass(frozen=True)
class Faults:
    """Shares of the requests with each fault."""

    delay: float = 0.1  # forwarded late
    error: float = 0.05  # 500, 503 or 429 instead of the server's answer
    disconnect: float = 0.05  # the connection ends before the request is forwarded
    lost: float = 0.05  # the server answers, then the connection ends
    spoilt: float = 0.05  # an answer that is cut, or whose scores are NaN or too few
    longest: float = 0.1  # seconds of a delay


ERRORS = (
    b"HTTP/1.1 500 Internal Server Error\r\n",
    b"HTTP/1.1 429 Too Many Requests\r\n",
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\n",
)
SPOILT = (
    b'{"scores": {"x',
    b'{"scores": {}, "seconds": 1}',
    b'{"scores": {"%s": [NaN]}, "seconds": 1}',
    b'{"scores": {"%s": [1]}, "seconds": 1}',
    b"<html>",
)


class Proxy:
    """A proxy in a thread of its own.

    Args:
      port: of the server, on this machine.
      name: of a score, for spoilt answers.
    """

    def __init__(self, port: int, faults: Faults, name: str, seed: int):
        self._server, self._faults, self._name = port, faults, name.encode()
        self._random = random.Random(seed)
        self.made: Counter[str] = Counter()
        listening = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(listening)), name="proxy", daemon=True
        )
        self._thread.start()
        listening.wait()

    def close(self) -> None:
        """Ends all connections."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _run(self, listening: threading.Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD)
        self.port = server.sockets[0].getsockname()[1]
        listening.set()
        await self._ended.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of a connection, one after the other."""
        try:
            while await self._pass(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # either side has gone, or the proxy ends
        finally:
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Passes a request and its answer, or makes a fault; returns whether the connection continues."""
        request = await message(reader)
        fault = self._fault()
        self.made[fault] += 1
        if fault == "disconnect":
            return False
        if fault == "error":
            writer.write(self._random.choice(ERRORS) + b"Content-Length: 0\r\n\r\n")
            return True
        if fault == "delay":
            await asyncio.sleep(self._random.uniform(0, self._faults.longest))
        there, to = await asyncio.open_connection("127.0.0.1", self._server, limit=HEAD)
        try:
            to.write(request)
            answer = await message(there)
        finally:
            to.close()
        if fault == "lost":
            return False
        if fault == "spoilt":
            body = self._random.choice(SPOILT).replace(b"%s", self._name)
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        writer.write(answer)
        await writer.drain()
        return True

    def _fault(self) -> str:
        draw = self._random.random()
        for field in ("delay", "error", "disconnect", "lost", "spoilt"):
            draw -= getattr(self._faults, field)
            if draw < 0:
                return field
        return "none"


async def message(reader: asyncio.StreamReader) -> bytes:
    """A whole message with a Content-Length, or without a body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)
