"""Simulates the scheduler at many sizes, and compares each step with the bound (G + T) / N.

A step of duration 1 has G device-seconds of generation and T of training on N devices that are always busy. Other
costs are fractions of it.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from digen_jax.scheduling.commands import SAMPLE, TRAIN
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import Disturbance, Report, WorkerLayout, simulate

RATIOS = {"1:8": 1 / 8, "1:4": 1 / 4, "1:2": 1 / 2, "1:1": 1.0, "2:1": 2.0, "4:1": 4.0, "8:1": 8.0}
JITTERS = 0.0, 0.02, 0.2
PASSES = 128  # per worker and step, so that one pass is less than 1% of a step
LIMIT = 1.005  # a larger share means that the simulator or the bound is wrong


class PoolSize(NamedTuple):
    """Number of devices; `chunks` per worker and measured `steps`, each without and with lag; `seeds` per jitter."""

    devices: int
    chunks: tuple[int, int]
    steps: tuple[int, int]
    seeds: tuple[int, int, int]


SIZES = (
    PoolSize(8, (16, 16), (4, 4), (1, 3, 10)), PoolSize(64, (16, 16), (2, 3), (1, 1, 1)),
    PoolSize(256, (8, 4), (1, 3), (1, 1, 1)), PoolSize(1024, (8, 4), (1, 3), (1, 1, 1)),
)  # fmt: skip


def layout_of(layout: str, devices: int, share: float) -> tuple[WorkerLayout, ...]:
    """Returns the workers of a layout; `share` is G / (G + T). The first one updates.

    In "sample-only", workers for three quarters of G only sample; the others train first and sample in between.
    In "one role", workers either only sample or only train, in the numbers closest to G and T.
    "colocated" is one worker: each of its programs takes as long as on its slowest device.
    """
    both, sample = WorkerLayout(), WorkerLayout(roles=(SAMPLE,))
    match layout:
        case "colocated":
            return (WorkerLayout(devices=devices),)
        case "one slow":
            return (both,) * (devices - 1) + (WorkerLayout(speed=0.5),)
        case "sample-only":
            few, rest = int(0.75 * devices * share), WorkerLayout(roles=(TRAIN, SAMPLE))
        case "one role":
            few = min(range(1, devices), key=lambda n: max(share / n, (1 - share) / (devices - n)))
            rest = WorkerLayout(roles=(TRAIN,))
        case _:
            few, rest = 0, both
    return (rest,) * (devices - few) + (sample,) * few


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Costs and the `required` share of the bound; `large` is required at 256 or more devices with the largest jitter.

    `sync` reduces the sums and sends weights to all workers, at the same time. `latency` is a reward's time per chunk.
    """

    name: str
    update: float
    sync: float
    required: float | None
    large: float | None = None
    layout: str = "pool"
    lag: int = 0
    latency: float = 0.0
    off_policy: float = 0.5  # maximum fraction of a step
    chunks: int | None = None  # instead of the size's
    sizes: tuple[int, ...] = (8, 64, 256, 1024)
    all_jitters: int = 256  # the largest size with all of JITTERS; larger ones use the last


LORA, FULL = (0.0015, 0.0015), (0.01, 0.02)
SCENARIOS = (
    Scenario("On policy, update + reduction 0.3%", *LORA, 0.98, 0.97, all_jitters=1024),
    Scenario("On policy, update 1%, reduction 2% (ceiling 97.1)", *FULL, 0.96),
    Scenario("Lag 1, update 1%, sync 2%", *FULL, 0.98, lag=1),
    Scenario("Lag 1, update 1%, sync 2%, reward latency 30%", *FULL, 0.97, lag=1, latency=0.3),
    Scenario("Half-speed worker, 16 chunks", *LORA, 0.98, layout="one slow", chunks=16, sizes=(8, 64, 256)),
    Scenario("Lag 1, sample-only workers", *FULL, 0.97, layout="sample-only", lag=1, sizes=(64, 256, 1024)),
    Scenario("Lag 1, each worker has one role", *LORA, 0.97, layout="one role", lag=1, off_policy=1.0, sizes=(64,)),
    Scenario("Colocated: on policy, update 0.15%", *LORA, None, layout="colocated", all_jitters=1024),
)  # fmt: skip


def simulated(scenario: Scenario, size: PoolSize, ratio: float, jitter: float, seed: int) -> float:
    """Returns the share of the bound of one simulated run."""
    generate, lag = ratio / (1 + ratio), scenario.lag
    workers = layout_of(scenario.layout, size.devices, generate)
    chunks, images = scenario.chunks or size.chunks[lag], size.devices // len(workers)
    groups = chunks * len(workers)  # one chunk each
    fraction, passes = scenario.off_policy, PASSES // chunks
    limits: dict[str, Any] = dict(max_policy_lag=lag, max_off_policy_fraction=fraction)
    settings = Settings(1, groups, images, images, passes=passes, **limits)
    image = sum(worker.devices * worker.speed for worker in workers) / (groups * images)
    costs = Costs(generate * image, (1 - generate) * image, score_latency=scenario.latency)
    costs = dataclasses.replace(costs, update=scenario.update, sync=scenario.sync)
    first, last = (3, 1) if lag else (1, 0)  # unmeasured steps
    steps, noise = size.steps[lag], Disturbance(jitter, seed=seed)
    report = simulate(workers, costs, settings, first + steps + last, noise)
    start, end = first - 1, first + steps - 1
    # With lag a step starts before the previous one ends, by a varying amount.
    sampled = sampled_early(report, end + 1, groups) - sampled_early(report, start + 1, groups)
    work = steps + generate * sampled
    return report.bound * work / (report.step_ends[end] - report.step_ends[start])


def sampled_early(report: Report, step: int, chunks: int) -> float:
    """Returns the share of a step of `chunks` chunks that was sampled when the previous step ended."""
    now, made = report.step_ends[step - 1], [i for i in report.intervals if i.kind == "generate"]
    started = (i for i in made if i.chunk and i.chunk.step == step and i.start < now)
    return sum(min(1.0, (now - one.start) / one.seconds) for one in started) / chunks


@dataclasses.dataclass(frozen=True)
class BoundRow:
    """Shares of the bound by ratio, at one number of devices and one jitter."""

    scenario: str
    devices: int
    jitter: float
    shares: dict[str, float]
    required: float | None

    @property
    def missed(self) -> list[str]:
        """Ratios whose share is too small, or larger than possible."""
        least = self.required or 0.0
        return [name for name, found in self.shares.items() if not least <= found <= LIMIT]


def rows(scenario: Scenario) -> Iterator[BoundRow]:
    """Measures a scenario: yields the mean over the seeds of each cell."""
    for size, (number, jitter) in itertools.product(SIZES, enumerate(JITTERS)):
        last, seeds = jitter == JITTERS[-1], range(size.seeds[number])
        if size.devices in scenario.sizes and (last or size.devices <= scenario.all_jitters):
            shares = {
                name: statistics.fmean(simulated(scenario, size, ratio, jitter, n) for n in seeds)
                for name, ratio in RATIOS.items()
            }
            large = scenario.large if last and size.devices >= 256 else None
            yield BoundRow(scenario.name, size.devices, jitter, shares, large or scenario.required)


def measure(show: Callable[[str], None]) -> list[BoundRow]:
    """Measures all scenarios and shows a table of each; an exclamation mark marks a share that is out of range."""
    show("Shares of the bound (G + T) / N in percent, by G:T. Jitter is per command and device.")
    for devices, chunks, steps, seeds in SIZES:
        measured = f"{chunks[0]} chunks per worker, {chunks[1]} with lag; {steps[0]} and {steps[1]} steps measured"
        show(
            f"{devices:,} devices: {measured}; {'/'.join(map(str, seeds))} seeds at 0/2/20% jitter"
        )
    found, names = [], "".join(f"{name:>7}" for name in RATIOS)
    for scenario in SCENARIOS:
        show(f"\n{scenario.name}\ndevices jitter{names} required")
        for row in rows(scenario):
            marks = {name: "!" if name in row.missed else " " for name in RATIOS}
            cells = "".join(f"{100 * row.shares[name]:6.1f}{marks[name]}" for name in RATIOS)
            required = f"{100 * row.required:.0f}" if row.required else "-"
            show(f"{row.devices:7,} {100 * row.jitter:5.0f}%{cells}{required:>9}")
            found.append(row)
    return found
