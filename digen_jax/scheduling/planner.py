"""Chooses the workers of a pool by running the scheduler on a virtual clock.

It enumerates the layouts of a problem, prunes them by a lower bound, and ranks the others by simulation.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from digen_jax.errors import ConfigError
from digen_jax.scheduling.commands import SAMPLE, TRAIN, bubbles
from digen_jax.scheduling.layouts import (
    DeviceBytes,
    PoolLayout,
    Problem,
    device_bytes,
    divisors,
    fits_memory,
)
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WARM_UP, Disturbance, WorkerLayout, simulate

STEADY = 16  # simulated steps in the steady state
CHUNKS = 128  # per simulated step; a larger problem is simulated as an equal part of it
SIMULATED = 2_700  # chunks per simulation, over all steps: a larger problem has fewer steps
WORK = 40_000  # chunks of all simulations in a search, about 10 seconds
TABLE = 5_000  # chunks of simulations for a kind of layout that is only in the table
SPLITS = 64  # splits of the devices between workers that only sample and others
NOTHING = 3e-3  # share of a step: smaller gains do not justify another worker, role or lag


def layouts(
    problem: Problem, runs: Callable[[PoolLayout], bool] = lambda layout: True
) -> list[PoolLayout]:
    """Returns all layouts that use every device, fit into memory and satisfy `runs`.

    For each training worker only the mesh with the fastest training that fits is included.

    Raises:
      ConfigError: No layout is possible.
    """
    allowed = [[one for one in shapes if runs(one)] for shapes in _shapes(problem)]
    if not any(allowed):
        raise ConfigError(
            f"no workers of {problem.devices} devices can split config.sampler.chunk, config.trainer.micro_batch "
            "and config.evaluation.batch: make these multiples of the devices, or change axes of config.placement"
        )
    first = (next((c for c in shapes if fits_memory(problem, c)), None) for shapes in allowed)
    found = [layout for layout in first if layout]
    if not found:
        needed = min(device_bytes(problem, one).largest for shapes in allowed for one in shapes)
        raise ConfigError(
            f"parameters, optimizer state and samples need {needed / 1e9:.1f} GB of a device, which has "
            f"{(problem.device_memory or 0) / 1e9:.1f}, on every placement of {problem.devices} devices: use more "
            "devices, or settings that need less memory, which launch/plan.py --topology tries"
        )
    return found


def _shapes(problem: Problem) -> Iterator[list[PoolLayout]]:
    """Yields, for each division of the devices into workers, the training workers' meshes, the fastest first."""
    total, settings = problem.devices, problem.settings
    grid = min(d for d in divisors(total) if d >= total / SPLITS)
    lags = range(1 + (settings.max_policy_lag if settings.off_policy_units else 0))
    axes = {
        "shared": problem.trainer_tensor * problem.trainer_sequence,
        "rollout_shared": problem.worker_tensor * problem.worker_sequence,
    }
    for part in range(0, total, grid):
        for size, workers in itertools.product(divisors(part or 1), divisors(total - part)):
            parts, rest = divmod(size if part else 0, axes["rollout_shared"])
            if rest or (parts and not problem.worker.fits(parts)):
                continue
            rollout = {"rollout": part // size, "rollout_devices": size} if part else {}
            for samples, lag in itertools.product((True, False) if part else (True,), lags):
                fields = {"samples": samples, "lag": lag, **rollout, **axes}
                yield _meshes(problem, workers, (total - part) // workers, fields)


def _meshes(problem: Problem, workers: int, size: int, fields: dict) -> list[PoolLayout]:
    """Returns the meshes of workers of `size` devices, sorted by speed; ties prefer meshes that split images."""
    parts, rest = divmod(size, fields["shared"])
    times = [t for t in divisors(parts or 1) if t <= problem.transitions and not rest]
    found = [
        PoolLayout(workers, size, t, **fields) for t in times if problem.trainer.fits(parts // t)
    ]
    return sorted(found, key=lambda one: (_train(problem, one), one.time))


def _train(problem: Problem, layout: PoolLayout) -> float:
    """Returns the seconds of training an image. Steps that `time` does not divide are padded."""
    longest = math.ceil(problem.transitions / layout.time)
    devices = layout.data * layout.shared * problem.transitions / longest
    return problem.costs.train * problem.trainer.seconds(devices)


def _sampling(problem: Problem, layout: PoolLayout) -> tuple[float, float]:
    """Returns sampling seconds, relative to one device, on a training worker and on a worker that only samples."""
    scaling = problem.worker
    own = scaling.seconds(scaling.used(layout.devices // layout.shared) * layout.shared)
    return own, scaling.seconds(layout.rollout_devices) if layout.rollout else math.inf


def settings_of(problem: Problem, layout: PoolLayout) -> Settings:
    """Returns the scheduler's settings for a layout."""
    given = problem.settings
    passes = given.passes
    if layout.time > 1:  # a pass packs at least `time` steps of a micro-batch
        batches = given.chunk_images // (problem.trainer.images or 1)
        passes = min(passes, batches * math.ceil(problem.transitions / layout.time))
    pulled = layout.lag or (layout.samples and layout.rollout)
    ordered = given.ordered and not pulled
    return dataclasses.replace(given, max_policy_lag=layout.lag, ordered=ordered, passes=passes)


def workers_of(problem: Problem, layout: PoolLayout) -> tuple[tuple[WorkerLayout, ...], Costs]:
    """Returns the workers with their speeds, the home worker first, and the costs on a worker of speed 1."""
    (own, other), size = _sampling(problem, layout), layout.rollout_devices
    # The simulator divides by devices and speed. The speed is the sampling speed; training costs are adapted to it.
    speed, costs = 1 / own / layout.devices, problem.costs
    changes = {"train": _train(problem, layout) / own, "update": costs.update * speed}
    roles = ((TRAIN, SAMPLE) if layout.rollout else (SAMPLE, TRAIN)) if layout.samples else (TRAIN,)
    workers = (WorkerLayout(layout.devices, roles, speed),) * layout.workers
    if layout.rollout:
        workers += (WorkerLayout(size, (SAMPLE,), 1 / other / size),) * layout.rollout
    return workers, dataclasses.replace(costs, **changes)


def _part(problem: Problem, layout: PoolLayout) -> tuple[Problem, PoolLayout, int]:
    """Returns a smaller problem, its layout, and the factor by which its step is shorter.

    It has fewer workers with the same work for each, or less work for each with proportionally smaller costs per step.
    """
    settings, given, costs = settings_of(problem, layout), problem.settings, problem.costs
    workers, excess = layout.workers + layout.rollout, settings.chunks / CHUNKS
    units = math.gcd(settings.groups, settings.set_units)
    both = math.gcd(units, layout.workers, layout.rollout)
    fewer = max(d for d in divisors(both) if d <= max(1, min(excess, workers / 8)))
    most = min(excess / fewer, settings.chunks / workers / 32)
    less = max(d for d in divisors(units // fewer) if d <= max(1, most))
    scorers = math.ceil(problem.scorers / fewer)
    of_step = "update", "sync", "encode", "score_latency"
    changes = {name: getattr(costs, name) / less for name in of_step}
    changes["score"] = costs.score * (scorers * fewer / problem.scorers if scorers else 1)
    names = "groups", "max_candidates", "oversampled_groups"
    counts = {name: math.ceil(getattr(given, name) / (fewer * less)) for name in names}
    settings, costs = dataclasses.replace(given, **counts), dataclasses.replace(costs, **changes)
    numbers: dict = {"workers": layout.workers // fewer, "rollout": layout.rollout // fewer}
    part = dataclasses.replace(problem, settings=settings, costs=costs, scorers=scorers)
    part = dataclasses.replace(part, devices=problem.devices // fewer)
    return part, dataclasses.replace(layout, **numbers), less


def lower_bound(problem: Problem, layout: PoolLayout) -> float:
    """Returns a lower bound of the mean step seconds in the steady state."""
    settings, costs = settings_of(problem, layout), problem.costs
    scales = _sampling(problem, layout)
    workers, chunk, count = layout.workers, settings.chunk_images, settings.chunks
    own, other = (max(1e-12, (costs.generate + costs.decode) * chunk * scale) for scale in scales)
    own = own if layout.samples else math.inf
    train, score = _train(problem, layout) * chunk, costs.seconds("score", chunk)
    rate = workers / own + layout.rollout / other

    def busy(others: float) -> float:
        """Returns the seconds if generation, training and `others` of training workers are divided optimally."""
        trained = count * train + others
        return max(trained / workers, (trained / own + count) / rate)

    def sampled(number: int) -> float:
        """Returns the seconds until `number` chunks are sampled."""
        if layout.samples and layout.rollout:
            return max(number / rate, min(own, other))
        return math.ceil(number / (layout.rollout or workers)) * min(own, other)

    spread = 1 if settings.ordered else workers
    last = math.ceil(settings.passes / spread) * train / settings.passes
    start = 0.0 if layout.samples else costs.sync
    found = [count * score / problem.scorers if problem.scorers else 0.0]
    if layout.lag:
        late = count - settings.off_policy_units * settings.unit_chunks
        path = start + sampled(late) + score + last + costs.update
        return max(*found, busy(settings.updates * costs.update), path if late > 0 else 0.0)
    # Without lag no worker has work during the last update, and only the home worker during weight sync.
    updates = (settings.updates - 1) * costs.update
    slow = busy(updates + (workers - 1) * costs.sync)
    found += [busy(updates), slow if slow >= costs.sync else 0.0]
    start += costs.encode * min(scales)
    gate = count if settings.step_first else 1 if settings.early else settings.unit_chunks
    found += [start + sampled(count) + score + last]
    found += [start + sampled(gate) + score + count * train / workers]
    return costs.update + max(found)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A simulated layout."""

    layout: PoolLayout
    step_seconds: float  # of the steady state
    images_per_device_second: float  # trained
    utilisation: float  # the bound (G + T)/N, with linear scaling, over the step seconds
    bubbles: dict[str, float]  # share of all devices' time spent waiting, by cause
    memory: DeviceBytes | None  # per device, if the footprint is known


class Simulations:
    """Cache of predictions; `work` counts the chunks that were simulated for them."""

    def __init__(self, problem: Problem):
        self.problem, self.work = problem, 0
        self.known: dict[PoolLayout, Prediction] = {}

    def predict(self, layout: PoolLayout) -> Prediction:
        """Returns the prediction for a layout, simulating it only once."""
        if layout in self.known:
            return self.known[layout]
        problem, (part, smaller, less) = self.problem, _part(self.problem, layout)
        settings, (workers, costs) = settings_of(part, smaller), workers_of(part, smaller)
        # The steady state excludes the first steps and the last one.
        steps = WARM_UP + 1 + min(STEADY, max(2, SIMULATED // settings.chunks - WARM_UP - 1))
        report = simulate(workers, costs, settings, steps, Disturbance(scorers=part.scorers))
        self.work += steps * settings.chunks
        waits = bubbles(report.intervals, report.devices)
        seconds, spent = report.step_seconds * less, report.step_ends[-1] * part.devices
        self.known[layout] = Prediction(
            layout,
            seconds,
            problem.settings.groups * problem.settings.images / seconds / problem.devices,
            problem.bound / seconds,
            {cause: idle / spent for cause, idle in waits.items() if cause != "end"},
            device_bytes(problem, layout) if problem.footprint else None,
        )
        return self.known[layout]


def search(simulations: Simulations, found: Sequence[PoolLayout], work: int = WORK) -> Prediction:
    """Returns the simplest layout among the nearly fastest ones.

    Layouts are simulated in the order of their bounds, corrected by the excess over the bound of the last layout of the
    same kind, until no bound is below the best step, or `work` is used up.
    """
    bounds = {layout: lower_bound(simulations.problem, layout) for layout in found}
    left: dict[str, list[PoolLayout]] = {}
    for layout in sorted(found, key=lambda one: (bounds[one], _effort(one)), reverse=True):
        left.setdefault(layout.kind, []).append(layout)
    beyond, best, last = dict.fromkeys(left, 1.0), math.inf, simulations.work + work
    while left and (simulations.work < last or best == math.inf):
        kind = min(
            left, key=lambda one: (bounds[left[one][-1]] * beyond[one], _effort(left[one][-1]))
        )
        layout = left[kind].pop()
        if not left[kind] or bounds[layout] >= best * (1 - NOTHING):
            del left[kind]
        if bounds[layout] < best * (1 - NOTHING):
            seconds = simulations.predict(layout).step_seconds
            beyond[kind], best = seconds / bounds[layout], min(best, seconds)
    return simplest([simulations.known[one] for one in found if one in simulations.known])


def simplest(predictions: Sequence[Prediction]) -> Prediction:
    """Returns the prediction with the least lag, fewest kinds of workers and fewest workers of the nearly fastest."""
    best = min(one.step_seconds for one in predictions) * (1 + NOTHING)
    near = [one for one in predictions if one.step_seconds <= best]
    return min(near, key=lambda one: (_effort(one.layout), one.step_seconds))


def _effort(layout: PoolLayout) -> tuple[int, bool, int]:
    return layout.lag, layout.rollout > 0, layout.workers + layout.rollout


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of the search."""

    problem: Problem
    choice: Prediction
    best: tuple[Prediction, ...]  # of every kind of layout (`PoolLayout.kind`), the fastest first
    layouts: int  # number of layouts
    simulated: int  # number of simulated layouts


def make_plan(problem: Problem, runs: Callable[[PoolLayout], bool] = lambda layout: True) -> Plan:
    """Searches all layouts that satisfy `runs`; the table has the fastest simulated layout of each kind.

    Raises:
      ConfigError: No layout can work.
    """
    found, simulations = layouts(problem, runs), Simulations(problem)
    search(simulations, found)
    kinds: dict[str, list[PoolLayout]] = {}
    for layout in found:
        kinds.setdefault(layout.kind, []).append(layout)
    for same in kinds.values():
        if not any(layout in simulations.known for layout in same):
            search(simulations, same, TABLE)
    predictions = list(simulations.known.values())
    choice = simplest(predictions)
    rows = [simplest([one for one in predictions if one.layout.kind == kind]) for kind in kinds]
    rows = [choice if row.layout.kind == choice.layout.kind else row for row in rows]
    rows.sort(key=lambda row: row.step_seconds)
    return Plan(problem, choice, tuple(rows), len(found), len(predictions))
