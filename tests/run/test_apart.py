"""Runs whose meshes have processes of their own, started by launch/train.py: what is lost, stopped, added and wrong."""

import contextlib
import functools
import itertools
import pathlib
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
from tests.remote.processes import Begun, begin  # noqa: F401
from tests.run.apart_config import STEPS
from tests.tiny_runs import pipeline, prompt_file

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
        kind="lora",
        processes=3,
        trainers=1,
        module="launch.train",
    ):
        self._start, self._base, self._processes, self._module = start, base, processes, module
        self._trainers = trainers
        self._options = f"--config={CONFIG}:{kind}", *options
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
        self.begun.append(self._start(self._module, devices, before, arguments, **variables))
        return self.begun[-1]

    def process(self, number: int, *options: str, **settings) -> Begun:
        """The process of a number; 0 leads, and only those that train have the workdir."""
        place = self._address, f"--processes={self._processes}", f"--process={number}"
        workdir = self.holds / "nowhere" if number >= self._trainers else None
        return self.begin(*place, *options, workdir=workdir, **settings)

    def mesh(self, name: str, *options: str, **settings) -> Begun:
        where = self.holds / "nowhere"
        return self.begin(self._address, f"--mesh={name}", *options, workdir=where, **settings)

    def together(self, *options: str) -> list[Begun]:
        return [self.process(number, *options) for number in range(self._processes)]

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
def unbroken(base, tmp_path_factory):
    """The workdir of a run of one process, by the kind of what is tuned."""
    pipeline(base), prompt_file(base)
    folder, found = tmp_path_factory.mktemp("unbroken"), {}

    def one(kind: str = "lora") -> pathlib.Path:
        if kind not in found:
            start = functools.partial(start_in, folder)
            job = Job(start, base, folder / kind, kind=kind)
            job.alone()
            job.ends(0)
            found[kind] = job.workdir
        return found[kind]

    return one


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


def wait_for(happens: Callable[[], bool], seconds: float = 30) -> None:
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


COMES = {"bytes": "bytes over gRPC", "transfer": "jax.experimental.transfer"}


@pytest.mark.parametrize(("kind", "link"), [("full", "transfer"), ("lora", "bytes")])
def test_a_run_apart_is_that_of_one_process(job, unbroken, kind, link):
    job = job("--config.reward_pool.processes=1", f"--link={link}", kind=kind)
    leader, *rollouts = job.together()
    job.ends(0, 0, 0)
    said = printed(leader)
    assert any("1 devices (cpu) train here, 2 meshes sample elsewhere" in line for line in said)
    for number, one in enumerate(rollouts):
        joined, *rest = printed(one)
        assert joined.startswith(
            f"rollout {number} joins 127.0.0.1:{job.port}: weights come as {COMES[link]}"
        )
        ended = f"rollout {number} ends: the run has ended"
        assert rest[-2:] == [f"rollout {number} is ready, on 1 devices", ended]
    assert set(job.generated()) == {"rollout 0", "rollout 1"}
    shown = read_status(job.workdir)["workers"]
    assert [shown[f"rollout {number}"]["process"] for number in (0, 1)] == [
        one.process.pid for one in rollouts
    ]
    assert_same_run(job.workdir, unbroken(kind))


def test_a_mesh_that_is_killed_is_done_without_and_joins_again(job, unbroken):
    job = job()
    job.hold(2)
    leader, _, killed = job.together()
    job.held(2)
    killed.signal(signal.SIGKILL)
    again = job.process(2)
    leader.until("rollout 1 joins")
    leader.until("rollout 1 joins")
    job.release(2)
    errors, *_ = job.ends(0, 0, -signal.SIGKILL, 0)
    assert "rollout 1 has lost its connection: given up" in errors
    assert "no sampling mesh is left" not in errors
    assert printed(again)[-1].endswith(" ends: the run has ended")
    assert set(job.generated(since=3)) == {"rollout 0", "rollout 1"}
    assert_same_run(job.workdir, unbroken())


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
    job.hold(5)
    spare = job.mesh("spare")
    leader.until("spare joins")
    job.release(4)
    errors, *_ = job.ends(0, -signal.SIGKILL, -signal.SIGKILL, 0)
    assert "no sampling mesh is left: the trainer generates until one joins" in errors
    ended = "spare ends: the run has ended"
    assert printed(spare)[-2:] == ["spare is ready, on 1 devices", ended]
    assert "spare" in job.generated()
    assert_same_run(job.workdir, unbroken(), left_out=["tag_share"])


def test_four_meshes_take_weights_from_one_another_also_when_one_is_lost(job, tmp_path):
    small = "--config.sampler.fragment=2", "--config.trainer.micro_batch=2"
    one = job(*small)
    job = job(
        "--config.placement.rollout.workers=4", *small, processes=5, module="tests.run.noted_gifts"
    )
    gifts = tmp_path / "gifts"
    job.hold(2)
    leader, *others = [job.process(number, GIFTS=str(gifts)) for number in range(5)]
    job.held(2)
    others[0].signal(signal.SIGKILL)
    job.process(1, GIFTS=str(gifts))
    for _ in range(5):
        leader.until(" joins: ")
    before = len(gifts.read_text().splitlines())
    assert before > 0
    job.release(2)
    errors, *_ = job.ends(0, -signal.SIGKILL, 0, 0, 0, 0)
    assert "rollout 0 has lost its connection: given up" in errors
    given = gifts.read_text().splitlines()
    assert len(given) > before, given
    one.alone()
    one.ends(0)
    assert_same_run(job.workdir, one.workdir)


def test_a_mesh_that_is_asked_to_stop_leaves_at_the_end_of_the_step(job, unbroken):
    job = job()
    job.hold(2)
    _, _, asked = job.together()
    job.held(2)
    asked.signal(signal.SIGTERM)
    wait_for(lambda: "leaving at the end of this step" in asked.errors.read_text())
    time.sleep(5)  # until the leader knows
    assert asked.process.poll() is None
    job.hold(4)
    job.release(2)
    job.held(4)
    code, said = asked.ends(20)
    assert code == 0, said
    job.release(4)
    errors, *_ = job.ends(0, 0, 0)
    assert "rollout 1 leaves, because it was asked to stop: given up" in errors
    assert "rollout 1" in job.generated() and "rollout 1" not in job.generated(since=4)
    assert_same_run(job.workdir, unbroken())


def test_a_leader_that_is_asked_to_stop_saves_and_the_run_continues_anywhere(job, unbroken):
    """From one process to three, to one and to three again."""
    job = job()
    job.hold(2)
    leader = job.alone()
    job.held(2)
    leader.signal(signal.SIGTERM)
    job.release(2)
    job.ends(128 + signal.SIGTERM)

    job.hold(3)
    leader, *rollouts = job.together()
    leader.until("continuing after step 2")
    job.held(3)
    leader.signal(signal.SIGTERM)
    job.release(3)
    stopped, *_ = job.ends(128 + signal.SIGTERM, 0, 0)
    assert "finishing this step, then saving" in stopped
    assert printed(leader)[-1] == "Stopped and saved after step 3; the same command continues."
    assert all(printed(one)[-1].endswith(" ends: the run has ended") for one in rollouts)
    apart = job.workdir.with_name("apart")
    shutil.copytree(job.workdir, apart)

    one = job.begin("--config.placement.rollout.data=0")
    job.ends(0)
    assert any("continuing after step 3" in line for line in printed(one))
    assert_same_run(job.workdir, unbroken())

    shutil.rmtree(job.workdir)
    apart.rename(job.workdir)
    job.together()
    job.ends(0, 0, 0)
    assert_same_run(job.workdir, unbroken())


def test_without_its_leader_every_process_ends_and_the_run_continues(job, unbroken):
    job = job()
    job.hold(2)
    leader, *rollouts = job.together()
    job.held(2)
    wait_for(lambda: (job.workdir / "checkpoints" / "1").exists())  # it is saved beside step 2
    leader.signal(signal.SIGKILL)
    lost = time.monotonic()
    for number, one in enumerate(rollouts):
        code, said = one.ends(10 - (time.monotonic() - lost))
        assert code == STOPPED, said
        (sentence,) = without_waiting(said)
        assert f"rollout {number} ends with code 75; start the whole job again" in sentence
    job.ends(-signal.SIGKILL, STOPPED, STOPPED)
    job.release(2)
    leader, *_ = job.together()
    leader.until("continuing after step 1")
    job.ends(0, 0, 0)
    assert_same_run(job.workdir, unbroken())


def test_prompts_that_the_trainers_process_has_encoded_come_over_the_link(job, base, tmp_path):
    """Rollout processes have neither the store nor the text encoders' weights; another prompt file is refused."""
    trains, samples, other = (tmp_path / name for name in ("trains", "samples", "other"))
    for folder in (trains, samples, other):
        shutil.copytree(base / "tiny-pipeline", folder / "tiny-pipeline")
        shutil.copy(base / "tiny-prompts.jsonl", folder)
    removed = [*samples.glob("tiny-pipeline/text_encoder*/*.safetensors")]
    for weights in removed:
        weights.unlink()
    assert len(removed) == 2
    ahead = "--config.prompts.encoding=ahead", "--config.prompts.store=store"
    apart, alone = job(*ahead), job(*ahead)
    leader = apart.process(0, here=trains, BASE=".")
    prompts = other / "tiny-prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("red", "green"))
    code, errors = apart.process(1, here=other, BASE=".").ends(60)
    assert code == 2 and "with the same command and the same prompt files" in errors
    for number in (1, 2):
        apart.process(number, here=samples, BASE=".")
    apart.ends(0, 2, 0, 0)
    assert any("are to be encoded" in line for line in printed(leader)), leader.said
    assert (trains / "store").exists() and not (samples / "store").exists()
    alone.alone(here=trains, BASE=".")
    alone.ends(0)
    assert_same_run(apart.workdir, alone.workdir)


# What is wrong, and a part of the sentence about it. No leader is there: nobody waits for it.
WRONG = [
    (
        ["--processes=3", "--process=1"],
        dict(DIGEN_JAX_TOKEN=""),
        "DIGEN_JAX_TOKEN must be a secret",
    ),
    (["--processes=4", "--process=3"], {}, "4 processes cannot share the meshes"),
    (["--processes=2", "--process=1"], {}, "2 processes cannot share the meshes"),
    (["--mesh=spare", "--process=1"], {}, "--mesh joins a run that another process leads"),
    (
        ["--processes=3", "--process=1", "--config.placement=auto"],
        {},
        "config.placement = 'auto' plans for one process only",
    ),
    (
        ["--mesh=spare", "--config.placement.rollout.data=0"],
        {},
        "config.placement.rollout.data = 0, so that the trainer's devices sample",
    ),
    (
        ["--processes=3", "--process=0", "--config.placement.trainer.data=2"],
        {},
        "config.placement.trainer has 2 devices",
    ),
]


def test_what_is_wrong_is_one_sentence_at_once(job):
    job = job()
    address = f"--coordinator=127.0.0.1:{job.port}"
    for options, variables, _ in WRONG:
        job.begin(address, *options, workdir=job.holds / "nowhere", **variables)
    job.begin("--mesh=spare", workdir=job.holds / "nowhere")
    sentences = [
        *(sentence for *_, sentence in WRONG),
        "--mesh joins a run that another process leads",
    ]
    for errors, sentence in zip(job.ends(*[2] * len(sentences)), sentences, strict=True):
        assert errors.startswith("train.py: ") and len(errors.splitlines()) == 1
        assert sentence in errors


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
