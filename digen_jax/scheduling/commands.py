"""What the scheduler tells the executors to do.

A worker is given one command after another, each when the one before is completed. Only `Publish`
to a rollout worker runs beside its other commands, so that weights travel while it generates.
Every command is answered by one `Completed` or `Failed`, except those with `answered = False`.
"""

import dataclasses
from typing import ClassVar

TRAINER = "trainer"


@dataclasses.dataclass(frozen=True, order=True)
class Fragment:
    """Images index * n ... index * n + n - 1 of a step's candidates, n images a fragment.

    Image j belongs to candidate group j // G. Of an evaluation, `step` is the version it is of.
    """

    step: int
    index: int
    evaluation: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """`serial` numbers all commands of a run."""

    serial: int
    answered: ClassVar[bool] = True
    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class Encode(Command):
    """Encode a step's prompts, or those of the evaluation (None), where the worker needs them."""

    worker: str
    step: int | None
    kind: ClassVar[str] = "encode"


@dataclasses.dataclass(frozen=True)
class Generate(Command):
    """Sample a fragment's trajectories by a version that the worker holds."""

    worker: str
    fragment: Fragment
    version: int
    kind: ClassVar[str] = "generate"


@dataclasses.dataclass(frozen=True)
class Decode(Command):
    """Decode the images; done when they and their trajectories outlive the worker."""

    worker: str
    fragment: Fragment
    kind: ClassVar[str] = "decode"


@dataclasses.dataclass(frozen=True)
class Score(Command):
    """Ask the pool of rewards for a fragment's values."""

    fragment: Fragment
    kind: ClassVar[str] = "score"


@dataclasses.dataclass(frozen=True)
class Train(Command):
    """Accumulate a fragment's gradient for an update; `early`: before its advantages are known."""

    worker: str
    fragment: Fragment
    update: int
    early: bool
    kind: ClassVar[str] = "train"


@dataclasses.dataclass(frozen=True)
class Update(Command):
    """One optimizer update from what was accumulated; the step's last one makes a new version."""

    worker: str
    step: int
    update: int
    kind: ClassVar[str] = "update"


@dataclasses.dataclass(frozen=True)
class Publish(Command):
    """Send a version's weights, which the trainer keeps, to a worker."""

    worker: str
    version: int
    kind: ClassVar[str] = "publish"


@dataclasses.dataclass(frozen=True)
class Switch(Command):
    """Make the trainer's devices a sampler ("sample") or a trainer ("train")."""

    worker: str
    role: str
    kind: ClassVar[str] = "switch"


@dataclasses.dataclass(frozen=True)
class Evaluate(Command):
    """All of a version's evaluation is scored: report it."""

    version: int
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "evaluate"


@dataclasses.dataclass(frozen=True)
class Checkpoint(Command):
    """Save the trainer's state after a step and the scheduler's, with the versions that it keeps."""

    step: int
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "checkpoint"


@dataclasses.dataclass(frozen=True)
class DropVersion(Command):
    """No fragment will need a version again: the trainer and every worker may free it."""

    version: int
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "drop_version"


@dataclasses.dataclass(frozen=True)
class DropFragments(Command):
    """Candidates that were begun and do not form the step: whatever there is of them may be freed."""

    fragments: tuple[Fragment, ...]
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "drop_fragments"
