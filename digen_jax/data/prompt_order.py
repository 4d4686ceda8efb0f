"""Prompt files as TFDS datasets (array_record, no TensorFlow), streamed through grain."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds

from digen_jax.data import prompt_files
from digen_jax.data.building import build, quiet
from digen_jax.errors import ConfigError

Path = str | os.PathLike[str]

SPOKEN = 50_000  # records between two lines of progress; they take seconds


@dataclasses.dataclass(eq=False)
class PromptFileConfig(tfds.core.BuilderConfig):
    """The content of a prompt file when it was read; `name` is its hash."""

    path: pathlib.Path = pathlib.Path()
    content: bytes = dataclasses.field(default=b"", repr=False)


class PromptFile(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of one prompt file; each content has its own folder in the cache."""

    VERSION = tfds.core.Version("1.0.0")  # raise it when the features change

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "index": np.int64,
            "prompt": tfds.features.Text(),
            "metadata": tfds.features.Text(doc="The record's other fields, as JSON."),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        config = self.builder_config
        records = prompt_files.parse_prompts(config.path, config.content)
        for index, record in enumerate(records):
            if len(records) > SPOKEN and index % SPOKEN == 0:
                words = f"prepared {index:,} of {len(records):,} prompts of {config.path}"
                print(words, file=sys.stderr, flush=True)
            prompt = record.pop("prompt")
            yield index, {"index": index, "prompt": prompt, "metadata": json.dumps(record)}


class PromptBatches(Iterator[list[dict[str, Any]]]):
    """An endless iterator over the steps of a run, see `prompt_batches`.

    Its state is a small JSON-able dict.
    """

    def __init__(self, steps: grain.MapDataset, stream: dict[str, Any]):
        """`stream` holds everything that the order of the prompts depends on."""
        # Reading a step takes microseconds: threads that read ahead would cost more time than they save.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._steps, self._iterator = steps, iter(steps.to_iter_dataset(options))
        self._stream = stream

    def __next__(self) -> list[dict[str, Any]]:
        return next(self._iterator)

    def at(self, number: int) -> list[dict[str, Any]]:
        """The prompts of the step with this number, counted from the run's begin; the position stays."""
        return self._steps[number]

    def get_state(self) -> dict[str, Any]:
        """The position after the last returned step, for `set_state`."""
        return {"stream": dict(self._stream), "position": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the step that `state` was taken at.

        Raises:
            ValueError: the state belongs to another prompt file, groups_per_step, seed or shuffle.
        """
        for name, here in self._stream.items():
            if state["stream"].get(name) != here:
                raise ValueError(
                    f"The saved position is one in another stream of prompts: its {name} is "
                    f"{state['stream'].get(name)!r}, here it is {here!r}; restore what was changed or "
                    "start in a new workdir."
                )
        self._iterator.set_state(state["position"])


def prompt_batches(
    paths: Path | Sequence[Path],
    groups_per_step: int,
    seed: int,
    cache_dir: str | os.PathLike[str],
    shuffle: bool = True,
    set_steps: int = 0,
    weights: Sequence[float] = (),
) -> PromptBatches:
    """The prompts of every step of a run: endless, deterministic, restartable.

    A step is a list of prompt records from `prompt_files.read_prompt_file`, one for each group, with the
    group's `serial` = step * groups_per_step + position in the step: its number in the whole run,
    which keys its randomness. A repeated prompt is another group. Every epoch holds each prompt once,
    in an order of its own if `shuffle`; epochs follow each other without a gap, so that a step may
    hold the end of one and the start of the next.

    Of several files each is such a stream of its own. Their prompts take turns, so that each file has
    its share of any number of groups up to rounding (and grain rounds the weights' ratios to the smallest
    one down to hundredths). Records then have the field `prompt_file`.

    Args:
        paths: the prompt file, or several.
        groups_per_step: groups in a step.
        seed: seed of the order, not negative.
        cache_dir: where the dataset is built, unless this content has been built there before.
        shuffle: False keeps the file's order.
        set_steps: number of steps after which the first ones come again, with their serials; 0: never.
        weights: positive, of several files; empty: all are the same.

    Raises:
        FileNotFoundError: there is no prompt file at a path.
        ValueError: a prompt file is malformed, the seed is negative, or a step has no group.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}: it must not be negative.")
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step is {groups_per_step}: it must be 1 or more.")
    paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    weights = [float(weight) for weight in weights] or [1.0] * len(paths)
    digests, prompts = _mixed(paths, weights, seed, cache_dir, shuffle)
    groups = prompts.map_with_index(_numbered)
    if set_steps:
        # Not a repeated slice, which would continue in the stream.
        fixed = grain.MapDataset.range(set_steps * groups_per_step).repeat()
        groups = fixed.map(groups.__getitem__)
    steps = groups.batch(groups_per_step, drop_remainder=True, batch_fn=list)
    # A single file has no list, so that the positions of older runs remain valid.
    digest = digests if len(digests) > 1 else digests[0]
    stream = {"prompt_file_hash": digest, "groups_per_step": groups_per_step, "seed": seed}
    stream |= {"shuffle": shuffle} | ({"set_steps": set_steps} if set_steps else {})
    stream |= {"weights": weights} if len(digests) > 1 else {}
    return PromptBatches(steps, stream)


def _mixed(
    paths: Sequence[Path],
    weights: Sequence[float],
    seed: int,
    cache_dir: str | os.PathLike[str],
    shuffle: bool,
) -> tuple[list[str], grain.MapDataset]:
    """(hashes of prompt files, their records, which take turns by the weights)."""
    digests, streams = [], []
    for number, path in enumerate(paths):
        digest, examples = _stream(path, _seed_of(seed, number), cache_dir, shuffle)
        digests.append(digest)
        streams.append(examples.map(functools.partial(_record, path, len(paths) > 1)))
    return digests, grain.MapDataset.mix(streams, weights) if len(paths) > 1 else streams[0]


def _stream(
    path: Path, seed: int, cache_dir: str | os.PathLike[str], shuffle: bool
) -> tuple[str, grain.MapDataset]:
    """(hash of a prompt file, its examples again and again, each time in another order if `shuffle`)."""
    content = prompt_files.read_bytes(path)
    digest = content_hash(path, content)
    with quiet():
        source = cached_source(path, content, digest, pathlib.Path(cache_dir))
    examples = grain.MapDataset.source(source).seed(seed)
    return digest, (examples.shuffle() if shuffle else examples).repeat()


def content_hash(path: str | os.PathLike[str], content: bytes) -> str:
    """A short hash of a prompt file's content, in the format that its suffix says."""
    return hashlib.sha256(prompt_files.suffix_of(path).encode() + content).hexdigest()[:16]


def cached_source(
    path: str | os.PathLike[str], content: bytes, digest: str, cache_dir: pathlib.Path
) -> Sequence[dict[str, Any]]:
    """The prompt file's dataset as a random-access sequence in the file's order.

    It is built if `cache_dir` lacks this content. Several processes may build it at once: each
    in a folder of its own, and the first one that is moved into place is used.
    """
    config = PromptFileConfig(name=digest, path=pathlib.Path(path), content=content)
    cache_dir.mkdir(parents=True, exist_ok=True)
    final = cache_dir / PromptFile.name / digest / str(PromptFile.VERSION)
    if not final.exists():
        build(lambda private: PromptFile(data_dir=private, config=config), final, cache_dir)
    with _undamaged(final):
        source = PromptFile(data_dir=cache_dir, config=config).as_data_source(split="train")
    return Checked(source, final)


class Checked(Sequence[dict[str, Any]]):
    """The records of a dataset's folder, whose damage is a `ConfigError`."""

    def __init__(self, source: Sequence[dict[str, Any]], folder: pathlib.Path):
        self._source, self._folder = source, folder

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with _undamaged(self._folder):
            record = self._source[index]
            if record["prompt"] is None:  # array_record reads this where a file was cut
                raise ValueError(f"record {index} is empty")
            return record


@contextlib.contextmanager
def _undamaged(folder: pathlib.Path) -> Iterator[None]:
    """Raises ConfigError where a dataset's folder cannot be read; array_record has checksums."""
    try:
        yield
    # TFDS and array_record raise RuntimeError, NotImplementedError and errors of protobuf, among others.
    except Exception as error:
        reason = str(error).partition("\n")[0][:100]
        raise ConfigError(
            f"the prompts in {folder} are damaged ({reason}): delete that folder, and the same command makes it again"
        ) from error


def _seed_of(seed: int, number: int) -> int:
    """The seed of a file's order: the run's for the first file, others for the next ones."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0]) if number else seed


def _record(path: Path, several: bool, example: dict[str, Any]) -> dict[str, Any]:
    record = {"prompt": example["prompt"].decode(), **json.loads(example["metadata"])}
    # Not when the dataset is built, because a file with the same content may lie in another folder.
    return prompt_files.marked(path, prompt_files.located(path, record), several)


def _numbered(serial: int, record: dict[str, Any]) -> dict[str, Any]:
    return record | {prompt_files.SERIAL: serial}
