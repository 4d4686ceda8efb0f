"""The emulated cluster: its layouts, and that real processes take as long as the simulator says."""

import dataclasses

import pytest

from digen_jax.benchmark.cluster import (
    CASES,
    FRAGMENT,
    Emulated,
    check,
    chosen,
    describe,
)
from digen_jax.benchmark.load import Load
from digen_jax.benchmark.runtime import TimedRun, simulations
from digen_jax.errors import ConfigError
from digen_jax.scheduling.commands import Fragment, Score, Train, Update

RUN = TimedRun(learn=2, steps=3, jitter=0.0)
FOUND = Emulated("1 mesh", (2.0, 4.0), (2.5, 3.5), 1.5, 0.25, 0.5, 0.02, 0.01, Load(0.2, 0.04))


def simulated(case):
    (first, *_) = simulations(case.layout, case.costs(8), case.settings(8), RUN, takers=2)
    return first


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layout_uses_its_tactics_and_waits_long_enough(case):
    report = simulated(case)
    assert (report.tag_share > 0) == case.tag
    assert (report.staleness > 0) == bool(case.staleness)
    assert report.devices == {"trainer": len(case.speeds)} | {
        f"rollout {number}": 1 for number in range(len(case.speeds))
    }
    costs, settings = case.costs(8), case.settings(8)
    # Of all rollout meshes together.
    generation = settings.fragments * FRAGMENT * (costs.generate + costs.decode)
    assert generation / sum(case.speeds) == pytest.approx(8)
    waits, fragment = RUN.waits(costs, settings), Fragment(0, 0)
    for command in (Score(0, fragment, ""), Train(0, "", fragment, 0, False), Update(0, "", 0, 0)):
        assert waits.seconds(command) >= 0.1


def test_training_that_is_faster_than_generation_hides_behind_it():
    """All but what comes before the first fragment and after the last one."""
    case = dataclasses.replace(CASES[1], training=0.1)
    costs = case.costs(8)
    last = FRAGMENT * (costs.deliver + costs.score + 2 * costs.train)
    # The trainer gives weights to two meshes, and then all three to the others.
    apart = 2 * costs.publish + costs.encode + last + costs.update
    assert simulated(case).step_seconds == pytest.approx(8 + apart, rel=0.03)


def test_the_table_has_the_largest_deviation():
    worse = dataclasses.replace(FOUND, case="2 meshes", simulated=(4.0,), load=Load(0.2, 0.06))
    assert FOUND.deviation == pytest.approx(0) and worse.deviation == pytest.approx(-0.25)
    lines = describe([FOUND, worse]).splitlines()
    row = "1 mesh 3.00 3.00 +0.0% 50% 50% 25% 0.50 2.0% 1.0% 24%"
    assert lines[1].split() == row.split() and lines[2].endswith("26% (busy)")
    assert lines[-1] == "The largest deviation is -25.0%, with 2 meshes."
    assert worse.record()["busy"] and worse.record()["deviation"] == worse.deviation


def test_what_cannot_be_run_is_refused():
    assert chosen([]) == list(CASES) and chosen(["2"]) == [CASES[1]]
    with pytest.raises(ConfigError, match="--layouts is '8'"):
        chosen(["8"])
    with pytest.raises(ConfigError, match="--step_seconds must be above 0"):
        check(0.0, RUN)
