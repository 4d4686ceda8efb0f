"""The label of a run's evaluation prompts in its output."""

import pathlib
from collections.abc import Sequence

HELD_OUT, TRAINING = "held-out prompts", "training prompts"


def prompts_label(training: Sequence[str], evaluation: str) -> str:
    """Returns TRAINING if the evaluation's prompt file is also a training file, else HELD_OUT."""
    own, *others = (pathlib.Path(path).resolve() for path in (evaluation, *training))
    return TRAINING if evaluation and own in others else HELD_OUT
