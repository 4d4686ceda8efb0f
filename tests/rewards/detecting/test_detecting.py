"""The reward "geneval" with a detector that answers what it is told."""

import importlib.util
import pickle
import subprocess
import sys

import numpy as np
import pytest

from digen_jax.config.inputs import needs_of
from digen_jax.errors import ConfigError
from digen_jax.learned_rewards.sanity_checks import object_pairs
from digen_jax.rewards.built_in import BUILT_IN, resolve
from digen_jax.rewards.geneval import Detection, Detector, judged, kept
from digen_jax.rewards.settings import RewardSettings

SETTINGS = {"folder": "weights/mask2former"}


def thing(label, confidence, color=None, x=0.0):
    return Detection(label, color, (x, 0.0, x + 10, 10.0), confidence)


class Told:
    labels = frozenset({"cat", "dog"})

    def __init__(self, *found):
        self.found, self.colored = list(map(list, found)), None

    def __call__(self, images, colored):
        assert len(images) == len(colored)
        self.colored = colored
        return self.found


def record(*include, tag="two_object", exclude=()):
    return {"tag": tag, "prompt": "p", "include": list(include), "exclude": list(exclude)}


def cats(count=1, **more):
    return {"class": "cat", "count": count, **more}


def score(found, *records):
    detector = Told(*found)
    assert isinstance(detector, Detector)
    images = np.zeros((len(records), 8, 8, 3), np.uint8)
    return judged(detector, images, records).tolist(), detector


def test_objects_count_above_a_confidence_that_depends_on_the_task():
    found = [[thing("cat", 0.9)], [thing("cat", 0.91)], [thing("cat", 0.31)], [thing("cat", 0.3)]]
    assert score(found, *[record(cats())] * 4)[0] == [1, 1, 1, 0]
    assert score(found, *[record(cats(), tag="counting")] * 4)[0] == [0, 1, 0, 0]
    two = [thing("cat", 0.95), thing("cat", 0.5, x=50.0)]
    one = record(cats(), tag="counting", exclude=[cats(2)])
    assert score([two], one)[0] == [1]
    assert score([two], one | {"tag": "single_object"})[0] == [0]


def test_at_most_16_objects_of_a_class_count():
    many = [thing("cat", 0.5 + i / 100) for i in range(20)] + [thing("dog", 0.4)]
    found = kept(many, record(cats()))
    sure = sorted(one.confidence for one in found if one.label == "cat")
    assert len(sure) == 16 and sure[0] == 0.54
    assert sum(one.label == "dog" for one in found) == 1
    assert score([many], record(cats(16), exclude=[cats(17)]))[0] == [1]


def test_colours_and_positions_are_those_of_the_surest():
    red = record(cats(color="red"), {"class": "dog", "count": 1, "position": ["right of", 0]})
    found = [thing("cat", 0.8, "red"), thing("cat", 0.7, "blue"), thing("dog", 0.9, x=80.0)]
    assert score([found], red)[0] == [1]
    found[0], found[1] = thing("cat", 0.7, "red"), thing("cat", 0.8, "blue")
    assert score([found], red)[0] == [0]
    found[0] = thing("cat", 0.9, "red", x=160.0)
    assert score([found], red)[0] == [0]  # the dog is left of it


def test_the_detector_is_asked_for_the_colours_that_a_record_needs():
    records = [record(cats(color="red"), cats(3, color="blue")), record(cats(2))]
    assert score([[], []], *records)[1].colored == [{"cat": 3}, {}]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"prompt": "p"}, "'p' has no `include`: use a JSONL file of GenEval's metadata"),
        (record({"class": "ring", "count": 1}), "'p' names the class 'ring', which the detector"),
        (record(cats(), exclude=[{"class": "ring", "count": 1}]), "names the class 'ring'"),
        (record(cats(color="beige")), "names the color 'beige': use one of red, orange"),
    ],
)
def test_what_no_picture_could_satisfy_is_refused(given, what):
    with pytest.raises(ConfigError, match=what):
        score([[]], given)


def test_a_record_needs_include():
    (needs,) = needs_of([RewardSettings("geneval", settings=SETTINGS)]).values()
    assert needs(record(cats())) is None
    assert needs({"prompt": "p", "include": []}) == needs({"prompt": "p"}) != None  # noqa: E711


def test_only_a_server_has_it():
    asked = [RewardSettings("geneval", settings=SETTINGS)]
    sentence = (
        r"config.rewards\[0\]: reward 'geneval' imports torch, which a run must not: start "
        r"launch/reward_server.py with --reward=geneval, and name the reward 'served'"
    )
    with pytest.raises(ConfigError, match=sentence):
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


def test_a_missing_torch_is_a_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'geneval' needs torch, .*pip install torch"):
        resolve([RewardSettings("geneval", settings=SETTINGS)], serving=True)


def test_clips_and_colours_without_a_clip_are_refused():
    (named,) = resolve([RewardSettings("geneval", settings=SETTINGS)], serving=True).members
    with pytest.raises(ConfigError, match="scores pictures, not clips"):
        named.function(np.zeros((1, 2, 8, 8, 3), np.uint8), ["p"], [record(cats())])
    with pytest.raises(ConfigError, match="needs a CLIP: set clip"):
        named.function(np.zeros((1, 8, 8, 3), np.uint8), ["p"], [record(cats(color="red"))])


def test_the_canary_asks_for_a_person():
    canary = object_pairs(64)
    labels = [one["include"][0]["class"] for one in canary.metadata]
    assert labels == ["person", "dog"] and canary.prefers == ((0, 1),) and not canary.verified
