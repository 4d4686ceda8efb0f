"""What a command failed by, from its process to the leader, which raises an error of the same type there."""

import time

from digen_jax.engine.divergence import DivergedError
from digen_jax.errors import ConfigError
from digen_jax.process.ending import Stopped
from digen_jax.process.exhausted import out_of_memory
from digen_jax.rewards.mistakes import RewardFailed, RewardMistake
from digen_jax.rewards.pool import Hung
from digen_jax.rewards.process import Gone, Late
from digen_jax.scheduling.commands import Command
from digen_jax.scheduling.events import Failed

KINDS = {
    kind.__name__: kind
    for kind in (
        *(RewardFailed, RewardMistake, ConfigError, Late, Gone),
        *(Hung, Stopped, DivergedError),
    )
}
ADVICE = ": "  # between a kind and what else to say


class NotDone(RuntimeError):
    """A command failed in its process, which still works."""


def kind_of(error: BaseException) -> str:
    """The type of an error, by name, if it means something to the leader; "": another one.

    The advice of a reward's process that is gone stands behind it.
    """
    names = [one.__name__ for one in type(error).__mro__ if KINDS.get(one.__name__) is one]
    if isinstance(error, Gone):
        return f"{names[0]}{ADVICE}{error.advice}"
    return next(iter(names), "")


def error_of(kind: str, reason: str) -> Exception:
    """The error that `kind_of` has named, with a text; of another one `NotDone`."""
    name, _, advice = kind.partition(ADVICE)
    found = KINDS.get(name, NotDone)
    return found(reason, advice) if issubclass(found, Gone) else found(reason)


def failed(command: Command, error: BaseException) -> Failed:
    """The event that a command has failed, with what its error says."""
    kind = kind_of(error)
    reason = str(error) if kind else out_of_memory(error) or repr(error)
    return Failed(time.monotonic(), command, reason, kind)
