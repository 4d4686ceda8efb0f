import pytest

from digen_jax.rewards.geneval import Detection, relations, satisfies


def at(label, x, y, color="red", size=10.0, confidence=0.9):
    box = (x - size / 2, y - size / 2, x + size / 2, y + size / 2)
    return Detection(label, color, box, confidence)


def wants(*include, exclude=()):
    return {"include": list(include), "exclude": list(exclude), "prompt": ""}


def test_include_needs_at_least_count():
    two = wants({"class": "cat", "count": 2})
    assert not satisfies([at("cat", 0, 0)], two)
    assert satisfies([at("cat", 0, 0), at("cat", 50, 0)], two)
    assert satisfies([at("cat", 0, 0), at("cat", 50, 0), at("cat", 90, 0)], two)
    assert not satisfies([at("cat", 0, 0), at("dog", 50, 0)], two)


def test_exclude_needs_fewer_than_count():
    record = wants({"class": "cat", "count": 2}, exclude=[{"class": "cat", "count": 3}])
    cats = [at("cat", 30 * i, 0) for i in range(3)]
    assert satisfies(cats[:2], record)
    assert not satisfies(cats, record)
    no_dog = wants({"class": "cat", "count": 1}, exclude=[{"class": "dog", "count": 1}])
    assert satisfies(cats[:1], no_dog)
    assert not satisfies([cats[0], at("dog", 90, 0)], no_dog)


def test_a_record_without_exclude_excludes_nothing():
    assert satisfies([at("cat", 0, 0)] * 5, {"include": [{"class": "cat", "count": 1}]})


def test_every_entry_of_include_counts():
    both = wants({"class": "cat", "count": 1}, {"class": "dog", "count": 1})
    assert satisfies([at("dog", 0, 0), at("cat", 50, 0)], both)
    assert not satisfies([at("cat", 0, 0), at("cat", 50, 0)], both)
    assert not satisfies([], both)


def test_color_is_that_of_the_most_confident_objects():
    red = wants({"class": "cat", "count": 1, "color": "red"})
    assert satisfies([at("cat", 0, 0, "red")], red)
    assert not satisfies([at("cat", 0, 0, "blue")], red)
    assert not satisfies([at("cat", 0, 0, None)], red)
    sure, unsure = at("cat", 0, 0, "blue", confidence=0.9), at("cat", 50, 0, confidence=0.5)
    assert not satisfies([unsure, sure], red)
    assert satisfies([at("cat", 0, 0, "blue", confidence=0.4), unsure], red)


def test_colors_belong_to_their_classes():
    record = wants(
        {"class": "cat", "count": 1, "color": "red"}, {"class": "dog", "count": 1, "color": "blue"}
    )
    assert satisfies([at("cat", 0, 0, "red"), at("dog", 50, 0, "blue")], record)
    assert not satisfies([at("cat", 0, 0, "blue"), at("dog", 50, 0, "red")], record)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (-30, 0, {"left of"}),
        (30, 0, {"right of"}),
        (0, -30, {"above"}),
        (0, 30, {"below"}),
        (-30, -30, {"left of", "above"}),  # (30 - 2) / 42.4 = 0.66 on both axes
        (-30, 10, {"left of"}),
        (1.5, 0, set()),  # nearer than a tenth of the summed widths, 2
        (3.0, 0, set()),  # (3 - 2) / 3 = 0.33
        (5.0, 0, {"right of"}),  # (5 - 2) / 5 = 0.6
    ],
)
def test_relations_follow_the_shortened_offset(x, y, expected):
    assert relations(at("cat", x, y), at("dog", 0, 0)) == expected


def test_position_refers_to_an_earlier_entry():
    record = wants(
        {"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}
    )
    assert satisfies([at("cat", 0, 0), at("dog", 50, 0)], record)
    assert not satisfies([at("cat", 50, 0), at("dog", 0, 0)], record)
    assert not satisfies([at("cat", 0, 0)], record)


@pytest.mark.parametrize("position", [["behind", 0], ["left of", 1]])
def test_an_impossible_position_is_refused(position):
    record = wants({"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": position})
    with pytest.raises(ValueError, match=r"must name one of left of, .* an earlier entry"):
        satisfies([at("cat", 0, 0), at("dog", 50, 0)], record)
