"""Early checks of prompt files: errors for missing inputs, warnings about suspicious prompts."""

import concurrent.futures
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from digen_jax.data.prompt_files import HIDDEN, Path, Record, first_numbers, numbered_records
from digen_jax.errors import ConfigError, collect_errors
from digen_jax.images import check_image_file, source_images

# Describes the missing input of a record for a reward, such as "quotes no text"; None if complete.
Needs = Callable[[Record], str | None]
# Returns for each prompt whether the text encoders truncate it.
IsLong = Callable[[list[str]], Iterable[bool]]

CHUNK = 10_000  # prompts tokenized at a time
REPORTED = 100_000  # prompts per progress line
LISTED = 10  # unknown words in a warning
WORD = re.compile(r"[^\W_]+")


def check_images(path: Path, count: int = 1, fields: Sequence[str] = ()) -> None:
    """Reads the images to edit of a prompt file. Every record must have `count`.

    With `fields` reads the images that these name instead, such as "chosen".

    Raises:
      FileNotFoundError: The prompt file does not exist.
      ValueError: See `read_prompt_file`. Also raised for a missing or broken image; names the first such line.
    """
    numbered = numbered_records(path)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # Pillow releases the GIL while decoding
        errors = pool.map(
            functools.partial(_image_error, count, fields), [record for _, record in numbered]
        )
        for (number, _), error in zip(numbered, errors, strict=True):
            if error:
                pool.shutdown(cancel_futures=True)
                raise ValueError(f"{path}, line {number}: {error}")


def _image_error(count: int, fields: Sequence[str], record: Record) -> str | None:
    images = [record.get(field) for field in fields] or source_images(record)
    for field, image in zip(fields, images, strict=False):
        if not isinstance(image, str) or not image.strip():
            what = "missing" if image is None else f"{image!r}"
            return (
                f'"{field}" is {what}; give the path of an image file, relative to the prompt file'
            )
    if not images or not all(isinstance(image, str) and image.strip() for image in images):
        return '"image" is missing; give the path of the image to edit, relative to the prompt file'
    if len(images) != count and not fields:
        return f'"image" has {len(images)} images, but config.model.source_images is {count}'
    try:
        for image in images:
            check_image_file(cast(str, image))
    except ValueError as error:
        return f"{error}; give the path of an image, relative to the prompt file"
    return None


def check_needs(paths: Iterable[Path], needs: Mapping[str, Needs]) -> None:
    """Checks that records have all inputs of the rewards.

    Args:
      paths: Prompt files. Duplicates are read once.
      needs: Check of each reward with required inputs, by reward name.

    Raises:
      ConfigError: Records lack inputs. The message has one line per file, reward and cause, with the number of records
        and their first line numbers.
      ValueError, FileNotFoundError: See `read_prompt_file`.
    """
    with collect_errors() as one:
        for path in dict.fromkeys(paths):
            numbered = numbered_records(path) if needs else []
            lacking: dict[tuple[str, str], list[int]] = {}
            for number, record in numbered:
                for reward, lack_of in needs.items():
                    if lack := lack_of(record):
                        lacking.setdefault((reward, lack), []).append(number)
            for (reward, lack), lines in lacking.items():
                with one():
                    raise ConfigError(
                        f"{path}, {_lines(lines)}: {len(lines):,} of {len(numbered):,} prompts cannot be scored by the "
                        f"reward {reward!r}, because each {lack}; change or remove them"
                    )


def report_odd_prompts(paths: Sequence[Path], is_long: IsLong, words: Sequence[str] = ()) -> None:
    """Prints the warnings of `odd_prompts` and `repeats_between`."""
    paths = list(dict.fromkeys(paths))
    for path in paths:
        for line in odd_prompts(path, is_long, words):
            print(line, file=sys.stderr, flush=True)
    for line in repeats_between(paths):
        print(line, file=sys.stderr, flush=True)


def odd_prompts(path: Path, is_long: IsLong, words: Sequence[str] = ()) -> list[str]:
    """Returns one warning for each kind of problem in a prompt file.

    Args:
      path: The prompt file. Each warning starts with it.
      is_long: Truncation check of the model's text encoders.
      words: Vocabulary of the model. Empty means any text.

    Raises:
      ValueError, FileNotFoundError: See `read_prompt_file`.
    """
    numbered = numbered_records(path)
    lines: dict[str, list[int]] = {}
    firsts = _first_lines(numbered)
    repeats = [(n, firsts[_key(record)]) for n, record in numbered if firsts[_key(record)] != n]
    for number, record in numbered:
        for text in {record["prompt"], record.get("negative_prompt", record["prompt"])}:
            lines.setdefault(text, []).append(number)
    found: list[tuple[list, str]] = []
    unknown = {text: at for text, at in lines.items() if unknown_words([text], words)}
    if unknown:
        at = sorted(set().union(*unknown.values()))
        listed = list_unknown(unknown_words(unknown, words), words)
        found.append((at, f"have words that this model does not know ({_lines(at)}): {listed}"))
    # Unknown words are spelled in letters, which soon exceeds the token limit.
    if truncated := _truncated_lines(
        {t: at for t, at in lines.items() if t not in unknown}, is_long
    ):
        found.append((truncated, f"are cut off by the text encoders: {_lines(truncated)}"))
    # A file that repeats most of its prompts, such as the embedded model's, is intentional.
    if 0 < len(repeats) <= len(numbered) / 2:
        found.append((repeats, "are repeats (line {} repeats line {})".format(*repeats[0])))
    if hidden := sorted({n for text, at in lines.items() if HIDDEN.search(text) for n in at}):
        found.append((hidden, f"have hidden characters: {_lines(hidden)}"))
    return [f"{path}: {len(at):,} of {len(numbered):,} prompts {what}" for at, what in found]


def repeats_between(paths: Sequence[Path]) -> list[str]:
    """Returns one warning for each prompt file with prompts of an earlier file, with line numbers of one example.

    Raises:
      ValueError or FileNotFoundError: As `read_prompt_file`.
    """
    firsts = [_first_lines(numbered_records(path)) for path in paths] if len(paths) > 1 else []
    found = []
    for number, (path, here) in enumerate(zip(paths, firsts, strict=False)):
        for other, there in zip(paths[:number], firsts, strict=False):
            if both := [key for key in here if key in there]:
                count = f"{len(both):,} of {len(here):,} different prompts"
                example = f"line {here[both[0]]} is line {there[both[0]]} there"
                found.append(f"{path}: {count} are in {other}, too ({example})")
    return found


def unknown_words(prompts: Iterable[str], words: Sequence[str]) -> list[str]:
    """Returns the unique words in `prompts` that are not in a model's vocabulary.

    Args:
      prompts: The prompts.
      words: Vocabulary of the model. Empty means any text.
    """
    found = dict.fromkeys(word for prompt in prompts for word in WORD.findall(prompt.lower()))
    return [word for word in found if words and word not in words]


def list_unknown(unknown: Sequence[str], words: Sequence[str]) -> str:
    """Formats the end of a warning: the first unknown words, and the vocabulary."""
    more = f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
    return f"{', '.join(map(repr, unknown[:LISTED]))}{more}; it knows only {', '.join(words)}"


def _first_lines(numbered: Iterable[tuple[int, Record]]) -> dict[tuple[str, ...], int]:
    """Returns the first line number of each (prompt, negative prompt, image)."""
    found: dict[tuple[str, ...], int] = {}
    for number, record in numbered:
        found.setdefault(_key(record), number)
    return found


def _key(record: Record) -> tuple[str, ...]:
    return record["prompt"], repr(record.get("negative_prompt")), repr(record.get("image"))


def _truncated_lines(lines: dict[str, list[int]], is_long: IsLong) -> list[int]:
    """Returns the line numbers of truncated prompts. `lines` maps prompts to their line numbers."""
    prompts, found = list(lines), set[int]()
    for first in range(0, len(prompts), CHUNK):
        chunk = prompts[first : first + CHUNK]
        if first and first % REPORTED == 0:
            print(f"tokenized {first:,} of {len(prompts):,} prompts", file=sys.stderr, flush=True)
        for prompt, truncated in zip(chunk, is_long(chunk), strict=True):
            found.update(lines[prompt] if truncated else ())
    return sorted(found)


def _lines(numbers: Sequence[int]) -> str:
    return f"line{'s' * (len(numbers) > 1)} {first_numbers(numbers)}"
