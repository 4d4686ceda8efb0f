"""The emulated cluster: its layouts, its table, and a run on Ray."""

import dataclasses
import importlib.util

import pytest

from benchmarks.cluster import (
    CASES,
    CHUNK,
    Case,
    Emulated,
    chosen,
    describe,
    measure,
)
from benchmarks.runtime import TimedRun, simulations
from benchmarks.waits import Waits
from digen_jax.errors import ConfigError
from digen_jax.scheduling.commands import TRAINER, Chunk, Score, Train, Update

RUN = TimedRun(warm_up=2, steps=3, jitter=0.0)
FOUND = Emulated("1 worker", 3.0, 3.0, 1.5, 0.5, 0.02, 0.01, 0.03, 0.24)


def simulated(case):
    (first, *_) = simulations(case.workers, case.costs(8), case.settings(8), RUN)
    return first


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_worker_has_its_roles_and_waits_long_enough(case):
    report = simulated(case)
    sampling = {one.worker for one in report.intervals if one.kind == "generate"}
    assert (TRAINER in sampling) == case.samples
    assert any(report.ahead) == bool(case.max_policy_lag)
    assert report.devices == {TRAINER: 1} | {
        f"rollout {number}": 1 for number in range(len(case.speeds))
    }
    costs, settings = case.costs(8), case.settings(8)
    # Of all rollout workers together.
    generation = settings.chunks * CHUNK * (costs.generate + costs.decode)
    assert generation / sum(case.speeds) == pytest.approx(8)
    waits, chunk, (home, *_) = Waits(costs, settings), Chunk(0, 0), case.workers
    train, update = Train(0, "", chunk, 0, 0, 0, 1), Update(0, "", 0, 0, ())
    for command in (Score(0, chunk, ""), train, update):
        assert waits.seconds(command, home) >= 0.1


def test_training_that_is_faster_than_generation_hides_behind_it():
    """All but what comes before the first chunk and after the last one."""
    case = dataclasses.replace(CASES[1], training=0.1)
    costs = case.costs(8)
    last = CHUNK * (costs.deliver + costs.score + 2 * costs.train)
    rest = costs.sync + costs.encode + last + costs.update
    assert simulated(case).step_seconds == pytest.approx(8 + rest, rel=0.03)


def test_the_table_has_a_row_of_numbers_for_every_case():
    other = dataclasses.replace(FOUND, case="2 workers", simulated=4.0)
    assert FOUND.deviation == pytest.approx(0) and other.deviation == pytest.approx(-0.25)
    assert len(describe([FOUND, other]).splitlines()) == 3
    shares = ["2.0%", "1.0%", "3.0%", "24.0%"]
    expected = ["2 workers", "3.00", "4.00", "-25.0%", "50%", "38%", "0.50", *shares]
    assert other.cells() == expected


def test_the_cases_are_chosen_by_number():
    assert chosen([]) == list(CASES) and chosen(["2"]) == [CASES[1]]
    with pytest.raises(ConfigError):
        chosen(["8"])


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray not installed")
def test_workers_on_ray_do_the_steps_that_the_simulator_predicts():
    case, steps = Case("2 workers", (1.0, 1.0), 8, max_policy_lag=1), []
    found = measure(case, 2.0, RUN, lambda: steps.append(None))
    assert len(steps) == RUN.warm_up + RUN.steps
    assert found.policy_lag > 0
    # Waits are never shorter than their costs.
    assert found.bound < found.step_seconds and found.simulated < 1.05 * found.step_seconds
    assert min(found.driver, found.worker, found.ray) > 0
