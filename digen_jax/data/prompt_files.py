"""Prompt files to records: GenEval metadata (.jsonl), one prompt a line (.txt), or a data set of the hub."""

import concurrent.futures
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from digen_jax.data import hub
from digen_jax.files import in_home, parse_json
from digen_jax.images import check_image_file

# Of a line in bytes: a text encoder reads some hundred letters, and metadata is not much longer.
LONGEST_LINE = 1_000_000
# Characters that no editor shows: control characters, soft hyphens, marks of direction, spaces without width, byte
# order marks, tags. Joiners of letters and emoji are not among them.
HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
JOINERS = "\u200c\u200d\ufe0e\ufe0f"
# Fields that records get.
SERIAL, PROMPT_FILE = "serial", "prompt_file"
RESERVED = {SERIAL: "the number of the group", PROMPT_FILE: "the file of the prompt"}


def read_prompt_file(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a prompt file, in the file's order.

    A .txt file holds one prompt a line; its records are `{"prompt": line}`, without the white
    space around it. A .jsonl file holds one object a line with a string `prompt`; blank lines are
    skipped. `negative_prompt`, a string that may be empty, is read by a model's pass without the
    prompt. The fields of GenEval's metadata (Ghosh et al. 2023, arXiv 2310.11513) are checked
    where they are present: `tag`, a string; `include` and `exclude`, lists of objects with
    `class`, `count` and optionally `color` and `position` = [relation, index of an earlier
    `include`]. `image` is the path of a picture to edit, relative to the file's folder: see
    `located`. All other fields are kept as they are. `path` may also name a data set of the hub,
    whose rows count as lines: see `hub.Place`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is neither .jsonl nor .txt, has no prompt, or has a line that cannot
            be used; the message gives its number and what to change.
    """
    return [record for _, record in numbered_records(path)]


def read_prompt_files(paths: Sequence[str | os.PathLike[str]]) -> list[list[dict[str, Any]]]:
    """The records of each file, as `marked`. Raises as `read_prompt_file`."""
    several = len(paths) > 1
    return [[marked(path, record, several) for record in read_prompt_file(path)] for path in paths]


def marked(path: str | os.PathLike[str], record: dict[str, Any], several: bool) -> dict[str, Any]:
    """A record that says which file it is from, if there are `several`."""
    return record | ({PROMPT_FILE: str(path)} if several else {})


def numbered_records(path: str | os.PathLike[str]) -> list[tuple[int, dict[str, Any]]]:
    """The records of a file with the numbers of their lines, from 1; raises as `read_prompt_file`."""
    numbered = _numbered_records(path, read_bytes(path))
    return [(number, located(path, record)) for number, record in numbered]


def located(path: str | os.PathLike[str], record: dict[str, Any]) -> dict[str, Any]:
    """A record of the prompt file at `path`, whose `image` is a path as seen from the working folder, or a URL."""
    image = record.get("image")
    if not isinstance(image, str) or not image.strip() or "://" in image or hub.is_hub(path):
        return record
    return record | {"image": str(pathlib.Path(path).parent / in_home(image))}


def first_negative(path: str | os.PathLike[str]) -> str | None:
    """The place of a prompt file's first negative prompt, "FILE, line N"; None: there is none.

    Raises as `read_prompt_file` if there is one.
    """
    if b"negative_prompt" not in read_bytes(path):
        return None
    numbers = (number for number, record in numbered_records(path) if "negative_prompt" in record)
    number = next(numbers, None)
    return None if number is None else f"{path}, line {number}"


def negatives_differ(paths: Sequence[str | os.PathLike[str]]) -> bool:
    """Whether prompts of files have different negative ones; a file that does not exist has none."""
    here = [path for path in paths if hub.is_hub(path) or pathlib.Path(path).is_file()]
    if all(first_negative(path) is None for path in here):
        return False
    records = itertools.chain.from_iterable(map(read_prompt_file, here))
    return len({record.get("negative_prompt") for record in records}) > 1


def check_pictures(path: str | os.PathLike[str]) -> None:
    """Reads the pictures to edit of a prompt file, of which each record must have one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as `read_prompt_file`; or names the line of the first record whose picture is
            missing or broken.
    """
    numbered = numbered_records(path)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Pillow decodes without Python's lock.
        mistakes = pool.map(_picture_mistake, [record for _, record in numbered])
        for (number, _), mistake in zip(numbered, mistakes, strict=True):
            if mistake:
                pool.shutdown(cancel_futures=True)
                raise ValueError(f"{path}, line {number}: {mistake}")


def _picture_mistake(record: dict[str, Any]) -> str | None:
    image = record.get("image")
    if not isinstance(image, str) or not image.strip():
        return (
            '"image" is missing; give the path of the picture to edit, relative to the prompt file'
        )
    try:
        check_image_file(image)
    except ValueError as error:
        return f"{error}; give the path of a whole picture, relative to the prompt file"
    return None


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of the prompt file at `path`; FileNotFoundError says what to do.

    A data set of the hub is read as the lines of a .jsonl file; ValueError says why it cannot be.
    """
    if hub.is_hub(path):
        return hub.read_rows(str(path))
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no prompt file at {path}: give the path of a .jsonl or .txt file, or hf:owner/name for a "
            "data set of the hub."
        )
    return path.read_bytes()


def parse_prompts(path: str | os.PathLike[str], content: bytes) -> list[dict[str, Any]]:
    """The records of a prompt file's content; `path` gives the format and is named in errors.

    As in `read_prompt_file`, but a picture's path is as the file has it.
    """
    return [record for _, record in _numbered_records(path, content)]


def _numbered_records(
    path: str | os.PathLike[str], content: bytes
) -> list[tuple[int, dict[str, Any]]]:
    parsers = {".jsonl": _parse_json, ".txt": _parse_text}
    suffix = suffix_of(path)
    if suffix not in parsers:
        raise ValueError(
            f"{path} ends in {suffix!r}: a prompt file is .jsonl (one JSON object a line) or .txt "
            "(one prompt a line)."
        )
    records = []
    for number, line in _lines(path, content):
        try:
            record = parsers[suffix](line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if record is not None:
            records.append((number, record))
    if not records:
        raise ValueError(f"{path} holds no prompt: write at least one line.")
    return records


def suffix_of(path: str | os.PathLike[str]) -> str:
    """What says the format of a prompt file."""
    return ".jsonl" if hub.is_hub(path) else pathlib.Path(path).suffix


def _lines(path: str | os.PathLike[str], content: bytes) -> Iterator[tuple[int, str]]:
    """Numbered lines up to the last that is not blank, without byte order marks, of which joined files have several.

    Only a line feed ends a line: a prompt may contain Unicode's other separators.
    """
    lines = content.rstrip().split(b"\n") if content.strip() else []
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"{path}, line {number}: {len(line):,} bytes are more than a prompt can have, which are "
                f"{LONGEST_LINE:,}; write one prompt a line."
            )
        try:
            yield number, line.decode("utf-8-sig").rstrip("\r")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: byte {error.start + 1} is not UTF-8; save the file in "
                "that encoding."
            ) from error


def _parse_text(line: str) -> dict[str, Any]:
    if not line.strip():
        raise ValueError("the prompt is blank; write one or delete the line.")
    if _is_hidden(line):
        raise ValueError("the prompt holds nothing but hidden characters; write a text.")
    return {"prompt": line.strip()}


def _is_hidden(text: str) -> bool:
    """Whether a text has no character that can be seen."""
    return not "".join(HIDDEN.sub("", text).split()).strip(JOINERS)


def _parse_json(line: str) -> dict[str, Any] | None:
    """The record of a line, None for a blank line."""
    if not line.strip():
        return None
    try:
        record = parse_json(line, _refuse)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"this is not JSON ({error.msg} at column {error.colno}); write one object a line, "
            'such as {"prompt": "a photo of a bench"}.'
        ) from error
    if not isinstance(record, dict):
        raise ValueError('write an object, such as {"prompt": "a photo of a bench"}.')
    _check_record(record)
    return record


def _refuse(constant: str) -> None:
    """Python reads these, but no other program does, a reward server among them."""
    raise ValueError(f"{constant} is no JSON number; write null, or leave the field out.")


def _check_record(record: dict[str, Any]) -> None:
    if "prompt" not in record:
        raise ValueError('"prompt" is missing; give the text to draw.')
    prompt = record["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'"prompt" is {json.dumps(prompt)}; write a text that is not blank.')
    if _is_hidden(prompt):
        raise ValueError('"prompt" holds nothing but hidden characters; write a text.')
    negative = record.get("negative_prompt", "")
    if not isinstance(negative, str):
        raise ValueError(f'"negative_prompt" is {json.dumps(negative)}; write a text, or "".')
    for name, text in (("prompt", prompt), ("negative_prompt", negative)):
        if re.search("[\ud800-\udfff]", text):
            raise ValueError(
                f'"{name}" holds half of a surrogate pair; write the character itself.'
            )
    for field, content in RESERVED.items():
        if field in record:
            raise ValueError(f'"{field}" will hold {content}; rename this field.')
    if not isinstance(record.get("tag", ""), str):
        raise ValueError(f'"tag" must be a text, not {record["tag"]!r}.')
    included = _objects(record, "include")
    for index, entry in enumerate(included):
        _check_object(f"include[{index}]", entry, earlier=index)
    for index, entry in enumerate(_objects(record, "exclude")):
        _check_object(f"exclude[{index}]", entry, earlier=len(included))


def _objects(record: dict[str, Any], field: str) -> list[Any]:
    entries = record.get(field, [])
    if not isinstance(entries, list):
        raise ValueError(f'"{field}" must be a list of objects, not {entries!r}.')
    return entries


def _check_object(name: str, entry: Any, earlier: int) -> None:
    """Check one entry of include or exclude; its position may refer to one of the `earlier` includes."""
    if not isinstance(entry, dict):
        raise ValueError(f'{name} must be an object with "class" and "count", not {entry!r}.')
    texts = {"class": entry.get("class"), "color": entry.get("color", "any")}
    for field, text in texts.items():
        if not isinstance(text, str) or not text:
            raise ValueError(f'{name}: "{field}" must be a text, not {text!r}.')
    count = entry.get("count")
    if not _is_integer(count) or count < 1:
        raise ValueError(f'{name}: "count" must be an integer of at least 1, not {count!r}.')
    if "position" in entry:
        _check_position(name, entry["position"], earlier)


def _check_position(name: str, position: Any, earlier: int) -> None:
    pair = isinstance(position, list) and len(position) == 2
    if not pair or not isinstance(position[0], str) or not _is_integer(position[1]):
        raise ValueError(
            f'{name}: "position" must be [relation, index of an earlier include], such as '
            f'["left of", 0], not {position!r}.'
        )
    if not 0 <= position[1] < earlier:
        raise ValueError(
            f'{name}: "position" names include[{position[1]}], which is not an earlier entry; '
            "give the index of one that stands before it."
        )


def _is_integer(value: Any) -> bool:
    """Whether a value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
