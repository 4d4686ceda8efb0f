"""Commands from the scheduler to the executors.

A worker gets one command after another, each when the previous one is completed. Only the transfers
to and from a rollout worker, `SyncWeights` and `Deliver`, run in parallel with its other commands, so that
weights and samples are transferred during generation.
Every command is answered by one `Completed` or `Failed`, except those with `answered = False`.
"""

import dataclasses
from typing import ClassVar

TRAINER = "trainer"


def trainer_names(count: int) -> tuple[str, ...]:
    """The names of some training workers, the home worker first."""
    return TRAINER, *(f"worker {number}" for number in range(1, count))


@dataclasses.dataclass(frozen=True, order=True)
class Chunk:
    """Images index * n ... index * n + n - 1 of a step's candidates, n images a chunk.

    Image j belongs to candidate group j // G. In an evaluation, `step` is the evaluated version.
    """

    step: int
    index: int
    evaluation: bool = False


@dataclasses.dataclass(frozen=True, order=True)
class WeightsVersion:
    """Weights of a version: for sampling and training or, if they differ, for evaluation.

    Evaluated weights are, for example, the moving average of the trained parameters. Within a step of several
    updates, `update` counts those that the weights have had since the version; only training workers get such weights.
    """

    version: int
    evaluated: bool = False
    update: int = 0


@dataclasses.dataclass(frozen=True)
class Command:
    """`serial` numbers all commands of a run."""

    serial: int
    answered: ClassVar[bool] = True
    kind: ClassVar[str]

    @property
    def receiver(self) -> str:
        """The worker that executes the command or, for a transfer, receives the data; "" if there is none."""
        return getattr(self, "to", getattr(self, "worker", ""))


@dataclasses.dataclass(frozen=True)
class Encode(Command):
    """Encode a step's prompts on a worker. A chunk of an evaluation encodes its own when it is generated."""

    worker: str
    step: int
    kind: ClassVar[str] = "encode"


@dataclasses.dataclass(frozen=True)
class Generate(Command):
    """Sample a chunk's trajectories with weights that the worker holds."""

    worker: str
    chunk: Chunk
    weights_version: WeightsVersion
    kind: ClassVar[str] = "generate"

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.weights_version.version


@dataclasses.dataclass(frozen=True)
class Decode(Command):
    """Decode the images; the worker then keeps them, and the samples to train, until they are fetched."""

    worker: str
    chunk: Chunk
    kind: ClassVar[str] = "decode"


@dataclasses.dataclass(frozen=True)
class Deliver(Command):
    """Transfer the samples of a decoded chunk from a worker to a training worker; `version` generated them."""

    worker: str
    chunk: Chunk
    version: int
    to: str
    kind: ClassVar[str] = "deliver"


@dataclasses.dataclass(frozen=True)
class Score(Command):
    """Ask the reward pool for the values of a chunk, whose images the worker `maker` holds."""

    chunk: Chunk
    maker: str
    kind: ClassVar[str] = "score"


@dataclasses.dataclass(frozen=True)
class Train(Command):
    """Accumulate the gradient of `count` passes of a chunk from `first` on.

    `early`: before the chunk's advantages are known.
    """

    worker: str
    chunk: Chunk
    version: int
    update: int
    first: int
    count: int
    early: bool = False
    kind: ClassVar[str] = "train"


@dataclasses.dataclass(frozen=True)
class Update(Command):
    """One optimizer update from the sums of `trained` workers; the step's last one makes a new version."""

    worker: str
    step: int
    update: int
    trained: tuple[str, ...]
    kind: ClassVar[str] = "update"


@dataclasses.dataclass(frozen=True)
class SyncWeights(Command):
    """Send published weights, which the trainer keeps, to a worker."""

    worker: str
    weights_version: WeightsVersion
    kind: ClassVar[str] = "publish"

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.weights_version.version


@dataclasses.dataclass(frozen=True)
class Evaluate(Command):
    """Report a version's evaluation, of which all chunks are scored."""

    version: int
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "evaluate"


@dataclasses.dataclass(frozen=True)
class DropVersion(Command):
    """No chunk will need these weights again: the trainer and every worker may free them."""

    weights_version: WeightsVersion
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "drop_version"


@dataclasses.dataclass(frozen=True)
class DropChunks(Command):
    """Free all data of begun candidates that do not form the step."""

    chunks: tuple[Chunk, ...]
    answered: ClassVar[bool] = False
    kind: ClassVar[str] = "drop_chunks"
