"""Runs whose meshes have processes of their own, in which something is slow, cut off, lost, full or strange.

What they end with is what a run of one process has, up to rounding.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from digen_jax.benchmark.equality import lines, metrics_off, steps, tuned, update_off
from digen_jax.benchmark.job import Job, memory
from digen_jax.process.ending import STOPPED
from tests.pipelines import ROOT, environment
from tests.remote.test_partition import host  # noqa: F401
from tests.run.faulty_config import ROLLOUTS
from tests.run.test_resuming import fill, small_disk  # noqa: F401
from tests.tiny_runs import pipeline, prompt_file

pytestmark = pytest.mark.slow
CONFIG = ROOT / "tests" / "run" / "faulty_config.py"
LONG = 120.0  # seconds for a start, and for a step
SLOW = "0.3"  # seconds of the reward, so that something can happen in a step
LAST = 12


@pytest.fixture(scope="module")
def variables(base) -> dict[str, str]:
    pipeline(base), prompt_file(base)
    return environment(
        1,
        BASE=str(base),
        SLOW=SLOW,
        PYTHONPATH=str(ROOT),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )


@pytest.fixture(scope="module")
def unbroken(variables, tmp_path_factory):
    """(the workdir of a run of one process, what is tuned after its first step)."""
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    options = [f"--config={CONFIG}", f"--workdir={workdir}", "--config.placement.rollout.data=0"]
    for count in (1, LAST):
        command = [sys.executable, "-m", "launch.train", *options, f"--config.steps={count}"]
        done = subprocess.run(command, cwd=ROOT, env=variables | {"SLOW": "0"}, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        if count == 1:
            first = tuned(workdir)
    return workdir, first


@pytest.fixture
def job(variables, tmp_path, monkeypatch):
    """Makes a job: its workdir may be given; a module other than launch.train, too."""
    monkeypatch.chdir(ROOT)
    jobs = []

    def make(workdir=None, module="launch.train", **more: str) -> Job:
        where = workdir or tmp_path / "run"
        command = ["-m", module, f"--config={CONFIG}", f"--workdir={where}"]
        found = Job(command, tmp_path / f"said {len(jobs)}", ROLLOUTS, variables | more)
        found.workdir = where
        jobs.append(found)
        return found

    yield make
    for one in jobs:
        one.close()
        assert not one.living()


def wait_for(job: Job, count: int) -> None:
    job.wait(lambda: len(steps(job.workdir)) >= count, LONG, f"step {count} ends")


def begin(job: Job, count: int = 2) -> Job:
    """Starts all its processes, and waits until all take part and some steps are done."""
    job.start_all()
    job.wait(lambda: all(one.ready for one in job.meshes()), LONG, "all are ready")
    wait_for(job, count)
    return job


def assert_ends_well(job: Job, unbroken) -> str:
    """All processes end with 0, none is left, and the run is the one without faults; returns what the leader said."""
    others = job.meshes()
    assert job.leader.ends(LONG) == 0, job.tails()
    assert [one.ends(15) for one in others] == [0] * len(others), job.tails()
    job.check_no_orphans()
    assert not [said for one in job.now.values() if "Traceback" in (said := one.said())]
    assert_same(job, unbroken)
    return job.leader.said()


def assert_same(job: Job, unbroken) -> None:
    workdir, first = unbroken
    assert steps(job.workdir) == [*range(1, LAST + 1)]
    assert metrics_off(job.workdir, workdir) < 1e-3
    assert update_off(tuned(job.workdir), tuned(workdir), first) < 1e-3


def test_a_mesh_whose_reward_process_dies_is_not_lost(job, unbroken):
    job = begin(job())
    process, killed = job.now["rollout 1"], 0
    while "died in its process (SIGKILL)" not in process.said():  # one that was idle is not missed
        assert job.leader.alive, job.tails()
        for one in job.rewards(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
                killed += 1
        time.sleep(1)
    said = assert_ends_well(job, unbroken)
    assert killed and "it is asked again" in said and "given up" not in said


# ------------------------------------------------------------------------------------ the network


# --------------------------------------------------------------------------------------- the disk


def test_a_full_disk_of_the_leader_ends_all_and_the_same_command_goes_on(job, unbroken, small_disk):  # noqa: F811
    job = begin(job(small_disk / "run"))
    meshes = job.meshes()
    fill(small_disk)
    assert job.leader.ends(LONG) == STOPPED, job.tails()
    assert [one.ends(15) for one in meshes] == [0, 0], job.tails()
    job.check_no_orphans()
    # Orbax and TensorStore may print errors of their own around it.
    (sentence,) = [one for one in job.leader.said().splitlines() if one.startswith("train.py: ")]
    assert "make room, and the same command continues" in sentence, job.tails()
    (small_disk / "ballast").unlink()
    job.start_all()
    assert_ends_well(job, unbroken)


# ------------------------------------------------------------------------------------- the memory


def test_the_memory_of_leader_and_rollout_stays_over_200_steps(job):
    job = job(SLOW="0")
    job.start_all(
        *("--config.steps=201", "--config.checkpoint.every=50", "--config.checkpoint.keep=2"),
        *("--config.sampler.fragment=4", "--config.batch.groups=1", "--config.sampler.steps=2"),
        "--config.sampler.window.length=1",
    )
    watched = [job.leader, *job.meshes()]
    sizes = []
    while (done := len(steps(job.workdir))) < 200:
        assert all(one.alive for one in watched), job.tails()
        if done >= 50:
            sizes.append((done, *(memory(one.process.pid) / 2**20 for one in watched)))
        time.sleep(0.25)
    number, *columns = np.transpose(sizes)
    assert number[-1] - number[0] > 120
    for one, column in zip(watched, columns, strict=True):
        slope = np.polyfit(number, column, 1)[0]
        print(f"{one.name}: {column[-1]:.0f} MiB, {1024 * slope:.0f} KiB a step")
        assert slope * 150 < 0.03 * column[0], (one.name, slope, column)
    assert job.leader.ends(LONG) == 0 and lines(job.workdir)
