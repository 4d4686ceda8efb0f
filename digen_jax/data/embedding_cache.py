"""Encoded prompts on disk, for all runs of a model: TFDS datasets (array_record) of the rows a network attends to.

    folder/encoded_prompts/MODEL-BLOCK/1.0.0/   one dataset, of the texts that were encoded together
        about.json                              the model's description, and a hash of each text, in the dataset's order

MODEL and BLOCK are hashes of the description and of the texts. A dataset never changes, and appears complete or not at
all, so that any number of processes may read and add at once, and be killed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from digen_jax.data.building import BUILDING, build, quiet
from digen_jax.files import parse_json

Rows = Mapping[str, np.ndarray]  # one prompt's arrays, of which texts differ in the first axis
Model = Mapping[str, Any]  # what the rows depend on in addition to the text, as JSON

ABOUT = "about.json"
REMOVED = "removed."
# Datasets that were read so recently are not removed to make room: a run may need them again.
IN_USE_S = 86_400.0
# What a dataset takes in addition to its rows: array_record fills up blocks of 64 kB.
OVERHEAD = 4 * 2**16


@dataclasses.dataclass(eq=False)
class BlockConfig(tfds.core.BuilderConfig):
    """Texts and their rows; `name` is their hash and the model's."""

    rows: Mapping[str, Rows] = dataclasses.field(default_factory=dict, repr=False)


class EncodedPrompts(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of texts that were encoded together."""

    VERSION = tfds.core.Version("1.0.0")  # raise it when the features change

    def _info(self) -> tfds.core.DatasetInfo:
        first = next(iter(self.builder_config.rows.values()))
        arrays = {
            name: tfds.features.Tensor(
                shape=(None, *array.shape[1:]), dtype=array.dtype.type, encoding="bytes"
            )
            for name, array in first.items()
        }
        features = {"text": tfds.features.Text(), "rows": tfds.features.FeaturesDict(arrays)}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, (text, rows) in enumerate(self.builder_config.rows.items()):
            yield index, {"text": text, "rows": dict(rows)}


class PromptStore:
    """The encoded prompts of one model in a folder, which may hold those of others; for one thread.

    Attributes:
      model: its description.
      limit: bytes that the folder may have. Writers at the same time may exceed it by what each of them adds.
    """

    def __init__(self, folder: str | os.PathLike[str], model: Model, limit: int):
        self.model, self.limit = dict(model), limit
        self._folder = pathlib.Path(folder)
        self._key = _hash(json.dumps(self.model, sort_keys=True))
        self._index: dict[str, tuple[pathlib.Path, int]] = {}
        self._sources: dict[pathlib.Path, Sequence[Any]] = {}

    def missing(self, texts: Iterable[str]) -> list[str]:
        """Those of the texts that are not stored yet, each once; the datasets of the others count as used.

        Raises:
          ValueError: names a damaged dataset.
        """
        self._refresh()
        hashes = {text: _hash(text) for text in texts}
        for block in {self._index[key][0] for key in hashes.values() if key in self._index}:
            _use(block)
        return [text for text, key in hashes.items() if key not in self._index]

    def add(self, rows: Mapping[str, Rows]) -> None:
        """Stores some texts, of which at least one, as one dataset.

        To make room within the limit, datasets of any model that were not used for IN_USE_S are removed, the least
        recently used first.

        Args:
          rows: of each text, arrays of equal names, dtypes and shapes but for the first axis.

        Raises:
          ValueError: there is not enough room, or arrays that do not belong together.
        """
        _check_alike(rows)
        sizes = [array.nbytes for arrays in rows.values() for array in arrays.values()]
        self._make_room(sum(sizes) + OVERHEAD)
        hashes = [_hash(text) for text in rows]
        config = BlockConfig(name=f"{self._key}-{_hash(*sorted(hashes))}", rows=rows)
        about = json.dumps({"model": self.model, "texts": hashes})
        final = _root(self._folder) / config.name / str(EncodedPrompts.VERSION)
        self._folder.mkdir(parents=True, exist_ok=True)
        with quiet():
            build(
                lambda private: EncodedPrompts(data_dir=private, config=config),
                final,
                self._folder,
                lambda folder: (folder / ABOUT).write_text(about, encoding="utf-8"),
            )
        self._refresh()

    def read(self, texts: Sequence[str]) -> list[Rows]:
        """The rows of each text.

        Raises:
          ValueError: a text is not stored, or names a damaged dataset.
        """
        places: dict[pathlib.Path, dict[str, int]] = {}
        if any(_hash(text) not in self._index for text in texts):
            self._refresh()
        for text in texts:
            if _hash(text) not in self._index:
                raise ValueError(f"{self._folder} does not hold {text!r} encoded: encode it first")
            block, position = self._index[_hash(text)]
            places.setdefault(block, {})[text] = position
        found = {}
        for block, positions in places.items():
            found |= self._read_block(block, positions)
        return [found[text] for text in texts]

    def excess(self, needed: int) -> int:
        """Bytes by which `needed` more would exceed the limit after all is removed that may be; 0: they fit."""
        removable = sum(map(_size, self._unused()))
        return max(0, self.size() - removable + needed - self.limit)

    def size(self) -> int:
        """Bytes of all files of the folder, those of other models too."""
        return _size(self._folder)

    def _refresh(self) -> None:
        """Finds the datasets of other processes, and forgets those that were removed."""
        found = {}
        for block in _blocks(self._folder, self._key):
            with contextlib.suppress(FileNotFoundError):
                for position, text in enumerate(_about(block)["texts"]):
                    found[text] = (block, position)
        self._index = found

    def _read_block(self, block: pathlib.Path, positions: Mapping[str, int]) -> dict[str, Rows]:
        _use(block)
        try:
            if block not in self._sources:
                with quiet():
                    builder = tfds.builder_from_directory(block)
                    self._sources[block] = builder.as_data_source(split="train")
            examples = self._sources[block].__getitems__(list(positions.values()))
        # TFDS, array_record and protobuf each have errors of their own.
        except Exception as error:
            if not block.exists():
                raise ValueError(
                    f"{block} has been removed to make room for others: encode its prompts again"
                ) from error
            raise _damaged(block, error) from error
        for text, example in zip(positions, examples, strict=True):
            if example["text"] != text.encode():
                raise _damaged(block, "a prompt is not in its place")
        pairs = zip(positions, examples, strict=True)
        return {text: example["rows"] for text, example in pairs}

    def _unused(self) -> list[pathlib.Path]:
        """The datasets that may be removed."""
        return [b for b in _blocks(self._folder) if time.time() - _last_use(b) > IN_USE_S]

    def _make_room(self, needed: int) -> None:
        """Removes datasets until `needed` bytes more are within the limit."""
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True)
        _remove_remains(self._folder)
        excess = self.size() + needed - self.limit
        for block in sorted(self._unused(), key=_last_use):
            if excess <= 0:
                return
            excess -= _size(block)
            _remove(block.parent, self._folder)
        if excess > 0:
            raise ValueError(
                f"{needed:,} bytes of encoded prompts do not fit into {self._folder}, which may have {self.limit:,} "
                f"and holds {self.size():,} that are in use: raise the limit by {excess:,}, or delete what is not "
                "needed"
            )


def models(folder: str | os.PathLike[str]) -> list[Model]:
    """The descriptions of the models whose prompts a folder holds.

    Raises:
      ValueError: names a damaged dataset.
    """
    found = {}
    for block in _blocks(pathlib.Path(folder)):
        with contextlib.suppress(FileNotFoundError):
            model = _about(block)["model"]
            found[json.dumps(model, sort_keys=True)] = model
    return [found[key] for key in sorted(found)]


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _root(folder: pathlib.Path) -> pathlib.Path:
    return folder / EncodedPrompts.name


def _blocks(folder: pathlib.Path, key: str = "*") -> list[pathlib.Path]:
    """The datasets of a model, or of all, in an order that does not change."""
    return sorted(_root(folder).glob(f"{key}-*/{EncodedPrompts.VERSION}"))


def _about(block: pathlib.Path) -> dict[str, Any]:
    """Raises FileNotFoundError if the dataset has been removed."""
    try:
        about = parse_json((block / ABOUT).read_bytes())
        return {"model": dict(about["model"]), "texts": list(about["texts"])}
    except FileNotFoundError as error:
        if block.exists():
            raise _damaged(block, f"{ABOUT} is missing") from error
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(block, f"{ABOUT} is broken") from error


def _damaged(block: pathlib.Path, reason: Any) -> ValueError:
    return ValueError(
        f"{block} is damaged ({reason}): delete that folder, and its prompts will be encoded again"
    )


def _check_alike(rows: Mapping[str, Rows]) -> None:
    """Raises ValueError if texts differ in their arrays' names, dtypes, or shapes behind the first axis."""
    kinds = {
        tuple(sorted((name, a.dtype.name, a.ndim, a.shape[1:]) for name, a in arrays.items()))
        for arrays in rows.values()
    }
    if len(kinds) != 1 or not all(rank for *_, rank, _ in next(iter(kinds))):
        raise ValueError(
            "all encoded prompts of a dataset must have arrays of the same names, dtypes and shapes but for the first "
            f"axis, and there are {len(kinds)} kinds"
        )


def _size(folder: pathlib.Path) -> int:
    """Bytes of all files below, without what another process removes meanwhile."""
    # Not by rglob, which fails where a folder is removed.
    return sum(_bytes(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)


def _bytes(file: str) -> int:
    try:
        return os.stat(file).st_size
    except FileNotFoundError:
        return 0


def _use(block: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # others' datasets may be read-only
        os.utime(block)


def _last_use(path: pathlib.Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Moves a folder out of sight, so that nothing sees half of it, and deletes it."""
    hidden = pathlib.Path(tempfile.mkdtemp(prefix=REMOVED, dir=folder))
    with contextlib.suppress(OSError):  # another process was faster
        path.rename(hidden / path.name)
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_remains(folder: pathlib.Path) -> None:
    """Deletes what processes left that were killed while they built or removed something."""
    for prefix in (BUILDING, REMOVED):
        for path in folder.glob(f"{prefix}*"):
            if time.time() - _last_use(path) > IN_USE_S:
                shutil.rmtree(path, ignore_errors=True)
