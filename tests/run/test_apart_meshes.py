"""Meshes of two processes each, started by launch/train.py: as one process with all devices, and lost as a whole."""

import re
import signal

import pytest

from digen_jax.process.ending import STOPPED
from tests.processes import begin  # noqa: F401
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
