"""The toy run under the real launchers, on this host: two processes of two devices that train together.

Slurm needs root, slurmctld, slurmd and munged (Debian: slurm-wlm, munge), Open MPI mpirun (openmpi-bin). The daemons
are this test's own, at free ports, with all their files in its folder.
"""

import getpass
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from digen_jax.logging.metrics import read_metrics
from digen_jax.logging.workdir import finished_step
from tests.compiling import quick_flags
from tests.pipelines import ROOT
from tests.ports import free_port
from tests.tiny_runs import PROMPTS

pytestmark = pytest.mark.slow
RUN = [f"--config={ROOT / 'tests' / 'run' / 'toy_process.py'}", "--workdir=run"]


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """A working folder whose launch/train.py is the toy's."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(PROMPTS) + "\n")
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.py").write_text(
        "import runpy\nrunpy.run_module('tests.run.toy_process', run_name='__main__')\n"
    )
    return tmp_path


def variables(**more: str) -> dict[str, str]:
    """The environment of a user whose `python` is this one."""
    python = pathlib.Path(sys.executable).parent
    given = dict(
        PATH=f"{python}:{os.environ['PATH']}",
        PYTHONPATH=str(ROOT),
        XLA_FLAGS=quick_flags(2),
        TOLD="-1 0 0",
    )
    return os.environ | given | more


def assert_trained(folder: pathlib.Path, said: str) -> None:
    assert "4 CPU devices of 2 processes for rollout and training in turn" in said, said
    assert finished_step(folder / "run") == 3
    history = read_metrics(folder / "run" / "metrics.jsonl")
    assert history[3]["evaluation/reward"] > history[0]["evaluation/reward"] + 0.001


def needs(*programs: str) -> None:
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")


def test_under_open_mpi(folder):
    needs("mpirun")
    said = subprocess.run(
        [
            *("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"),
            *("python", "launch/train.py", *RUN, "--coordinator=auto"),
        ],
        cwd=folder,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 0, said.stderr
    assert_trained(folder, said.stdout)


CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes={host} Default=YES
"""


@pytest.fixture
def slurm(tmp_path_factory):
    """A cluster of this host alone; gives the environment in which its commands find it."""
    needs("munged", "slurmctld", "slurmd", "sbatch")
    if getpass.getuser() != "root":
        pytest.skip("slurmd must be started by root")
    home = tmp_path_factory.mktemp("slurm")
    home.chmod(0o755)
    for name in ("state", "spool"):
        (home / name).mkdir()
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o600)
    host = os.uname().nodename.partition(".")[0]
    ports = dict(controller=free_port(), daemon=free_port())
    file = home / "slurm.conf"
    file.write_text(CONFIG.format(host=host, folder=home, **ports))
    found = variables(SLURM_CONF=str(file))
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={home}/munge.socket"]
        + [f"--{kind}-file={home}/munge.{kind}" for kind in ("key", "log", "pid", "seed")],
        ["slurmctld", "-D", "-f", file],
        ["slurmd", "-D", "-f", file],
    ]
    begun = []
    try:
        for command in daemons:
            with (home / f"{command[0]}.out").open("w") as out:
                begun.append(subprocess.Popen(command, env=found, stdout=out, stderr=out))
            time.sleep(1)
        for _ in range(60):
            state = subprocess.run(["sinfo", "-h", "-o", "%T"], env=found, capture_output=True)
            if state.stdout.strip() == b"idle":
                break
            time.sleep(0.5)
        else:
            logs = [path.read_text()[-600:] for path in home.glob("*.out")]
            raise AssertionError(f"the cluster does not start: {logs}")
        yield found
    finally:
        for process in reversed(begun):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def batch(folder: pathlib.Path, slurm: dict[str, str], *words: str | pathlib.Path) -> str:
    """What the batch script of docs/launching.md prints; `words` are sbatch's options, then train.py's."""
    options = [word for word in words if str(word).startswith("--ntasks")]
    script = ROOT / "docs" / "launching" / "slurm.sh"
    said = subprocess.run(
        ["sbatch", "--wait", "--output=said", *options, script, *words[len(options) :]],
        cwd=folder,
        env=slurm,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Submitted batch job" in said.stdout, said.stderr
    shown = (folder / "said").read_text()
    assert said.returncode == 0, shown + said.stderr
    return shown


def test_under_slurm(folder, slurm):
    assert_trained(folder, batch(folder, slurm, "--ntasks-per-node=2", *RUN))
