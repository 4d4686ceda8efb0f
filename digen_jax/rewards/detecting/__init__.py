"""The reward "geneval": whether pictures show what GenEval's metadata ask for, by a detector's answers.

The rules are `rewards.geneval`'s. This module does with a detector's answers what GenEval does before it applies them
(Ghosh et al., arXiv 2310.11513; djghosh13/geneval, evaluation/evaluate_images.py, commit 16f1681): objects count above
a confidence of 0.3, in the task "counting" above 0.9, and of each class the 16 surest. GenEval drops no boxes that
overlap, since its `max_overlap` is 1. The score is GenEval's `correct`, 1 or 0.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, UInt8

from digen_jax.errors import ConfigError, check_range
from digen_jax.rewards.geneval import Detection, satisfies

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
    from digen_jax.rewards.detecting.mask2former import Mask2FormerDetector

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
