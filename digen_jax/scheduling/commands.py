"""What the scheduler tells the executors to do.

A worker is given one command after another, each when the one before is completed. Only transfers
to and from a rollout worker, `Publish` and `Deliver`, run beside its other commands, so that weights
and samples travel while it generates.
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


@dataclasses.dataclass(frozen=True, order=True)
class Publication:
    """Published weights of a version: those that sample training images, or, where these differ, those evaluated.

    Evaluated is, for example, the moving average of the trained parameters.
    """

    version: int
    evaluated: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """`serial` numbers all commands of a run."""

    serial: int
    answered: ClassVar[bool] = True
    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class Encode(Command):
    """Encode a step's prompts on a worker. A fragment of an evaluation encodes its own when it is generated."""

    worker: str
    step: int
    kind: ClassVar[str] = "encode"


@dataclasses.dataclass(frozen=True)
class Generate(Command):
    """Sample a fragment's trajectories by weights that the worker holds."""

    worker: str
    fragment: Fragment
    publication: Publication
    kind: ClassVar[str] = "generate"

    @property
    def version(self) -> int:
        """The weights' version."""
        return self.publication.version


@dataclasses.dataclass(frozen=True)
class Decode(Command):
    """Decode the images; they and what is trained of them then wait on the worker to be taken."""

    worker: str
    fragment: Fragment
    kind: ClassVar[str] = "decode"


@dataclasses.dataclass(frozen=True)
class Deliver(Command):
    """Bring what is trained of a decoded fragment, made by some version, from its worker to the trainer."""

    worker: str
    fragment: Fragment
    version: int
    kind: ClassVar[str] = "deliver"


@dataclasses.dataclass(frozen=True)
class Score(Command):
    """Ask the pool of rewards for the values of a fragment, whose images are on the worker that made it."""

    fragment: Fragment
    maker: str
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
    """Bring published weights, which the trainer keeps, to a worker."""

    worker: str
    publication: Publication
    kind: ClassVar[str] = "publish"

    @property
    def version(self) -> int:
        """The weights' version."""
        return self.publication.version


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
    """No fragment will need these weights again: the trainer and every worker may free them."""

    publication: Publication
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "drop_version"


@dataclasses.dataclass(frozen=True)
class DropFragments(Command):
    """Candidates that were begun and do not form the step: whatever there is of them may be freed."""

    fragments: tuple[Fragment, ...]
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "drop_fragments"
