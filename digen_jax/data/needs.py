"""Whether prompt files have what rewards need, found before anything slow starts."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from digen_jax.data.lines import named
from digen_jax.data.prompt_files import numbered_records
from digen_jax.errors import ConfigError, together

# What a record lacks for a reward, as the end of a sentence about its prompt ("quotes no text"); None: nothing.
Needs = Callable[[dict[str, Any]], str | None]


def check_needs(paths: Iterable[str | os.PathLike[str]], needs: Mapping[str, Needs]) -> None:
    """Refuses prompt files with records that lack what a reward needs.

    Args:
      paths: of the files; each is read once, even if it is named twice.
      needs: of each reward that needs something, by the rewards' names.

    Raises:
      ConfigError: a sentence for each file, reward and kind of lack, with the number of records and their first lines.
      ValueError or FileNotFoundError: as `files.read_prompt_file`.
    """
    with together() as one:
        for path in dict.fromkeys(paths):
            numbered = numbered_records(path) if needs else []
            for (reward, lack), lines in _lacking(numbered, needs).items():
                with one():
                    raise ConfigError(_sentence(path, len(numbered), reward, lack, lines))


def _lacking(
    numbered: Iterable[tuple[int, dict[str, Any]]], needs: Mapping[str, Needs]
) -> dict[tuple[str, str], list[int]]:
    """The lines of records that lack something, by the reward and what they lack."""
    found: dict[tuple[str, str], list[int]] = {}
    for number, record in numbered:
        for reward, lack_of in needs.items():
            if lack := lack_of(record):
                found.setdefault((reward, lack), []).append(number)
    return found


def _sentence(
    path: str | os.PathLike[str], total: int, reward: str, lack: str, lines: list[int]
) -> str:
    return (
        f"{path}, {named(lines)}: {len(lines):,} of {total:,} prompts cannot be scored by the reward "
        f"{reward!r}, because each {lack}; change or remove them"
    )
