"""Warnings about a prompt file before a run: prompts that are cut off, repeated, or contain odd characters."""

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from digen_jax.data.lines import named
from digen_jax.data.prompt_files import HIDDEN, numbered_records

CHUNK = 10_000  # prompts tokenized at a time
SHOWN = 10  # unknown words in a note
WORD = re.compile(r"[^\W_]+")
SPOKEN = 100_000  # prompts between two lines of progress

Path = str | os.PathLike[str]


def tell(
    paths: Sequence[Path], cut: Callable[[list[str]], Iterable[bool]], words: Sequence[str] = ()
) -> None:
    """Prints the `notes` on each prompt file, and what they `share`; a path that comes twice counts once."""
    paths = list(dict.fromkeys(paths))
    for note in itertools.chain(*(notes(path, cut, words) for path in paths), shared(paths)):
        print(note, file=sys.stderr, flush=True)


def shared(paths: Sequence[Path]) -> list[str]:
    """A sentence for each prompt file that has prompts of an earlier one, with the lines of one example.

    Raises:
      ValueError or FileNotFoundError: as `files.read_prompt_file`.
    """
    firsts = [_firsts(path) for path in paths] if len(paths) > 1 else []
    found = []
    for number, (path, here) in enumerate(zip(paths, firsts, strict=False)):
        for other, there in zip(paths[:number], firsts, strict=False):
            if both := [key for key in here if key in there]:
                count = f"{len(both):,} of {len(here):,} different prompts"
                example = f"line {here[both[0]]} is line {there[both[0]]} there"
                found.append(f"{path}: {count} are in {other}, too ({example})")
    return found


def _firsts(path: Path) -> dict[tuple[str, ...], int]:
    """The first line of each prompt with its negative one and its picture."""
    found: dict[tuple[str, ...], int] = {}
    for number, record in numbered_records(path):
        found.setdefault(_key(record), number)
    return found


def _key(record: dict[str, Any]) -> tuple[str, ...]:
    return record["prompt"], repr(record.get("negative_prompt")), repr(record.get("image"))


def unknown(prompts: Iterable[str], words: Sequence[str]) -> list[str]:
    """The words of some prompts that a model cannot read, each once.

    Args:
      prompts: any texts.
      words: all that the model can read. Empty means any.
    """
    found = dict.fromkeys(word for prompt in prompts for word in WORD.findall(prompt.lower()))
    return [word for word in found if words and word not in words]


def only(unread: Sequence[str], words: Sequence[str]) -> str:
    """The end of a sentence about prompts with unknown words: these, and the words that can be read."""
    more = f" and {len(unread) - SHOWN} more" if len(unread) > SHOWN else ""
    return f"{', '.join(map(repr, unread[:SHOWN]))}{more}; it knows only {', '.join(words)}"


def notes(
    path: Path, cut: Callable[[list[str]], Iterable[bool]], words: Sequence[str] = ()
) -> list[str]:
    """A sentence for each kind of problem of a prompt file.

    Args:
      path: of the file; the sentences begin with it.
      cut: says of each prompt whether it is longer than the text encoders read.
      words: that the model knows. Empty means that it reads any text.

    Raises:
      ValueError or FileNotFoundError: as `files.read_prompt_file`.
    """
    numbered = numbered_records(path)
    lines: dict[str, list[int]] = {}
    firsts: dict[tuple[str, ...], int] = {}
    repeats: list[tuple[int, int]] = []
    for number, record in numbered:
        prompt = record["prompt"]
        negative = record.get("negative_prompt")
        for text in {prompt, prompt if negative is None else negative}:
            lines.setdefault(text, []).append(number)
        first = firsts.setdefault(_key(record), number)
        if first != number:
            repeats.append((number, first))
    odd = sorted({number for text in lines if HIDDEN.search(text) for number in lines[text]})
    found = []
    strange = dict.fromkeys(text for text in lines if words and unknown([text], words))
    if strange:
        at = sorted({number for text in strange for number in lines[text]})
        read = only(unknown(strange, words), words)
        found.append((at, f"have words that this model does not know ({named(at)}): {read}"))
    # A model that spells words in letters soon has too many tokens.
    if long := _long({t: at for t, at in lines.items() if t not in strange}, cut):
        found.append((long, f"are cut off by the text encoders: {named(long)}"))
    # A file that repeats most of its prompts, such as the embedded model's, does so on purpose.
    if 0 < len(repeats) <= len(numbered) / 2:
        found.append((repeats, "are repeats (line {} repeats line {})".format(*repeats[0])))
    if odd:
        found.append((odd, f"have hidden characters: {named(odd)}"))
    return [f"{path}: {len(at):,} of {len(numbered):,} prompts {what}" for at, what in found]


def _long(lines: dict[str, list[int]], cut: Callable[[list[str]], Iterable[bool]]) -> list[int]:
    prompts, found = list(lines), []
    for first in range(0, len(prompts), CHUNK):
        part = prompts[first : first + CHUNK]
        if first and first % SPOKEN == 0:
            print(f"tokenized {first:,} of {len(prompts):,} prompts", file=sys.stderr, flush=True)
        for prompt, is_cut in zip(part, cut(part), strict=True):
            found += lines[prompt] if is_cut else ()
    return sorted(set(found))
