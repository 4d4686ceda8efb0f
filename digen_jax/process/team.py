"""The processes that work together: all of a job of JAX, or where several meshes share a job those of one mesh."""

import jax
from jax._src import distributed  # JAX has no public way to it

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
