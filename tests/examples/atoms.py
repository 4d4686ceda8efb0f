"""The combinations in a prompt, taken from its words alone, without the split's rules."""

import itertools
import re

COLOR = "red|orange|yellow|green|blue|purple|white|black"
SHAPE = "circle|triangle|cross|star|ring|heart"
THING = rf"an? (?:({COLOR}) )?({SHAPE})"
MIRROR = {"left of": "right of", "above": "below"}


def atoms_in(prompt):
    """All atoms of all tasks that the prompt names, as hashable tuples that start with the task."""
    if match := re.fullmatch(rf"a photo of an? ({SHAPE}) on an? (\w+) background", prompt):
        return {("single_object", match[1], match[2])}
    if match := re.fullmatch(rf"a photo of (two|three|four) ({SHAPE})e?s", prompt):
        return {("counting", match[1], match[2])}
    if match := re.fullmatch(rf"a photo of {THING}", prompt):
        return {("colors", match[1], match[2])}
    if match := re.fullmatch(rf"a photo of {THING} (left of|right of|above|below) {THING}", prompt):
        _, a, relation, _, b = match.groups()
        if relation in MIRROR:
            a, relation, b = b, MIRROR[relation], a
        return {("position", a, relation, b), ("two_object", frozenset((a, b)))}
    match = re.fullmatch(rf"a photo of {THING} and {THING}", prompt)
    color_a, a, color_b, b = match.groups()
    atoms = {("two_object", frozenset((a, b)))}
    if color_a:
        pair = frozenset(((color_a, a), (color_b, b)))
        atoms |= {("color_attr", pair), ("colors", color_a, a), ("colors", color_b, b)}
    return atoms


def all_atoms():
    """All atoms by task, counted by hand from the words."""
    colors, shapes = COLOR.split("|"), SHAPE.split("|")
    colored = itertools.combinations(itertools.product(colors, shapes), 2)
    return {
        "single_object": len(shapes) * 6,
        "two_object": 15,
        "counting": len(shapes) * 3,
        "colors": len(shapes) * len(colors),
        "position": 15 * 4,
        "color_attr": sum(a[0] != b[0] and a[1] != b[1] for a, b in colored),
    }
