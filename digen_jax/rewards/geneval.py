"""GenEval's rules: do the objects that a detector found satisfy a prompt's metadata?

The rules are those of GenEval (Ghosh et al., 2023, arXiv 2310.11513, and its evaluation code), for
any detector. A class of `include` needs at least `count` objects; the `count` most confident ones
count, and all of them must have the colour and position asked for. A class of `exclude` must have
fewer than `count` objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
