"""Ray's costs on one machine: commands to rollout workers, weights of different sizes, starts, idle processes."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import jax
import jax.numpy as jnp
import psutil

from benchmarks.cluster import Emulation, WaitingProcess
from benchmarks.waits import Waits
from digen_jax.distributed.engine import LOCAL, RayEngine, surroundings
from digen_jax.distributed.transfer import TrainerTransfer
from digen_jax.distributed.workers import WorkerProxy
from digen_jax.planning.report import aligned
from digen_jax.scheduling.commands import Chunk, WeightsVersion
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout

WORKERS = 2
LONGEST = 120.0  # timeout in seconds for the start of a worker
CALLERS = 16  # threads that send commands concurrently
ARRAYS = 20  # number of float32 arrays of the weights
VERSIONS = 3  # versions of each size, of which the median counts
SETTLING, IDLE = 5.0, 10.0  # seconds before and during the measurement of idle processes
_versions = itertools.count()


@dataclasses.dataclass(frozen=True)
class RayCosts:
    """Costs of Ray on this machine.

    Attributes:
      command_milliseconds: Median time of a command that does nothing, including its answer.
      commands_per_second: Rate to all workers, from `CALLERS` threads.
      weights_seconds: Seconds until all workers have received a weights version, by megabytes.
      ray_seconds: Start of Ray.
      actor_seconds: Start of an actor until its first answer.
      idle_mebibytes: Memory of Ray's processes; shared pages count once.
      idle_share: Share of a core that they use while the workers are idle.
    """

    command_milliseconds: float
    commands_per_second: float
    weights_seconds: dict[int, float]
    ray_seconds: float
    actor_seconds: float
    idle_mebibytes: float
    idle_share: float

    def rows(self) -> list[tuple[str, float, str, str]]:
        """Returns (name, value, unit, required value) rows; "" means no requirement."""
        return [
            ("command", self.command_milliseconds, "ms", "<= 3"),
            ("commands", self.commands_per_second, "/s", ">= 1000"),
            *((f"weights, {size} MB", s, "s", "") for size, s in self.weights_seconds.items()),
            ("start of Ray", self.ray_seconds, "s", ""),
            ("start of an actor", self.actor_seconds, "s", ""),
            ("Ray's memory", self.idle_mebibytes, "MiB", "<= 500"),
            ("Ray's CPU", 100 * self.idle_share, "% of a core", "<= 5"),
        ]

    def describe(self) -> str:
        """Returns the rows as a table."""
        head = ["", "measured", "required", "unit"]
        rows = [[name, f"{value:.4g}", least, unit] for name, value, unit, least in self.rows()]
        return aligned([head, *rows])


def measure(commands: int, megabytes: Sequence[int]) -> RayCosts:
    """Starts Ray and measures it.

    Args:
      commands: Number of sequential commands for the median, and of concurrent commands for the rate.
      megabytes: Sizes of the weights.

    Raises:
      ConfigError: Ray is not installed.
    """
    start = time.perf_counter()
    with closing(RayEngine(LOCAL, show=False, cpus=WORKERS)) as engine:
        ray_seconds = time.perf_counter() - start
        transfer = TrainerTransfer(engine)
        seconds, workers = zip(*(_start(engine, transfer, n) for n in range(WORKERS)), strict=True)
        memory, share = _idle(workers)
        calls = [functools.partial(_command, workers[0], number) for number in range(commands)]
        milliseconds = 1000 * statistics.median(map(_seconds, calls))
        with ThreadPoolExecutor(CALLERS) as pool:
            sent = itertools.cycle(workers), range(commands)
            rate = commands / _seconds(lambda: list(pool.map(_command, *sent)))
            weights = {
                size: statistics.median(
                    _transfer(transfer, workers, pool, size) for _ in range(VERSIONS)
                )
                for size in megabytes
            }
    return RayCosts(milliseconds, rate, weights, ray_seconds, seconds[0], memory, share)


def _start(engine: RayEngine, transfer: TrainerTransfer, number: int) -> tuple[float, WorkerProxy]:
    """Starts a worker; returns the seconds until its actor's first answer, and the worker."""
    name, start = f"rollout {number}", time.perf_counter()
    _, *folders = surroundings()
    given = name, {"JAX_PLATFORMS": "cpu"}, *folders
    actors = engine.start(WaitingProcess, [given])
    engine.call(actors[0], "ping", group="ping").result(LONGEST)
    seconds = time.perf_counter() - start
    nothing = Waits(Costs(0.0, 0.0), Settings(1, 1, 1, 1))
    emulation = Emulation((WorkerLayout(),) * (1 + WORKERS), nothing)
    opened = engine.call(actors[0], "open", emulation, 0, group="work").result(LONGEST)
    return seconds, WorkerProxy(name, opened, actors, engine, transfer)


def _idle(workers: Sequence[WorkerProxy]) -> tuple[float, float]:
    """Returns the memory of Ray's processes in MiB, and the share of a core that they use."""
    time.sleep(SETTLING)
    pids = {worker.opened.pid for worker in workers}
    own = [one for one in psutil.Process().children(recursive=True) if one.pid not in pids]
    before = _total(own, lambda one: sum(one.cpu_times()[:2]))  # user and system
    time.sleep(IDLE)
    share = (_total(own, lambda one: sum(one.cpu_times()[:2])) - before) / IDLE
    return _total(own, lambda one: one.memory_full_info().pss) / 2**20, share


def _total(processes: Sequence[psutil.Process], value: Callable[[psutil.Process], float]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended
            total += value(process)
    return total


def _command(worker: WorkerProxy, number: int) -> None:
    """Sends a command that takes no time on the worker."""
    worker.generate(Chunk(0, number), WeightsVersion(0))


def _transfer(
    transfer: TrainerTransfer, workers: Sequence[WorkerProxy], pool: ThreadPoolExecutor, size: int
) -> float:
    """Returns the seconds until all workers have received a new version of `size` megabytes."""
    version = WeightsVersion(next(_versions))
    arrays = {str(n): jnp.ones(size * 10**6 // ARRAYS // 4) for n in range(ARRAYS)}
    transfer.put(version, jax.block_until_ready(arrays))
    try:
        return _seconds(lambda: list(pool.map(lambda one: one.receive(version), workers)))
    finally:
        transfer.delete(version)
        for worker in workers:
            worker.drop_weights(version)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
