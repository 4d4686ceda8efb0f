"""The benchmark of faults: its comparisons of runs and weights, and the processes that it finds."""

import json
import math
import os
import signal
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kills_train
from benchmarks.fault_injection import Fault
from benchmarks.job import Job, Unexpected, processes, steps
from benchmarks.kills import FaultOutcome, metrics_difference, update_difference
from digen_jax.scheduling.commands import WeightsVersion

LINE = {"seconds/clock": 1.0, "images_per_second": 2.0, "tag_share": 0.0}
# Starts a process that outlives it, prints its number and waits.
PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True).pid, flush=True)
time.sleep(60)
"""


def write(folder, rewards, **more):
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps(LINE | {"step": i, "reward": r} | more) for i, r in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9')
    return folder


def test_runs_are_compared_by_their_lines(tmp_path):
    one, two = write(tmp_path / "one", [1.0, 4.0]), tmp_path / "two"
    assert steps(one) == [1, 2]  # without the torn line
    assert metrics_difference(one, write(two, [1.0, 4.0], tag_share=0.5, utilisation=1.0)) == 0
    assert metrics_difference(one, write(two, [1.02, 4.0])) == pytest.approx(0.02 / 4, rel=0.05)
    assert metrics_difference(one, write(two, [1.0])) == math.inf
    assert metrics_difference(one, write(two, [1.0, 4.0], loss=1.0)) == math.inf


def test_updates_are_compared_by_what_they_change():
    start, end = {"a": np.zeros(3), "b": np.ones(2)}, {"a": np.float64([0, 3, 0]), "b": np.ones(2)}
    assert update_difference(end, end, start) == 0
    other = {"a": end["a"], "b": np.float64([1, 1.3])}
    assert update_difference(other, end, start) == pytest.approx(0.1)


def test_received_weights_that_were_never_sent_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv(kills_train.FOLDER, str(tmp_path))
    sent, received = kills_train.SENT, kills_train.RECEIVED
    first, second = ({"a": jnp.arange(4.0) + i, "b": jnp.ones(2) * i} for i in range(2))
    for version, tree in enumerate((first, second)):
        kills_train.record(sent, WeightsVersion(version), tree)
        copy = {name: np.asarray(leaf) for name, leaf in tree.items()}
        kills_train.record(received, WeightsVersion(version), copy)
    (tmp_path / "killed").write_text(f"{received} 1 0123")
    assert kills_train.compare_hashes(tmp_path) == (2, [])
    kills_train.record(received, WeightsVersion(1), first | {"b": second["b"]})
    kills_train.record(received, WeightsVersion(1, True), second)
    assert kills_train.compare_hashes(tmp_path) == (4, ["1", "1e"])


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_process_that_outlives_its_parent_is_found_and_ended(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    job = Job([str(script)], tmp_path / "run", {})
    job.start()
    try:
        job.wait(job.output, 60, "it has started")
        (tmp_path / "run").mkdir()
        left, parent = int(job.output()), job.driver.pid
        worker = {"process": left, "lost": None}
        status = {
            "process": parent,
            "workers": {"rollout 0": worker, "lost": worker | {"lost": 1.0}},
        }
        (tmp_path / "run" / "status.json").write_text(json.dumps(status))
        assert job.trainer() == parent and job.workers() == {"rollout 0": left}
        assert not job.left()
        with pytest.raises(Unexpected):
            job.wait(lambda: False, 0.2, "never")
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(Unexpected):  # a process is left
            job.wait_for_end(-signal.SIGKILL, 1.0)
        assert [one.pid for one in job.left()] == [left]
        assert job.trainer() is None and not job.workers()
    finally:
        job.close()
    assert left not in [one.pid for one in processes()]


def test_the_table_has_a_row_for_each_kind():
    faults = Fault("b", 1.0, 2.0), Fault("a", None, None), Fault("b", 3.0, 8.0, 0.5)
    shown = FaultOutcome(faults, 60.0, 9, 1e-5, 2e-5, 4, 7).describe()
    rows = [line.split() for line in shown.splitlines()]
    assert ["a", "1", "-", "-", "-"] in rows
    assert ["b", "2", "2.0,", "3.0", "5.0,", "8.0", "0.5,", "0.5"] in rows
