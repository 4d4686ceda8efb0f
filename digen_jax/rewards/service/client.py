"""A reward that asks reward servers."""

import email.utils
import json
import logging
import math
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np
import stamina
from jaxtyping import Float32, Num

from digen_jax.errors import ConfigError, check_range
from digen_jax.images import to_uint8
from digen_jax.process.ending import Stopped
from digen_jax.rewards.mistakes import RewardMistake
from digen_jax.rewards.service import REWARDS, SCORE, VERSION
from digen_jax.rewards.service.servers import FIRST, MOST, Server, Servers
from digen_jax.rewards.service.wire import SHOWN, Malformed, decode_answer, encode_request

CONNECT = 5.0  # seconds for a connection, and for /rewards
WAIT, WAITS = 0.1, 5.0  # first and longest pause between two attempts
QUIET = 5.0  # seconds between two printed lines on a server
AGAIN = (408, 425, 429)  # statuses after which a request is repeated, beside 5xx
ANSWER = 2**16, 64  # bytes of an answer at most: and for each score

# They have a line for every retry and every request; `RemoteReward` prints its own.
for name, level in (("stamina", logging.ERROR), ("httpx", logging.WARNING)):
    logging.getLogger(name).setLevel(level)


class Exchange(NamedTuple):
    """A request as the timeline shows it, by `time.perf_counter`."""

    server: str
    begin: float
    end: float
    images: int
    failure: str | None  # why it is repeated


class Passing(Exception):
    """A failure after which the request is repeated.

    Args:
      which: the image it is about, within the request.
      after: seconds that the server asks to wait.
      down: the server itself does not work.
    """

    def __init__(self, reason: str, which: int = 0, after: float = 0.0, down: bool = False):
        super().__init__(reason)
        self.which, self.after, self.down = which, after, down
        self.server: str | None = None


class Unreachable(ConfigError):
    """No server answers."""


class RemoteReward:
    """A reward whose scores reward servers make. Several threads may call it at the same time.

    Args:
      servers: their addresses, such as "http://127.0.0.1:8100".
      names: that the scores must have; others are returned, too.
      token: that the servers ask for.
      limit: seconds of one attempt.
      deadline: seconds of all attempts of a request.
      retries: attempts after the first; also how often in a row every server may fail, whoever asks.
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
        names: Sequence[str] = (),
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
        self._servers = Servers([checked_address(one) for one in servers], *alone)
        if not servers or len(set(servers)) < len(servers):
            raise ConfigError("servers must be one or more addresses, each once")
        self._names, self._limit, self._deadline = tuple(names), limit, deadline
        self._retries, self._waits, self._listen = retries, waits, listen
        self._most = sys.maxsize, math.inf  # images and pixels of a request
        self.checked = False  # whether `check` has had an answer
        self._told: dict[str, float] = {}  # when a server's last line was printed
        self._lock = threading.Lock()
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            transport=transport,
            trust_env=False,  # servers are addressed directly, not by the environment's proxies
        )

    def check(self) -> dict[str, Any]:
        """Asks each server what it has, and keeps to the smallest limits; returns the answers by address.

        Raises:
          Unreachable: none answers.
          ConfigError: one refuses the token or has another version.
        """
        found = {}
        for server in self._servers:
            try:
                response = self._http.get(server.url + REWARDS, timeout=CONNECT)
            except httpx.TransportError as error:
                print(f"reward server {server.url}: {_words(error)}", file=sys.stderr, flush=True)
                continue
            found[server.url] = _told(server.url, response)
        if not found:
            addresses = ", ".join(server.url for server in self._servers)
            raise Unreachable(
                f"no reward server answers at {addresses}: start one by launch/reward_server.py"
            )
        self.checked = True
        self._most = tuple(
            min(told["limits"][name] for told in found.values()) for name in ("images", "pixels")
        )
        return found

    def __call__(
        self,
        images: Num[np.ndarray, "b h w 3"] | Num[np.ndarray, "b t h w 3"],
        prompts: list[str],
        metadata: list[dict],
    ) -> dict[str, Float32[np.ndarray, "b"]]:
        """The scores by name.

        Raises:
          Stopped: the servers have failed too often or too long: names the last server, a prompt and the reason.
          RewardMistake: a server refuses the request, which would not change.
        """
        pixels = math.prod(images.shape[1:-1])
        count = int(max(1, min(self._most[0], self._most[1] // max(1, pixels))))
        found = []
        for i in range(0, len(prompts), count):
            part = slice(i, i + count)
            found.append(self._ask(to_uint8(images[part]), prompts[part], metadata[part]))
        names = [name for name in found[0] if all(name in one for one in found)]
        return {name: np.concatenate([one[name] for one in found]) for name in names}

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _ask(
        self, images: np.ndarray, prompts: list[str], metadata: list[dict]
    ) -> dict[str, Float32[np.ndarray, "b"]]:
        """One request, repeated with its id."""
        try:
            kind, body = encode_request(images, prompts, metadata, secrets.token_hex(16))
        except ValueError as error:
            raise RewardMistake(str(error)) from error
        begin = time.monotonic()
        until = begin + self._deadline
        attempts = stamina.retry_context(
            on=lambda error: self._pause(error, until),
            attempts=self._retries + 1,
            timeout=self._deadline,
            wait_initial=self._waits[0],
            wait_max=self._waits[1],
            wait_jitter=self._waits[1] / 5,
        )
        tries, last = 0, None
        try:
            for attempt in attempts:
                with attempt:
                    tries += 1
                    try:
                        return self._once(kind, body, prompts, until)
                    except Passing as error:
                        if last is not None and time.monotonic() >= until:
                            raise last from error  # this one had too little time to tell more
                        last = error
                        raise
        except Passing as error:
            often = f"{tries} attempts" if tries > 1 else "one attempt"
            raise Stopped(
                f"reward server {error.server or 'of any address'} {error} (prompt "
                f"{prompts[error.which]!r}), after {often} in {time.monotonic() - begin:.1f} s: repair or "
                "restart it, and the same command continues"
            ) from error
        raise AssertionError("an attempt returns or raises")

    def _pause(self, error: Exception, until: float) -> bool | float:
        """Whether stamina repeats a request: True with its back-off, else after a number of seconds."""
        left = until - time.monotonic()
        if not isinstance(error, Passing) or left <= 0:
            return False
        # Where no server works, a single request at a time is tried: it counts for all threads.
        if self._servers.all_failed(self._retries + 1):
            return False
        # A pause that a server asks for holds in `Servers` for all requests.
        return True if left > self._waits[1] else random.uniform(0, left)

    def _once(
        self, kind: str, body: bytes, prompts: list[str], until: float
    ) -> dict[str, Float32[np.ndarray, "b"]]:
        """One attempt.

        Raises:
          Passing: it may be repeated; without a server if all were left alone to the end.
        """
        server = self._servers.take(until)
        if server is None:
            raise Passing("does not answer: all have failed and are left alone")
        begun, begin, failure = self._servers.clock(), time.perf_counter(), None
        try:
            content = self._post(server.url, kind, body, prompts, until)
            try:
                scores, _ = decode_answer(content, len(prompts), self._names)
            except Malformed as error:
                which = error.args[1] if len(error.args) > 1 else 0
                raise Passing(f"sent an answer that {error.args[0]}", which, down=True) from error
        except Passing as error:
            failure, error.server = str(error), server.url
            self._settle(server, begun, error)
            raise
        except BaseException:
            self._servers.passed(server)
            raise
        else:
            self._servers.succeeded(server)
        finally:
            if self._listen is not None:
                end = time.perf_counter()
                self._listen(Exchange(server.url, begin, end, len(prompts), failure))
        return scores

    def _settle(self, server: Server, begun: float, error: Passing) -> None:
        """Leaves a server alone after a failure, and prints a line if the last one is some time ago."""
        if error.down:
            alone = self._servers.failed(server, begun)
        else:
            alone = error.after and error.after * random.uniform(1, 1.25)
            self._servers.passed(server, alone)
        with self._lock:
            now = time.monotonic()
            if now - self._told.get(server.url, -math.inf) < QUIET:
                return
            self._told[server.url] = now
        left = f"; it is left alone for {alone:.1f} s" if alone else ""
        print(f"reward server {server.url} {error}{left}", file=sys.stderr, flush=True)

    def _post(self, url: str, kind: str, body: bytes, prompts: list[str], until: float) -> bytes:
        """The content of an answer with status 200.

        Raises:
          Passing, RewardMistake: see `__call__`.
        """
        end = min(until, time.monotonic() + self._limit)
        left = max(1e-3, end - time.monotonic())
        timeout = httpx.Timeout(left, connect=min(CONNECT, left))
        try:
            with self._http.stream(
                "POST", url + SCORE, content=body, headers={"Content-Type": kind}, timeout=timeout
            ) as response:
                content = _read(response, ANSWER[0] + ANSWER[1] * len(prompts), end)
        except httpx.PoolTimeout as error:
            raise Passing("had no free connection: give connections a larger number") from error
        except httpx.HTTPError as error:
            raise Passing(_words(error), down=True) from error
        status = response.status_code
        if status == 200:
            return content
        sentence = _sentence(content)
        if status in AGAIN or status >= 500:
            raise Passing(f"answered {status}: {sentence}", after=retry_after(response.headers))
        raise RewardMistake(f"reward server {url} refuses {prompts[0]!r} with {status}: {sentence}")


def checked_address(text: str) -> str:
    """A server's address without a slash at its end.

    Raises:
      ConfigError: it is none.
    """
    try:
        url = httpx.URL(text.rstrip("/"))
    except (httpx.InvalidURL, AttributeError) as error:
        raise ConfigError(f"{text!r} is no address of a reward server: {error}") from error
    known = url.port is None or 0 < url.port < 2**16
    if (
        url.scheme not in ("http", "https")
        or not url.host
        or url.path != "/"
        or url.userinfo
        or not known
    ):
        raise ConfigError(
            f"{text!r} is no address of a reward server: write one such as http://127.0.0.1:8100"
        )
    return str(url).rstrip("/")


def retry_after(headers: httpx.Headers) -> float:
    """The seconds of a Retry-After, which has a number or a date; 0 without one."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0


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


def _told(url: str, response: httpx.Response) -> dict[str, Any]:
    """A server's answer to /rewards, checked."""
    if response.status_code != 200:
        raise ConfigError(
            f"reward server {url} answered {response.status_code}: {_sentence(response.content)}"
        )
    try:
        told = response.json()
        version, limits = told["version"], told["limits"]
        if not all(
            isinstance(limits[name], int) and limits[name] > 0 for name in ("images", "pixels")
        ):
            raise ValueError("limits")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{url} is no reward server: its {REWARDS} has another format") from error
    if version != VERSION:
        raise ConfigError(
            f"reward server {url} has version {version!r} of the format, this code {VERSION}: use the same code"
        )
    return told


def _sentence(content: bytes) -> str:
    """The sentence of an error, on one line."""
    try:
        text = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = content[:SHOWN].decode("utf-8", "replace") or "without a reason"
    return " ".join(str(text).split())[:SHOWN]


def _words(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "did not answer in time"
    if isinstance(error, httpx.ConnectError):
        return f"cannot be reached ({error})"
    return f"ended the connection ({error or type(error).__name__})"
