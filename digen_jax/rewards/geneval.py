"""Reward "geneval": whether the objects detected in an image satisfy GenEval's metadata.

The rules are those of GenEval (Ghosh et al., 2023, arXiv 2310.11513; djghosh13/geneval, evaluation/evaluate_images.py,
commit 16f1681), for any detector. The 16 most confident objects per class count, above a confidence of 0.3, or 0.9 in
the task "counting". GenEval drops no overlapping boxes, since its `max_overlap` is 1. A class of `include` needs at
least `count` objects; the `count` most confident ones must all have the given color and position. A class of `exclude`
must have fewer than `count` objects. The score is GenEval's `correct`, 1 or 0.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, UInt8

from digen_jax.errors import ConfigError, check_range

RELATIONS = ("left of", "right of", "above", "below")
POSITION_THRESHOLD = 0.1  # of the two objects' summed width (height), subtracted from the offset
THRESHOLD, COUNTING = 0.3, 0.9
MAX_OBJECTS = 16  # per class
COLORS = "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"
# Number of most confident objects that need a color, by class.
Colored = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Detection:
    """An object in an image."""

    label: str | None  # class; None means that the object resembles no class of the detector
    color: str | None  # None means unknown or not determined
    box: tuple[float, float, float, float]  # (x0, y0, x1, y1); y increases downwards
    confidence: float  # in [0, 1]


@runtime_checkable
class Detector(Protocol):
    """Finds objects in images."""

    labels: frozenset[str]  # supported classes, in GenEval's naming

    def __call__(
        self, images: UInt8[np.ndarray, "b h w 3"], colored: Sequence[Colored]
    ) -> list[list[Detection]]:
        """Returns all objects of each image with a confidence above `THRESHOLD`.

        Objects selected by `colored` need a color of `COLORS`; other objects may have None.
        """
        ...


def score_images(
    detector: Detector, images: UInt8[np.ndarray, "b h w 3"], metadata: Sequence[dict[str, Any]]
) -> Float32[np.ndarray, "b"]:
    """Returns 1 for each image whose objects satisfy its record, else 0.

    Raises:
      ConfigError: The images are clips, or a record has no `include`, or names a class or color that the detector does
        not support.
    """
    check_images("geneval", images)
    for record in metadata:
        _check_record(record, detector.labels)
    found = detector(images, [colored(record) for record in metadata])
    pairs = zip(found, metadata, strict=True)
    return np.array([satisfies(kept(things, record), record) for things, record in pairs], "f4")


def check_images(name: str, images: np.ndarray) -> None:
    """Raises ConfigError for clips, which reward `name` cannot score."""
    if images.ndim != 4:
        raise ConfigError(f"reward {name!r} scores images, not clips: set frames to 1")


def kept(found: Sequence[Detection], record: Mapping[str, Any]) -> list[Detection]:
    """Filters objects by the task's confidence threshold, and keeps the most confident ones per class."""
    least = COUNTING if record.get("tag") == "counting" else THRESHOLD
    things: dict[str | None, list[Detection]] = {}
    for thing in sorted(found, key=lambda one: -one.confidence):
        same_class = things.setdefault(thing.label, [])
        if thing.confidence > least and len(same_class) < MAX_OBJECTS:
            same_class.append(thing)
    return [thing for same_class in things.values() for thing in same_class]


def colored(record: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of objects that need a color, by class."""
    found: dict[str, int] = {}
    for entry in record["include"]:
        if "color" in entry:
            found[entry["class"]] = max(found.get(entry["class"], 0), entry["count"])
    return found


def satisfies(found: Sequence[Detection], record: dict) -> bool:
    """Returns whether objects satisfy `include` and `exclude` of a record.

    Raises:
      ValueError: A position has an unknown relation, or refers to a later entry.
    """
    by_confidence = sorted(found, key=lambda thing: -thing.confidence)
    matched: list[list[Detection] | None] = []
    for entry in record["include"]:
        things = [thing for thing in by_confidence if thing.label == entry["class"]]
        things = things[: entry["count"]]
        matched.append(things if _matches(things, entry, matched) else None)
    excluded = any(
        sum(thing.label == entry["class"] for thing in found) >= entry["count"]
        for entry in record.get("exclude", [])
    )
    return None not in matched and not excluded


def relations(a: Detection, b: Detection) -> set[str]:
    """Returns the relations of a to b: the direction of a's center as seen from b's.

    The offset of the centers is first reduced by a tenth of the summed sizes per axis. A relation holds if the
    remainder exceeds half of the distance. A horizontal and a vertical relation may both hold.
    """
    box_a, box_b = np.asarray([a.box, b.box]).reshape(2, 2, 2)
    offset = box_a.mean(axis=0) - box_b.mean(axis=0)
    sizes = np.ptp(box_a, axis=0) + np.ptp(box_b, axis=0)
    beyond = np.sign(offset) * np.maximum(np.abs(offset) - POSITION_THRESHOLD * sizes, 0)
    if not beyond.any():
        return set()
    x, y = beyond / np.linalg.norm(offset)
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {relation for relation, true in holds.items() if true}


def _matches(things: list[Detection], entry: dict, matched: Sequence) -> bool:
    """Returns whether there are enough objects with the right color and position relative to `matched`."""
    if len(things) < entry["count"]:
        return False
    if "color" in entry and any(thing.color != entry["color"] for thing in things):
        return False
    if "position" not in entry:
        return True
    relation, other = entry["position"]
    if relation not in RELATIONS or other >= len(matched):
        known = f"one of {', '.join(RELATIONS)} and an earlier entry of include"
        raise ValueError(f"position {entry['position']!r} must name {known}")
    targets = matched[other]
    pairs = [(thing, target) for thing in things for target in targets or ()]
    return targets is not None and all(relation in relations(*pair) for pair in pairs)


def needs(record: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str | None:
    """Describes the missing input of a record, such as "has no field ...", or returns None."""
    del settings
    include = record.get("include")
    if isinstance(include, list) and include:
        return None
    return "has no `include`: use a JSONL file of GenEval's metadata"


def _check_record(record: Mapping[str, Any], labels: frozenset[str]) -> None:
    """Rejects a record that no image can satisfy."""
    prompt = f"the prompt {record.get('prompt', '')!r}"
    if (lacking := needs(record)) is not None:
        raise ConfigError(f"{prompt} {lacking}")
    for entry in [*record["include"], *record.get("exclude", [])]:
        if (name := entry["class"]) not in labels:
            raise ConfigError(f"{prompt} names the class {name!r}, unknown to the detector")
        if (color := entry.get("color", COLORS[0])) not in COLORS:
            raise ConfigError(f"{prompt} names the color {color!r}: use one of {', '.join(COLORS)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenEval:
    """GenEval score with Mask2Former and CLIP in torch, loaded at the first call in a process of a reward server."""

    folder: str  # folder or Hub id of a Mask2Former for instance segmentation of COCO's 80 classes
    clip: str = ""  # of a CLIP with tokenizer and processor; empty: no prompt has a color
    device: str = ""  # torch device; empty: the GPU if available
    batch: int = 8

    def __post_init__(self):
        """Raises ConfigError if torch is not installed, or a number is not positive."""
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "the reward 'geneval' needs torch, which this project does not install: run pip install "
                "torch, as described on pytorch.org for your GPU, in a separate environment for the reward "
                "server"
            )
        check_range("batch", self.batch, 1)

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns 1 or 0 for each image.

        Raises:
          ConfigError: See `score_images`. Also raised for clips, or if `clip` is missing for a prompt with a color.
          ValueError: A folder is missing or invalid.
        """
        check_images("geneval", images)
        if not self.clip and any(colored(one) for one in metadata if needs(one) is None):
            raise ConfigError("a prompt has a color: set clip, which 'geneval' needs for colors")
        return score_images(_detector(*dataclasses.astuple(self)), images, metadata)


@functools.lru_cache(maxsize=2)
def _detector(*settings: Any) -> Detector:
    from digen_jax.rewards.mask2former import Mask2FormerDetector

    return Mask2FormerDetector(*(*settings, THRESHOLD))
