"""Infinite, seeded and resumable iterator over the prompts of each training step."""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from digen_jax.data.prompt_files import (
    SERIAL,
    Path,
    Record,
    add_source,
    numbered_records,
    read_bytes,
    suffix_of,
)


class PromptBatches(Iterator[list[Record]]):
    """Infinite iterator over the prompts of each step; see `prompt_batches`. Its state is a small JSON-able dict."""

    def __init__(self, steps: Sequence[list[Record]], stream: dict[str, Any]):
        """Initializes the iterator; `stream` identifies everything that the prompt order depends on."""
        self._steps, self._stream, self._next = steps, stream, 0

    def __next__(self) -> list[Record]:
        self._next += 1
        return self._steps[self._next - 1]

    def at(self, number: int) -> list[Record]:
        """Returns the prompts of a step, counted from the start of the run, without moving the position."""
        return self._steps[number]

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last returned step, for `set_state`."""
        return {"stream": dict(self._stream), "position": {"next_index": self._next}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes after the step at which `state` was taken.

        Raises:
          ValueError: The state belongs to another prompt file, groups_per_step, seed or shuffle.
        """
        for name, here in self._stream.items():
            if state["stream"].get(name) != here:
                raise ValueError(
                    f"The saved position is one in another stream of prompts: its {name} is "
                    f"{state['stream'].get(name)!r}, here it is {here!r}; restore what was changed or "
                    "start in a new workdir."
                )
        self._next = state["position"]["next_index"]


def prompt_batches(
    paths: Path | Sequence[Path],
    groups_per_step: int,
    seed: int,
    shuffle: bool = True,
    set_steps: int = 0,
    weights: Sequence[float] = (),
) -> PromptBatches:
    """Returns an iterator over the prompts of each training step.

    A step is a list of records of `read_prompt_file`, one per group, with `serial` = step * groups_per_step + position
    in the step: the group's number in the run, which seeds its randomness. Repeated prompts form separate groups.
    Every epoch contains each prompt once, reshuffled per epoch if `shuffle`; a step may span the end of an epoch and
    the start of the next.

    Several files are independent streams, mixed by `weights` up to rounding (grain rounds down the ratios to the
    smallest weight to hundredths). Records then have the field `prompt_file`.

    Args:
      paths: One or several prompt files.
      groups_per_step: Groups per step.
      seed: Non-negative seed of the order.
      shuffle: Whether to shuffle. False keeps file order.
      set_steps: Number of steps after which the first ones repeat, with their serials. 0 means never.
      weights: Positive weights of the files. Empty means equal weights.

    Raises:
      FileNotFoundError: A prompt file does not exist.
      ValueError: A prompt file is malformed, the seed is negative, or groups_per_step is not positive.
    """
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
        streams.append((stream.shuffle() if shuffle else stream).repeat())
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
    stream |= {"shuffle": shuffle} | ({"set_steps": set_steps} if set_steps else {})
    stream |= {"weights": weights} if len(digests) > 1 else {}
    return PromptBatches(steps, stream)
