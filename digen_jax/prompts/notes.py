"""Warnings about a prompt file before a run: prompts that are cut off, repeated, or contain odd characters."""

import os
import sys
from collections.abc import Callable, Iterable

from digen_jax.prompts.files import CONTROL, numbered_records

SHOWN = 5  # lines that are named
CHUNK = 10_000  # prompts tokenized at a time
SPOKEN = 100_000  # prompts between two lines of progress


def tell(path: str | os.PathLike[str], cut: Callable[[list[str]], Iterable[bool]]) -> None:
    """Prints the `notes` on a prompt file."""
    for note in notes(path, cut):
        print(note, file=sys.stderr, flush=True)


def notes(path: str | os.PathLike[str], cut: Callable[[list[str]], Iterable[bool]]) -> list[str]:
    """A sentence for each kind of problem of a prompt file.

    Args:
      path: of the file; the sentences begin with it.
      cut: says of each prompt whether it is longer than the text encoders read.

    Raises:
      ValueError or FileNotFoundError: as `files.read_prompt_file`.
    """
    numbered = numbered_records(path)
    lines: dict[str, list[int]] = {}
    same: dict[tuple[str, str, str], list[int]] = {}
    for number, record in numbered:
        prompt = record["prompt"]
        negative = record.get("negative_prompt")
        for text in {prompt, prompt if negative is None else negative}:
            lines.setdefault(text, []).append(number)
        same.setdefault((prompt, str(negative), str(record.get("image"))), []).append(number)
    odd = sorted({number for text in lines if CONTROL.search(text) for number in lines[text]})
    again = sorted(number for places in same.values() for number in places[1:])
    total = len(numbered)
    found = {
        "are longer than the text encoders read, so that their ends are cut off": _long(lines, cut),
        "repeat an earlier one": again,
        "hold control characters": odd,
    }
    return [f"{path}: {_count(at, total)} {what}: {_where(at)}" for what, at in found.items() if at]


def _long(lines: dict[str, list[int]], cut: Callable[[list[str]], Iterable[bool]]) -> list[int]:
    prompts, found = list(lines), []
    for first in range(0, len(prompts), CHUNK):
        part = prompts[first : first + CHUNK]
        if first and first % SPOKEN == 0:
            print(f"tokenized {first:,} of {len(prompts):,} prompts", file=sys.stderr, flush=True)
        for prompt, is_cut in zip(part, cut(part), strict=True):
            found += lines[prompt] if is_cut else ()
    return sorted(set(found))


def _count(at: list[int], total: int) -> str:
    return f"{len(at):,} of {total:,} prompts"


def _where(at: list[int]) -> str:
    more = f" and {len(at) - SHOWN:,} more" if len(at) > SHOWN else ""
    return f"line{'s' * (len(at) > 1)} {', '.join(map(str, at[:SHOWN]))}{more}"
