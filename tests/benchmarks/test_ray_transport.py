"""Ray as measured on one machine."""

import importlib.util
import json

import pytest

from tests.scripts import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray not installed"),
]


def test_everything_is_measured(tmp_path):
    output = tmp_path / "ray.json"
    sizes = "--commands=20", "--megabytes=1,4", "--idle_seconds=1"
    done = run_script("benchmark.py", "ray", *sizes, f"--output={output}")
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    weights = found.pop("weights_seconds")
    assert set(weights) == {"1", "4"} and min(weights.values()) > 0
    assert found.pop("idle_share") >= 0  # in ticks of the clock
    assert set(found) == {
        "command_milliseconds",
        "commands_per_second",
        "ray_seconds",
        "actor_seconds",
        "idle_mebibytes",
    }
    assert min(found.values()) > 0
