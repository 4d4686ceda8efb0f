"""Held-out combinations, which are never in a training prompt or training image.

A combination (an *atom*) belongs to one task of images: a class on a background, an unordered pair of classes, a class
and its count, a color and its class, a relation between two classes (a left of b is b right of a), or an unordered pair
of colored classes. In clips it is a color, its class and its motion. An eighth to a quarter of the atoms of images, and
an eighth of those of clips, are held out by fixed rules over positions in the vocabulary, so that every class, color,
count, background, relation and motion keeps its share of training.
"""

import zlib

from examples.shapes.vocabulary import (
    BACKGROUNDS,
    COLORS,
    MIRRORED,
    MOTIONS,
    RELATIONS,
    SHAPES,
)

_SHAPE = {name: i for i, name in enumerate(SHAPES)}
_COLOR = {name: i for i, name in enumerate(COLORS)}
_BACKGROUND = {name: i for i, name in enumerate(BACKGROUNDS)}
_RELATION = {name: i for i, name in enumerate(RELATIONS)}
_MOTION = {name: i for i, name in enumerate(MOTIONS)}


def background_held_out(shape: str, background: str) -> bool:
    """Returns whether a class on a background is held out (single_object)."""
    return (_SHAPE[shape] + _BACKGROUND[background]) % 4 == 0


def pair_held_out(a: str, b: str) -> bool:
    """Returns whether a pair of classes is held out (two_object); every class loses one of its five partners."""
    return abs(_SHAPE[a] - _SHAPE[b]) == len(SHAPES) // 2


def count_held_out(shape: str, count: int) -> bool:
    """Returns whether a class with a count of two to four is held out (counting); a single one never is."""
    return count > 1 and (_SHAPE[shape] + count) % 4 == 0


def color_held_out(color: str, shape: str) -> bool:
    """Returns whether a class in a color is held out (colors); each class loses one of its eight colors."""
    return (_SHAPE[shape] + _COLOR[color]) % 8 == 0


def relation_held_out(a: str, relation: str, b: str) -> bool:
    """Returns whether a in `relation` to b is held out (position); every other pair loses one of four relations."""
    if _SHAPE[a] > _SHAPE[b]:
        a, relation, b = b, MIRRORED[relation], a
    return (_SHAPE[a] + 2 * _SHAPE[b] + _RELATION[relation]) % 8 == 0


def colored_pair_held_out(color_a: str, a: str, color_b: str, b: str) -> bool:
    """Returns whether a pair of colored classes is held out (color_attr)."""
    words = sorted([f"{color_a} {a}", f"{color_b} {b}"])
    return zlib.crc32(" and ".join(words).encode()) % 4 == 0


def motion_held_out(color: str, shape: str, motion: str) -> bool:
    """Returns whether a colored class with a motion is held out: one of the eight colors for each class and motion."""
    return (_SHAPE[shape] + _COLOR[color] + 3 * _MOTION[motion]) % 8 == 0
