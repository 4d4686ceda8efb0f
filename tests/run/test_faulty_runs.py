"""Runs whose meshes have processes of their own, in which something is slow, cut off, lost, full or strange.

What they end with is what a run of one process has, up to rounding.
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest

from digen_jax.benchmark.equality import lines, metrics_off, steps, tuned, update_off
from digen_jax.benchmark.job import Begun, Job, memory
from digen_jax.errors import ConfigError
from digen_jax.process.ending import STOPPED
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.following import Following
from digen_jax.remote.identity import Identity, code_version
from digen_jax.remote.wire import Wire
from digen_jax.runtime.log import read_log
from digen_jax.scheduling.commands import Generate
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


def generated(job: Job, since: int) -> list[str]:
    """Who has generated each fragment of the steps after `since`."""
    _, commands = read_log(job.workdir / "commands.jsonl")
    made = [one for one in commands if isinstance(one, Generate) and not one.fragment.evaluation]
    return [one.worker for one in made if one.fragment.step >= since]


@contextlib.contextmanager
def slowed(process: Begun, share: float = 0.1, period: float = 0.5):
    """In this block a process runs for a share of the time."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set() and process.alive:
            process.signal(signal.SIGSTOP)
            over.wait(period * (1 - share))
            process.signal(signal.SIGCONT)
            over.wait(period * share)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_mesh_that_is_ten_times_slower_is_not_given_up(job, unbroken):
    job = begin(job())
    done = len(steps(job.workdir))
    with slowed(job.now["rollout 1"]):
        wait_for(job, LAST - 1)
    said = assert_ends_well(job, unbroken)
    assert "given up" not in said
    made = generated(job, done + 1)
    assert 0 < made.count("rollout 1") < made.count("rollout 0")


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


def test_a_mesh_that_is_cut_off_is_replaced_when_it_comes_back(job, unbroken, host):  # noqa: F811
    """In the meantime the other one does its work; it ends by itself, and its next start joins."""
    job = job(SLOW="1")
    job.address = f"{host.here}:{job.address.rpartition(':')[2]}"
    job.start("trainer")
    job.start("rollout 0")
    far = job.start("rollout 1", before=host.inside)
    job.wait(lambda: all(one.ready for one in job.meshes()), LONG, "all are ready")
    wait_for(job, 2)
    host.cable(False)
    assert far.ends(15) == STOPPED
    assert "continues from the last checkpoint" in far.said()
    done = len(steps(job.workdir))
    job.wait(lambda: "rollout 1 has been silent" in job.leader.said(), 15, "it is lost")
    wait_for(job, done + 1)
    host.cable(True)
    again = job.start("rollout 1", before=host.inside)
    job.wait(lambda: again.ready or not job.leader.alive, LONG, "it joins again")
    assert_ends_well(job, unbroken)


def ports(process: int) -> list[int]:
    """At which a process listens."""
    inodes, found = set(), []
    for one in pathlib.Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            inodes.add(os.readlink(one))
    for table in ("tcp", "tcp6"):
        for row in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                found.append(int(local.rpartition(":")[2], 16))
    return found


def garbage(port: int) -> None:
    """What strangers send: other protocols, nonsense, nothing."""
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\n", b""):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as one:
            one.sendall(data)
            one.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                one.recv(100)


def test_strangers_change_nothing(job, unbroken):
    job = begin(job(SLOW="1"))
    strange = [
        Identity("another-token-of-16", "c", code_version()),
        Identity(job.token, "c", "old"),
    ]
    strange.append(Identity(job.token, "c", code_version()))
    words = "its job token differs", "its code is 'old'", "its config is 'c'"
    for identity, sentence in zip(strange, words, strict=True):
        for name in ("rollout 0", "a stranger"):
            with pytest.raises(ConfigError, match=sentence):
                Following(Wire(identity), job.address, pb.Hello(mesh=name, devices=1), 20)
    listening = [port for one in (job.leader, *job.meshes()) for port in ports(one.process.pid)]
    assert len(listening) >= 1 + ROLLOUTS
    for port in listening:
        garbage(port)
        channel = Wire(strange[0]).channel(f"127.0.0.1:{port}")
        call = channel.unary_unary("/digen_jax.remote.Lending/Open", pb.Ask.SerializeToString, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(pb.Ask(key="x"), timeout=10, metadata=Wire(strange[0]).metadata)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        channel.close()
    assert len(steps(job.workdir)) < LAST
    said = assert_ends_well(job, unbroken)
    assert "given up" not in said and "a stranger" not in said


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


def test_a_slow_disk_of_the_leader_costs_no_mesh(job, unbroken):
    """Every rename and every sync takes half a second."""
    job = begin(job(module="tests.run.slow_disk"), 1)
    assert "given up" not in assert_ends_well(job, unbroken)


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
