"""Data sets of the Hugging Face hub as the lines of a .jsonl file.

The hub converts every public data set to Parquet files, whatever its own format, on a branch of the data set's
repository: SUBSET/SPLIT/NUMBER.parquet on refs/convert/parquet. They are downloaded with `huggingface_hub` into its
cache and read with pyarrow, which tensorflow-datasets needs too, so that the library `datasets` is not needed. Without
a network what is in that cache is read.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from digen_jax.data.lines import shown

PREFIX = "hf:"
BRANCH = "refs/convert/parquet"
FORM = re.compile(
    r"hf:(?P<repository>[\w-][\w.-]*/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?::(?P<split>[\w.-]+)(?::(?P<column>.+))?)?"
)


@dataclasses.dataclass(frozen=True)
class Place:
    """The texts of a data set: hf:OWNER/NAME, hf:OWNER/NAME/SUBSET, each with :SPLIT or :SPLIT:COLUMN.

    Attributes:
      repository: "owner/name".
      subset: of the data set; "default" where its authors named none.
      split: of the subset.
      column: the one that holds the prompts. All others are the records' metadata, without nulls and without those that
        hold bytes, such as pictures.
    """

    repository: str
    subset: str = "default"
    split: str = "train"
    column: str = "prompt"

    @classmethod
    def of(cls, name: str) -> "Place":
        """The place that a text names; a ValueError if it has another form."""
        found = FORM.fullmatch(name)
        if not found:
            raise ValueError(
                f"{name} names no data set of the hub: write hf:owner/name, hf:owner/name/subset, or one of these "
                "with :split or :split:column behind it"
            )
        return cls(**{field: text for field, text in found.groupdict().items() if text})


def is_hub(path: str | os.PathLike[str]) -> bool:
    """Whether a prompt file's path names a data set of the hub."""
    return str(path).startswith(PREFIX)


@functools.cache  # a run reads its prompt files several times
def read_rows(name: str) -> bytes:
    """The rows of a data set as JSON lines with the field "prompt"; line n is row n, from 1.

    Rows without a text in the prompts' column are blank lines; a printed line counts and names them.

    Raises:
      ValueError: says what is wrong with the name, the network, the data set or its columns.
    """
    place = Place.of(name)
    rows = [_record(row, place.column) for row in _rows(name, place)]
    if without := [number for number, row in enumerate(rows, start=1) if row is None]:
        print(
            f"{name}: {len(without):,} of {len(rows):,} rows hold no text in the column {place.column!r} and are left "
            f"out: {shown(without)}",
            file=sys.stderr,
            flush=True,
        )
    return b"\n".join(b"" if row is None else json.dumps(row, default=str).encode() for row in rows)


def _record(row: dict[str, Any], column: str) -> dict[str, Any] | None:
    prompt = row.pop(column, None)
    if not isinstance(prompt, str) or not prompt.strip():
        return None
    # A table has each column in every row: null or NaN, which equals nothing, where the row's author gave none.
    given = {name: value for name, value in row.items() if value is not None and value == value}
    return given | {"prompt": prompt}


def _rows(name: str, place: Place) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as parquet  # takes a while, and few runs need it

    for file in _files(name, place):
        schema = parquet.read_schema(file)
        if place.column not in schema.names:
            raise ValueError(
                f"{name} has no column {place.column!r}, but {', '.join(map(repr, schema.names))}: write "
                f"{PREFIX}{place.repository}/{place.subset}:{place.split}:COLUMN"
            )
        columns = [field.name for field in schema if not _has_bytes(field.type)]
        for batch in parquet.ParquetFile(file).iter_batches(columns=columns):
            yield from batch.to_pylist()


def _has_bytes(kind: Any) -> bool:
    """Whether a pyarrow type holds bytes, such as a picture's file, or contains one that does."""
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _files(name: str, place: Place) -> list[pathlib.Path]:
    """The data set's Parquet files on this machine, in their order."""
    inside = f"{place.subset}/{place.split}"
    try:
        folder = huggingface_hub.snapshot_download(
            place.repository,
            repo_type="dataset",
            revision=BRANCH,
            allow_patterns=[f"{inside}/*.parquet"],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, ConnectionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} cannot be downloaded (check the name, the network, and whether the data set's page on the hub "
            f"shows its rows), or write its prompts to a .jsonl file: {reason}"
        ) from error
    files = sorted(pathlib.Path(folder, inside).glob("*.parquet"))
    if not files:
        raise ValueError(
            f"{name} has no rows in the subset {place.subset!r} and the split {place.split!r}: write "
            f"{PREFIX}{place.repository}/SUBSET:SPLIT with the names on the data set's page on the hub"
        )
    return files
