"""Errors of user rewards: one message with the reward, the error and the user's line."""

import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

from digen_jax.errors import ConfigError
from digen_jax.process import shutdown
from digen_jax.process.shutdown import Stopped

# Deliberate errors of this package, for example about a server that does not respond.
DELIBERATE = (ConfigError, Stopped)
# Code outside of the user's: this package, the standard library, installed packages.
FOREIGN = [
    Path(__file__).resolve().parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
]


class RewardError(ConfigError):
    """Raised if a reward returns an invalid value: a message, and lines with details."""

    def shown(self) -> str:
        """Returns the text that scripts print."""
        return str(self)


class RewardFailed(RewardError):
    """Raised if user code raises: a line that names the exception, and one per line of user code."""


@contextmanager
def user_code(
    name: str, doing: str, passing: tuple[type[BaseException], ...] = (*DELIBERATE, CancelledError)
) -> Iterator[None]:
    """Converts any exception of the user code of reward `name`, including `sys.exit`, to a picklable RewardFailed.

    Args:
      name: Name of the reward.
      doing: Verb of the message, such as "raised" or "cannot be imported:".
      passing: Exceptions to raise unchanged; by default including that of a closed pool.

    Raises:
      RewardFailed: Names the reward and the error, with the lines of the user's code.
      KeyboardInterrupt: The user pressed Ctrl-C.
    """
    try:
        yield
    except passing:
        raise
    # Includes SystemExit, asyncio.CancelledError and user-defined BaseExceptions.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _is_signal(error):
            raise
        what = f"{type(error).__name__}: {error}".removesuffix(": ").removesuffix(": None")
        lines = [f"reward {name!r} {doing} {what}", *user_lines(error)]
        raise RewardFailed("\n".join(lines)) from error


def _is_signal(error: KeyboardInterrupt) -> bool:
    """Returns whether Ctrl-C raised it: in the main thread, by this package's or Python's handler."""
    if threading.current_thread() is not threading.main_thread():
        return False
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return python or raised_in == shutdown.__file__


def user_lines(error: BaseException) -> list[str]:
    """Returns the lines of user code in an error's traceback, innermost last."""
    if isinstance(error, SyntaxError) and error.filename:
        return [f"  {error.filename}, line {error.lineno}: {(error.text or '').strip()}"]
    return [
        f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).resolve().is_relative_to(one) for one in FOREIGN)
    ]
