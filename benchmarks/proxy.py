"""Local proxy that delays, breaks and corrupts HTTP messages between a client and a server."""

import asyncio
import random
import threading
from collections import Counter

HEAD = 2**16  # maximum bytes of a message's head
# Share of the requests with each fault: delayed; 500, 503 or 429 instead of the server's answer; connection closed
# before the request is forwarded, or after the server's answer; an answer that is truncated, or whose scores are NaN
# or too few.
FAULTS = {"delay": 0.1, "error": 0.05, "disconnect": 0.05, "lost": 0.05, "corrupted": 0.05}
DELAY = 0.1  # maximum seconds
ERRORS = (
    b"HTTP/1.1 500 Internal Server Error\r\n",
    b"HTTP/1.1 429 Too Many Requests\r\n",
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\n",
)
CORRUPTED = (
    b'{"scores": {"x',
    b'{"scores": {}, "seconds": 1}',
    b'{"scores": {"%s": [NaN]}, "seconds": 1}',
    b'{"scores": {"%s": [1]}, "seconds": 1}',
    b"<html>",
)


class Proxy:
    """Proxy in a separate thread; `faults` counts the injected faults.

    Args:
      port: Port of the server, on this machine.
      name: Name of a score, for corrupted answers.
      seed: Seed of the random choices.
    """

    def __init__(self, port: int, name: str, seed: int):
        self._server, self._name, self._random = port, name.encode(), random.Random(seed)
        self.faults: Counter[str] = Counter()
        listening = threading.Event()
        run = self._run(listening)
        self._thread = threading.Thread(target=lambda: asyncio.run(run), name="proxy", daemon=True)
        self._thread.start()
        listening.wait()

    def close(self) -> None:
        """Closes all connections."""
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
        """Forwards the requests of a connection, one after the other."""
        try:
            while await self._forward(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side disconnected, or the proxy is closing
        finally:
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Forwards a request and its answer, or injects a fault; returns whether the connection continues."""
        request = await read_message(reader)
        weights = [*FAULTS.values(), 1 - sum(FAULTS.values())]
        (fault,) = self._random.choices([*FAULTS, "none"], weights)
        self.faults[fault] += 1
        if fault == "disconnect":
            return False
        if fault == "error":
            writer.write(self._random.choice(ERRORS) + b"Content-Length: 0\r\n\r\n")
            return True
        if fault == "delay":
            await asyncio.sleep(self._random.uniform(0, DELAY))
        from_server, to_server = await asyncio.open_connection(
            "127.0.0.1", self._server, limit=HEAD
        )
        try:
            to_server.write(request)
            answer = await read_message(from_server)
        finally:
            to_server.close()
        if fault == "lost":
            return False
        if fault == "corrupted":
            body = self._random.choice(CORRUPTED).replace(b"%s", self._name)
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        writer.write(answer)
        await writer.drain()
        return True


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Reads a complete message with a Content-Length, or without a body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)
