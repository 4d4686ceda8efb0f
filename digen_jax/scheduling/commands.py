"""Commands from the scheduler to the executors, events from these to the scheduler, and what workers did when.

A worker gets its commands one after another. Only the transfers to and from a rollout worker, `SyncWeights` and
`Deliver`, run in parallel with its other commands, so that weights and samples are transferred during generation.
Every command is answered by one `Completed` or `Failed`, except commands with `answered = False`.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

TRAINER = "trainer"  # name of the home worker
SAMPLE, TRAIN = "sample", "train"  # roles


def trainer_names(count: int) -> tuple[str, ...]:
    """Returns the names of `count` workers that train, the home worker first."""
    return TRAINER, *(f"worker {number}" for number in range(1, count))


@dataclasses.dataclass(frozen=True, order=True)
class Chunk:
    """Images index * n to index * n + n - 1 of a step's candidates, for chunks of n images.

    Image j belongs to candidate group j // G. In an evaluation, `step` is the evaluated version.
    """

    step: int
    index: int
    evaluation: bool = False


@dataclasses.dataclass(frozen=True, order=True)
class WeightsVersion:
    """Weights of a version: for sampling and training or, if they differ, for evaluation.

    Evaluated weights are, for example, the moving average of the trained parameters. In a step of several updates,
    `update` counts the updates since the version; only training workers get such weights.
    """

    version: int
    evaluated: bool = False
    update: int = 0


@dataclasses.dataclass(frozen=True)
class Command:
    """A command to an executor; `serial` numbers all commands of a run."""

    serial: int
    kind: ClassVar[str]
    answered: ClassVar[bool]

    def __init_subclass__(cls, kind: str, answered: bool = True):
        cls.kind, cls.answered = kind, answered

    @property
    def receiver(self) -> str:
        """Worker that executes the command or, for a transfer, receives the data; "" if there is none."""
        return getattr(self, "to", getattr(self, "worker", ""))


@dataclasses.dataclass(frozen=True)
class Encode(Command, kind="encode"):
    """Encodes a step's prompts on a worker. Prompts of an evaluation are encoded when its chunks are generated."""

    worker: str
    step: int


@dataclasses.dataclass(frozen=True)
class Generate(Command, kind="generate"):
    """Samples a chunk's trajectories with weights that the worker holds."""

    worker: str
    chunk: Chunk
    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class Decode(Command, kind="decode"):
    """Decodes a chunk's images. The worker keeps them, and the samples to train, until they are fetched."""

    worker: str
    chunk: Chunk


@dataclasses.dataclass(frozen=True)
class Deliver(Command, kind="deliver"):
    """Transfers the samples of a decoded chunk to a training worker; weights of `version` generated them."""

    worker: str
    chunk: Chunk
    version: int
    to: str


@dataclasses.dataclass(frozen=True)
class Score(Command, kind="score"):
    """Scores the images of a chunk, which are stored on the worker `maker`, which decoded them."""

    chunk: Chunk
    maker: str


@dataclasses.dataclass(frozen=True)
class Train(Command, kind="train"):
    """Accumulates the gradient of `count` passes of a chunk, starting at pass `first`.

    `early` means before the chunk's advantages are known.
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
    """Applies one optimizer update from gradient sums of `trained` workers; a step's last creates a new version."""

    worker: str
    step: int
    update: int
    trained: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SyncWeights(Command, kind="sync"):
    """Sends a weights version, which the trainer stores, to a worker."""

    worker: str
    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class Evaluate(Command, kind="evaluate", answered=False):
    """Reports the evaluation of a version whose chunks are all scored."""

    version: int


@dataclasses.dataclass(frozen=True)
class DropVersion(Command, kind="drop_version", answered=False):
    """Frees a weights version on the trainer and all workers; no chunk will need it again."""

    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class DropChunks(Command, kind="drop_chunks", answered=False):
    """Frees all data of started candidates that are not in the step."""

    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class Event:
    """An event at the time `at`, in seconds."""

    at: float


@dataclasses.dataclass(frozen=True)
class Joined(Event):
    """A worker is ready.

    The run starts when the home worker, TRAINER, joins; other workers that are ready join before it.
    """

    worker: str
    roles: tuple[str, ...]  # in order of preference
    spare: tuple[str, ...] = ()  # roles that it takes only while no other worker has them


@dataclasses.dataclass(frozen=True)
class Removed(Event):
    """A worker disconnected or was dropped, with all its work; its later reports are ignored."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Completed(Event):
    """A command completed after `seconds`; for a Score, `values` has one value per image."""

    command: Command
    seconds: float
    values: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Failed(Event):
    """A command failed; its worker still runs and is free."""

    command: Command
    reason: str


# Causes of waiting: "weights" in transfer, a "reward", others' "sampling" or "training", the "update", the "end".
CAUSES = ("sampling", "reward", "training", "update", "weights", "evaluation", "end")


class Interval(NamedTuple):
    """One activity of a worker from `start` to `end`, in seconds.

    `kind` is a command's kind, "evaluate" for an evaluation chunk, or "wait" for `cause`, one of CAUSES. The worker
    "reward" is all rewards; its intervals may overlap. Transfers to and from a rollout worker have separate rows, such
    as "sync rollout 0", and so has each server of a reward, such as "judge 127.0.0.1:8000", with
    "request" or, if it is retried, "failed request"; these may overlap, too.
    """

    worker: str
    kind: str
    start: float
    end: float
    chunk: Chunk | None = None
    cause: str = ""

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.end - self.start


class Recorder:
    """Records the intervals of workers' commands and waits."""

    def __init__(self):
        self.intervals: list[Interval] = []
        # Worker: (start of its wait or the last `split`, start of its wait, cause).
        self.waits: dict[str, tuple[float, float, str]] = {}

    def work(
        self, worker: str, kind: str, start: float, end: float, chunk: Chunk | None = None
    ) -> None:
        """Records work of a worker from `start`, which ends its wait, to `end`."""
        self.end_wait(worker, start)
        self.intervals.append(Interval(worker, kind, start, end, chunk))

    def wait(self, worker: str, cause: str, now: float) -> None:
        """Starts a worker's wait, unless it already waits for this cause."""
        if worker not in self.waits or self.waits[worker][2] != cause:
            self.end_wait(worker, now)
            self.waits[worker] = now, now, cause

    def end_wait(self, worker: str, now: float) -> None:
        """Ends and records a worker's wait."""
        start, _, cause = self.waits.pop(worker, (now, now, ""))
        if now > start:
            self.intervals.append(Interval(worker, "wait", start, now, None, cause))

    def split(self, now: float) -> None:
        """Ends every wait at `now`; waits that continue start again."""
        for worker, (_, since, cause) in list(self.waits.items()):
            self.end_wait(worker, now)
            self.waits[worker] = now, since, cause


def bubbles(intervals: Iterable[Interval], devices: Mapping[str, int]) -> dict[str, float]:
    """Returns device-seconds of waiting, by cause."""
    found = defaultdict[str, float](float)
    for interval in intervals:
        if interval.kind == "wait":
            found[interval.cause] += interval.seconds * devices[interval.worker]
    return dict(found)


# Dataclasses that `unpack` creates, by name; `settings` adds its own.
CLASSES: dict[str, Any] = {n: one for n, one in globals().items() if dataclasses.is_dataclass(one)}
# Field names in older checkpoints, and the new names.
RENAMED = {"evaluated_apart": "separate_eval_weights", "redundant_groups": "oversampled_groups"}


def pack(value: Any) -> Any:
    """Returns JSON values: dataclasses and tuples become tagged dicts, and other values are unchanged."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: pack(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"is": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return {"is": "tuple", "items": [pack(v) for v in value]}
    if isinstance(value, dict):
        return {key: pack(v) for key, v in value.items()}
    return [pack(v) for v in value] if isinstance(value, list) else value


def unpack(value: Any) -> Any:
    """Inverts `pack`."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "is" not in value:
        return {key: unpack(v) for key, v in value.items()}
    if value["is"] == "tuple":
        return tuple(unpack(v) for v in value["items"])
    fields = {str(RENAMED.get(k, k)): unpack(v) for k, v in value.items() if k != "is"}
    return CLASSES[value["is"]](**fields)
