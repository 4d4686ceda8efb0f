import itertools

from examples.shapes import split
from examples.shapes.vocabulary import BACKGROUNDS, COLORS, MIRRORED, RELATIONS, SHAPES

COLORED = list(itertools.product(COLORS, SHAPES))


def test_a_relation_and_its_mirror_image_are_one_combination():
    for a, b in itertools.permutations(SHAPES, 2):
        for relation in RELATIONS:
            mirrored = split.relation_held_out(b, MIRRORED[relation], a)
            assert split.relation_held_out(a, relation, b) == mirrored


def test_pairs_have_no_order():
    for a, b in itertools.permutations(SHAPES, 2):
        assert split.pair_held_out(a, b) == split.pair_held_out(b, a)
    for one, other in itertools.permutations(COLORED, 2):
        assert split.colored_pair_held_out(*one, *other) == split.colored_pair_held_out(
            *other, *one
        )


def test_every_class_keeps_most_of_its_combinations():
    for shape in SHAPES:
        assert sum(split.color_held_out(color, shape) for color in COLORS) == 1
        assert 1 <= sum(split.background_held_out(shape, name) for name in BACKGROUNDS) <= 2
        assert sum(split.pair_held_out(shape, other) for other in SHAPES) == 1
        assert sum(split.count_held_out(shape, count) for count in (2, 3, 4)) <= 1
    for a, b in itertools.combinations(SHAPES, 2):
        assert sum(split.relation_held_out(a, relation, b) for relation in RELATIONS) <= 1


def test_the_hash_of_colored_pairs_never_changes():
    assert split.colored_pair_held_out("red", "circle", "white", "cross") is False
    held = sum(
        split.colored_pair_held_out(*one, *other)
        for one, other in itertools.combinations(COLORED, 2)
        if one[0] != other[0] and one[1] != other[1]
    )
    assert held == 204
