"""Runs whose meshes have processes of their own, started by launch/train.py: what is lost, stopped, added and wrong."""

import contextlib
import functools
import itertools
import pathlib
import re
import shutil
import signal
import time
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from digen_jax.process.ending import STOPPED
from digen_jax.process.ports import free_port
from digen_jax.records.status import read_status
from digen_jax.runtime.log import read_log
from digen_jax.scheduling.commands import TRAINER, Generate
from tests.engine import toy
from tests.metrics import assert_same_metrics, metrics
from tests.pipelines import ROOT
from tests.processes import Begun, begin  # noqa: F401
from tests.run.apart_config import STEPS
from tests.tiny_runs import once, pipeline, prompt_file

pytestmark = pytest.mark.slow

CONFIG = ROOT / "tests" / "run" / "apart_config.py"
LONG = 240.0  # seconds for a process to start, or for a run


class Job:
    """The processes of a run, and the steps that it holds."""

    def __init__(
        self,
        start,
        base: pathlib.Path,
        folder: pathlib.Path,
        *options: str,
    ):
        self._start, self._base = start, base
        self._options = f"--config={CONFIG}", *options
        self.workdir, self.holds = folder / "run", folder / "holds"
        self.holds.mkdir(parents=True)
        self.port = free_port()
        self.begun: list[Begun] = []

    def begin(
        self, *options: str, workdir: pathlib.Path | None = None, devices=1, here=None, **variables
    ) -> Begun:
        """A process; `here` is the folder that it is started in."""
        arguments = [*self._options, f"--workdir={workdir or self.workdir}", *options]
        variables = dict(BASE=str(self._base), HOLDS=str(self.holds)) | variables
        before = ("env", "-C", str(here)) if here else ()
        self.begun.append(self._start("launch.train", devices, before, arguments, **variables))
        return self.begun[-1]

    def process(self, number: int, *options: str, **settings) -> Begun:
        """The process of a number; 0 leads, and only that one has the workdir."""
        place = self._address, "--processes=3", f"--process={number}"
        workdir = self.holds / "nowhere" if number else None
        return self.begin(*place, *options, workdir=workdir, **settings)

    def mesh(self, name: str, *options: str, **settings) -> Begun:
        where = self.holds / "nowhere"
        return self.begin(self._address, f"--mesh={name}", *options, workdir=where, **settings)

    def together(self, *options: str) -> list[Begun]:
        return [self.process(number, *options) for number in range(3)]

    def alone(self, *options: str, **settings) -> Begun:
        """On one process, with the devices of all meshes."""
        return self.begin(*options, devices=3, **settings)

    @property
    def _address(self) -> str:
        return f"--coordinator=127.0.0.1:{self.port}"

    # ------------------------------------------------------------------------------------- holds

    def hold(self, step: int) -> None:
        (self.holds / f"hold {step}").touch()

    def held(self, step: int) -> None:
        """Waits until some images of the step are to be scored."""
        end = time.monotonic() + LONG
        while not (self.holds / f"held {step}").exists():
            ended = [one for one in self.begun if one.process.poll() is not None]
            refused = any(one.process.returncode not in (0, -signal.SIGKILL) for one in ended)
            assert time.monotonic() < end and not refused, [one.errors.read_text() for one in ended]
            time.sleep(0.1)

    def release(self, step: int) -> None:
        (self.holds / f"hold {step}").unlink()

    # -------------------------------------------------------------------------------------- ends

    def ends(self, *codes: int, seconds: float = LONG) -> list[str]:
        """Waits for all processes: their exit codes in order of their start; returns what each said as an error."""
        ended = [one.ends(seconds) for one in self.begun]
        assert [code for code, _ in ended] == list(codes), ended
        for one, (_, errors) in zip(self.begun, ended, strict=True):
            assert "Traceback" not in errors, errors
            one.leaves_nothing()
        assert not (self.holds / "nowhere").exists()
        self.begun.clear()
        return [errors for _, errors in ended]

    def generated(self, since: int = 0) -> list[str]:
        """Who has generated each fragment from a step on, since the leader was started last."""
        _, commands = read_log(self.workdir / "commands.jsonl")
        made = (one for one in commands if isinstance(one, Generate))
        return [one.worker for one in made if one.fragment.step >= since - 1]


@pytest.fixture
def job(begin, base, tmp_path):  # noqa: F811
    pipeline(base), prompt_file(base)
    numbers = map(str, itertools.count())

    def one(*options: str, **settings) -> Job:
        return Job(begin, base, tmp_path / next(numbers), *options, **settings)

    return one


@pytest.fixture(scope="module")
def unbroken(base) -> pathlib.Path:
    """The workdir of a run of one process, once for all tests."""
    pipeline(base), prompt_file(base)

    def run(folder: pathlib.Path) -> None:
        job = Job(functools.partial(start_in, folder.parent), base, folder)
        job.alone()
        job.ends(0)

    return once(base / "apart-unbroken", run) / "run"


def start_in(folder, module, devices, *command, **variables) -> Begun:
    return Begun(module, folder, devices, *command, **variables)


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


def wait_for(happens: Callable[[], bool], seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.1)


def without_waiting(errors: str) -> list[str]:
    """What was said beside the line that the leader was not there yet."""
    return [line for line in errors.splitlines() if not line.startswith("waiting for the first")]


def printed(process: Begun) -> list[str]:
    """All lines of a process that has ended."""
    with contextlib.suppress(AssertionError):
        while True:
            process.line(0.5)
    return process.said


def test_a_run_apart_is_that_of_one_process(job, base, tmp_path):
    """Rollout processes need no text encoders for prompts that the trainer's process has encoded."""
    trains, samples, other = (tmp_path / name for name in ("trains", "samples", "other"))
    for folder in (trains, samples, other):
        shutil.copytree(base / "tiny-pipeline", folder / "tiny-pipeline")
        shutil.copy(base / "tiny-prompts.jsonl", folder)
    removed = [*samples.glob("tiny-pipeline/text_encoder*/*.safetensors")]
    for weights in removed:
        weights.unlink()
    assert len(removed) == 2
    prompts = other / "tiny-prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("red", "green"))
    ahead = "--config.prompts.encoding=ahead", "--config.prompts.store=store"
    job, alone = job("--link=transfer", *ahead), job(*ahead)
    leader = job.process(0, here=trains, BASE=".")
    code, errors = job.process(1, here=other, BASE=".").ends(LONG)
    assert code == 2 and "prompt files" in errors
    job.begun.pop()
    rollouts = [job.process(number, here=samples, BASE=".") for number in (1, 2)]
    job.ends(0, 0, 0)
    assert (trains / "store").exists() and not (samples / "store").exists()
    said = printed(leader)
    assert any("rollout on 2 other workers" in line for line in said)
    for number, one in enumerate(rollouts):
        joined, *rest = printed(one)
        assert joined.startswith(
            f"rollout {number} joins 127.0.0.1:{job.port}: weights come as jax.experimental.transfer"
        )
        ended = f"rollout {number} ends: the run has ended"
        assert rest[-2:] == [f"rollout {number} is ready, on 1 devices", ended]
    assert set(job.generated()) == {"rollout 0", "rollout 1"}
    shown = read_status(job.workdir)["workers"]
    assert [shown[f"rollout {number}"]["process"] for number in (0, 1)] == [
        one.process.pid for one in rollouts
    ]
    alone.alone(here=trains, BASE=".")
    alone.ends(0)
    assert_same_run(job.workdir, alone.workdir)


def test_without_meshes_the_trainer_generates_until_another_one_joins(job, unbroken):
    job = job()
    job.hold(2), job.hold(4)
    leader, *killed = job.together()
    job.held(2)
    for one in killed:
        one.signal(signal.SIGKILL)
    leader.until("the trainer reads what sampling needs beside its own parameters")
    job.release(2)
    job.held(4)
    assert set(job.generated(since=3)) == {TRAINER}
    spare, again = job.mesh("spare"), job.process(2)
    leader.until(" joins: ")
    leader.until(" joins: ")
    job.release(4)
    errors, *_ = job.ends(0, -signal.SIGKILL, -signal.SIGKILL, 0, 0)
    assert "rollout 1 has lost its connection: given up" in errors
    assert "no sampling mesh is left: the trainer generates until one joins" in errors
    ended = "spare ends: the run has ended"
    assert printed(spare)[-2:] == ["spare is ready, on 1 devices", ended]
    assert printed(again)[-1].endswith(" ends: the run has ended")
    assert {"spare", "rollout 1"} & set(job.generated(since=4))
    assert_same_run(job.workdir, unbroken, left_out=["tag_share"])


def test_a_mesh_that_is_asked_to_stop_leaves_at_the_end_of_the_step(job, unbroken):
    job = job()
    job.hold(2)
    _, _, asked = job.together()
    job.held(2)
    asked.signal(signal.SIGTERM)
    wait_for(lambda: "leaving at the end of this step" in asked.errors.read_text())
    assert asked.process.poll() is None
    # The coordinator knows of it at the end of step 2 or 3.
    for step in (3, 4):
        job.hold(step)
        job.release(step - 1)
        job.held(step)
    code, said = asked.ends(LONG)
    assert code == 0, said
    job.release(4)
    errors, *_ = job.ends(0, 0, 0)
    assert "rollout 1 leaves, because it was asked to stop: given up" in errors
    assert "rollout 1" in job.generated() and "rollout 1" not in job.generated(since=4)
    assert_same_run(job.workdir, unbroken)


def test_a_leader_that_is_asked_to_stop_saves_and_the_run_continues_anywhere(job, unbroken):
    """From three processes to one."""
    job = job()
    job.hold(3)
    leader, *rollouts = job.together()
    job.held(3)
    leader.signal(signal.SIGTERM)
    job.release(3)
    stopped, *_ = job.ends(128 + signal.SIGTERM, 0, 0)
    assert "finishing this step, then saving" in stopped
    # Step 3 may have begun while step 2 is recorded.
    (done,) = re.findall(r"Stopped and saved after step ([23]);", printed(leader)[-1])
    assert all(printed(one)[-1].endswith(" ends: the run has ended") for one in rollouts)

    one = job.begin("--config.placement.rollout.data=0")
    job.ends(0)
    assert any(f"continuing after step {done}" in line for line in printed(one))
    assert_same_run(job.workdir, unbroken)


def test_meshes_may_share_one_job_of_jax(job, unbroken):
    """As on a TPU slice. The job ends with each of its processes, and continues."""
    job = job("--one_job")
    job.hold(3)
    leader, _, killed = job.together()
    job.held(3)
    killed.signal(signal.SIGKILL)
    job.release(3)
    codes = [one.ends(LONG)[0] for one in job.begun]
    # A process that samples is told that the run ends, unless it notices the loss before.
    assert codes in ([STOPPED, code, -signal.SIGKILL] for code in (0, STOPPED)), codes
    assert "all meshes are one job of JAX: start the same command" in leader.errors.read_text()
    job.begun.clear()
    job.together()
    job.ends(0, 0, 0)
    assert_same_run(job.workdir, unbroken)


def test_a_leader_refuses_what_does_not_fit_and_waits_for_what_does(job):
    job = job("--config.placement.rollout.data=2")
    leader = job.process(0)
    leader.until("sampling meshes may join")
    job.process(1, "--config.seed=5", devices=2)
    job.process(1, devices=2, DIGEN_JAX_TOKEN="of-another-job-that-runs")
    job.process(2, devices=1)
    found = [one.ends(60) for one in job.begun[1:]]
    for (code, errors), sentence in zip(
        found,
        ["its config is", "token", "config.placement.rollout has 2 devices"],
        strict=True,
    ):
        assert code == 2, errors
        (said,) = without_waiting(errors)
        assert sentence in said
    assert leader.process.poll() is None
    leader.until("waiting for rollout 0, rollout 1")
    leader.signal(signal.SIGTERM)
    job.ends(128 + signal.SIGTERM, 2, 2, 2)
