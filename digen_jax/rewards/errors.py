"""Errors of a user's reward as one text: which reward, what failed, and where in the user's own code."""

import inspect
import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from digen_jax.errors import ConfigError
from digen_jax.process import shutdown
from digen_jax.process.shutdown import Stopped

ARGUMENTS = ("images", "prompts", "metadata")
# Errors that a pool or a client of a server raises on purpose, such as of a server that does not answer.
OURS = (ConfigError, Stopped)
# Code that the user has not written: this package, Python's own modules, installed packages.
FOREIGN = [
    Path(__file__).resolve().parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
]


class RewardError(ConfigError):
    """A reward returned something wrong: one sentence, and lines on its consequences."""

    def shown(self) -> str:
        """As a script prints it, line by line."""
        return str(self)


class RewardFailed(RewardError):
    """A user's code raised an exception: a line that names it, and one for each place in that code."""


@contextmanager
def blamed(
    name: str, doing: str, passing: tuple[type[BaseException], ...] = (*OURS, CancelledError)
) -> Iterator[None]:
    """Turns any exception of a user's code, `sys.exit` included, into a RewardFailed, which can be pickled.

    Args:
      name: the reward's.
      doing: what it did, such as "raised" or "cannot be imported:".
      passing: exceptions that are raised unchanged. By default also what a pool that is closed raises.

    Raises:
      RewardFailed: names the reward and the error, with the lines of the user's own code that led there.
      KeyboardInterrupt: somebody pressed Ctrl-C.
    """
    try:
        yield
    except passing:
        raise
    # Also what Python does not count as an error: SystemExit, asyncio.CancelledError, a user's own BaseException.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _is_signal(error):
            raise
        what = f"{type(error).__name__}: {error}".removesuffix(": ").removesuffix(": None")
        raise RewardFailed(
            "\n".join([f"reward {name!r} {doing} {what}", *own_lines(error)])
        ) from error


def _is_signal(error: KeyboardInterrupt) -> bool:
    """Whether Ctrl-C may have raised it: only in the main thread, by the handler of this package or Python's own."""
    if threading.current_thread() is not threading.main_thread():
        return False
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return python or raised_in == shutdown.__file__


def own_lines(error: BaseException) -> list[str]:
    """The origin of an error: a line for each place in the user's own code, the innermost last."""
    if isinstance(error, SyntaxError) and error.filename:
        return [f"  {error.filename}, line {error.lineno}: {(error.text or '').strip()}"]
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
        for frame in frames
        if _own(frame.filename)
    ]


def check_callable(reward: object, name: str, settings: Mapping[str, Any]) -> None:
    """Refuses a reward that cannot be called with images, prompts, metadata and its settings as keywords.

    Raises:
      ConfigError: it is a class, is not callable, or takes other arguments.
    """
    if isinstance(reward, type):
        raise ConfigError(
            f"reward {name!r} is a class: name a function, or an instance of it that the module makes"
        )
    if not callable(reward):
        raise ConfigError(f"reward {name!r} is a {type(reward).__name__}: name a function")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # of some that are written in C it is not known
        return
    try:
        signature.bind(*ARGUMENTS, **settings)
    except TypeError as error:
        raise ConfigError(
            f"reward {name!r} takes {signature}: it must take ({', '.join(ARGUMENTS)})"
        ) from error


def _own(file: str) -> bool:
    path = Path(file).resolve()
    return not file.startswith("<") and not any(path.is_relative_to(one) for one in FOREIGN)
