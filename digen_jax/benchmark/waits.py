"""Executors whose commands wait for a stated time instead of using devices."""

import dataclasses
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from statistics import fmean

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.executors import Samples
from digen_jax.runtime.judging import Judged, ready, then
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Decode,
    Deliver,
    DropFragments,
    DropVersion,
    Encode,
    Evaluate,
    Fragment,
    Generate,
    Publication,
    Publish,
    Score,
    Train,
    Update,
)
from digen_jax.scheduling.planner.simulate import Layout, Mesh
from digen_jax.scheduling.settings import Costs


@dataclasses.dataclass(frozen=True)
class Waits:
    """The durations of commands.

    Each takes its cost times a factor drawn uniformly from 1 - `jitter` to 1 + `jitter`. The factor depends
    on the seed and on the work, but not on the worker or the time, so that all placements have the same
    work to do. A fragment has a draw for every `unit` of its images and takes their mean.
    """

    costs: Costs
    images: int  # of a fragment
    unit: int  # divides the images of a fragment
    jitter: float
    seed: int

    def seconds(self, command: Command, speed: float = 1.0) -> float:
        """Duration of a command on a worker of a given speed."""
        return self.costs.seconds(command.kind, self.images, speed) * self.factor(command)

    def factor(self, command: Command) -> float:
        """The factor by which jitter changes a command's cost."""
        drawn = (
            random.Random(f"{self.seed} {command.kind} {part}") for part in self._work(command)
        )
        return 1 + self.jitter * fmean(one.uniform(-1, 1) for one in drawn)

    def _work(self, command: Command) -> list[tuple[int, int]]:
        """The parts of a step that a command is about, independent of the worker."""
        match command:
            case Generate() | Decode() | Deliver() | Score() | Train():
                fragment, units = command.fragment, self.images // self.unit
                first = fragment.index * units
                return [(fragment.step, part) for part in range(first, first + units)]
            case Encode():
                return [(command.step, 0)]
            case Update():
                return [(command.step, command.update)]
            case Publish():
                return [(command.version, 0)]
            case _:
                return [(command.serial, 0)]  # role switches differ between placements


@contextmanager
def lasting(seconds: float, late: list[float]) -> Iterator[None]:
    """A block that lasts so long at least; how much later it ends, from work in it or the timer, goes to `late`."""
    end = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, end - time.perf_counter()))
    late.append(time.perf_counter() - end)


class WaitingJudge:
    """Has fragments scored by a pool whose reward is `score` below, which takes a command's seconds."""

    def __init__(self, waits: Waits, pool: RewardPool):
        self._waits, self._pool = waits, pool

    def submit(self, fragment: Fragment) -> Future[Judged]:
        """The future scores of a fragment, all equal, without previews of images."""
        images, seconds = self._waits.images, self._waits.seconds(Score(0, fragment, ""))
        black = np.zeros((images, 1, 1, 3), np.uint8)
        asked = self._pool.submit(black, [""] * images, [{"seconds": seconds}] * images)
        looks = ready(None)
        return then(
            asked, lambda f: Judged(f.scores, f.scores.columns[:, 0], f.seconds, looks=looks)
        )


class WaitingSampler:
    """A rollout worker that only waits, with the interface of `SamplingExecutor`."""

    def __init__(self, name: str, mesh: Mesh, waits: Waits):
        self.name, self.devices = name, mesh.devices
        self.late: list[float] = []  # of each wait, in seconds
        self._speed, self._waits = mesh.speed, waits

    def receive(self, publication: Publication) -> None:
        """A transfer of weights."""
        with self.lasting(Publish(0, self.name, publication)):
            pass

    def encode(self, number: int) -> None:
        """A step's prompts."""
        with self.lasting(Encode(0, self.name, number)):
            pass

    def generate(self, fragment: Fragment, publication: Publication) -> None:
        """A fragment's trajectories."""
        with self.lasting(Generate(0, self.name, fragment, publication)):
            pass

    def decode(self, fragment: Fragment) -> None:
        """A fragment's images."""
        with self.lasting(Decode(0, self.name, fragment)):
            pass

    def score(self, fragment: Fragment, judge: WaitingJudge) -> Future[Judged]:
        """See `WaitingJudge`."""
        return judge.submit(fragment)

    def scored(self, fragment: Fragment) -> None:
        """There are no images."""

    def drop_fragment(self, fragment: Fragment) -> None:
        """There is nothing to free."""

    def drop_weights(self, publication: Publication) -> None:
        """There is nothing to free."""

    def end_step(self, step: int) -> None:
        """There is nothing to free."""

    def give_up(self) -> None:
        """There is nothing to free."""

    def lasting(self, command: Command) -> AbstractContextManager[None]:
        """A block that lasts as long as a command on this worker."""
        return lasting(self._waits.seconds(command, self._speed), self.late)


class WaitingExecutors:
    """Executors for a `Driver` that only wait.

    The driver, its threads, the scheduler and the reward pool are the real ones.

    Attributes:
      samplers: by worker, the trainer's, too; those of rollout workers may be in other processes.
      late: seconds by which the trainer's waits and transfers ended too late.
    """

    extremes = None

    def __init__(self, waits: Waits, layout: Layout, rollouts: Iterable[Samples] | None = None):
        """`rollouts`: the executors of the rollout workers. None means that they wait in this process."""
        self._waits, self._step = waits, 0
        if rollouts is None:
            meshes = ((f"rollout {i}", mesh) for i, mesh in enumerate(layout.rollout))
            rollouts = [WaitingSampler(*one, waits) for one in meshes]
        self._assistant = WaitingSampler(TRAINER, layout.trainer, waits)
        self.samplers: dict[str, Samples] = {one.name: one for one in (*rollouts, self._assistant)}

    @property
    def devices(self) -> dict[str, int]:
        """The number of devices of every worker."""
        return {name: one.devices for name, one in self.samplers.items()}

    @property
    def late(self) -> list[float]:
        """The delay of each wait of this process, in seconds."""
        samplers = [one for one in self.samplers.values() if isinstance(one, WaitingSampler)]
        return [delay for one in samplers for delay in one.late]

    def do(self, command: Command) -> None:
        """Waits for the duration of a command, or has its worker do it."""
        match command:
            case Encode():
                self.samplers[command.worker].encode(command.step)
            case Generate():
                self.samplers[command.worker].generate(command.fragment, command.publication)
            case Decode():
                self.samplers[command.worker].decode(command.fragment)
            case Publish():
                self.samplers[command.worker].receive(command.publication)
            case DropVersion():
                for one in list(self.samplers.values()):
                    one.drop_weights(command.publication)
            case DropFragments():
                holders = itertools.product(list(self.samplers.values()), command.fragments)
                for one, fragment in holders:
                    one.drop_fragment(fragment)
            case _ if command.answered:
                with self.working(command):
                    pass

    def working(self, command: Command) -> AbstractContextManager[None]:
        """A block that lasts as long as a command of the trainer, or as a transfer to it."""
        return self._assistant.lasting(command)

    def score(self, command: Score, pool: RewardPool) -> Future[Judged]:
        """Asks the reward below, which takes the command's seconds."""
        judge = WaitingJudge(self._waits, pool)
        return self.samplers[command.maker].score(command.fragment, judge)

    def scored(self, command: Score, judged: Judged) -> None:
        """Only the scheduler reads the scores."""
        if command.maker in self.samplers:
            self.samplers[command.maker].scored(command.fragment)

    def end_step(self) -> dict[str, float]:
        """Ends the step for all samplers; there are no metrics besides those that the driver measures."""
        for one in list(self.samplers.values()):
            one.end_step(self._step)
        self._step += 1
        return {}

    def published(self, publication: Publication) -> None:
        """A version without weights."""

    def evaluated(self, command: Evaluate) -> None:
        """Nothing is evaluated."""

    def give_up(self, worker: str) -> None:
        """Removes a lost worker."""
        self.samplers.pop(worker).give_up()


def score(
    images: UInt8[np.ndarray, "b h w 3"], prompts: Sequence[str], metadata: Sequence[dict]
) -> Float[np.ndarray, "b"]:
    """A reward that takes the seconds that its metadata states."""
    time.sleep(metadata[0]["seconds"])
    return np.zeros(len(images))
