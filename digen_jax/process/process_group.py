"""The processes that work together: all of a job of JAX, or where several meshes share a job those of one mesh."""

import itertools

import jax
from jax._src import distributed  # JAX has no public way to it

from digen_jax.process.shutdown import Stopped

LONGEST_WAIT = 10**6  # seconds, for waits without a deadline

_meetings = itertools.count()  # a name for each, as all processes come to the same ones
_first: int = 0
_count: int | None = None  # None: all


def form(first: int, count: int) -> None:
    """From now on this process works with so many, of which `first` is the first one's number within the job."""
    global _first, _count
    _first, _count = first, count
    if count == 1:
        # Libraries that count the job's processes, such as orbax, would take arrays of this one for parts.
        jax.process_count = lambda backend=None: 1


def size() -> int:
    """How many they are; 1 where there is no job."""
    state = distributed.global_state
    if state.client is None:
        return 1
    return state.num_processes if _count is None else _count


def is_first() -> bool:
    """Whether this process is the first of them; always true in a run of one process."""
    return distributed.global_state.process_id == _first


def members() -> list[int] | None:
    """Their numbers within the job; None: all of it."""
    return None if _count is None else list(range(_first, _first + _count))


def several() -> bool:
    """Whether this run has more than one process."""
    return size() > 1


def meet(what: str, seconds: float) -> None:
    """Waits until all processes have come to this call; with one process it does nothing.

    Args:
      what: the work that all have done by then, in words.
      seconds: the longest wait, which may be infinite.

    Raises:
      Stopped: another process has not come, or has ended.
    """
    if not several():
        return
    limit = int(min(seconds, LONGEST_WAIT) * 1000)
    try:
        name, client = f"digen_jax/meeting/{next(_meetings)}", distributed.global_state.client
        client.wait_at_barrier(name, limit, process_ids=members())
    except jax.errors.JaxRuntimeError as error:
        late = "DEADLINE_EXCEEDED" in str(error)
        why = f"not there within {seconds:g} seconds (config.runtime.deadline)" if late else "gone"
        raise Stopped(
            f"another process is {why} after {what}: look at what it printed, and start the same command on all again, "
            "which continues"
        ) from error
