"""Runs with rollout workers in processes of their own: a full disk, and memory over many steps."""

import time

import numpy as np
import pytest

from digen_jax.benchmark.equality import lines, steps
from digen_jax.benchmark.job import Job, memory
from digen_jax.process.ending import STOPPED
from tests.pipelines import ROOT, environment
from tests.run.faulty_config import ROLLOUTS
from tests.run.test_resuming import fill, small_disk  # noqa: F401
from tests.tiny_runs import pipeline, prompt_file

pytestmark = pytest.mark.slow
CONFIG = ROOT / "tests" / "run" / "faulty_config.py"
LONG = 120.0  # seconds for a start, and for a step
SLOW = "0.3"  # seconds of the reward, so that something can happen in a step
LAST = 6


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


@pytest.fixture
def job(variables, tmp_path, monkeypatch):
    """Makes a job, whose workdir may be given."""
    monkeypatch.chdir(ROOT)
    jobs = []

    def make(workdir=None, **more: str) -> Job:
        where = workdir or tmp_path / "run"
        options = f"--config={CONFIG}", f"--workdir={where}", f"--config.steps={LAST}"
        command = ["-m", "launch.train", *options]
        found = Job(command, tmp_path / f"said {len(jobs)}", ROLLOUTS, variables | more)
        found.workdir = where
        jobs.append(found)
        return found

    yield make
    for one in jobs:
        one.close()
        assert not one.living()


def test_a_full_disk_of_the_leader_ends_all_and_the_same_command_goes_on(job, small_disk):  # noqa: F811
    job = job(small_disk / "run")
    job.start_all()
    meshes = job.meshes()
    job.wait(lambda: all(one.ready for one in meshes), LONG, "all are ready")
    job.wait(lambda: len(steps(job.workdir)) >= 2, LONG, "two steps are done")
    fill(small_disk)
    assert job.leader.ends(LONG) == STOPPED, job.tails()
    assert [one.ends(LONG) for one in meshes] == [0, 0], job.tails()
    job.check_no_orphans()
    # Orbax and TensorStore may print errors of their own around it.
    (sentence,) = [one for one in job.leader.said().splitlines() if one.startswith("train.py: ")]
    assert "make room, and the same command continues" in sentence, job.tails()
    (small_disk / "ballast").unlink()
    job.start_all()
    assert [one.ends(LONG) for one in (job.leader, *job.meshes())] == [0] * 3, job.tails()
    job.check_no_orphans()
    assert steps(job.workdir) == [*range(1, LAST + 1)]


def test_the_memory_of_leader_and_rollout_stays_over_many_steps(job):
    job = job(SLOW="0")
    job.start_all(
        *("--config.steps=121", "--config.checkpoint.every=50", "--config.checkpoint.keep=2"),
        *("--config.sampler.fragment=4", "--config.batch.groups=1", "--config.sampler.steps=2"),
        "--config.sampler.window.length=1",
    )
    watched = [job.leader, *job.meshes()]
    sizes = []
    while (done := len(steps(job.workdir))) < 120:
        assert all(one.alive for one in watched), job.tails()
        if done >= 40:
            sizes.append((done, *(memory(one.process.pid) / 2**20 for one in watched)))
        time.sleep(0.25)
    number, *columns = np.transpose(sizes)
    assert number[-1] - number[0] > 60
    for one, column in zip(watched, columns, strict=True):
        slope = np.polyfit(number, column, 1)[0]
        print(f"{one.name}: {column[-1]:.0f} MiB, {1024 * slope:.0f} KiB a step")
        assert slope * 150 < 0.05 * column[0], (one.name, slope, column)
    assert job.leader.ends(LONG) == 0 and lines(job.workdir)
