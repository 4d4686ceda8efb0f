"""A run in the processes that launch/cluster.py starts, as docs/several-hosts.md has it."""

import os
import signal
import subprocess
import sys

import pytest

from digen_jax.records.status import read_status
from tests.pipelines import ROOT
from tests.processes import begin  # noqa: F401
from tests.run.test_apart import CONFIG, Job, assert_same_run, job, printed, unbroken, wait_for  # noqa: F401

pytestmark = pytest.mark.slow


def test_a_job_whose_leader_is_killed_is_started_again_and_ends_as_one_process(job, unbroken):  # noqa: F811
    made: Job = job()
    made.hold(2)
    command = "launch/train.py", f"--config={CONFIG}", f"--workdir={made.workdir}"
    given = dict(BASE=str(made._base), HOLDS=str(made.holds))
    started = made._start(
        "launch.cluster", 1, (), ["-n", "3", "--restarts=2", "--", *command], **given
    )
    made.begun.append(started)
    made.held(2)
    wait_for(lambda: (made.workdir / "checkpoints" / "1").exists())  # it is saved beside step 2
    wait_for(lambda: read_status(made.workdir)["step"] == 1)
    script = [sys.executable, "launch/status.py", f"--workdir={made.workdir}"]
    shown = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = " ".join(shown.split())  # lines are broken
    assert "1 of 4 steps are done" in words and "it still has the workdir" in words
    assert all(f"\n{name}" in shown for name in ("trainer", "rollout 0", "rollout 1")), shown
    os.kill(read_status(made.workdir)["process"], signal.SIGKILL)
    made.release(2)
    (errors,) = made.ends(0)
    said = printed(started)
    assert "the whole job is started again (1 of 2)" in errors
    assert any(line.startswith("[0] continuing after step 1") for line in said), said
    assert any(line.startswith("[1] rollout 0 is ready") for line in said)
    assert_same_run(made.workdir, unbroken)
