"""Meshes of two processes each, started by launch/train.py: as one process with all devices, and lost as a whole."""

import re
import signal

import pytest

from digen_jax.process.ending import STOPPED
from tests.remote.processes import begin  # noqa: F401
from tests.remote.test_control import certificates  # noqa: F401
from tests.run.test_apart import LONG, Job, assert_same_run, job, start_in  # noqa: F401

pytestmark = pytest.mark.slow
# A trainer of two devices in two processes, whose parameters are split over both; one such rollout mesh.
WIDE = (
    "--config.placement.rollout.workers=1",
    "--config.placement.rollout.fsdp=2",
    "--config.placement.trainer.fsdp=2",
    "--config.placement.rules=(('.*', 'fsdp'),)",
)


@pytest.fixture(scope="module")
def unbroken(base, tmp_path_factory):
    """The workdir of a run of one process with four devices."""
    from tests.run.test_apart import pipeline, prompt_file

    pipeline(base), prompt_file(base)
    folder = tmp_path_factory.mktemp("wide")
    alone = Job(lambda *given, **named: start_in(folder, *given, **named), base, folder, *WIDE)
    alone.begin(devices=4)
    alone.ends(0)
    return alone.workdir


def test_meshes_may_share_one_job_of_jax(job, unbroken):  # noqa: F811
    """As on a TPU slice, with two processes for each mesh. It ends with each of its processes, and continues."""
    made = job("--one_job", *WIDE, processes=4, trainers=2)
    made.hold(3)
    leader, *others = made.together()
    made.held(3)
    others[-1].signal(signal.SIGKILL)
    made.release(3)
    codes = [one.ends(LONG)[0] for one in made.begun]
    # A process that samples is told that the run ends, unless it notices the loss before.
    assert codes[:2] == [STOPPED] * 2 and codes[3] == -signal.SIGKILL, codes
    assert codes[2] in (0, STOPPED)
    assert "all meshes are one job of JAX: start the same command" in leader.errors.read_text()
    made.begun.clear()
    made.together()
    made.ends(0, 0, 0, 0)
    assert_same_run(made.workdir, unbroken)


def begin_mesh(made: Job) -> list:
    """The two processes of the rollout mesh."""
    place = f"--coordinator=127.0.0.1:{made.port}", "--processes=4"
    nowhere = made.holds / "nowhere"
    return [made.begin(*place, f"--process={number}", workdir=nowhere) for number in (2, 3)]


def begin_all(made: Job) -> list:
    """The trainer's two processes, and two that sample."""
    place = f"--coordinator=127.0.0.1:{made.port}", "--processes=4"
    return [made.begin(*place, f"--process={number}") for number in (0, 1)] + begin_mesh(made)


def test_a_lost_process_costs_its_mesh_which_comes_again(job, unbroken, certificates):  # noqa: F811
    """By TLS: the first process, at which the mesh's processes meet."""
    files = vars(certificates[0])
    made = job(*WIDE, *(f"--tls_{name}={path}" for name, path in files.items()))
    made.hold(2)
    *trainer, killed, other = begin_all(made)
    trainer[0].until("rollout 0 joins")
    made.held(2)
    killed.signal(signal.SIGKILL)
    code, errors = other.ends(LONG)
    # By the leader's word, or by JAX, which may notice the loss before.
    assert code == STOPPED and re.search("start it again|start the same command", errors)
    assert "Traceback" not in errors
    other.leaves_nothing(), killed.leaves_nothing()
    made.begun = list(trainer)
    begin_mesh(made)
    trainer[0].until("rollout 0 joins")
    made.release(2)
    made.ends(0, 0, 0, 0)
    assert_same_run(made.workdir, unbroken)


def test_a_lost_process_of_the_trainer_ends_the_job_which_continues(job, unbroken):  # noqa: F811
    """The one that does not lead, before common work."""
    made = job(*WIDE)
    made.hold(3)
    _, lost, *_ = begin_all(made)
    made.held(3)
    lost.signal(signal.SIGKILL)
    made.release(3)
    first, _, *others = made.ends(STOPPED, -signal.SIGKILL, STOPPED, STOPPED)
    assert "trainer has lost process 1, which has lost its connection" in first
    assert all("continues from the last checkpoint" in text for text in (first, *others))
    begin_all(made)
    made.ends(0, 0, 0, 0)
    assert_same_run(made.workdir, unbroken)
