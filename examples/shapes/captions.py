"""The prompts of the shapes task in GenEval's format: six tasks of images and three of clips, in two parts.

A training prompt contains no held-out combination of any task (see `split`). A held-out prompt contains exactly
one, from its task: it measures this combination, whose parts have all been trained.

    python -m examples.shapes.captions assets/prompts     # writes all prompt files
"""

import itertools
import json
import pathlib
import sys
import zlib
from collections.abc import Iterator
from functools import cache

import numpy as np

from examples.shapes import split
from examples.shapes.scene import Scene, relation_between
from examples.shapes.vocabulary import (
    BACKGROUNDS,
    COLORS,
    MOTION_TASKS,
    MOTIONS,
    NUMBERS,
    PLURALS,
    RELATIONS,
    SHAPES,
    TASKS,
)

TRAIN_PER_TASK = 300
HELDOUT_PER_TASK = {TASKS: 90, MOTION_TASKS: 120}
PROMPT_FILES = {"shapes": TASKS, "moving_shapes": MOTION_TASKS}
MOTION_PAIRS = 8  # one in this many prompts of two moving objects is used, because there are 42,000


def train_record(rng: np.random.Generator, tasks: tuple[str, ...] = TASKS) -> dict:
    """Returns a training record: a task sampled uniformly, then one of its prompts."""
    records = _prompts(tasks[rng.integers(len(tasks))])[0]
    return records[rng.integers(len(records))]


def train_records(tasks: tuple[str, ...] = TASKS) -> list[dict]:
    """Returns the training records, with equal numbers per task, interleaved; a task with few prompts repeats them."""
    return _interleaved(0, tasks, TRAIN_PER_TASK)


def heldout_records(tasks: tuple[str, ...] = TASKS) -> list[dict]:
    """Returns the held-out records, with equal numbers per task, interleaved, so that any first 6 n are balanced."""
    return _interleaved(1, tasks, HELDOUT_PER_TASK[tasks])


def tags(scene: Scene) -> str:
    """Describes everything in a scene, such as "red star left of blue ring gray background".

    A prompt leaves most of an image undefined; a complete caption teaches each word faster.
    """
    first, *others = (f"{thing.color} {thing.shape}" for thing in scene.objects)
    relation = None
    if len({thing.shape for thing in scene.objects}) == 2:
        relation = relation_between(*scene.objects)
    between = [relation] if relation else []
    return " ".join([first, *between, *others, f"{scene.background.name} background"])


def write_prompt_files(folder: str | pathlib.Path) -> None:
    """Writes `NAME_train.jsonl` and `NAME_heldout.jsonl` for each of `PROMPT_FILES`, one record per line."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tasks in PROMPT_FILES.items():
        for part, records in (("train", train_records(tasks)), ("heldout", heldout_records(tasks))):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (folder / f"{name}_{part}.jsonl").write_text(text)


def make_record(task: str, include: list[dict], prompt: str) -> dict:
    """Returns a record that requires the objects in `include` and, by GenEval's `exclude`, no others.

    GenEval excludes surplus objects only in counting. Here every task excludes them and all other classes, so that
    an image with more than the prompt names gets no reward.
    """
    counts = {entry["class"]: entry["count"] for entry in include}
    exclude = [{"class": shape, "count": counts.get(shape, 0) + 1} for shape in SHAPES]
    return {"tag": task, "include": include, "exclude": exclude, "prompt": prompt}


@cache
def _prompts(task: str) -> tuple[tuple[dict, ...], tuple[dict, ...]]:
    """Returns all training records and all held-out records of a task."""
    train, heldout = list[dict](), list[dict]()
    start = "" if task in MOTION_TASKS else "a photo of "
    for prompt, include, held_out, others in _candidates(task):
        if not others:
            record = make_record(task, include, start + prompt)
            (heldout if held_out else train).append(record)
    return tuple(train), tuple(heldout)


def _interleaved(part: int, tasks: tuple[str, ...], per_task: int) -> list[dict]:
    """Returns `per_task` records of each task, interleaved; each pass over a task's prompts is shuffled again."""
    columns = []
    for number, task in enumerate(tasks):
        records = _prompts(task)[part]
        rng = np.random.default_rng((part, number))
        passes = -(-per_task // len(records))
        order = np.concatenate([rng.permutation(len(records)) for _ in range(passes)])
        columns.append([records[i] for i in order[:per_task]])
    return [record for row in zip(*columns, strict=True) for record in row]


def _candidates(task: str) -> Iterator[tuple[str, list[dict], bool, bool]]:
    """Yields prompts of a task, their `include`, and whether an atom of this task, or of another one, is held out."""
    pairs = itertools.permutations(SHAPES, 2)
    match task:
        case "single_object":
            for shape, background in itertools.product(SHAPES, BACKGROUNDS):
                held_out = split.background_held_out(shape, background)
                yield (
                    f"{_a(shape)} on {_a(background)} background",
                    [_entry(shape)],
                    held_out,
                    False,
                )
        case "two_object":
            for a, b in pairs:
                include = [_entry(a), _entry(b)]
                yield f"{_a(a)} and {_a(b)}", include, split.pair_held_out(a, b), False
        case "counting":
            for shape, (count, number) in itertools.product(SHAPES, NUMBERS.items()):
                held_out = split.count_held_out(shape, count)
                yield f"{number} {PLURALS[shape]}", [_entry(shape, count)], held_out, False
        case "colors":
            for color, shape in itertools.product(COLORS, SHAPES):
                include, held_out = [_entry(shape, color=color)], split.color_held_out(color, shape)
                yield _a(f"{color} {shape}"), include, held_out, False
        case "position":
            for (a, b), relation in itertools.product(pairs, RELATIONS):
                include = [_entry(b), _entry(a, position=[relation, 0])]
                held_out = split.relation_held_out(a, relation, b)
                yield f"{_a(a)} {relation} {_a(b)}", include, held_out, split.pair_held_out(a, b)
        case "color_attr":
            for (a, b), colors in itertools.product(pairs, itertools.permutations(COLORS, 2)):
                things = list(zip(colors, (a, b), strict=True))
                include = [_entry(shape, color=color) for color, shape in things]
                held_out = split.colored_pair_held_out(*things[0], *things[1])
                others = split.pair_held_out(a, b) or any(
                    split.color_held_out(*one) for one in things
                )
                prompt = " and ".join(_a(f"{color} {shape}") for color, shape in things)
                yield prompt, include, held_out, others
        case "motion" | "motion_counting":
            for color, shape, motion in itertools.product(COLORS, SHAPES, MOTIONS):
                one = _a(f"{color} {shape}")
                count, words = (
                    (1, one) if task == "motion" else (2, f"two {color} {PLURALS[shape]}")
                )
                include = [_entry(shape, count, color=color, motion=motion)]
                held_out = split.motion_held_out(color, shape, motion)
                yield f"{words} {motion}", include, held_out, False
        case "motion_attr":
            two_colors = itertools.permutations(COLORS, 2)
            ways = itertools.product(MOTIONS, repeat=2)
            for shapes, named, moving in itertools.product(pairs, two_colors, ways):
                both = list(zip(named, shapes, moving, strict=True))
                prompt = " and ".join(_a(" ".join(words)) for words in both)
                if zlib.crc32(prompt.encode()) % MOTION_PAIRS == 0:
                    include = [_entry(shape, color=c, motion=motion) for c, shape, motion in both]
                    held = [split.motion_held_out(*words) for words in both]
                    yield prompt, include, any(held), all(held)


def _entry(shape: str, count: int = 1, **rest: object) -> dict:
    """Returns an entry of `include`, with its fields in GenEval's order."""
    return {"class": shape, "count": count, **rest}


def _a(words: str) -> str:
    """Returns the words with their article, as in GenEval."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m examples.shapes.captions OUTDIR")
    write_prompt_files(sys.argv[1])
