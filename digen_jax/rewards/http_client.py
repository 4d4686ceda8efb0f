"""HTTP client with retries and failover across servers, for reward servers and judges."""

import contextlib
import dataclasses
import email.utils
import io
import json
import logging
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import httpx
import stamina

from digen_jax.errors import ConfigError, check_range
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards import record_exchange
from digen_jax.rewards.errors import RewardError

T = TypeVar("T")

CONNECT = 5.0  # timeout in seconds to connect, and of requests of `get_each`
GET_BYTES = 2**22  # maximum response size of `get_each`
PAUSES = 0.1, 5.0  # first and maximum pause between two attempts, in seconds
BLOCKED = 0.5, 30.0  # first and maximum seconds for which a failed server is blocked, doubling
LOG_INTERVAL = 5.0  # minimum seconds between two log lines about a server
RETRIED = (408, 425, 429)  # retried statuses in addition to 5xx
MESSAGE = 300  # maximum characters of a server's error message
ADVICE = "repair or restart it; then the same command continues"

# These libraries log every retry and request; `FailoverClient` logs separately.
for name, level in (("stamina", logging.ERROR), ("httpx", logging.WARNING)):
    logging.getLogger(name).setLevel(level)


class Request(NamedTuple):
    """A request to any of the servers."""

    path: str
    prompts: Sequence[str]  # of the images, for error messages
    max_bytes: int  # maximum response size
    content_type: str = ""
    # Maps the number of `UnusableAnswer`s so far to the body. None means GET.
    body: Callable[[int], bytes] | None = None


class RetryableError(Exception):
    """Raised for a failure of a server, such as `reason` = "did not answer in time"; the request is retried.

    `image` is the index of the affected image in the request, `after` how many seconds the server asked to wait, and
    `down` whether the server itself has failed.
    """

    advice = ADVICE

    def __init__(self, reason: str, image: int = 0, after: float = 0.0, down: bool = False):
        super().__init__(reason)
        self.image, self.after, self.down = image, after, down
        self.server: str | None = None


class UnusableAnswer(RetryableError):
    """Raised for a well-formed answer without the expected content; retried at most `max_retries` times."""

    def __init__(self, reason: str, max_retries: int, advice: str):
        super().__init__(reason)
        self.max_retries, self.advice = max_retries, advice


@dataclasses.dataclass
class ServerState:
    """Client-side state of a server."""

    url: str
    in_flight: int = 0  # requests
    total: int = 0  # requests so far
    failures: int = 0  # consecutive failures
    blocked_until: float = 0.0
    failed_at: float = 0.0  # time of the last failure that counts


class Servers:
    """Load balancer: picks the server with the fewest requests in flight; blocks failed servers. Thread-safe.

    `blocked` is for how many seconds a failed server is blocked: after the first failure, and at most.
    """

    def __init__(self, urls: Sequence[str], blocked: Any = BLOCKED):
        self._servers = [ServerState(url) for url in urls]
        self._blocked = blocked
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[ServerState]:
        return iter(self._servers)

    def take(self, until: float) -> ServerState | None:
        """Returns the server to use. Waits while all are blocked; returns None at the time `until`.

        A failed server gets one request at a time until one succeeds.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                blocked = [one.blocked_until for one in self._servers if one.blocked_until > now]
                usable = [one for one in self._servers if now >= one.blocked_until]
                usable = [one for one in usable if not (one.failures and one.in_flight)]
                if usable:
                    chosen = min(usable, key=lambda one: (one.in_flight, one.total))
                    chosen.in_flight += 1
                    chosen.total += 1
                    return chosen
                if now >= until:
                    return None
                self._changed.wait(min([until, *blocked]) - now)

    def release(self, server: ServerState, succeeded: bool = False, pause: float = 0.0) -> None:
        """Ends a request that the server answered, and blocks the server for `pause` seconds."""
        with self._changed:
            server.in_flight -= 1
            if succeeded:
                server.failures, server.blocked_until = 0, 0.0
            elif pause:
                server.blocked_until = max(server.blocked_until, time.monotonic() + pause)
            self._changed.notify_all()

    def fail(self, server: ServerState, start: float) -> float:
        """Ends a failed request that was sent at `start`. Returns the seconds for which the server is blocked.

        Requests in flight at an earlier failure count as the same failure.
        """
        with self._changed:
            now = time.monotonic()
            if start >= server.failed_at:
                server.failures += 1
                server.failed_at = now
                seconds = self._blocked[0] * 2 ** min(server.failures - 1, 32)
                until = now + min(self._blocked[1], seconds)
                server.blocked_until = max(server.blocked_until, until)
            server.in_flight -= 1
            self._changed.notify_all()
            return max(0.0, server.blocked_until - now)


class FailoverClient:
    """Sends requests to servers, and records those with a body (`rewards.take_exchanges`). Thread-safe.

    Args:
      servers: Addresses, such as "http://127.0.0.1:8100".
      kind: Kind of server, for messages.
      token: Bearer token.
      attempt: Timeout of one attempt, in seconds.
      deadline: Timeout of all attempts of a request, in seconds.
      retries: Attempts after the first; also the maximum consecutive failures of every server, over all requests.
      connections: Maximum connections to all servers.
      blocked: See `Servers`.
      pauses: First and maximum pause between two attempts, in seconds.
      transport: Replaces the network, for tests.

    Raises:
      ConfigError: An address or a number is invalid.
    """

    def __init__(
        self,
        servers: Sequence[str],
        kind: str = "reward server",
        token: str | None = None,
        attempt: float = 600.0,
        deadline: float = 1800.0,
        retries: int = 8,
        connections: int = 64,
        blocked: tuple[float, float] = BLOCKED,
        pauses: tuple[float, float] = PAUSES,
        transport: httpx.BaseTransport | None = None,
    ):
        check_range("attempt", attempt, 1e-3)
        check_range("deadline", deadline, 1e-3)
        check_range("retries", retries, 0)
        check_range("connections", connections, 1)
        self.servers = Servers([parse_address(one, kind) for one in servers], blocked)
        if not servers or len(set(servers)) < len(servers):
            raise ConfigError("servers must be one or more different addresses")
        self._kind, self._attempt, self._deadline = kind, attempt, deadline
        self._retries, self._pauses = retries, pauses
        self._logged: dict[str, float] = {}  # last log time by server
        self._lock = threading.Lock()
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            transport=transport,
            trust_env=False,  # ignore proxies from the environment
        )

    def get_each(self, path: str, start: str, prompts: Sequence[str] = ()) -> dict[str, bytes]:
        """Sends a GET to every server and returns the answers of reachable ones, by address.

        Args:
          path: Path on each server.
          start: Command that starts a server, for the error message.
          prompts: Prompts to be scored. If there are any and no server is reachable, the GET is retried like `post`,
            and only the first answer is returned.

        Raises:
          ConfigError: A server rejects the request, or none is reachable and there are no prompts.
          Stopped: See `post`.
        """
        found, request = {}, Request(path, prompts, GET_BYTES)
        for server in self.servers:
            try:
                found[server.url] = self._send(server.url, request, time.monotonic() + CONNECT, 0)
            except RetryableError as error:
                print(f"{self._kind} {server.url}: {error}", file=sys.stderr, flush=True)
        if not found and prompts:
            url, content = self._retry(request, bytes)
            return {url: content}
        if not found:
            addresses = ", ".join(server.url for server in self.servers)
            raise ConfigError(f"no {self._kind} answers at {addresses}: start one by {start}")
        return found

    def post(self, request: Request, read: Callable[[bytes], T]) -> T:
        """Returns `read(content)` of an answer. Retries if `read` raises RetryableError.

        Raises:
          Stopped: Attempts or deadline are exhausted; names the last server, a prompt and the reason.
          RewardError: A server rejects the request itself, so a retry would not help.
        """
        return self._retry(request, read)[1]

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _retry(self, request: Request, read: Callable[[bytes], T]) -> tuple[str, T]:
        """Returns (address of the server that answered, `read(content)`). Raises like `post`."""
        start, attempts = time.monotonic(), 0
        until, failures = start + self._deadline, list[RetryableError]()

        def unusable() -> int:
            return sum(isinstance(one, UnusableAnswer) for one in failures)

        def pause(error: Exception) -> bool | float:
            """Returns whether stamina retries: True means after its own backoff, a number after these seconds."""
            if not isinstance(error, RetryableError):
                return False
            left = until - time.monotonic()
            if left > 0 or not failures:  # the end of the deadline says nothing about the server
                failures.append(error)
            if left <= 0 or (isinstance(error, UnusableAnswer) and unusable() > error.max_retries):
                return False
            # While all servers are down, one request at a time is tried on behalf of all threads.
            if all(server.failures > self._retries for server in self.servers):
                return False
            return True if left > self._pauses[1] else random.uniform(0, left)

        with contextlib.suppress(RetryableError):
            for attempt in stamina.retry_context(
                on=pause,
                attempts=self._retries + 1,
                timeout=self._deadline,
                wait_initial=self._pauses[0],
                wait_max=self._pauses[1],
                wait_jitter=self._pauses[1] / 5,
            ):
                with attempt:
                    attempts += 1
                    return self._try_once(request, unusable(), read, until)
        error, seconds = failures[-1], time.monotonic() - start
        raise Stopped(
            f"{self._kind} {error.server or 'of any address'} {error} (prompt {request.prompts[error.image]!r}), "
            f"after {attempts} attempt{'s' * (attempts > 1)} in {seconds:.1f} s: {error.advice}"
        ) from error

    def _try_once(self, request: Request, unusable: int, read: Any, until: float) -> tuple:
        """Returns like `_retry` after one attempt."""
        server = self.servers.take(until)
        if server is None:
            raise RetryableError("does not answer: all have failed and are paused")
        sent, start, failure = time.monotonic(), time.perf_counter(), None
        try:
            found = read(self._send(server.url, request, until, unusable))
        except RetryableError as error:
            failure, error.server = str(error), server.url
            if error.down:
                blocked = self.servers.fail(server, sent)
            else:
                blocked = error.after and error.after * random.uniform(1, 1.25)
                self.servers.release(server, pause=blocked)
            self._log(f"{self._kind} {server.url} {error}", server.url, blocked)
            raise
        except BaseException:
            self.servers.release(server)
            raise
        else:
            self.servers.release(server, succeeded=True)
        finally:
            if request.body is not None:
                count = len(request.prompts)
                record_exchange(self._kind, server.url, start, count, failure)
        return server.url, found

    def _log(self, text: str, url: str, blocked: float) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._logged.get(url, -math.inf) < LOG_INTERVAL:
                return
            self._logged[url] = now
        paused = f"; it is not used for {blocked:.1f} s" if blocked else ""
        print(f"{text}{paused}", file=sys.stderr, flush=True)

    def _send(self, url: str, request: Request, until: float, unusable: int) -> bytes:
        """Returns the content of an answer with status 200.

        Raises:
          RetryableError, RewardError: See `post`.
          ConfigError: See `get_each`.
        """
        end = min(until, time.monotonic() + self._attempt)
        left = max(1e-3, end - time.monotonic())
        given: dict[str, Any] = {"timeout": httpx.Timeout(left, connect=min(CONNECT, left))}
        method, content = "GET" if request.body is None else "POST", bytearray()
        # As a file, which is sent in pieces: httpx copies the unsent rest of bytes after each piece, and its response
        # keeps them until garbage collection.
        body = io.BytesIO(request.body(unusable) if request.body else b"")
        if request.body is not None:
            given["content"] = body
            given["headers"] = {"Content-Type": request.content_type}
        try:
            with body, self._http.stream(method, url + request.path, **given) as response:
                for chunk in response.iter_bytes():
                    if content and time.monotonic() > end:
                        raise RetryableError("did not answer in time", down=True)
                    content += chunk
                    if len(content) > (most := request.max_bytes):
                        raise RetryableError(f"sent an answer of more than {most} bytes", down=True)
        except httpx.PoolTimeout as error:
            raise RetryableError("had no free connection: increase connections") from error
        except httpx.TimeoutException as error:
            raise RetryableError("did not answer in time", down=True) from error
        except httpx.ConnectError as error:
            raise RetryableError(f"cannot be reached ({error})", down=True) from error
        except httpx.HTTPError as error:
            reason = f"closed the connection ({error or type(error).__name__})"
            raise RetryableError(reason, down=True) from error
        status = response.status_code
        if status == 200:
            return bytes(content)
        message = f"{status}: {error_message(content)}"
        if status in RETRIED or status >= 500:
            raise RetryableError(f"answered {message}", after=retry_after(response.headers))
        if request.body is None:
            raise ConfigError(f"{self._kind} {url} answered {message}")
        raise RewardError(f"{self._kind} {url} refuses {request.prompts[0]!r} with {message}")


def parse_address(text: str, kind: str = "reward server") -> str:
    """Returns an address without a trailing slash. `kind` describes the server in the ConfigError."""
    try:
        url = httpx.URL(text.rstrip("/"))
        valid = url.port is None or 0 < url.port < 2**16
    except (httpx.InvalidURL, AttributeError) as error:
        raise ConfigError(f"{text!r} is not an address of a {kind}: {error}") from error
    valid &= url.scheme in ("http", "https") and bool(url.host) and url.path == "/"
    if not valid or url.userinfo:
        raise ConfigError(
            f"{text!r} is not an address of a {kind}: write it as http://127.0.0.1:8100"
        )
    return str(url).rstrip("/")


def parse_addresses(servers: Sequence[str] | str, kind: str, example: str) -> tuple[str, ...]:
    """Returns the addresses in a reward's setting `servers`: a sequence, or a string for a single one.

    The suffix "/v1", which OpenAI clients append, is removed.

    Raises:
      ConfigError: An address is missing or invalid.
    """
    given = (servers,) if isinstance(servers, str) else tuple(servers)
    if not given:
        raise ConfigError(
            f"the reward has no address of a {kind}: give its settings, such as dict(servers=({example!r},))"
        )
    return tuple(parse_address(str(one).rstrip("/").removesuffix("/v1"), kind) for one in given)


def retry_after(headers: httpx.Headers) -> float:
    """Returns the seconds of a Retry-After header (a number or a date), or 0 without one."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0


def error_message(content: bytes | bytearray) -> str:
    """Returns the message of an error response as one line.

    Reward servers send it as `error`, OpenAI's API as `error.message`, FastAPI as `detail`.
    """
    try:
        fields = json.loads(content)
        text = fields["error"] if "error" in fields else fields["detail"]
        if isinstance(text, dict) and "message" in text:
            text = text["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = content[:MESSAGE].decode("utf-8", "replace") or "without a reason"
    return " ".join(str(text).split())[:MESSAGE]
