"""GenEval's rules: do the objects that a detector found satisfy a prompt's metadata?

The rules are those of GenEval (Ghosh et al., 2023, arXiv 2310.11513, and its evaluation code), for
any detector. A class of `include` needs at least `count` objects; the `count` most confident ones
count, and all of them must have the colour and position asked for. A class of `exclude` must have
fewer than `count` objects.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, UInt8

from digen_jax.errors import ConfigError, check_range

RELATIONS = ("left of", "right of", "above", "below")
POSITION_THRESHOLD = 0.1  # of the two objects' summed width (height), taken off the offset


@dataclass(frozen=True)
class Detection:
    """One object in a picture: its class, its colour, its box (x0, y0, x1, y1; y down).

    `label` or `color` is None where the object resembles nothing that the detector can name;
    `confidence` is from 0 to 1.
    """

    label: str | None
    color: str | None
    box: tuple[float, float, float, float]
    confidence: float


def satisfies(found: Sequence[Detection], record: dict) -> bool:
    """Whether the objects found satisfy `include` and `exclude` of a prompt record.

    Raises:
      ValueError: a position names a relation that GenEval does not have, or a later entry.
    """
    surest = sorted(found, key=lambda thing: -thing.confidence)
    matched: list[list[Detection] | None] = []
    for entry in record["include"]:
        things = [thing for thing in surest if thing.label == entry["class"]][: entry["count"]]
        matched.append(things if _matches(things, entry, matched) else None)
    excluded = any(
        sum(thing.label == entry["class"] for thing in found) >= entry["count"]
        for entry in record.get("exclude", [])
    )
    return None not in matched and not excluded


def relations(a: Detection, b: Detection) -> set[str]:
    """The relations in which a stands to b: where a's centre lies, seen from b's.

    The offset of the centres is first shortened by a tenth of the summed sizes in each direction. A
    relation holds where the rest exceeds half of the whole distance. A horizontal and a vertical one
    may both hold.
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


def _matches(
    things: list[Detection], entry: dict, matched: Sequence[list[Detection] | None]
) -> bool:
    """Whether there are enough of these objects, in the right colour and position."""
    if len(things) < entry["count"]:
        return False
    if "color" in entry and any(thing.color != entry["color"] for thing in things):
        return False
    if "position" not in entry:
        return True
    relation, other = entry["position"]
    if relation not in RELATIONS or other >= len(matched):
        raise ValueError(
            f"position {entry['position']!r} must name one of {', '.join(RELATIONS)} and an "
            "earlier entry of include"
        )
    targets = matched[other]
    return targets is not None and all(
        relation in relations(thing, target) for thing in things for target in targets
    )


THRESHOLD, COUNTING = 0.3, 0.9
MOST = 16  # objects of a class
COLORS = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
)

# By class, how many of its objects, from the surest on, need a colour.
Colored = Mapping[str, int]


@runtime_checkable
class Detector(Protocol):
    """Finds objects in pictures.

    Attributes:
      labels: the classes that it knows, as GenEval's metadata name them.
    """

    labels: frozenset[str]

    def __call__(
        self, images: UInt8[np.ndarray, "b h w 3"], colored: Sequence[Colored]
    ) -> list[list[Detection]]:
        """All objects of each picture with a confidence above `THRESHOLD`, without a limit to their number.

        A colour, one of `COLORS`, is needed of those that `colored` asks for; of others it may be None.
        """
        ...


def judged(
    detector: Detector, images: UInt8[np.ndarray, "b h w 3"], metadata: Sequence[dict[str, Any]]
) -> Float32[np.ndarray, "b"]:
    """1 for each picture whose objects satisfy its record, else 0.

    Raises:
      ConfigError: a record has no `include`, or names a class or colour that the detector does not know.
    """
    for record in metadata:
        _check(record, detector.labels)
    found = detector(images, [colored(record) for record in metadata])
    pairs = zip(found, metadata, strict=True)
    return np.array([satisfies(kept(things, record), record) for things, record in pairs], "f4")


def kept(found: Sequence[Detection], record: Mapping[str, Any]) -> list[Detection]:
    """The objects that count: sure enough for the record's task, and of each class the surest."""
    least = COUNTING if record.get("tag") == "counting" else THRESHOLD
    things: dict[str | None, list[Detection]] = {}
    for thing in sorted(found, key=lambda one: -one.confidence):
        of = things.setdefault(thing.label, [])
        if thing.confidence > least and len(of) < MOST:
            of.append(thing)
    return [thing for of in things.values() for thing in of]


def colored(record: Mapping[str, Any]) -> dict[str, int]:
    """By class, how many of its objects need a colour for a record."""
    found: dict[str, int] = {}
    for entry in record["include"]:
        if "color" in entry:
            found[entry["class"]] = max(found.get(entry["class"], 0), entry["count"])
    return found


def needs(record: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str | None:
    """What a prompt record lacks for this reward, as the end of a sentence about it; None: nothing."""
    del settings
    given = record.get("include")
    if isinstance(given, list) and given:
        return None
    return "has no `include`: use a JSONL file of GenEval's metadata"


@dataclasses.dataclass(frozen=True)
class GenEval:
    """GenEval's score by Mask2Former and CLIP in torch, which are read by the first call in a process.

    The fields are those of `geneval`.
    """

    folder: str
    clip: str
    device: str
    batch: int

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """1 or 0 for each picture.

        Raises:
          ConfigError: see `judged`; the images are clips, or `clip` is missing for a prompt with a colour.
          ValueError: a folder is missing or does not fit.
        """
        if images.ndim != 4:
            raise ConfigError("the reward 'geneval' scores pictures, not clips")
        if not self.clip and any(colored(one) for one in metadata if needs(one) is None):
            raise ConfigError(
                "a prompt asks for a colour, for which the reward 'geneval' needs a CLIP: set clip"
            )
        return judged(_detector(self), images, metadata)


@functools.lru_cache(maxsize=2)
def _detector(asked: GenEval) -> Detector:
    from digen_jax.rewards.mask2former import Mask2FormerDetector

    return Mask2FormerDetector(asked.folder, asked.clip, asked.device, asked.batch, THRESHOLD)


def geneval(*, folder: str, clip: str = "", device: str = "", batch: int = 8) -> GenEval:
    """GenEval's score, for the processes of a reward server.

    Args:
      folder: of a Mask2Former that segments the instances of COCO's 80 classes, or its hub id.
      clip: of a CLIP with its tokenizer and processor, or its hub id; "": no prompt asks for a colour.
      device: torch's name; "": the GPU if there is one.
      batch: pictures that are searched at once.

    Raises:
      ConfigError: torch is not installed, or a number is not positive.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the reward 'geneval' needs torch, which this project does not install: run pip install torch, as "
            "pytorch.org says for your GPU, in an environment of the reward server's own"
        )
    check_range("batch", batch, 1)
    return GenEval(folder, clip, device, batch)


def _check(record: Mapping[str, Any], labels: frozenset[str]) -> None:
    """Refuses a record that no picture could satisfy, whatever it shows."""
    prompt = record.get("prompt", "")
    lacking = needs(record)
    if lacking is not None:
        raise ConfigError(f"the prompt {prompt!r} {lacking}")
    for entry in [*record["include"], *record.get("exclude", [])]:
        if entry["class"] not in labels:
            raise ConfigError(
                f"the prompt {prompt!r} names the class {entry['class']!r}, which the detector does not know"
            )
        if entry.get("color", COLORS[0]) not in COLORS:
            raise ConfigError(
                f"the prompt {prompt!r} names the color {entry['color']!r}: use one of {', '.join(COLORS)}"
            )
