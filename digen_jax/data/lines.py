"""The lines of a prompt file as words of a sentence."""

from collections.abc import Sequence

SHOWN = 3  # lines that are named: a note fits a line of a terminal


def shown(numbers: Sequence[int]) -> str:
    """The first numbers of lines, and how many more there are."""
    more = f" and {len(numbers) - SHOWN:,} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more


def named(numbers: Sequence[int]) -> str:
    """The same after "line" or "lines"."""
    return f"line{'s' * (len(numbers) > 1)} {shown(numbers)}"
