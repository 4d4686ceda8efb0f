"""A process's servers: one thread has all their connections and streams, a few others answer calls that take long.

A thread for each stream would do for a few meshes, not for a thousand: see docs/several-hosts.md.
"""

import asyncio
import functools
import logging
import resource
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc

CALLS = 32  # that take long, at the same time; others wait for these
STREAMS = 2048
Context = Any  # of a call in a thread: gRPC's, which may be ended by its `abort`
MOST = 4 * STREAMS  # streams and calls, waiting ones included
# Whoever called is lost while it is answered. gRPC logs this where it has not heard of the loss before.
logging.getLogger("grpc._cython.cygrpc").addFilter(
    lambda record: "ExecuteBatchError raised in core" not in record.getMessage()
)


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """The loop of this process's servers, in a thread of its own that never ends."""
    found = asyncio.new_event_loop()

    def work() -> None:
        asyncio.set_event_loop(found)
        grpc.aio.init_grpc_aio()  # else gRPC ends with the last server, which another thread may free
        found.run_forever()

    threading.Thread(target=work, name="servers", daemon=True).start()
    return found


class Server:
    """A server that has started.

    Args:
      services: each method is a coroutine, which must not block, or a function, for a thread.
      admits: of a call's metadata whether it may come in; others are refused before anything of them is read.
      options: gRPC's.
      open_port: opens the server's port, and returns its number.

    Raises:
      RuntimeError: it cannot listen.
    """

    def __init__(
        self,
        services: Sequence[grpc.GenericRpcHandler],
        admits: Callable[[Sequence[tuple[str, Any]]], str | None],
        options: Sequence[tuple[str, Any]],
        open_port: Callable[[grpc.aio.Server], int],
    ):
        _allow_files()
        self._threads = ThreadPoolExecutor(CALLS, "grpc")
        started = self._start(services, _Doorkeeper(admits), options, open_port)
        self.port = asyncio.run_coroutine_threadsafe(started, loop()).result()

    async def _start(
        self,
        services: Sequence[grpc.GenericRpcHandler],
        doorkeeper: grpc.aio.ServerInterceptor,
        options: Sequence[tuple[str, Any]],
        open_port: Callable[[grpc.aio.Server], int],
    ) -> int:
        self._server = grpc.aio.server(
            self._threads, services, [doorkeeper], options, maximum_concurrent_rpcs=MOST
        )
        port = open_port(self._server)
        await self._server.start()
        return port

    def stop(self, grace: float) -> threading.Event:
        """Ends it; its calls have so many seconds. The event is set when it has ended."""
        ended = threading.Event()

        def stopped(_: Any) -> None:
            self._threads.shutdown(wait=False)  # not before: calls that have come in need a thread
            ended.set()

        stopping = asyncio.run_coroutine_threadsafe(self._server.stop(grace), loop())
        stopping.add_done_callback(stopped)
        return ended


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Refuses calls of strangers with a sentence."""

    def __init__(self, admits: Callable[[Sequence[tuple[str, Any]]], str | None]):
        self._admits = admits

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Looks at the call's metadata."""
        sentence = self._admits(details.invocation_metadata)
        return await continuation(details) if sentence is None else _refused(sentence)


def _refused(sentence: str) -> grpc.RpcMethodHandler:
    """A method that does nothing; one of streams, which does not wait for a message before."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _allow_files() -> None:
    """As many connections as this process may have: often 1,024 files are the usual limit, and far more are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
