"""Runs by `launch/train.py --ray=local`: equal to one process, also after lost processes and signals."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from digen_jax.distributed.launch import PART, TrainerPart
from digen_jax.process.ending import STOPPED
from digen_jax.process.launching import Place
from digen_jax.records.status import read_status
from digen_jax.runtime.log import read_log
from digen_jax.scheduling.commands import Generate
from tests.distributed.held_config import STEPS
from tests.engine import toy
from tests.metrics import assert_same_metrics, metrics
from tests.pipelines import ROOT
from tests.processes import Begun, begin  # noqa: F401
from tests.tiny_runs import once, pipeline, prompt_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray not installed"),
]


CONFIG = ROOT / "tests" / "distributed" / "held_config.py"
ONE = "--config.placement.rollout.workers=1"
LONG = 240.0  # seconds for a process to start, or for a run


class Run:
    """A run in separate processes, and the steps whose scores it holds back."""

    def __init__(self, start, base: pathlib.Path, folder: pathlib.Path):
        pipeline(base), prompt_file(base)
        self._start, self.workdir, self.holds = start, folder / "run", folder / "holds"
        self._variables = dict(BASE=str(base), HOLDS=str(self.holds))
        self.holds.mkdir(parents=True)

    def begin(self, *options: str, devices: int = 1, ray: bool = True, **variables: str) -> Begun:
        arguments = [f"--config={CONFIG}", f"--workdir={self.workdir}", *options]
        arguments += ["--ray=local"] if ray and not any("--ray" in one for one in options) else []
        return self._start("launch.train", devices, (), arguments, **self._variables | variables)

    def hold(self, step: int) -> None:
        (self.holds / f"hold {step}").touch()

    def held(self, step: int, process: Begun) -> None:
        """Waits until some images of the step are to be scored."""
        held = self.holds / f"held {step}"
        wait_for(lambda: held.exists() or process.process.poll() is not None, process)
        assert held.exists(), process.errors.read_text()
        held.unlink()

    def release(self, step: int) -> None:
        (self.holds / f"hold {step}").unlink()

    def pid(self, worker: str, process: Begun) -> int:
        """The process of a worker, once status.json names it."""
        found: list[int] = []

        def known() -> bool:
            with contextlib.suppress(Exception):
                workers = read_status(self.workdir)["workers"]
                found.append(workers[worker]["process"])
            return bool(found)

        wait_for(known, process)
        return found[-1]

    def generated(self) -> set[str]:
        _, commands = read_log(self.workdir / "commands.jsonl")
        return {one.worker for one in commands if isinstance(one, Generate)}


def wait_for(condition, process: Begun) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, process.errors.read_text()
        time.sleep(0.1)


def ends(process: Begun, code: int) -> list[str]:
    """Waits for a process's end; returns its lines."""
    found, errors = process.ends(LONG)
    assert found == code and "Traceback" not in errors, errors
    process.leaves_nothing(LONG)
    return printed(process)


def tuned(workdir: pathlib.Path, step: int):
    """The tuned parameters of a checkpoint, whatever devices had them."""
    arrays = workdir / "checkpoints" / str(step) / "arrays"
    with ocp.PyTreeCheckpointer() as reader:
        there = reader.metadata(arrays).item_metadata.tree
        whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), there)
        return reader.restore(arrays, restore_args=whole)["tuned"]


def assert_same_run(workdir: pathlib.Path, unbroken: pathlib.Path, left_out=()) -> None:
    """Up to float32's rounding: every number of every line, and the changes of the parameters."""
    found, expected = metrics(workdir), metrics(unbroken)
    assert [line["step"] for line in found] == [*range(STEPS + 1)]
    assert sum("evaluation/reward" in line for line in expected) == 3
    for line in (*found, *expected):
        for name in left_out:
            line.pop(name, None)
    assert_same_metrics(found, expected, rel=1e-5)
    start = tuned(unbroken, 1)
    moves = [jax.tree.map(np.subtract, tuned(one, STEPS), start) for one in (workdir, unbroken)]
    assert toy.difference(*moves) < 1e-3


def assert_same_until_lost(workdir: pathlib.Path, unbroken: pathlib.Path) -> None:
    """Up to step 2, in which a worker was lost: from then on another mesh sampled, which rounds differently."""
    found, expected = metrics(workdir), metrics(unbroken)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    assert_same_metrics(found[:2], expected[:2], rel=1e-5)


def printed(process: Begun) -> list[str]:
    """All lines of a process that has ended."""
    with contextlib.suppress(AssertionError):
        while True:
            process.line(0.5)
    return process.said


@pytest.fixture(scope="module")
def unbroken(base) -> pathlib.Path:
    """The workdir of a run of one process, once for all tests."""

    def make(folder: pathlib.Path) -> None:
        def start(module, devices, *command, **variables):
            return Begun(module, folder.parent, devices, *command, **variables)

        ends(Run(start, base, folder).begin(devices=3, ray=False), 0)

    return once(base / "ray-unbroken", make) / "run"


@pytest.fixture
def run(begin, base, tmp_path):  # noqa: F811
    return Run(begin, base, tmp_path)


def test_rollout_workers_get_prompts_that_were_encoded_before_the_run(run, unbroken, tmp_path):
    """Which are rounded differently: metrics up to the first update are near those of one process."""
    store = tmp_path / "store"
    said = ends(run.begin("--config.prompts.encoding=ahead", f"--config.prompts.store={store}"), 0)
    assert any("rollout on 2 other workers" in line for line in said)
    assert store.exists() and run.generated() == {"rollout 0", "rollout 1"}
    found, expected = metrics(run.workdir), metrics(unbroken)
    assert len(found) == len(expected)
    assert_same_metrics(found[:2], expected[:2], rel=2e-3)


def test_rollout_workers_that_are_lost_start_again_and_change_nothing(run, unbroken):
    for step in (2, 3, 4):
        run.hold(step)
    process = run.begin()
    for step, worker, number in (
        (2, "rollout 1", signal.SIGKILL),
        (3, "rollout 0", signal.SIGSTOP),
    ):
        run.held(step, process)
        os.kill(run.pid(worker, process), number)
        run.release(step)
        assert process.until("starting it again in 1 s").startswith(f"{worker} ")
    run.held(4, process)
    run.release(4)
    ends(process, 0)
    assert_same_run(run.workdir, unbroken, left_out=["tag_share"])


def test_a_run_that_is_stopped_or_killed_again_and_again_continues(run, unbroken):
    """Each time in the step after the last checkpoint. Ctrl-C in a terminal reaches the driver's whole group."""
    step = 2
    for what, number in (
        ("driver", signal.SIGTERM),
        ("trainer", signal.SIGKILL),
        ("group", signal.SIGINT),
        ("driver", signal.SIGKILL),
    ):
        run.hold(step)
        process = run.begin(ONE)
        run.held(step, process)
        if what == "group":
            process.signal(number)
        else:
            driver = process.process.pid
            os.kill(driver if what == "driver" else run.pid(what, process), number)
        if number != signal.SIGKILL:
            wait_for(lambda: "then saving" in process.errors.read_text(), process)  # noqa: B023
        run.release(step)
        lost = STOPPED if what == "trainer" else -signal.SIGKILL
        said = ends(process, lost if number == signal.SIGKILL else 128 + number)
        (done,) = re.findall(r"Stopped and saved after step (\d);", "\n".join(said)) or [step - 1]
        step = int(done) + 1
    assert any(f"continuing after step {step - 1}" in line for line in ends(run.begin(ONE), 0))
    assert_same_run(run.workdir, unbroken)


def test_a_cluster_that_does_not_answer_and_a_missing_ray_are_refused(run, tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('not installed')\n")
    broken = {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    for process, named in (
        (run.begin("--ray=127.0.0.1:1"), "--ray=127.0.0.1:1"),
        (run.begin(**broken), "requirements-ray.txt"),
    ):
        code, errors = process.ends(LONG)
        assert code == 2 and named in errors and "Traceback" not in errors
    assert not (run.workdir / "config.json").exists()


def test_a_worker_of_two_processes_is_lost_and_started_again_as_one(run, begin, base, tmp_path):  # noqa: F811
    meshes = "--config.placement.rollout.data=2", "--config.placement.rollout.workers=1"
    alone = Run(begin, base, tmp_path / "alone")
    ends(alone.begin(*meshes, devices=3, ray=False), 0)
    run.hold(2), run.hold(3)
    process = run.begin(*meshes, "--config.placement.rollout.hosts=2")
    run.held(2, process)
    os.kill(run.pid("rollout 0", process), signal.SIGKILL)
    run.release(2)
    process.until("starting it again in 1 s")
    run.held(3, process)
    run.release(3)
    ends(process, 0)
    assert_same_until_lost(run.workdir, alone.workdir)


@pytest.fixture(scope="module")
def wide(base) -> pathlib.Path:
    """The workdir of a run of one process whose trainer has two devices, once for all tests."""

    def make(folder: pathlib.Path) -> None:
        def start(module, devices, *command, **variables):
            return Begun(module, folder.parent, devices, *command, **variables)

        ends(Run(start, base, folder).begin(*WIDE, devices=4, ray=False), 0)

    return once(base / "ray-wide", make) / "run"


WIDE = "--config.placement.trainer.fsdp=2", "--config.placement.rules=(('.*', 'fsdp'),)"
HOSTS = *WIDE, "--config.placement.trainer.hosts=2"


def trainer_pid(process: Begun, number: int) -> int:
    """A process of the trainer, by what its driver has told it."""
    for pid in process.started():
        environ = b""
        with contextlib.suppress(OSError):  # it has ended
            environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        lines = environ.decode().split("\0")
        told = [one.partition("=")[2] for one in lines if one.startswith(f"{PART}=")]
        if told and Place(*TrainerPart(*json.loads(told[0])).place).process == number:
            return pid
    raise AssertionError(f"there is no process {number} of the trainer")


def test_a_lost_second_process_of_the_trainer_ends_all_and_the_same_command_continues(run, wide):
    run.hold(3)
    process = run.begin(*HOSTS)
    run.held(3, process)
    os.kill(trainer_pid(process, 1), signal.SIGKILL)
    ends(process, STOPPED)
    run.release(3)
    ends(run.begin(*HOSTS), 0)
    assert_same_run(run.workdir, wide)


def test_all_processes_are_one_job_of_jax(run, unbroken):
    ends(run.begin("--one_job"), 0)
    assert run.generated() == {"rollout 0", "rollout 1"}
    assert_same_run(run.workdir, unbroken)


def test_a_lost_worker_ends_a_run_of_one_job(run):
    run.hold(2)
    process = run.begin("--one_job")
    run.held(2, process)
    os.kill(run.pid("rollout 1", process), signal.SIGKILL)
    ends(process, STOPPED)


def test_a_trainer_of_two_processes_samples_while_its_worker_is_lost(run, wide):
    run.hold(2), run.hold(3)
    process = run.begin(*HOSTS, ONE)
    run.held(2, process)
    os.kill(run.pid("rollout 0", process), signal.SIGKILL)
    run.release(2)
    process.until("rollout 0 joins")
    run.release(3)
    ends(process, 0)
    assert run.generated() == {"rollout 0", "trainer"}
    assert_same_until_lost(run.workdir, wide)
