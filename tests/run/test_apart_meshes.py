"""Meshes of two processes each, started by launch/train.py: as one process with all devices, and lost as a whole."""

import re
import signal
import time

import pytest

from digen_jax.process.ending import STOPPED
from tests.remote.processes import begin  # noqa: F401
from tests.remote.test_control import certificates  # noqa: F401
from tests.run.test_apart import Job, assert_same_run, job, printed, start_in, wait_for  # noqa: F401

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


@pytest.mark.parametrize("processes", [3, 4])
def test_meshes_may_share_one_job_of_jax(job, unbroken, request, processes):  # noqa: F811
    """As on a TPU slice, with a process for each mesh, or two. It ends with each of its processes, and continues."""
    wide, trainers = processes == 4, processes - 2
    made = job("--one_job", *(WIDE if wide else ()), processes=processes, trainers=trainers)
    made.hold(3)
    leader, *others = made.together()
    made.held(3)
    others[-1].signal(signal.SIGKILL)
    made.release(3)
    codes = [one.ends(30)[0] for one in made.begun]
    # A process that samples is told that the run ends, unless it notices the loss before.
    assert codes[:trainers] == [STOPPED] * trainers and codes[-1] == -signal.SIGKILL, codes
    assert set(codes[trainers:-1]) <= {0, STOPPED}
    assert "all meshes are one job of JAX: start the same command" in leader.errors.read_text()
    made.begun.clear()

    made.hold(4)
    leader, *others = made.together()
    made.held(4)
    if wide:
        others[-1].signal(signal.SIGTERM)
        wait_for(lambda: "leaving at the end of this step" in others[-1].errors.read_text())
        time.sleep(5)  # until the leader knows
        made.release(4)
        made.ends(*[128 + signal.SIGTERM] * trainers, 0, 0)
        assert "Stopped and saved after step" in printed(leader)[-1]
    else:
        leader.signal(signal.SIGKILL)
        made.ends(-signal.SIGKILL, STOPPED, STOPPED, seconds=10)
        made.release(4)
    made.together()
    made.ends(*[0] * processes)
    whole = unbroken if wide else request.getfixturevalue("alone")
    assert_same_run(made.workdir, whole)


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The same of a run whose meshes have one device each."""
    folder = tmp_path_factory.mktemp("alone")
    one = Job(lambda *given, **named: start_in(folder, *given, **named), base, folder)
    one.alone()
    one.ends(0)
    return one.workdir


# The same trainer, and two rollout meshes of one process each.
TWO = WIDE[2:]


def begin_mesh(made: Job) -> list:
    """The two processes of the rollout mesh."""
    place = f"--coordinator=127.0.0.1:{made.port}", "--processes=4"
    nowhere = made.holds / "nowhere"
    return [made.begin(*place, f"--process={number}", workdir=nowhere) for number in (2, 3)]


def begin_all(made: Job) -> list:
    """The trainer's two processes, and two that sample."""
    place = f"--coordinator=127.0.0.1:{made.port}", "--processes=4"
    return [made.begin(*place, f"--process={number}") for number in (0, 1)] + begin_mesh(made)


def test_two_meshes_of_two_processes_train_as_one_process_does(job, unbroken, certificates):  # noqa: F811
    """By TLS."""
    files = vars(certificates[0])
    made = job(*WIDE, *(f"--tls_{name}={path}" for name, path in files.items()))
    begin_all(made)
    made.ends(0, 0, 0, 0)
    assert_same_run(made.workdir, unbroken)


def test_a_lost_process_costs_its_mesh_which_comes_again(job, unbroken):  # noqa: F811
    """First the second process, then the first one, at which the mesh's processes meet."""
    made = job(*WIDE)
    made.hold(2), made.hold(3)
    *trainer, first, second = begin_all(made)
    trainer[0].until("rollout 0 joins")
    for step, lost in ((2, 1), (3, 0)):
        made.held(step)
        killed, other = (first, second)[lost], (first, second)[1 - lost]
        killed.signal(signal.SIGKILL)
        code, errors = other.ends(10)
        # By the leader's word, or by JAX, which may notice the loss before.
        assert code == STOPPED and re.search("start it again|start the same command", errors)
        assert "Traceback" not in errors
        other.leaves_nothing(), killed.leaves_nothing()
        made.begun = list(trainer)
        first, second = begin_mesh(made)
        trainer[0].until("rollout 0 joins")
        made.release(step)
    made.ends(0, 0, 0, 0)
    assert_same_run(made.workdir, unbroken)


def test_a_lost_process_of_the_trainer_ends_the_job_which_continues(job):  # noqa: F811
    """First the one that does not lead, before common work, then the one that leads."""
    made, one = job(*TWO), job(*TWO)
    for step, lost in ((3, 1), (4, 0)):
        made.hold(step)
        processes = begin_all(made)
        made.held(step)
        processes[lost].signal(signal.SIGKILL)
        if lost:
            made.release(step)
        codes = [STOPPED] * 4
        codes[lost] = -signal.SIGKILL
        said = made.ends(*codes, seconds=10)
        assert all(
            "continues from the last checkpoint" in text for text in said if text is not said[lost]
        )
        if lost:
            assert "trainer has lost process 1, which has lost its connection" in said[0]
    made.release(4)
    begin_all(made)
    made.ends(0, 0, 0, 0)
    one.begin(devices=4)
    one.ends(0)
    assert_same_run(made.workdir, one.workdir)
