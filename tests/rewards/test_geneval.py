"""GenEval's rules, and the reward "geneval" with a fake detector."""

import importlib.util
import pickle
import subprocess
import sys

import numpy as np
import pytest

from digen_jax.config.load import needs_of
from digen_jax.errors import ConfigError
from digen_jax.learned_rewards.sanity_checks import object_pairs
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import BUILT_IN, resolve
from digen_jax.rewards.geneval import Detection, Detector, kept, relations, satisfies, score_images

SETTINGS = {"folder": "weights/mask2former"}


def at(label, x=0.0, y=0.0, color=None, confidence=0.9, size=10.0):
    box = (x - size / 2, y - size / 2, x + size / 2, y + size / 2)
    return Detection(label, color, box, confidence)


def record(*include, tag="two_object", exclude=()):
    return {"tag": tag, "prompt": "p", "include": list(include), "exclude": list(exclude)}


def cats(count=1, **more):
    return {"class": "cat", "count": count, **more}


def dogs(count=1, **more):
    return {"class": "dog", "count": count, **more}


CATS = [at("cat", 30 * i) for i in range(3)]
RED, BLUE = at("cat", color="red"), at("cat", color="blue")


@pytest.mark.parametrize(
    ("include", "exclude", "found", "satisfied"),
    [
        # at least `count` of a class
        ([cats(2)], [], CATS[:1], False),
        ([cats(2)], [], CATS[:2], True),
        ([cats(2)], [], CATS, True),
        ([cats(2)], [], [CATS[0], at("dog", 50)], False),
        # fewer than `count` of an excluded one
        ([cats(2)], [cats(3)], CATS[:2], True),
        ([cats(2)], [cats(3)], CATS, False),
        ([cats()], [dogs()], CATS[:1], True),
        ([cats()], [dogs()], [CATS[0], at("dog", 90)], False),
        # every entry
        ([cats(), dogs()], [], [at("dog"), at("cat", 50)], True),
        ([cats(), dogs()], [], CATS[:2], False),
        ([cats(), dogs()], [], [], False),
        # the color of the most confident objects
        ([cats(color="red")], [], [RED], True),
        ([cats(color="red")], [], [BLUE], False),
        ([cats(color="red")], [], CATS[:1], False),
        ([cats(color="red")], [], [at("cat", 50, color="red", confidence=0.5), BLUE], False),
        ([cats(color="red")], [], [at("cat", color="blue", confidence=0.4), RED], True),
        # the colors of each class
        ([cats(color="red"), dogs(color="blue")], [], [RED, at("dog", 50, color="blue")], True),
        ([cats(color="red"), dogs(color="blue")], [], [BLUE, at("dog", 50, color="red")], False),
        # the position relative to an earlier entry
        ([dogs(), cats(position=["left of", 0])], [], [at("cat"), at("dog", 50)], True),
        ([dogs(), cats(position=["left of", 0])], [], [at("cat", 50), at("dog")], False),
        ([dogs(), cats(position=["left of", 0])], [], [at("cat")], False),
    ],
)
def test_the_rules_of_geneval(include, exclude, found, satisfied):
    assert satisfies(found, record(*include, exclude=exclude)) == satisfied
    if not exclude:
        assert satisfies(found, {"include": include}) == satisfied


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
def test_relations_follow_the_reduced_offset(x, y, expected):
    assert relations(at("cat", x, y), at("dog")) == expected


@pytest.mark.parametrize("position", [["behind", 0], ["left of", 1]])
def test_an_impossible_position_is_refused(position):
    with pytest.raises(ValueError, match="earlier entry"):
        satisfies([at("cat"), at("dog", 50)], record(dogs(), cats(position=position)))


class FakeDetector:
    labels = frozenset({"cat", "dog"})

    def __init__(self, *found):
        self.found, self.colored = list(map(list, found)), None

    def __call__(self, images, colored):
        assert len(images) == len(colored)
        self.colored = colored
        return self.found


def score(found, *records):
    detector = FakeDetector(*found)
    assert isinstance(detector, Detector)
    images = np.zeros((len(records), 8, 8, 3), np.uint8)
    return score_images(detector, images, records).tolist(), detector


def test_objects_count_above_a_confidence_that_depends_on_the_task():
    found = [[at("cat", confidence=one)] for one in (0.9, 0.91, 0.31, 0.3)]
    assert score(found, *[record(cats())] * 4)[0] == [1, 1, 1, 0]
    assert score(found, *[record(cats(), tag="counting")] * 4)[0] == [0, 1, 0, 0]
    two = [at("cat", confidence=0.95), at("cat", 50, confidence=0.5)]
    one = record(cats(), tag="counting", exclude=[cats(2)])
    assert score([two], one)[0] == [1]
    assert score([two], one | {"tag": "single_object"})[0] == [0]


def test_at_most_16_objects_of_a_class_count():
    many = [at("cat", confidence=0.5 + i / 100) for i in range(20)] + [at("dog", confidence=0.4)]
    found = kept(many, record(cats()))
    counted = sorted(one.confidence for one in found if one.label == "cat")
    assert len(counted) == 16 and counted[0] == 0.54
    assert sum(one.label == "dog" for one in found) == 1
    assert score([many], record(cats(16), exclude=[cats(17)]))[0] == [1]


def test_the_detector_is_asked_for_the_colors_that_a_record_needs():
    records = [record(cats(color="red"), cats(3, color="blue")), record(cats(2))]
    assert score([[], []], *records)[1].colored == [{"cat": 3}, {}]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"prompt": "p"}, "include"),
        (record({"class": "ring", "count": 1}), "ring"),
        (record(cats(), exclude=[{"class": "ring", "count": 1}]), "ring"),
        (record(cats(color="beige")), "beige"),
    ],
)
def test_a_record_that_no_image_could_satisfy_is_refused(given, what):
    with pytest.raises(ConfigError, match=what):
        score([[]], given)


def test_a_record_needs_include():
    (needs,) = needs_of([RewardSettings("geneval", settings=SETTINGS)]).values()
    assert needs(record(cats())) is None
    assert needs({"prompt": "p", "include": []}) == needs({"prompt": "p"}) != None  # noqa: E711


def test_only_a_server_has_it():
    asked = [RewardSettings("geneval", settings=SETTINGS)]
    with pytest.raises(ConfigError, match=r"config.rewards\[0\]: .*reward_server"):
        resolve(asked)
    (named,) = resolve(asked, serving=True).members
    assert pickle.loads(pickle.dumps(named.function)) == named.function
    assert [name for name, one in BUILT_IN.items() if one.where == "server"] == ["geneval"]


def test_its_interface_imports_no_torch():
    code = (
        "import sys, digen_jax.rewards.built_in, digen_jax.rewards.geneval, digen_jax.rewards.judge; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_missing_torch_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torch"):
        resolve([RewardSettings("geneval", settings=SETTINGS)], serving=True)


def test_clips_and_colors_without_a_clip_are_refused():
    (named,) = resolve([RewardSettings("geneval", settings=SETTINGS)], serving=True).members
    for shape, given in (((1, 2, 8, 8, 3), cats()), ((1, 8, 8, 3), cats(color="red"))):
        with pytest.raises(ConfigError, match="geneval"):
            named.function(np.zeros(shape, np.uint8), ["p"], [record(given)])


def test_the_sanity_check_has_a_person():
    check = object_pairs(64)
    labels = [one["include"][0]["class"] for one in check.metadata]
    assert labels == ["person", "dog"] and check.prefers == ((0, 1),) and not check.verified
