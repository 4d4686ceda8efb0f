"""What the benchmark of faults looks at: lines of metrics, updates, notes of weights, processes that are left."""

import json
import math
import os
import signal
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.benchmark import witness
from digen_jax.benchmark.equality import metrics_off, steps, update_off
from digen_jax.benchmark.fault_injection import Fault
from digen_jax.benchmark.job import Job, Wrong, memory
from digen_jax.benchmark.kills import Outcome
from digen_jax.scheduling.commands import Publication

LINE = {"seconds/clock": 1.0, "images_per_second": 2.0, "tag_share": 0.0}
# Starts a process that would outlive it, and waits; a reward's would not.
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
    assert metrics_off(one, write(two, [1.0, 4.0], tag_share=0.5, utilisation=1.0)) == 0
    assert metrics_off(one, write(two, [1.02, 4.0])) == pytest.approx(0.02 / 4, rel=0.05)
    assert metrics_off(one, write(two, [1.0])) == math.inf
    assert metrics_off(one, write(two, [1.0, 4.0], loss=1.0)) == math.inf


def test_updates_are_compared_by_what_they_change():
    start, end = {"a": np.zeros(3), "b": np.ones(2)}, {"a": np.float64([0, 3, 0]), "b": np.ones(2)}
    assert update_off(end, end, start) == 0
    other = {"a": end["a"], "b": np.float64([1, 1.3])}
    assert update_off(other, end, start) == pytest.approx(0.1)


def test_weights_that_were_never_published_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv(witness.FOLDER, str(tmp_path))
    first, second = ({"a": jnp.arange(4.0) + i, "b": jnp.ones(2) * i} for i in range(2))
    for version, tree in enumerate((first, second)):
        witness.note(witness.GIVEN, Publication(version), tree)
        witness.note(
            witness.TAKEN, Publication(version), {k: np.asarray(v) for k, v in tree.items()}
        )
    with (tmp_path / "killed").open("w") as file:
        file.write("taken 1 0123")
    assert witness.torn(tmp_path) == (2, [])
    witness.note(witness.TAKEN, Publication(1), first | {"b": second["b"]})
    witness.note(witness.TAKEN, Publication(1, True), second)
    assert witness.torn(tmp_path) == (4, ["1", "1e"])


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_process_that_outlives_its_parent_is_found_and_ended(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    job = Job([script], tmp_path / "said", 1)
    try:
        trainer, rollout = job.start("trainer"), job.start("rollout 0")
        job.wait(lambda: all(one.said() for one in (trainer, rollout)), 20, "both have begun")
        assert not job.orphans() and len(job.living()) == 4
        assert memory(trainer.process.pid) > 2**20
        rollout.signal(signal.SIGKILL)
        assert rollout.ends(60) == -signal.SIGKILL
        left = int(rollout.said())
        assert job.orphans() == [left]
        with pytest.raises(Wrong, match=f"processes are left: \\[{left}\\]"):
            job.check_no_orphans(0.2)
        with pytest.raises(Wrong, match="trainer has not ended in"):
            trainer.ends(0.1)
        begin = time.monotonic()
        with pytest.raises(Wrong, match=r"not in 0.2 s: never"):
            job.wait(lambda: False, 0.2, "never")
        assert time.monotonic() - begin < 60
    finally:
        job.close()
    for _ in range(100):
        if not job.living():
            break
        time.sleep(0.05)
    assert not job.living()
    with pytest.raises(ProcessLookupError):
        os.kill(trainer.process.pid, 0)


def test_the_table_has_a_row_for_each_kind():
    faults = Fault("b", 1.0, 2.0), Fault("a", None, None), Fault("b", 3.0, 8.0, 0.5)
    shown = Outcome(faults, 60.0, 9, 1e-5, 2e-5, 4, 7, {"the leader": 2**20}).describe()
    rows = [line.split() for line in shown.splitlines()]
    assert ["a", "1", "-", "-"] in rows and ["b", "2", "2.0,", "3.0", "5.0,", "8.0"] in rows
    assert "the leader: at most 1 MiB." in shown and "after at most 0.5 s" in shown
