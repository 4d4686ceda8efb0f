"""Recognises errors of JAX that a user can act on: a device ran out of memory, or there is no such device."""

import contextlib
import re
import sys
import traceback
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


def no_devices(error: BaseException) -> str | None:
    """What devices JAX did not find, with the first line of its error; None: `error` has another reason."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    # JAX raises an AssertionError without a text where it finds no driver of NVIDIA's.
    if not isinstance(error, RuntimeError | AssertionError) or not last:
        return None
    if not last[0].filename.endswith("xla_bridge.py"):
        return None
    asked = sys.modules["jax"].config.jax_platforms
    first = str(error).strip().partition("\n")[0]
    return f"JAX finds no devices of JAX_PLATFORMS={asked or ''}" + (f" ({first})" if first else "")


def _exhausted(error: BaseException) -> bool:
    # A script that has not imported JAX cannot have its errors, and need not import it for this.
    jax = sys.modules.get("jax")
    return (
        jax is not None
        and isinstance(error, jax.errors.JaxRuntimeError)
        and STATUS.match(str(error)) is not None
    )
