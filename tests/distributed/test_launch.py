"""Runs by `launch/train.py --ray=local`: equal to one process, also after lost processes and signals."""

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from digen_jax.distributed.launch import PART, TrainerPart
from digen_jax.logging.command_log import read_log
from digen_jax.logging.status import read_status
from digen_jax.process.job import Place
from digen_jax.process.shutdown import STOPPED
from digen_jax.scheduling.commands import Command, Generate, Train
from tests.metrics import assert_same_metrics, metrics
from tests.parallel import toy
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
        (self.holds / f"held {step}").unlink(missing_ok=True)  # of an earlier start
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
        return {one.worker for one in self.commands() if isinstance(one, Generate)}

    def trained(self, step: int = 0) -> set[str]:
        trained = [one for one in self.commands() if isinstance(one, Train)]
        return {one.worker for one in trained if one.chunk.step == step}

    def commands(self) -> list[Command]:
        return read_log(self.workdir / "commands.jsonl")[1]


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


def assert_same_steps(workdir: pathlib.Path, unbroken: pathlib.Path, last: int) -> None:
    """Every number of every line up to a step, up to float32's rounding; the trainer may have generated, too."""
    found, expected = (metrics(one)[: last + 1] for one in (workdir, unbroken))
    assert [line["step"] for line in found] == [*range(last + 1)]
    for line in (*found, *expected):
        line.pop("assisted", None)
    assert_same_metrics(found, expected, rel=1e-5)


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


def test_a_run_continues_the_same_after_any_process_dies_or_stops(run, unbroken, tmp_path):
    """Removed workers start again, unless all processes are one job of JAX; all else ends the run.

    The run continues with other workers each time.
    """
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
        assert process.until("restarting it in 1 s").startswith(f"{worker} ")
    run.held(4, process)
    os.kill(process.process.pid, signal.SIGKILL)
    ends(process, -signal.SIGKILL)
    run.release(4)

    run.hold(5)
    process = run.begin("--one_job")
    run.held(5, process)
    os.kill(run.pid("rollout 1", process), signal.SIGKILL)
    ends(process, STOPPED)
    assert run.generated() == {"rollout 0", "rollout 1"}

    # Then two workers sample and train, with prompts that are encoded before. Ctrl-C in a terminal reaches the driver's
    # whole group.
    run.hold(5), run.hold(6)
    store = tmp_path / "store"
    ahead = "--config.prompts.encoding=precomputed", f"--config.prompts.cache={store}"
    pool = "--config.placement.rollout.data=0", "--config.placement.trainer.workers=2"
    process = run.begin(*pool, *ahead, "--config.steps=7", "--profile=6-9")
    run.held(5, process)
    os.kill(run.pid("worker 1", process), signal.SIGKILL)
    process.until("worker 1 joins")
    run.release(5)
    run.held(6, process)
    process.signal(signal.SIGINT)
    wait_for(lambda: "then saving" in process.errors.read_text(), process)
    run.release(6)
    said = "\n".join(ends(process, 128 + signal.SIGINT))
    assert "continuing after step 4" in said and "Stopped and saved after step 6;" in said
    assert run.generated() == run.trained(5) == {"trainer", "worker 1"}
    assert store.exists()
    profiled = (run.workdir / "profile").glob("*/plugins/profile/*/*.xplane.pb")
    assert sorted(path.parents[3].name for path in profiled) == ["trainer_0", "worker_1_0"]

    assert_same_steps(run.workdir, unbroken, 4)
    start = tuned(unbroken, 1)
    moves = [jax.tree.map(np.subtract, tuned(one, 4), start) for one in (run.workdir, unbroken)]
    assert toy.difference(*moves) < 1e-3
    # What is encoded in other batches is rounded differently.
    found, expected = ([metrics(one)[5] | {"assisted": 0}] for one in (run.workdir, unbroken))
    assert_same_metrics(found, expected, rel=2e-3)


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


def test_a_worker_and_a_trainer_of_two_processes_die(run, begin, base, tmp_path):  # noqa: F811
    """Without its worker the trainer generates; a lost process of the trainer ends the run.

    Both processes of the trainer encode the prompts before the first step.
    """
    meshes = "--config.placement.trainer.fsdp=2", "--config.placement.rules=(('.*', 'fsdp'),)"
    meshes += "--config.placement.rollout.data=2", "--config.prompts.encoding=precomputed", ONE
    hosts = "--config.placement.trainer.hosts=2", "--config.placement.rollout.hosts=2"
    alone = Run(begin, base, tmp_path / "alone")
    store = f"--config.prompts.cache={tmp_path / 'alone' / 'store'}"
    ends(alone.begin(*meshes, store, "--config.steps=2", devices=4, ray=False), 0)

    run.hold(3), run.hold(4)
    store = f"--config.prompts.cache={tmp_path / 'store'}"
    process = run.begin(*meshes, *hosts, store)
    run.held(3, process)
    os.kill(run.pid("rollout 0", process), signal.SIGKILL)
    run.release(3)
    process.until("rollout 0 joins")
    run.held(4, process)
    os.kill(trainer_pid(process, 1), signal.SIGKILL)
    ends(process, STOPPED)
    assert run.generated() == {"rollout 0", "trainer"}
    # From step 3 on another mesh sampled, which rounds differently.
    assert len(metrics(run.workdir)) == 4
    assert_same_steps(run.workdir, alone.workdir, 2)
