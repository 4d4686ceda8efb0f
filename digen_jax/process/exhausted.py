"""Recognises that a device has run out of memory, which XLA reports as an error like any other."""

import contextlib
import re
import sys
from collections.abc import Iterator

# The status is also that of messages too large for a connection.
STATUS = re.compile(r"RESOURCE_EXHAUSTED\b.*?(memory|allocat)", re.IGNORECASE | re.DOTALL)
LONGEST = 300  # letters of XLA's first line


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Notes what this block does in an error by which a device runs out of memory, for `out_of_memory`."""
    try:
        yield
    except Exception as error:
        if _exhausted(error):
            error.add_note(what)
        raise


def out_of_memory(error: BaseException) -> str | None:
    """What a device ran out of memory by, with the first line of XLA's error; None: `error` has another reason."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if _exhausted(found):
            first = str(found).strip().partition("\n")[0]
            shown = first if len(first) <= LONGEST else f"{first[:LONGEST]}..."
            notes = getattr(found, "__notes__", [])
            where = f" during {notes[0]}" if notes else ""
            return f"a device ran out of memory{where} ({shown.rstrip('.')})"
        seen.add(id(found))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return None


def _exhausted(error: BaseException) -> bool:
    # A script that has not imported JAX cannot have its errors, and need not import it for this.
    jax = sys.modules.get("jax")
    return (
        jax is not None
        and isinstance(error, jax.errors.JaxRuntimeError)
        and STATUS.match(str(error)) is not None
    )
