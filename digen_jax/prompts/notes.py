"""Warnings about a prompt file before a run: prompts that are cut off, repeated, or contain odd characters."""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

from digen_jax.prompts.files import CONTROL, numbered_records

SHOWN = 5  # lines that are named
CHUNK = 10_000  # prompts tokenized at a time
SPOKEN = 100_000  # prompts between two lines of progress


Path = str | os.PathLike[str]


def tell(paths: Sequence[Path], cut: Callable[[list[str]], Iterable[bool]]) -> None:
    """Prints the `notes` on each prompt file, and what they `share`; a path that comes twice counts once."""
    paths = list(dict.fromkeys(paths))
    for note in itertools.chain(*(notes(path, cut) for path in paths), shared(paths)):
        print(note, file=sys.stderr, flush=True)


def shared(paths: Sequence[Path]) -> list[str]:
    """A sentence for each prompt file that has prompts of an earlier one, which gives the first of their lines in both.

    Raises:
      ValueError or FileNotFoundError: as `files.read_prompt_file`.
    """
    firsts = [_firsts(path) for path in paths] if len(paths) > 1 else []
    found = []
    for number, (path, here) in enumerate(zip(paths, firsts, strict=False)):
        for other, there in zip(paths[:number], firsts, strict=False):
            if at := {here[key]: there[key] for key in here if key in there}:
                count = f"{len(at):,} of {len(here):,} different prompts"
                found.append(f"{path}: {count} are in {other}, too: {_where(at, '{} ({} there)')}")
    return found


def _firsts(path: Path) -> dict[tuple[str, ...], int]:
    """The first line of each prompt with its negative one and its picture."""
    found: dict[tuple[str, ...], int] = {}
    for number, record in numbered_records(path):
        found.setdefault(_key(record), number)
    return found


def _key(record: dict[str, Any]) -> tuple[str, ...]:
    return record["prompt"], str(record.get("negative_prompt")), str(record.get("image"))


def notes(path: Path, cut: Callable[[list[str]], Iterable[bool]]) -> list[str]:
    """A sentence for each kind of problem of a prompt file.

    Args:
      path: of the file; the sentences begin with it.
      cut: says of each prompt whether it is longer than the text encoders read.

    Raises:
      ValueError or FileNotFoundError: as `files.read_prompt_file`.
    """
    numbered = numbered_records(path)
    lines: dict[str, list[int]] = {}
    same: dict[tuple[str, ...], list[int]] = {}
    for number, record in numbered:
        prompt = record["prompt"]
        negative = record.get("negative_prompt")
        for text in {prompt, prompt if negative is None else negative}:
            lines.setdefault(text, []).append(number)
        same.setdefault(_key(record), []).append(number)
    odd = sorted({number for text in lines if CONTROL.search(text) for number in lines[text]})
    repeated = [(number, places[0]) for places in same.values() for number in places[1:]]
    total = len(numbered)
    found: dict[str, list[int] | dict[int, int]] = {
        "are longer than the text encoders read, so that their ends are cut off": _long(lines, cut),
        "repeat an earlier one": dict(sorted(repeated)),
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


def _count(at: Sized, total: int) -> str:
    return f"{len(at):,} of {total:,} prompts"


def _where(at: list[int] | dict[int, int], pair: str = "{} (as {})") -> str:
    """The first lines; of a dict each with the other line that it maps to."""
    more = f" and {len(at) - SHOWN:,} more" if len(at) > SHOWN else ""
    pairs = at.items() if isinstance(at, dict) else ()
    words = [pair.format(*lines) for lines in pairs] or [*map(str, at)]
    return f"line{'s' * (len(at) > 1)} {', '.join(words[:SHOWN])}{more}"
