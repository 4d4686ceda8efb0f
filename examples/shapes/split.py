"""Which combinations are held out: never in a training prompt, nor in a training image.

A combination (an *atom*) belongs to one of the six tasks: a class on a background, an unordered
pair of classes, a class and its count, a color and its class, a relation between two classes (a
left of b is b right of a), or an unordered pair of colored classes. An eighth to a quarter of each
task's atoms are held out by fixed rules over places in the vocabulary, so that every class, color,
count, background and relation keeps its share of training.
"""

import zlib

from examples.shapes.vocabulary import BACKGROUNDS, COLORS, MIRRORED, RELATIONS, SHAPES

_SHAPE = {name: i for i, name in enumerate(SHAPES)}
_COLOR = {name: i for i, name in enumerate(COLORS)}
_BACKGROUND = {name: i for i, name in enumerate(BACKGROUNDS)}
_RELATION = {name: i for i, name in enumerate(RELATIONS)}


def background_held_out(shape: str, background: str) -> bool:
    """single_object: a class on a background."""
    return (_SHAPE[shape] + _BACKGROUND[background]) % 4 == 0


def pair_held_out(a: str, b: str) -> bool:
    """two_object: two classes in one image; every class loses one of its five partners."""
    return abs(_SHAPE[a] - _SHAPE[b]) == len(SHAPES) // 2


def count_held_out(shape: str, count: int) -> bool:
    """counting: two to four of a class; a single one is never held out."""
    return count > 1 and (_SHAPE[shape] + count) % 4 == 0


def color_held_out(color: str, shape: str) -> bool:
    """colors: a class in a color; each class loses one of its eight colors."""
    return (_SHAPE[shape] + _COLOR[color]) % 8 == 0


def relation_held_out(a: str, relation: str, b: str) -> bool:
    """position: a in `relation` to b; every other pair of classes loses one of its four relations."""
    if _SHAPE[a] > _SHAPE[b]:
        a, relation, b = b, MIRRORED[relation], a
    return (_SHAPE[a] + 2 * _SHAPE[b] + _RELATION[relation]) % 8 == 0


def colored_pair_held_out(color_a: str, a: str, color_b: str, b: str) -> bool:
    """color_attr: two colored classes in one image."""
    words = sorted([f"{color_a} {a}", f"{color_b} {b}"])
    return zlib.crc32(" and ".join(words).encode()) % 4 == 0
