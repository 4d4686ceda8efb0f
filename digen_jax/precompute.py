"""Precomputes the prompt embeddings of a run, so that text encoders need no device memory during sampling.

If a run trains image files, it precomputes their latents in the same way.

Prompts are encoded on the first rollout worker's mesh and stored in blocks, so that an interrupted precomputation can
be resumed. With several processes, encoding is collective, and each process stores what its folder lacks.
"""

import dataclasses
import itertools
import math
import pathlib
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Shaped, UInt8
from tqdm import tqdm

from digen_jax.assemble import Parts, held_out_prompts, open_parts, train_prompts
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.embedding_cache import HEADER, EmbeddingCache
from digen_jax.data.prompt_files import read_prompt_files
from digen_jax.errors import ConfigError, check_output, prefix_errors, user_input
from digen_jax.families import read_parts
from digen_jax.images import crop_image, image_hash, read_image
from digen_jax.models.family import Family, Params, Record
from digen_jax.parallel import encoding
from digen_jax.parallel.encoding import Rows, null_prompt_key, prompt_key
from digen_jax.parallel.mesh import any_of, fetch
from digen_jax.parallel.placement import DeviceGroup, chunked_map
from digen_jax.policies import (
    EACH_STEP,
    encoder_shapes,
    is_precomputed,
    on_devices,
    reads_null,
)
from digen_jax.process.job import barrier, is_first, several
from digen_jax.process.shutdown import during
from digen_jax.process.terminal import track
from digen_jax.prompt_store import missing_weights, open_latents, open_store, store_folder
from digen_jax.scheduling.settings import time_limit

# Maximum prompts and bytes per cache file. An unwritten file is lost if the process is killed.
FILE_PROMPTS, FILE_BYTES = 1024, 2**30
TOKENIZED = 4096  # prompts per tokenizer call


@dataclasses.dataclass
class Precomputation:
    """Prompts of a run, and which of them are not cached yet."""

    noun: ClassVar[str] = "prompt"
    # Alternative to a larger limit of the cache.
    alternative: ClassVar[str] = f", or set config.prompts.encoding to {EACH_STEP!r}"

    config: TrainConfig
    folder: pathlib.Path  # of the model
    family: Family
    group: DeviceGroup  # mesh of the text encoders
    store: EmbeddingCache
    # All prompt records by key: unconditional passes first (`null_prompt_key`), then prompts (`prompt_key`).
    records: Mapping[str, Record]
    nulls: frozenset[str]  # keys of unconditional passes
    missing: list[str]  # keys that are not cached yet

    def check(self) -> None:
        """Prints the number of prompts to encode, and their size.

        Raises:
          ConfigError: The text encoders' weights are missing, or the embeddings exceed the disk space or the limit.
        """
        if not self.missing:
            _log(f"all {len(self.records):,} {self.noun}s are encoded in {self._place}")
            return
        if absent := self._missing_weights():
            prompts = (self.records[key]["prompt"] for key in self.missing if key not in self.nulls)
            raise ConfigError(
                f"{self._count()} not encoded in {self._place}, such as {next(prompts, '')!r}, and "
                f"{self.folder / absent[0]} holds no weights to encode them: restore the weights, or encode "
                "these prompts on a machine with the weights, with launch/encode_prompts.py and the same "
                "config"
            )
        size = self._size()
        check_output("config.prompts.cache", self._place, folder=True)
        limit, what = self.config.prompts.cache_limit, f"{self._count()} to be encoded"
        if excess := self.store.excess(size):
            raise ConfigError(
                f"config.prompts.cache_limit = {limit:g} GB is too small: {what}, "
                f"{_format(size)} in {self._place}: set it to {math.ceil(limit + excess / 1e9)} or more, or delete "
                f"what is not needed there{self.alternative}"
            )
        place = self._place.absolute()
        free = shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free
        if size > free:
            raise ConfigError(
                f"config.prompts.cache = {str(place)!r} has {_format(free)} of free space, and {what}, "
                f"{_format(size)}: free some space, or set a folder on another disk"
            )
        many = f"{len(self.missing):,} are to be encoded, {_format(size)} in {self._place}"
        _log(f"of {len(self.records):,} {self.noun}s {many}")

    @property
    def _place(self) -> pathlib.Path:
        return store_folder(self.config)

    def _size(self) -> int:
        """Returns the size on disk of what is missing, in bytes."""
        family, shapes = self.family, encoder_shapes(self.config, self.family)
        if family.masked:
            blocks = map(self._inputs, _blocks(self.missing, TOKENIZED, self.nulls))
            rows = sum(int(encoding.row_bytes(family, shapes, one).sum()) for one in blocks)
        else:  # all have the same size
            tokens = family.tokenize([encoding.example_record(family)])
            rows = int(encoding.row_bytes(family, shapes, tokens).sum()) * len(self.missing)
        return rows + HEADER * len(self.missing)

    def run(self) -> None:
        """Encodes and stores the missing prompts. All processes must call it with the same prompts.

        Raises:
          ConfigError: The weights cannot be read, or the embeddings cannot be stored.
        """
        keys = self._missing_anywhere()
        if not keys:
            return
        # Smaller blocks for few prompts. All blocks have one size, so that one program is compiled.
        images = self.group.images
        largest = self._block_size()
        count = min(largest, -(-len(keys) // images) * images)
        blocks = _blocks(keys, count, self.nulls)
        start = last = time.monotonic()
        size = 0
        pending: dict[str, Rows] = {}
        for number, encoded in enumerate(self._encode(blocks, count)):
            pending |= encoded
            held = _bytes(pending)
            # Predicts the remaining time from the second block, since the first one includes compilation.
            timed = number == 1 and len(blocks) > 2
            if timed or len(pending) >= FILE_PROMPTS or held >= FILE_BYTES:
                self._store(pending)
                size, pending = size + held, {}
            seconds, last = time.monotonic() - last, time.monotonic()
            if timed:
                left = tqdm.format_interval(seconds * (len(blocks) - 2))
                _log(f"{len(blocks) - 2:,} blocks of {count:,} {self.noun}s are left, about {left}")
        size += _bytes(pending)
        if pending:
            self._store(pending)
        seconds = tqdm.format_interval(time.monotonic() - start)
        _log(f"encoded {len(keys):,} {self.noun}s, {_format(size)}, in {seconds}")

    def _encode(self, blocks: list[list[str]], count: int) -> Iterator[dict[str, Rows]]:
        """Yields the arrays of each block. Frees the networks' parameters at the end."""
        with prefix_errors("config.model.folder: "):
            params = self._params()
        program, done = self._program(), 0
        shown = track(blocks, f"encoding {self.noun}s", "block", note=lambda: _format(done))
        for block in shown if is_first() else blocks:
            inputs = jax.tree.map(lambda rows: _pad(rows, count), self._inputs(block))
            with during(f"the encoding of {self.noun}s"):
                encoded = jax.tree.map(fetch, program(params, inputs))
            rows = dict(zip(block, self._rows(encoded), strict=False))
            done += _bytes(rows)
            yield rows

    def _count(self) -> str:
        """Returns the number of missing keys, with a verb."""
        count = len(self.missing)
        return f"{count:,} {self.noun}s are" if count > 1 else f"1 {self.noun} is"

    # What follows is of prompts.

    def _missing_weights(self) -> list[str]:
        """Returns the components without weights, if prompts could be encoded elsewhere."""
        return missing_weights(self.folder, self.family)

    def _block_size(self) -> int:
        """Returns the number of keys that a mesh encodes per call."""
        return encoding.block_size(self.family, self.group)

    def _params(self) -> Params:
        """Reads the parameters that encoding needs."""
        dtype = self.config.precision.stored
        return read_parts(self.family, self.folder, self.family.encoders, self.group, dtype)

    def _program(self) -> Any:
        """Returns the jitted program (parameters, inputs) -> arrays, replicated on every device."""
        return encoding.jit_encoder(self.family, self.group)

    def _rows(self, encoded: Any) -> Sequence[Rows]:
        """Returns the arrays of each key from the program's, on the host."""
        return encoding.unpad_rows(self.family, encoded)

    def _inputs(self, block: list[str]) -> Any:
        """Returns the tokens of a block, one row per key, since different keys have different tokens."""
        records = [self.records[key] for key in block]
        is_null = block[0] in self.nulls
        return self.family.tokenize_null(records) if is_null else self.family.tokenize(records)

    def _missing_anywhere(self) -> list[str]:
        """Returns the keys missing in any process, in the same order in all processes."""
        keys, missing = [*self.records], set(self.missing)
        mask = np.array([key in missing for key in keys], bool)
        if several() and keys:
            mask = any_of(mask, self.group.mesh)
        return [key for key, one in zip(keys, mask, strict=True) if one]

    def _store(self, rows: dict[str, Rows]) -> None:
        """Stores embeddings, unless another process stored them in the same folder."""
        with prefix_errors("config.prompts.cache: "):
            if is_first():
                self.store.add(rows)
            if not several():
                return
            barrier(f"storing {self.noun}s", time_limit(self.config.runtime.deadline))
            if own := self.store.missing(rows):
                self.store.add({key: rows[key] for key in own})


class LatentPrecomputation(Precomputation):
    """Image files of a run by hash, and which of their latents are not stored yet. A record has its path as "image"."""

    noun: ClassVar[str] = "image"
    alternative: ClassVar[str] = ""

    def _size(self) -> int:
        size = 4 * math.prod(self.family.latent_shape(self.config.model.size))
        return (size + HEADER) * len(self.missing)

    def _missing_weights(self) -> list[str]:
        return []

    def _block_size(self) -> int:
        return max(1, self.family.decoded_pixels // math.prod(self.config.model.size)) * (
            self.group.images
        )

    def _params(self) -> Params:
        return read_parts(self.family, self.folder, self.family.decoders, self.group)

    def _program(self) -> Any:
        family, group = self.family, self.group
        rows = self._block_size() // group.images

        def encode(params: Params, images: UInt8[Array, "b h w 3"]) -> Float32[Array, "b *latent"]:
            def share(images: UInt8[Array, "n h w 3"]) -> Float32[Array, "n *latent"]:
                return family.encode_images(params, images.astype(jnp.float32) / 255)

            return chunked_map(share, images, rows, group)

        return jax.jit(encode, out_shardings=group.replicated)

    def _rows(self, encoded: Float32[np.ndarray, "b *latent"]) -> Sequence[Rows]:
        return [{"latents": one} for one in encoded]

    def _inputs(self, block: list[str]) -> UInt8[np.ndarray, "b h w 3"]:
        height, width, _ = self.config.model.size
        with user_input():
            return np.stack(
                [crop_image(read_image(self.records[key]["image"]), height, width) for key in block]
            )


def find_missing(config: TrainConfig, parts: Parts, unique: Sequence[Record]) -> Precomputation:
    """Finds the prompts to encode among all prompt records of a run, given the result of `open_parts`.

    Fast, since it loads no weights.

    Raises:
      ConfigError: The cache is invalid, or `Precomputation.check` failed.
    """
    folder, family, placement = parts.folder, parts.family, parts.placement
    unconditional = unique if reads_null(config, family) else ()
    nulls = {null_prompt_key(family, record): record for record in unconditional}
    wanted = nulls | {prompt_key(family, record): record for record in unique}
    store = open_store(config, folder, family)
    with prefix_errors("config.prompts.cache: "):
        missing = store.missing(wanted)
    prompts = wanted, frozenset(nulls), missing
    found = Precomputation(config, folder, family, placement.rollout, store, *prompts)
    found.check()
    return found


def find_missing_latents(config: TrainConfig, parts: Parts) -> LatentPrecomputation:
    """Finds the image files to encode among all that the prompt files name. Loads no weights.

    Raises:
      ConfigError: The model generates only clips, an image file is missing, or as for `find_missing`.
    """
    folder, family, placement = parts.folder, parts.family, parts.placement
    height, width, _ = config.model.size
    one = jax.ShapeDtypeStruct((1, height, width, 3), np.float32)
    with prefix_errors("config.algorithm.name: "):
        jax.eval_shape(family.encode_images, family.shapes(), one)
    with prefix_errors("config.prompts.file: "):
        records = list(itertools.chain(*read_prompt_files(config.prompts.paths)))
        fields = config.algorithm.given_images
        paths = [record[field] for record in records for field in fields]
        images = {image_hash(path): {"image": path} for path in paths}
    store = open_latents(config, folder, family)
    with prefix_errors("config.prompts.cache: "):
        missing = store.missing(images)
    of_images = images, frozenset[str](), missing
    found = LatentPrecomputation(config, folder, family, placement.rollout, store, *of_images)
    found.check()
    return found


def precompute_all(config: TrainConfig) -> None:
    """Encodes all prompts of a run on the available devices.

    Raises:
      ConfigError: Prompts are not precomputed, the model is invalid, or `find_missing` or `Precomputation.run` failed.
    """
    devices = jax.devices()
    config = on_devices(config, len(devices))
    given = {"prompts.file": config.prompts.paths, "evaluation.prompts": config.evaluation.prompts}
    for name, value in given.items():
        if not value:
            raise ConfigError(f"config.{name} is not given: add --config.{name}=... to the command")
    parts = open_parts(config, devices)
    images = config.algorithm.given_images
    if is_precomputed(config, parts.family):
        find_missing(config, parts, reached(config)).run()
    elif not images:
        encoding = config.prompts.encoding
        raise ConfigError(
            f"config.prompts.encoding = {encoding!r} runs this model's text encoders in each step: set it to "
            "'precomputed' here and in training"
        )
    if images:
        find_missing_latents(config, parts).run()


def reached(config: TrainConfig, first: int = 0) -> list[dict[str, Any]]:
    """Returns the prompt records of a run's evaluations and of its steps from `first` on.

    Records are deduplicated by prompt, negative prompt and image.

    Raises:
      ConfigError: A prompt file is invalid.
    """
    with prefix_errors("config.evaluation.prompts: "):
        held_out = held_out_prompts(config)
    with prefix_errors("config.prompts.file: "):
        left = set(map(_content, itertools.chain(*read_prompt_files(config.prompts.paths))))
        steps = train_prompts(config).steps
    found = {_content(record): record for record in held_out}
    for number in range(first, config.steps):
        unique = {_content(record): record for record in steps[number]}
        found |= {content: unique[content] for content in unique if content not in found}
        left.difference_update(unique)
        if not left:
            break
    return list(found.values())


def _content(record: dict[str, Any]) -> tuple[str, str | None, str]:
    return record["prompt"], record.get("negative_prompt"), str(record.get("image", ""))


def _blocks(keys: Sequence[str], count: int, nulls: Collection[str]) -> list[list[str]]:
    """Splits keys into blocks of at most `count`, with separate blocks for unconditional passes."""
    of_nulls = [key for key in keys if key in nulls]
    others = [key for key in keys if key not in nulls]
    return [part[i : i + count] for part in (of_nulls, others) for i in range(0, len(part), count)]


def _pad(rows: Shaped[np.ndarray, "b ..."], count: int) -> Shaped[np.ndarray, "n ..."]:
    """Pads to `count` rows with copies of the last one."""
    free = [(0, 0)] * (rows.ndim - 1)
    return np.pad(rows, [(0, count - len(rows)), *free], mode="edge")


def _bytes(rows: Mapping[str, Rows]) -> int:
    return sum(array.nbytes for arrays in rows.values() for array in arrays.values())


def _format(size: int) -> str:
    return tqdm.format_sizeof(size, "B")


def _log(text: str) -> None:
    if is_first():
        print(text, flush=True)
