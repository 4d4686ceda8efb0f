"""The benchmark as a user runs it: launch/benchmark.py."""

import json
import re

import pytest

from benchmarks.runtime import KINDS
from tests.scripts import run_forked, run_script

SHAPES = "--config=configs/shapes_flow_grpo.py"
ALL = "--config=configs/shapes_algorithms.py"


@pytest.mark.slow
def test_runtime_measures_every_kind_of_layout(tmp_path):
    output = tmp_path / "speed.json"
    few = ("--devices=4", "--ratios=2:1", "--seconds=0.5", "--warm_up=1", "--steps=1")
    done = run_script("benchmark.py", "runtime", *few, f"--output={output}")
    assert done.returncode == 0, done.stderr
    for kind in KINDS:
        assert re.search(rf"^{re.escape(kind)}  .*%  [01].\d\d$", done.stdout, re.MULTILINE)
    (ratio,) = json.loads(output.read_text())["ratios"]
    assert ratio["work"]["generate"] == 2
    assert list(ratio["kinds"]) == list(KINDS)
    assert f" {ratio['kinds']['colocated']['step_seconds']:.3f} " in done.stdout
    # Steps are hardly shorter than their mean waits; with lag a part of them is done in the one before.
    assert all(row["utilisation"] < 1.1 for row in ratio["kinds"].values())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "bound or runtime or peers or asynchrony or algorithms"),
        (("runtim",), "did you mean 'runtime'?"),
        (("runtime", "fast"), "'fast'"),
        (("runtime", "--ratios=1:4,3"), "--ratios: '3'"),
        (("runtime", "--devices=0"), "--devices"),
        (("peers",), "--config"),
        (("peers", SHAPES, "--wide=-1"), "--wide"),
        (("peers", f"{ALL}:awm"), "config.algorithm.name = 'awm'"),
        (("asynchrony", SHAPES, "--workdir=x"), "config.runtime.max_policy_lag"),
        (("algorithms", SHAPES, "--workdir=x"), "shapes_flow_grpo.py has no ALGORITHMS"),
        (("algorithms", ALL, "--workdir=x", "--only=dance"), "did you mean 'dance_grpo'?"),
        (("runtime", "--output=/dev/null"), "--output"),
    ],
)
def test_errors_are_one_line_that_names_the_option(arguments, named):
    done = run_forked("benchmark.py", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmark.py: ") and named in line
