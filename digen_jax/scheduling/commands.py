"""Commands from the scheduler to the executors, and events from these to the scheduler.

A worker gets one command after another, each when the previous one is completed. Only the transfers
to and from a rollout worker, `SyncWeights` and `Deliver`, run in parallel with its other commands, so that
weights and samples are transferred during generation.
Every command is answered by one `Completed` or `Failed`, except those with `answered = False`.
"""

import dataclasses
from typing import ClassVar

TRAINER = "trainer"


def trainer_names(count: int) -> tuple[str, ...]:
    """Returns the names of `count` training workers, the home worker first."""
    return TRAINER, *(f"worker {number}" for number in range(1, count))


@dataclasses.dataclass(frozen=True, order=True)
class Chunk:
    """Images index * n to index * n + n - 1 of a step's candidates, for n images a chunk.

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
    kind: ClassVar[str]
    answered: ClassVar[bool]

    def __init_subclass__(cls, kind: str, answered: bool = True):
        cls.kind, cls.answered = kind, answered

    @property
    def receiver(self) -> str:
        """The worker that executes the command or, for a transfer, receives the data; "" if there is none."""
        return getattr(self, "to", getattr(self, "worker", ""))


@dataclasses.dataclass(frozen=True)
class Encode(Command, kind="encode"):
    """Encode a step's prompts on a worker. Prompts of an evaluation are encoded when its chunks are generated."""

    worker: str
    step: int


@dataclasses.dataclass(frozen=True)
class Generate(Command, kind="generate"):
    """Sample a chunk's trajectories with weights that the worker holds."""

    worker: str
    chunk: Chunk
    weights_version: WeightsVersion

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.weights_version.version


@dataclasses.dataclass(frozen=True)
class Decode(Command, kind="decode"):
    """Decode the images; the worker then keeps them, and the samples to train, until they are fetched."""

    worker: str
    chunk: Chunk


@dataclasses.dataclass(frozen=True)
class Deliver(Command, kind="deliver"):
    """Transfer the samples of a decoded chunk from a worker to a training worker; `version` generated them."""

    worker: str
    chunk: Chunk
    version: int
    to: str


@dataclasses.dataclass(frozen=True)
class Score(Command, kind="score"):
    """Score the images of a chunk, which are stored on the worker `maker`."""

    chunk: Chunk
    maker: str


@dataclasses.dataclass(frozen=True)
class Train(Command, kind="train"):
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


@dataclasses.dataclass(frozen=True)
class Update(Command, kind="update"):
    """One optimizer update from the sums of `trained` workers; the step's last one creates a new version."""

    worker: str
    step: int
    update: int
    trained: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SyncWeights(Command, kind="sync"):
    """Send a weights version, which the trainer keeps, to a worker."""

    worker: str
    weights_version: WeightsVersion

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.weights_version.version


@dataclasses.dataclass(frozen=True)
class Evaluate(Command, kind="evaluate", answered=False):
    """Report a version's evaluation, of which all chunks are scored."""

    version: int


@dataclasses.dataclass(frozen=True)
class DropVersion(Command, kind="drop_version", answered=False):
    """No chunk will need these weights again: the trainer and every worker may free them."""

    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class DropChunks(Command, kind="drop_chunks", answered=False):
    """Free all data of started candidates that do not form the step."""

    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class Event:
    """`at` is the time of the event, in seconds."""

    at: float


@dataclasses.dataclass(frozen=True)
class Joined(Event):
    """A worker is ready.

    The run starts when the home worker, TRAINER, joins; other workers that are ready join before it.

    Attributes:
      worker: Its name.
      roles: "sample" and "train", in order of preference.
      spare: Roles that it takes only while no other worker has them.
    """

    worker: str
    roles: tuple[str, ...]
    spare: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Removed(Event):
    """A worker disconnected or was dropped, with all its work; its later reports are ignored."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Completed(Event):
    """A command is done after `seconds`; a Score has one value per image in `values`."""

    command: Command
    seconds: float
    values: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Failed(Event):
    """A command failed; its worker still works and is free."""

    command: Command
    reason: str
