"""Requests to one of several servers, repeated until one is answered well: for clients of reward servers and judges."""

import logging
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import httpx
import stamina

from digen_jax.errors import ConfigError, check_range
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.request_log import Exchange
from digen_jax.rewards.service.http import checked_address, retry_after, sentence, words
from digen_jax.rewards.service.servers import FIRST, MOST, Server, Servers

T = TypeVar("T")

CONNECT = 5.0  # seconds for a connection, and for an answer to `Asker.each`
TOLD = 2**22  # bytes of an answer to `Asker.each` at most
WAIT, WAITS = 0.1, 5.0  # first and longest pause between two attempts
QUIET = 5.0  # seconds between two printed lines on a server
AGAIN = (408, 425, 429)  # statuses after which a request is repeated, in addition to 5xx
ADVICE = "repair or restart it, and the same command continues"

# They have a line for every retry and every request; `Asker` prints its own.
for name, level in (("stamina", logging.ERROR), ("httpx", logging.WARNING)):
    logging.getLogger(name).setLevel(level)


class Request(NamedTuple):
    """What is sent.

    Attributes:
      path: on each server.
      prompts: of its images, for errors.
      most: bytes of an answer.
      kind: of the content.
      body: from the number of its answers that were `Unreadable` to the content; None: it is a GET.
    """

    path: str
    prompts: Sequence[str]
    most: int
    kind: str = ""
    body: Callable[[int], bytes] | None = None


class Passing(Exception):
    """A failure after which the request is repeated.

    Args:
      which: the image it is about, within the request.
      after: seconds that the server asks to wait.
      down: the server itself does not work.
    """

    advice = ADVICE

    def __init__(self, reason: str, which: int = 0, after: float = 0.0, down: bool = False):
        super().__init__(reason)
        self.which, self.after, self.down = which, after, down
        self.server: str | None = None


class Unreachable(ConfigError):
    """No server answers, before anything has been asked of one."""


class Unreadable(Passing):
    """An answer of a server that works, without what is looked for in it.

    Args:
      most: how often the request is repeated after such answers.
      advice: what to do if that does not help.
    """

    def __init__(self, reason: str, most: int, advice: str):
        super().__init__(reason)
        self.most, self.advice = most, advice


class Asker:
    """Asks servers. Several threads may do so at the same time.

    Args:
      servers: their addresses, such as "http://127.0.0.1:8100".
      what: one is, in errors.
      token: that the servers ask for.
      limit: seconds of one attempt.
      deadline: seconds of all attempts of a request.
      retries: attempts after the first; also how often in a row every server may fail, whichever request asks.
      connections: at the same time, to all servers together.
      alone: seconds that a server is left alone after its first failure and at most.
      waits: the first and the longest pause between two attempts, in seconds.
      listen: gets each `Exchange`, in the thread that asked.
      transport: how requests are sent; None: over the network.

    Raises:
      ConfigError: an address is none, or a number out of range.
    """

    def __init__(
        self,
        servers: Sequence[str],
        what: str = "reward server",
        token: str | None = None,
        limit: float = 600.0,
        deadline: float = 1800.0,
        retries: int = 8,
        connections: int = 64,
        alone: tuple[float, float] = (FIRST, MOST),
        waits: tuple[float, float] = (WAIT, WAITS),
        listen: Callable[[Exchange], None] | None = None,
        transport: httpx.BaseTransport | None = None,
    ):
        for name, value, least in (
            ("limit", limit, 1e-3),
            ("deadline", deadline, 1e-3),
            ("retries", retries, 0),
            ("connections", connections, 1),
        ):
            check_range(name, value, least)
        self.servers = Servers([checked_address(one, what) for one in servers], *alone)
        if not servers or len(set(servers)) < len(servers):
            raise ConfigError("servers must be one or more addresses, each once")
        self.what, self._limit, self._deadline = what, limit, deadline
        self._retries, self._waits, self._listen = retries, waits, listen
        self._told: dict[str, float] = {}  # when a server's last line was printed
        self._lock = threading.Lock()
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            transport=transport,
            trust_env=False,  # servers are addressed directly, not by the environment's proxies
        )

    def each(self, path: str, start: str, prompts: Sequence[str] = ()) -> dict[str, bytes]:
        """What each server that can be reached answers to a GET, by address.

        Args:
          path: on each server.
          start: what starts a server, in the error.
          prompts: that wait to be scored. If there are any, and no server can be reached, the GET is repeated as `ask`
            repeats a request, and the first answer is the only one.

        Raises:
          Unreachable: none can be reached, and no prompt waits.
          ConfigError: a server refuses the request.
          Stopped: as `ask`.
        """
        found, request = {}, Request(path, prompts, TOLD)
        for server in self.servers:
            try:
                found[server.url] = self._send(server.url, request, time.monotonic() + CONNECT)
            except Passing as error:
                print(f"{self.what} {server.url}: {error}", file=sys.stderr, flush=True)
        if found:
            return found
        if prompts:
            url, content = self._repeated(request, bytes)
            return {url: content}
        addresses = ", ".join(server.url for server in self.servers)
        raise Unreachable(f"no {self.what} answers at {addresses}: start one by {start}")

    def ask(self, request: Request, read: Callable[[bytes], T]) -> T:
        """What `read` makes of the content of an answer; the request is repeated where that raises Passing.

        Raises:
          Stopped: the servers have failed too often or too long, or `Unreadable` answers came too often: names the
            last server, a prompt and the reason.
          RewardError: a server refuses the request, which would not change.
        """
        return self._repeated(request, read)[1]

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _repeated(self, request: Request, read: Callable[[bytes], T]) -> tuple[str, T]:
        """(the address of the server that answered, what `read` makes of the answer); raises as `ask`."""
        begin = time.monotonic()
        until = begin + self._deadline
        tries, unreadable, last = 0, 0, None

        def pause(error: Exception) -> bool | float:
            if isinstance(error, Unreadable) and unreadable > error.most:
                return False
            return self._pause(error, until)

        attempts = stamina.retry_context(
            on=pause,
            attempts=self._retries + 1,
            timeout=self._deadline,
            wait_initial=self._waits[0],
            wait_max=self._waits[1],
            wait_jitter=self._waits[1] / 5,
        )
        try:
            for attempt in attempts:
                with attempt:
                    tries += 1
                    try:
                        return self._once(request, unreadable, read, until)
                    except Passing as error:
                        unreadable += isinstance(error, Unreadable)
                        if last is not None and time.monotonic() >= until:
                            raise last from error  # this one had too little time to tell more
                        last = error
                        raise
        except Passing as error:
            often = f"{tries} attempts" if tries > 1 else "one attempt"
            raise Stopped(
                f"{self.what} {error.server or 'of any address'} {error} (prompt "
                f"{request.prompts[error.which]!r}), after {often} in {time.monotonic() - begin:.1f} s: {error.advice}"
            ) from error
        raise AssertionError("an attempt returns or raises")

    def _pause(self, error: Exception, until: float) -> bool | float:
        """Whether stamina repeats a request: True with its back-off, else after a number of seconds."""
        left = until - time.monotonic()
        if not isinstance(error, Passing) or left <= 0:
            return False
        # Where no server works, a single request at a time is tried: it counts for all threads.
        if self.servers.all_failed(self._retries + 1):
            return False
        # A pause that a server asks for holds in `Servers` for all requests.
        return True if left > self._waits[1] else random.uniform(0, left)

    def _once(
        self, request: Request, unreadable: int, read: Callable[[bytes], T], until: float
    ) -> tuple[str, T]:
        """One attempt, after so many answers that were `Unreadable`.

        Raises:
          Passing: it may be repeated; without a server if all were left alone to the end.
        """
        server = self.servers.take(until)
        if server is None:
            raise Passing("does not answer: all have failed and are left alone")
        begun, begin, failure = self.servers.clock(), time.perf_counter(), None
        try:
            found = read(self._send(server.url, request, until, unreadable))
        except Passing as error:
            failure, error.server = str(error), server.url
            self._settle(server, begun, error)
            raise
        except BaseException:
            self.servers.passed(server)
            raise
        else:
            self.servers.succeeded(server)
        finally:
            if self._listen is not None and request.body is not None:
                end = time.perf_counter()
                self._listen(Exchange(server.url, begin, end, len(request.prompts), failure))
        return server.url, found

    def _settle(self, server: Server, begun: float, error: Passing) -> None:
        """Leaves a server alone after a failure, and prints a line if the last one is some time ago."""
        if error.down:
            alone = self.servers.failed(server, begun)
        else:
            alone = error.after and error.after * random.uniform(1, 1.25)
            self.servers.passed(server, alone)
        with self._lock:
            now = time.monotonic()
            if now - self._told.get(server.url, -math.inf) < QUIET:
                return
            self._told[server.url] = now
        left = f"; it is left alone for {alone:.1f} s" if alone else ""
        print(f"{self.what} {server.url} {error}{left}", file=sys.stderr, flush=True)

    def _send(self, url: str, request: Request, until: float, unreadable: int = 0) -> bytes:
        """The content of an answer with status 200.

        Raises:
          Passing, RewardError: see `ask`; ConfigError: see `each`.
        """
        end = min(until, time.monotonic() + self._limit)
        left = max(1e-3, end - time.monotonic())
        asked: dict[str, Any] = {"timeout": httpx.Timeout(left, connect=min(CONNECT, left))}
        if request.body is not None:
            asked |= {
                "content": request.body(unreadable),
                "headers": {"Content-Type": request.kind},
            }
        method = "GET" if request.body is None else "POST"
        try:
            with self._http.stream(method, url + request.path, **asked) as response:
                content = _read(response, request.most, end)
        except httpx.PoolTimeout as error:
            raise Passing("had no free connection: give connections a larger number") from error
        except httpx.HTTPError as error:
            raise Passing(words(error), down=True) from error
        status = response.status_code
        if status == 200:
            return content
        told = sentence(content)
        if status in AGAIN or status >= 500:
            raise Passing(f"answered {status}: {told}", after=retry_after(response.headers))
        if request.body is None:
            raise ConfigError(f"{self.what} {url} answered {status}: {told}")
        prompt = request.prompts[0]
        raise RewardError(f"{self.what} {url} refuses {prompt!r} with {status}: {told}")


def _read(response: httpx.Response, most: int, end: float) -> bytes:
    """An answer's content, of limited size, within the time."""
    content = bytearray()
    for chunk in response.iter_bytes():
        if content and time.monotonic() > end:
            raise Passing("did not answer in time", down=True)
        content += chunk
        if len(content) > most:
            raise Passing(f"sent an answer of more than {most} bytes", down=True)
    return bytes(content)
