"""Reads prompt files: .jsonl (one object per line), .txt (one prompt per line), or a dataset of `datasets`.

`prompt_batches` returns the prompts of each training step, in a seeded order.
"""

import copy
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from digen_jax.files import in_home, parse_json

Path = str | os.PathLike
Record = dict[str, Any]

# Maximum line length in bytes; text encoders read a few hundred characters.
LONGEST_LINE = 1_000_000
# Invisible characters: control characters, soft hyphens, direction marks, zero-width spaces, byte order marks, tags;
# not the joiners of letters and emoji.
HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
JOINERS = "\u200c\u200d\ufe0e\ufe0f"
# Prefixes of datasets' names, on the Hugging Face Hub and in a TensorFlow Datasets folder.
HUB, TFDS = "hf:", "tfds:"
LISTED = 3  # maximum number of line numbers in a message, to fit a terminal line
# Fields added to records.
SERIAL, PROMPT_FILE = "serial", "prompt_file"
RESERVED = {SERIAL: "the number of the group", PROMPT_FILE: "the file of the prompt"}
IMAGES = "image", "chosen", "rejected"  # fields with paths of images
# Labels of evaluation prompts in a run's output.
HELD_OUT, TRAINING = "held-out prompts", "training prompts"


def read_prompt_file(path: Path) -> list[Record]:
    """Reads the records of a prompt file, in file order.

    A .txt file has one prompt per line; its records are `{"prompt": line}`, with surrounding whitespace stripped. A
    .jsonl file has one object per line with a string `prompt`; blank lines are skipped. `negative_prompt`, a possibly
    empty string, is the prompt of the unconditional pass. The fields of GenEval's metadata (Ghosh et al. 2023, arXiv
    2310.11513) are validated if present: `tag`, a string; `include` and `exclude`, lists of objects with `class`,
    `count` and optionally `color` and `position` = [relation, index of an earlier `include`]. `image` is a URL or the
    path of an image to edit, relative to the file's folder, as are `chosen` and `rejected`, the images of algorithms
    that train image files. All other fields are kept unchanged. `path` may also name a dataset, with rows as lines: see
    `datasets`.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The file is neither .jsonl nor .txt, has no prompt, or has an invalid line; the message contains the
        line number and the fix.
    """
    return [record for _, record in numbered_records(path)]


def read_prompt_files(paths: Sequence[Path]) -> list[list[Record]]:
    """Reads the records of each file, with the field `prompt_file` if there are several; see `read_prompt_file`."""
    return [add_source(path, paths, read_prompt_file(path)) for path in paths]


def add_source(path: Path, paths: Sequence[Path], records: Sequence[Record]) -> list[Record]:
    """Adds the field `prompt_file` to the records of `path` if there are several `paths`."""
    source = {PROMPT_FILE: str(path)} if len(paths) > 1 else {}
    return [record | source for record in records]


def numbered_records(path: Path, content: bytes | None = None) -> list[tuple[int, Record]]:
    """Reads records with their line numbers, starting at 1. Raises like `read_prompt_file`.

    Args:
      path: The prompt file; determines the format.
      content: Content of the file. None means to read it.
    """
    content = read_bytes(path) if content is None else content
    return [(number, dict(record)) for number, record in _parse(str(path), content)]


@functools.lru_cache(maxsize=4)
def _parse(path: str, content: bytes) -> list[tuple[int, Record]]:
    """Parses a prompt file. Cached, because each check of a start reads the files."""
    parsers = {".jsonl": _parse_json, ".txt": _parse_text}
    suffix = suffix_of(path)
    if suffix not in parsers:
        raise ValueError(
            f"{path} ends in {suffix!r}: a prompt file is .jsonl (one JSON object per line) or .txt (one "
            "prompt per line)."
        )
    records = []
    for number, line in _lines(path, content):
        try:
            record = parsers[suffix](line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if record is not None:
            records.append((number, _with_image_paths(path, record)))
    if not records:
        raise ValueError(f"{path} holds no prompt: write at least one line.")
    return records


def _with_image_paths(path: Path, record: Record) -> Record:
    """Returns a record whose image paths are relative to the working directory instead of the prompt file's folder."""

    def located(image: Any) -> Any:
        if isinstance(image, list):
            return [located(one) for one in image]
        if not isinstance(image, str) or not image.strip() or "://" in image:
            return image
        return str(pathlib.Path(path).parent / in_home(image))

    if is_dataset(path):
        return record
    return record | {field: located(record[field]) for field in IMAGES if field in record}


def first_negative(path: Path) -> str | None:
    """Returns "FILE, line N" of the first negative prompt, or None. Raises like `read_prompt_file`."""
    content = read_bytes(path)
    if b"negative_prompt" not in content:  # skips parsing
        return None
    numbered = numbered_records(path, content)
    found = (f"{path}, line {n}" for n, record in numbered if "negative_prompt" in record)
    return next(found, None)


def negatives_differ(paths: Sequence[Path]) -> bool:
    """Returns whether the files' negative prompts differ. Missing files are ignored."""
    found = [path for path in paths if is_dataset(path) or pathlib.Path(path).is_file()]
    if all(first_negative(path) is None for path in found):
        return False
    records = itertools.chain.from_iterable(map(read_prompt_file, found))
    return len({record.get("negative_prompt") for record in records}) > 1


def prompts_label(training: Sequence[str], evaluation: str) -> str:
    """Returns TRAINING if the evaluation prompt file is also a training file, else HELD_OUT."""
    own, *others = (pathlib.Path(path).resolve() for path in (evaluation, *training))
    return TRAINING if evaluation and own in others else HELD_OUT


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Returns whether a prompt file's path names a dataset."""
    return str(path).startswith((HUB, TFDS))


def read_bytes(path: Path) -> bytes:
    """Reads a prompt file; a dataset is converted to .jsonl.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The dataset cannot be read.
    """
    if is_dataset(path):
        from digen_jax.data import datasets  # few runs read one

        return datasets.read_rows(str(path))
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no prompt file at {path}: give the path of a .jsonl or .txt file, or hf:owner/name for a "
            "data set of the hub."
        )
    return path.read_bytes()


def first_numbers(numbers: Sequence[int]) -> str:
    """Formats the first `LISTED` numbers and the count of the remaining ones."""
    more = f" and {len(numbers) - LISTED:,} more" if len(numbers) > LISTED else ""
    return ", ".join(map(str, numbers[:LISTED])) + more


def suffix_of(path: Path) -> str:
    """Returns the suffix that determines a prompt file's format."""
    return ".jsonl" if is_dataset(path) else pathlib.Path(path).suffix


def _lines(path: Path, content: bytes) -> Iterator[tuple[int, str]]:
    """Yields numbered lines up to the last non-blank one, without byte order marks.

    Concatenated files have several marks. Only a line feed ends a line; prompts may contain other Unicode separators.
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


def _parse_text(line: str) -> Record:
    if not line.strip():
        raise ValueError("the prompt is blank; write one or delete the line.")
    if _is_hidden(line):
        raise ValueError("the prompt contains only hidden characters; write a text.")
    return {"prompt": line.strip()}


def _is_hidden(text: str) -> bool:
    """Returns whether a text has no visible characters."""
    return not "".join(HIDDEN.sub("", text).split()).strip(JOINERS)


def _parse_json(line: str) -> Record | None:
    """Returns the record of a line, or None for a blank line."""
    if not line.strip():
        return None
    try:
        record = parse_json(line, _refuse)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"this is not JSON ({error.msg} at column {error.colno}); write one object per line, "
            'such as {"prompt": "a photo of a bench"}.'
        ) from error
    if not isinstance(record, dict):
        raise ValueError('write an object, such as {"prompt": "a photo of a bench"}.')
    _check_record(record)
    return record


def _refuse(constant: str) -> None:
    """Rejects NaN and infinities, which are not valid JSON for reward servers."""
    raise ValueError(f"{constant} is not a JSON number; write null, or omit the field.")


def _check_record(record: Record) -> None:
    if "prompt" not in record:
        raise ValueError('"prompt" is missing; give the text of the prompt.')
    prompt = record["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'"prompt" is {json.dumps(prompt)}; write a text that is not blank.')
    if _is_hidden(prompt):
        raise ValueError('"prompt" contains only hidden characters; write a text.')
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
            raise ValueError(f'"{field}" will contain {content}; rename this field.')
    if not isinstance(record.get("tag", ""), str):
        raise ValueError(f'"tag" must be a text, not {record["tag"]!r}.')
    included = _objects(record, "include")
    for index, entry in enumerate(included):
        _check_object(f"include[{index}]", entry, earlier=index)
    for index, entry in enumerate(_objects(record, "exclude")):
        _check_object(f"exclude[{index}]", entry, earlier=len(included))


def _objects(record: Record, field: str) -> list[Any]:
    entries = record.get(field, [])
    if not isinstance(entries, list):
        raise ValueError(f'"{field}" must be a list of objects, not {entries!r}.')
    return entries


def _check_object(name: str, entry: Any, earlier: int) -> None:
    """Checks an entry of include or exclude. Its position may refer to one of the `earlier` includes."""
    if not isinstance(entry, dict):
        raise ValueError(f'{name} must be an object with "class" and "count", not {entry!r}.')
    texts = {"class": entry.get("class"), "color": entry.get("color", "any")}
    for field, text in texts.items():
        if not isinstance(text, str) or not text:
            raise ValueError(f'{name}: "{field}" must be a text, not {text!r}.')
    count = entry.get("count")
    if type(count) is not int or count < 1:
        raise ValueError(f'{name}: "count" must be an integer of at least 1, not {count!r}.')
    if "position" in entry:
        _check_position(name, entry["position"], earlier)


def _check_position(name: str, position: Any, earlier: int) -> None:
    pair = isinstance(position, list) and len(position) == 2
    if not pair or not isinstance(position[0], str) or type(position[1]) is not int:
        raise ValueError(
            f'{name}: "position" must be [relation, index of an earlier include], such as '
            f'["left of", 0], not {position!r}.'
        )
    if not 0 <= position[1] < earlier:
        raise ValueError(
            f'{name}: "position" names include[{position[1]}], which is not an earlier entry; '
            "give the index of one that stands before it."
        )


class PromptBatches(NamedTuple):
    """Prompts of each training step, without end; see `prompt_batches`."""

    steps: Sequence[list[Record]]
    stream: dict[str, Any]  # everything that the order depends on, as JSON

    def since(self, first: int) -> Iterator[list[Record]]:
        """Yields the prompts of each step from `first` on."""
        return map(self.steps.__getitem__, itertools.count(first))

    def check(self, saved: Mapping[str, Any]) -> None:
        """Checks that a run, which had the stream `saved`, continues with the same prompts.

        Raises:
          ValueError: The run had another prompt file, groups_per_step or seed.
        """
        for name, here in self.stream.items():
            if saved.get(name) != here:
                raise ValueError(
                    f"The checkpoint belongs to other prompts: its {name} is {saved.get(name)!r}, here it is "
                    f"{here!r}; restore it, or start in a new workdir."
                )


def prompt_batches(
    paths: Path | Sequence[Path],
    groups_per_step: int,
    seed: int,
    set_steps: int = 0,
    weights: Sequence[float] = (),
) -> PromptBatches:
    """Returns the prompts of each training step.

    A step is a list of records of `read_prompt_file`, one per group, with `serial` = step * groups_per_step + position
    in the step: the group's number in the run, which seeds its randomness. Repeated prompts form separate groups.
    Every epoch contains each prompt once, in a new order; a step may span the end of an epoch and the start of the
    next.

    Several files are independent streams, mixed by `weights` up to rounding (grain rounds down the ratios to the
    smallest weight to hundredths). Records then have the field `prompt_file`.

    Args:
      paths: One or several prompt files.
      groups_per_step: Groups per step.
      seed: Non-negative seed of the order.
      set_steps: Number of steps after which the first ones repeat, with their serials. 0 means never.
      weights: Positive weights of the files. Empty means equal weights.

    Raises:
      FileNotFoundError: A prompt file does not exist.
      ValueError: A prompt file is malformed, the seed is negative, or groups_per_step is not positive.
    """
    import grain  # slow to import; reading prompt files does not need it

    if seed < 0:
        raise ValueError(f"seed is {seed}: it must not be negative.")
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step is {groups_per_step}: it must be 1 or more.")
    paths = [paths] if isinstance(paths, Path) else list(paths)
    weights = [float(weight) for weight in weights] or [1.0] * len(paths)
    digests, streams = [], []
    for number, path in enumerate(paths):
        content = read_bytes(path)
        digests.append(hashlib.sha256(suffix_of(path).encode() + content).hexdigest()[:16])
        records = [record for _, record in numbered_records(path, content)]
        # The first file uses the run's seed, so its order is the same as without other files.
        own = np.random.SeedSequence([seed, number]).generate_state(1)[0] if number else seed
        stream = grain.MapDataset.source(add_source(path, paths, records)).seed(int(own))
        streams.append(stream.shuffle().repeat())
    groups = grain.MapDataset.mix(streams, weights) if len(paths) > 1 else streams[0]
    # Copies, because rewards may modify records.
    groups = groups.map_with_index(lambda serial, record: copy.deepcopy(record) | {SERIAL: serial})
    if set_steps:
        # A repeated slice would continue in the stream.
        fixed = grain.MapDataset.range(set_steps * groups_per_step).repeat()
        groups = fixed.map(groups.__getitem__)
    steps = groups.batch(groups_per_step, drop_remainder=True, batch_fn=list)
    # A single file has no list, for compatibility with older checkpoints.
    digest = digests if len(digests) > 1 else digests[0]
    stream = {"prompt_file_hash": digest, "groups_per_step": groups_per_step, "seed": seed}
    stream |= {"set_steps": set_steps} if set_steps else {}
    stream |= {"weights": weights} if len(digests) > 1 else {}
    return PromptBatches(steps, stream)
