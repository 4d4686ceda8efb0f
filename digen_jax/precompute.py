"""Encodes the prompts that a run will draw before it samples: its text encoders are on the devices only while it does.

They are encoded in blocks on the first sampling mesh, and stored as they come, so that an interrupted encoding
continues where it stopped. With several processes all encode together, and each stores what its own folder lacks.
"""

import dataclasses
import itertools
import math
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped
from tqdm import tqdm

from digen_jax.assemble import drawn_prompts, open_parts
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.embedding_cache import OVERHEAD, PromptStore
from digen_jax.data.prompt_files import read_prompt_file, read_prompt_files
from digen_jax.errors import ConfigError, blame, check_output
from digen_jax.families import read_parts
from digen_jax.models.family import Family, Record, Tokens
from digen_jax.parallel.encoding import (
    Rows,
    block_size,
    example_record,
    jit_encoder,
    null_prompt_key,
    prompt_key,
    row_bytes,
    unpad_rows,
)
from digen_jax.parallel.mesh import any_of, fetch
from digen_jax.parallel.placement import DeviceGroup, MeshRole
from digen_jax.policies import on_devices, reads_null
from digen_jax.process.job import barrier, is_first, several
from digen_jax.process.shutdown import during
from digen_jax.process.terminal import track
from digen_jax.prompt_store import (
    EACH_STEP,
    encoder_shapes,
    is_ahead,
    missing_weights,
    open_store,
    store_folder,
)
from digen_jax.scheduling.settings import Deadline

# What is stored together at most, and lost if the process is killed meanwhile.
TOGETHER, TOGETHER_BYTES = 1024, 2**30
TOKENIZED = 4096  # prompts tokenized at a time


@dataclasses.dataclass
class Encoding:
    """Prompts that a run needs encoded.

    Attributes:
      recipe: of the run.
      folder: of its model.
      family: of its model.
      group: the sampling mesh whose devices encode.
      store: where they are kept.
      records: all of them by their keys: first those of passes without the prompt (`null_prompt_key`), if there is one,
        then those of the prompts (`prompt_key`).
      nulls: the keys of passes without the prompt.
      missing: the keys of those that are not stored yet.
    """

    recipe: TrainConfig
    folder: pathlib.Path
    family: Family
    group: DeviceGroup
    store: PromptStore
    records: Mapping[str, Record]
    nulls: frozenset[str]
    missing: list[str]

    def check(self) -> None:
        """Prints what will be encoded, and its size.

        Raises:
          ConfigError: the text encoders' weights, or the room for what they make, are missing.
        """
        if not self.missing:
            _say(f"all {len(self.records):,} prompts are encoded in {self._place}")
            return
        if absent := missing_weights(self.folder, self.family):
            prompts = (self.records[key]["prompt"] for key in self.missing if key not in self.nulls)
            first = next(prompts, "")
            raise ConfigError(
                f"{_prompts(self.missing)} not encoded in {self._place}, such as {first!r}, and "
                f"{self.folder / absent[0]} holds no weights to encode them: bring the weights back, or encode these "
                "prompts where they are, by launch/encode_prompts.py with the same config"
            )
        size = self._size()
        self._check_room(size)
        _say(
            f"of {len(self.records):,} prompts {len(self.missing):,} are to be encoded, "
            f"{_shown(size)} in {self._place}"
        )

    @property
    def _place(self) -> pathlib.Path:
        return store_folder(self.recipe)

    def _size(self) -> int:
        """Bytes on disk of what is missing."""
        family, shapes = self.family, encoder_shapes(self.recipe, self.family)
        if family.masked:
            blocks = map(self._tokens, _blocks(self.missing, TOKENIZED, self.nulls))
            rows = sum(int(row_bytes(family, shapes, tokens).sum()) for tokens in blocks)
        else:  # all have as many
            one = row_bytes(family, shapes, family.tokenize([example_record(family)]))
            rows = int(one.sum()) * len(self.missing)
        return rows + (2 + len(self.missing) // TOGETHER + rows // TOGETHER_BYTES) * OVERHEAD

    def _check_room(self, size: int) -> None:
        check_output("config.prompts.cache", self._place, folder=True)
        limit, what = self.recipe.prompts.cache_limit, f"{_prompts(self.missing)} to be encoded"
        if excess := self.store.excess(size):
            raise ConfigError(
                f"config.prompts.cache_limit = {limit:g} GB is too small: {what}, "
                f"{_shown(size)} in {self._place}: set it to {math.ceil(limit + excess / 1e9)} or more, delete what is "
                f"not needed there, or set config.prompts.encoding to {EACH_STEP!r}"
            )
        place = self._place.absolute()
        free = shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free
        if size > free:
            raise ConfigError(
                f"config.prompts.cache = {str(place)!r} has room for {_shown(free)}, and {what}, "
                f"{_shown(size)}: make room, or name a folder on another disk"
            )

    def run(self) -> None:
        """Encodes what is missing; with several processes all call it, with the same texts.

        Raises:
          ConfigError: the weights cannot be read, or what was encoded cannot be stored.
        """
        texts = self._missing_anywhere()
        if not texts:
            return
        # Smaller ones if there are few texts; all have the same size, so that there is one program.
        images = self.group.images
        count = min(block_size(self.family, self.group), -(-len(texts) // images) * images)
        blocks = _blocks(texts, count, self.nulls)
        begin = last = time.monotonic()
        size = 0
        waiting: dict[str, Rows] = {}
        for number, encoded in enumerate(self._encoded(blocks, count)):
            waiting |= encoded
            held = _bytes(waiting)
            # The first block has compiled, and the second one says how long all take.
            timed = number == 1 and len(blocks) > 2
            if timed or len(waiting) >= TOGETHER or held >= TOGETHER_BYTES:
                self._keep(waiting)
                size, waiting = size + held, {}
            seconds, last = time.monotonic() - last, time.monotonic()
            if timed:
                left = tqdm.format_interval(seconds * (len(blocks) - 2))
                _say(f"{len(blocks) - 2:,} blocks of {count:,} prompts are left, about {left}")
        size += _bytes(waiting)
        if waiting:
            self._keep(waiting)
        seconds = tqdm.format_interval(time.monotonic() - begin)
        _say(f"encoded {len(texts):,} prompts, {_shown(size)}, in {seconds}")

    def _encoded(self, blocks: list[list[str]], count: int) -> Iterator[dict[str, Rows]]:
        """The rows of each text, a block at a time; at its end the text encoders' memory is free."""
        family, group = self.family, self.group
        with blame("config.model.folder: "):
            kept = self.recipe.precision.frozen
            params = read_parts(family, self.folder, family.encoders, group, kept)
        program, done = jit_encoder(family, group), 0
        shown = track(blocks, "encoding prompts", "block", note=lambda: _shown(done))
        for block in shown if is_first() else blocks:
            tokens = jax.tree.map(lambda rows: _filled(rows, count), self._tokens(block))
            with during("the encoding of prompts"):
                made = jax.tree.map(fetch, program(params, tokens))
            rows = dict(zip(block, unpad_rows(family, made), strict=False))
            done += _bytes(rows)
            yield rows

    def _tokens(self, block: list[str]) -> Tokens:
        """Of keys that `_blocks` has put together: different keys have different tokens, so that each has a row."""
        records = [self.records[key] for key in block]
        of_nulls = block[0] in self.nulls
        return self.family.tokenize_null(records) if of_nulls else self.family.tokenize(records)

    def _missing_anywhere(self) -> list[str]:
        """The texts that some process lacks, in the same order in all processes."""
        texts, lacking = [*self.records], set(self.missing)
        mask = np.array([text in lacking for text in texts], bool)
        if several() and texts:
            mask = any_of(mask, self.group.mesh)
        return [text for text, one in zip(texts, mask, strict=True) if one]

    def _keep(self, rows: dict[str, Rows]) -> None:
        """Stores rows, unless another process has stored them in the same folder."""
        with blame("config.prompts.cache: "):
            if is_first():
                self.store.add(rows)
            if not several():
                return
            barrier("storing prompts", Deadline(self.recipe.runtime.deadline).seconds())
            if own := self.store.missing(rows):
                self.store.add({text: rows[text] for text in own})


def prepare(
    recipe: TrainConfig,
    devices: Sequence[jax.Device],
    records: Callable[[], Sequence[Record]],
    mesh: MeshRole | None = None,
) -> Encoding | None:
    """What is to be encoded of some prompts, with a look at the store; None: the text encoders run in each step.

    Nothing slow happens: no weights are read. `mesh` is the only one of this process; None: it has all.

    Raises:
      ConfigError: the model, the devices or the store cannot be used, or see `Encoding.check`.
    """
    if recipe.prompts.encoding == EACH_STEP:
        return None
    folder, family, placement, _ = open_parts(recipe, devices, mesh)
    if not is_ahead(recipe, family):
        return None
    drawn = records()
    own = drawn if reads_null(recipe, family) else ()
    nulls = {null_prompt_key(family, record): record for record in own}
    wanted = nulls | {prompt_key(family, record): record for record in drawn}
    store = open_store(recipe, folder, family)
    with blame("config.prompts.cache: "):
        missing = store.missing(wanted)
    found = Encoding(
        recipe, folder, family, placement.rollout, store, wanted, frozenset(nulls), missing
    )
    found.check()
    return found


def encode(recipe: TrainConfig, devices: Sequence[jax.Device], records: Sequence[Record]) -> None:
    """Encodes prompts that are not stored yet, if the recipe's prompts are encoded ahead.

    Raises:
      ConfigError: as `prepare` and `Encoding.run`.
    """
    if found := prepare(recipe, devices, lambda: records):
        found.run()


def encode_all(recipe: TrainConfig) -> None:
    """Encodes the prompts of a recipe's whole run on the available devices.

    Raises:
      ConfigError: its prompts are not encoded ahead, or as `prepare` and `Encoding.run`.
    """
    devices = jax.devices()
    recipe = on_devices(recipe, len(devices))
    for name, given in (
        ("prompts.file", recipe.prompts.paths),
        ("evaluation.prompts", recipe.evaluation.prompts),
    ):
        if not given:
            raise ConfigError(f"config.{name} is not given: add --config.{name}=... to the command")
    with tempfile.TemporaryDirectory() as cache:
        found = prepare(recipe, devices, lambda: reached(recipe, pathlib.Path(cache)))
    if found is None:
        raise ConfigError(
            f"config.prompts.encoding = {recipe.prompts.encoding!r} has this model's text encoders run in each step: "
            "set it to 'precomputed' here and in training"
        )
    found.run()


def reached(recipe: TrainConfig, cache: pathlib.Path, first: int = 0) -> list[dict[str, Any]]:
    """The records of a run's evaluations and of its steps from `first` on, one of each prompt, negative and picture.

    Args:
      recipe: of the run.
      cache: where the prompt file's data set is built, as in `prompt_batches`.
      first: steps that are done.

    Raises:
      ConfigError: a prompt file cannot be used.
    """
    with blame("config.evaluation.prompts: "):
        held_out = read_prompt_file(recipe.evaluation.prompts)[: recipe.evaluation.images or None]
    with blame("config.prompts.file: "):
        left = set(map(_content, itertools.chain(*read_prompt_files(recipe.prompts.paths))))
        steps = drawn_prompts(recipe, cache)
    found = {_content(record): record for record in held_out}
    for records in itertools.islice(steps, first, recipe.steps):
        drawn = {_content(record): record for record in records}
        found |= {content: drawn[content] for content in drawn if content not in found}
        left.difference_update(drawn)
        if not left:
            break
    return list(found.values())


def _content(record: dict[str, Any]) -> tuple[str, str | None, str]:
    return record["prompt"], record.get("negative_prompt"), str(record.get("image", ""))


def _blocks(texts: Sequence[str], count: int, nulls: Collection[str]) -> list[list[str]]:
    """Texts that are tokenized together, at most `count`; those of passes without the prompt are apart."""
    of_nulls = [text for text in texts if text in nulls]
    others = [text for text in texts if text not in nulls]
    return [part[i : i + count] for part in (of_nulls, others) for i in range(0, len(part), count)]


def _filled(rows: Shaped[np.ndarray, "b ..."], count: int) -> Shaped[np.ndarray, "n ..."]:
    """Rows with repetitions of the last one behind them."""
    free = [(0, 0)] * (rows.ndim - 1)
    return np.pad(rows, [(0, count - len(rows)), *free], mode="edge")


def _bytes(rows: Mapping[str, Rows]) -> int:
    return sum(array.nbytes for own in rows.values() for array in own.values())


def _prompts(texts: Sequence[str]) -> str:
    return f"{len(texts):,} prompts are" if len(texts) > 1 else "1 prompt is"


def _shown(size: int) -> str:
    return tqdm.format_sizeof(size, "B")


def _say(text: str) -> None:
    if is_first():
        print(text, flush=True)
