"""Addresses of servers, and what their answers and failures say."""

import email.utils
import json
import time
from collections.abc import Sequence

import httpx

from digen_jax.errors import ConfigError
from digen_jax.rewards.service.wire import SHOWN


def checked_address(text: str, what: str = "reward server") -> str:
    """A server's address without a slash at its end; `what` it is, in the error.

    Raises:
      ConfigError: it is none.
    """
    try:
        url = httpx.URL(text.rstrip("/"))
    except (httpx.InvalidURL, AttributeError) as error:
        raise ConfigError(f"{text!r} is no address of a {what}: {error}") from error
    known = url.port is None or 0 < url.port < 2**16
    if (
        url.scheme not in ("http", "https")
        or not url.host
        or url.path != "/"
        or url.userinfo
        or not known
    ):
        raise ConfigError(
            f"{text!r} is no address of a {what}: write one such as http://127.0.0.1:8100"
        )
    return str(url).rstrip("/")


def addresses(
    servers: Sequence[str] | str, reward: str, what: str, example: str
) -> tuple[str, ...]:
    """The addresses in a reward's settings, where a single one may be a text.

    Args:
      servers: the setting; "/v1", which clients of OpenAI's API add to an address, may be at an end.
      reward: its name, in errors.
      what: a server is.
      example: an address.

    Raises:
      ConfigError: there is none, or one is no address.
    """
    given = (servers,) if isinstance(servers, str) else tuple(servers)
    if not given:
        raise ConfigError(
            f"the reward {reward!r} has no servers: give their addresses in its settings, such as "
            f"dict(servers=({example!r},))"
        )
    return tuple(checked_address(str(one).rstrip("/").removesuffix("/v1"), what) for one in given)


def retry_after(headers: httpx.Headers) -> float:
    """The seconds of a Retry-After, which has a number or a date; 0 without one."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0


def sentence(content: bytes) -> str:
    """The sentence of an error, on one line.

    Reward servers send it as `error`, OpenAI's API as `error.message`, FastAPI as `detail`.
    """
    try:
        told = json.loads(content)
        text = told["error"] if "error" in told else told["detail"]
        if isinstance(text, dict) and "message" in text:
            text = text["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = content[:SHOWN].decode("utf-8", "replace") or "without a reason"
    return " ".join(str(text).split())[:SHOWN]


def words(error: httpx.HTTPError) -> str:
    """Why a request got no answer."""
    if isinstance(error, httpx.TimeoutException):
        return "did not answer in time"
    if isinstance(error, httpx.ConnectError):
        return f"cannot be reached ({error})"
    return f"ended the connection ({error or type(error).__name__})"
