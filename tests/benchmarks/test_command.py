"""The benchmark as a user runs it: launch/benchmark.py."""

import json
import re

import pytest

from benchmarks.variants import KINDS
from tests.scripts import run_forked, run_script

SHAPES = "--config=configs/shapes_flow_grpo.py"
ALL = "--config=configs/shapes_algorithms.py"


@pytest.mark.slow
def test_the_script_measures_every_kind_of_layout(tmp_path):
    output = tmp_path / "speed.json"
    few = ("--devices=4", "--ratios=2:1", "--seconds=0.5", "--warm_up=1", "--steps=1")
    done = run_script("benchmark.py", "runtime", *few, f"--output={output}")
    assert done.returncode == 0, done.stderr
    assert "Waits instead of device work, with a jitter of 20%" in done.stdout
    assert "generate:train 2:1, bound (G + T)/N 0.5" in done.stdout
    for kind in KINDS:
        assert re.search(rf"^{re.escape(kind)}  .*%  [01].\d\d$", done.stdout, re.MULTILINE)
    (ratio,) = json.loads(output.read_text())["ratios"]
    assert ratio["work"]["generate"] == 2
    assert list(ratio["kinds"]) == list(KINDS)
    colocated = ratio["kinds"]["colocated"]
    assert f" {colocated['step_seconds']:.3f} " in done.stdout
    assert "Timer wake-up delay: " in done.stdout
    # Steps are hardly shorter than their mean waits; with lag a part of them is done in the one before.
    assert all(row["utilisation"] < 1.1 for row in ratio["kinds"].values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (),
            "say which one to run: bound or runtime or compute or peers or asynchrony or algorithms",
        ),
        (("runtim",), "the first word is 'runtim'; did you mean 'runtime'?"),
        (("runtime", "fast"), "'fast' belongs to no option"),
        (("runtime", "--ratios=1:4,3"), "--ratios: '3' must be two numbers such as 4:1"),
        (("runtime", "--devices=0"), "--devices must be above 0"),
        (("runtime", "--workers=pol"), "did you mean 'pool'?"),
        (("runtime", "--jitter=2"), "jitter must lie in [0, 1), not be 2.0"),
        (("compute",), "say what to compute, by --config"),
        (("compute", SHAPES, "--rounds=0"), "rounds must be above 0"),
        (("compute", f"{ALL}:awm"), "config.algorithm.name = 'awm' trains final images, but what"),
        (("compute", SHAPES), "config.sampler.chunk = 144 is a whole step of 144 images"),
        (("peers", SHAPES, "--wide=-1"), "--wide must not be below 0"),
        (("peers", f"{ALL}:awm"), "config.algorithm.name = 'awm' trains final images, but the"),
        (("ray", "--commands=0"), "--commands must be above 0"),
        (("asynchrony", SHAPES), "say where its runs may lie, by --workdir"),
        (
            ("asynchrony", SHAPES, "--workdir=x"),
            "config.runtime.max_policy_lag = 0 is no asynchrony",
        ),
        (("algorithms", SHAPES, "--workdir=x"), "shapes_flow_grpo.py has no ALGORITHMS by name"),
        (("algorithms", ALL, "--workdir=x", "--only=dance"), "did you mean 'dance_grpo'?"),
        (
            ("algorithms", "--cells=none.csv", "--workdir=x"),
            "No such file or directory: 'none.csv'",
        ),
        (("algorithms", "--cells=none.csv"), "say where its runs may lie, by --workdir"),
        (("compute", "--config=none.py"), "there is no config file none.py"),
        (("runtime", "--output=/dev/null"), "--output"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence):
    done = run_forked("benchmark.py", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmark.py: ") and sentence in line
