"""Two random faults in a run of several processes; launch/benchmark.py kills has a hundred."""

import sys

import pytest

from digen_jax.benchmark.kills import TOLERANCE, compare
from tests.pipelines import ROOT, environment
from tests.tiny_runs import pipeline, prompt_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc"),
]


def test_two_random_faults_leave_nothing_and_change_nothing(base, tmp_path, monkeypatch):
    pipeline(base), prompt_file(base)
    monkeypatch.chdir(ROOT)
    variables = environment(
        1,
        BASE=str(base),
        SLOW="0",
        PYTHONPATH=str(ROOT),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    told: list[str] = []
    found = compare(
        "tests/run/faulty_config.py",
        {"trainer.learning_rate": 3.0, "sampler.window.length": 2},
        tmp_path / "kills",
        kills=2,
        seed=3,
        told=told.append,
        environment=variables,
    )
    assert len(found.faults) == len(told) == 2 and found.steps > 2
    assert max(found.metrics, found.update) < TOLERANCE
    assert found.taken > found.steps and found.starts > 2
    print(found.describe())
