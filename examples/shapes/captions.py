"""The prompts of the shapes task in GenEval's format: six tasks, a training and a held-out part.

A training prompt contains no held-out combination of any task (see `split`). A held-out prompt
contains exactly one, of its task: it measures that combination, whose parts have all been trained.

    python -m examples.shapes.captions assets/prompts     # writes both prompt files
"""

import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from functools import cache

import numpy as np

from examples.shapes import split
from examples.shapes.scene import Scene, relation_between
from examples.shapes.vocabulary import (
    BACKGROUNDS,
    COLORS,
    NUMBERS,
    PLURALS,
    RELATIONS,
    SHAPES,
    TASKS,
)

TRAIN_PER_TASK = 300
HELDOUT_PER_TASK = 90


def train_record(rng: np.random.Generator) -> dict:
    """Samples a training prompt record: a task uniformly, then one of its prompts."""
    records = _prompts(TASKS[rng.integers(len(TASKS))])[0]
    return records[rng.integers(len(records))]


def train_records() -> list[dict]:
    """Returns the training prompts: equally many of each task, interleaved; a task with few prompts repeats them."""
    return _interleaved(0, TRAIN_PER_TASK)


def heldout_records() -> list[dict]:
    """Returns the held-out prompts: equally many of each task, interleaved, so that any first 6 n are balanced."""
    return _interleaved(1, HELDOUT_PER_TASK)


def tags(scene: Scene) -> str:
    """Describes everything in a scene, such as "red star left of blue ring gray background".

    A prompt leaves most of an image open; a caption that leaves nothing open teaches each word faster.
    """
    first, *others = (f"{thing.color} {thing.shape}" for thing in scene.objects)
    relation = None
    if len({thing.shape for thing in scene.objects}) == 2:
        relation = relation_between(*scene.objects)
    between = [relation] if relation else []
    return " ".join([first, *between, *others, f"{scene.background.name} background"])


def write_prompt_files(folder: str | pathlib.Path) -> None:
    """Writes `shapes_train.jsonl` and `shapes_heldout.jsonl`, one record a line."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in [("train", train_records()), ("heldout", heldout_records())]:
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"shapes_{name}.jsonl").write_text(text)


def make_record(task: str, include: list[dict], prompt: str) -> dict:
    """Returns a record that requires what `include` lists and, by GenEval's `exclude`, nothing else.

    GenEval itself excludes surplus objects only in counting. Here every task excludes them and all other
    classes, so that an image with more than the prompt names gets no reward.
    """
    counts = {entry["class"]: entry["count"] for entry in include}
    exclude = [{"class": shape, "count": counts.get(shape, 0) + 1} for shape in SHAPES]
    return {"tag": task, "include": include, "exclude": exclude, "prompt": prompt}


@cache
def _prompts(task: str) -> tuple[tuple[dict, ...], tuple[dict, ...]]:
    """Returns all training records and all held-out records of a task."""
    train, heldout = [], []
    for record, own, others in _CANDIDATES[task]():
        if not others:
            (heldout if own else train).append(record)
    return tuple(train), tuple(heldout)


def _interleaved(part: int, per_task: int) -> list[dict]:
    """Returns `per_task` records of each task, interleaved; each pass over a task's prompts is shuffled again."""
    columns = []
    for number, task in enumerate(TASKS):
        records = _prompts(task)[part]
        rng = np.random.default_rng((part, number))
        passes = -(-per_task // len(records))
        order = np.concatenate([rng.permutation(len(records)) for _ in range(passes)])
        columns.append([records[i] for i in order[:per_task]])
    return [record for row in zip(*columns, strict=True) for record in row]


# Each generator below yields a record, whether the atom of its task is held out, and whether an atom of
# another task in it is.
Candidates = Iterator[tuple[dict, bool, bool]]


def _single_object() -> Candidates:
    for shape, background in itertools.product(SHAPES, BACKGROUNDS):
        prompt = f"a photo of {_a(shape)} on {_a(background)} background"
        record = make_record("single_object", [_entry(shape)], prompt)
        yield record, split.background_held_out(shape, background), False


def _two_object() -> Candidates:
    for a, b in itertools.permutations(SHAPES, 2):
        prompt = f"a photo of {_a(a)} and {_a(b)}"
        record = make_record("two_object", [_entry(a), _entry(b)], prompt)
        yield record, split.pair_held_out(a, b), False


def _counting() -> Candidates:
    for shape, (count, number) in itertools.product(SHAPES, NUMBERS.items()):
        prompt = f"a photo of {number} {PLURALS[shape]}"
        record = make_record("counting", [_entry(shape, count)], prompt)
        yield record, split.count_held_out(shape, count), False


def _colors() -> Candidates:
    for color, shape in itertools.product(COLORS, SHAPES):
        prompt = f"a photo of {_a(f'{color} {shape}')}"
        record = make_record("colors", [_entry(shape, color=color)], prompt)
        yield record, split.color_held_out(color, shape), False


def _position() -> Candidates:
    for (a, b), relation in itertools.product(itertools.permutations(SHAPES, 2), RELATIONS):
        prompt = f"a photo of {_a(a)} {relation} {_a(b)}"
        include = [_entry(b), _entry(a, position=[relation, 0])]
        others = split.pair_held_out(a, b)
        yield (
            make_record("position", include, prompt),
            split.relation_held_out(a, relation, b),
            others,
        )


def _color_attr() -> Candidates:
    pairs = itertools.product(itertools.permutations(SHAPES, 2), itertools.permutations(COLORS, 2))
    for (a, b), (color_a, color_b) in pairs:
        prompt = f"a photo of {_a(f'{color_a} {a}')} and {_a(f'{color_b} {b}')}"
        include = [_entry(a, color=color_a), _entry(b, color=color_b)]
        own = split.colored_pair_held_out(color_a, a, color_b, b)
        others = (
            split.pair_held_out(a, b)
            or split.color_held_out(color_a, a)
            or split.color_held_out(color_b, b)
        )
        yield make_record("color_attr", include, prompt), own, others


_CANDIDATES = {
    "single_object": _single_object,
    "two_object": _two_object,
    "counting": _counting,
    "colors": _colors,
    "position": _position,
    "color_attr": _color_attr,
}


def _entry(shape: str, count: int = 1, **rest: object) -> dict:
    """Returns an entry of `include`, with its fields in GenEval's order."""
    return {"class": shape, "count": count, **rest}


def _a(words: str) -> str:
    """Returns the words with their article, as GenEval writes them."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m examples.shapes.captions OUTDIR")
    write_prompt_files(sys.argv[1])
