"""Rollout workers that fail to start, are lost in mid-run or hang: see `local_engine`."""

import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from digen_jax.distributed import workers
from digen_jax.distributed.transfer import TrainerTransfer
from digen_jax.distributed.worker_process import CallFailed, Member, RolloutProcess
from digen_jax.distributed.workers import RemoteWorkers, WorkerProxy
from digen_jax.errors import ConfigError
from digen_jax.runtime.driver import WorkerDisconnected
from digen_jax.scheduling.commands import TRAINER, Chunk, WeightsVersion
from tests.distributed import driving
from tests.distributed.local_engine import LocalEngine
from tests.distributed.test_algorithms import TWO, assert_same, config, in_one_process, makers, run
from tests.parallel import toy
from tests.pipelines import ROOT

pytestmark = pytest.mark.usefixtures("exact_and_split")

LONG = 60.0  # seconds in which everything happens


@pytest.fixture
def quick(monkeypatch):
    """Pings are frequent, and so are restarts."""
    monkeypatch.setattr(workers, "PING", 0.05)
    monkeypatch.setattr(workers, "FIRST_PAUSE", 0.05)


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def drive(system, c, steps, faults, **options):
    """As `driving.drive`; `faults[n](driver, engine)` happens when n steps are done."""
    engine, log, history = LocalEngine(), [], []
    with driving.driver(system, c, engine=engine, log=log, **options) as driver:
        for step in range(steps):
            if step in faults:
                faults[step](driver, engine)
            history.append(driver.step())
    return driver.executor.state, history, log


@pytest.mark.slow
def test_disconnected_workers_restart_and_change_nothing(quick, monkeypatch):
    """The first worker does not answer; later both are killed, and the trainer may sample until one is back."""
    c, system, expected = in_one_process("two meshes, LoRA")
    release = threading.Event()

    def silence(driver, engine):
        with monkeypatch.context() as patch:
            patch.setattr(workers, "PING_TIMEOUT", 0.2)
            engine.actors[0].object.ping = lambda: release.wait(LONG)
            until(lambda: engine.actors[0].lost)
        release.set()

    def kill(driver, engine):
        started = len(engine.actors)
        for actor in engine.actors:
            engine.kill(actor)
        until(lambda: len(engine.actors) >= started + 2)
        until(lambda: {"rollout 0", "rollout 1"} <= set(driver.executor.samplers))

    def with_faults(*given, **options):
        return drive(*given, {1: silence, 2: kill}, **options)

    found = run(with_faults, system, c)
    assert_same(found, expected, once=False)
    assert makers(found[3]) <= {"rollout 0", "rollout 1", TRAINER}


@pytest.fixture
def remote():
    """remote(opened): (`RemoteWorkers`, engine) of processes that call `opened(name)` when they open."""
    started = []

    def start(opened, **rollout):
        class Process(RolloutProcess):
            def open(self, train_config, first, place=None):
                opened(self._name)
                return Member(1, "here", 0, "cpu")

        c, engine = config("flow_grpo", TWO), LocalEngine()
        c.placement.rollout.update(rollout)
        started.append(RemoteWorkers(toy.opened(c), engine, kind=Process))
        return started[0], engine

    yield start
    started[0].close()


@pytest.mark.parametrize(
    ("error", "seconds", "named"),
    [
        (ConfigError("config.model.folder: x is missing"), LONG, "model.folder"),
        (RuntimeError("no memory"), 0.1, "placement.rollout"),
    ],
)
def test_a_run_does_not_start_without_any_worker(remote, error, seconds, named):
    def fail(name):
        raise error

    with pytest.raises(ConfigError, match=named):
        remote(fail)[0].wait(seconds)


def test_a_worker_that_fails_to_start_restarts(quick, remote):
    failures = [RuntimeError("no memory")] * 3

    def fail(name):
        if failures:
            raise failures.pop()

    found, engine = remote(fail)
    found.wait(LONG)
    assert len(engine.actors) == 5


def test_workers_write_a_profile_or_say_why_not(remote, tmp_path, capsys):
    """All workers share this process, in which the profiler runs once: the second one to start it fails."""
    found, engine = remote(lambda name: None)
    found.wait(LONG)
    assert {actor.object._name for actor in engine.actors} == {"rollout 0", "rollout 1"}
    found.profile(str(tmp_path))
    found.profile("")
    (file,) = tmp_path.rglob("*.xplane.pb")
    number = re.fullmatch(r"rollout_(.)_0", file.relative_to(tmp_path).parts[0])[1]
    said = capsys.readouterr().err
    assert (
        said.count("no profile") == said.count(f"rollout {1 - int(number)} has no profile (") == 1
    )


def test_a_worker_that_hangs_during_its_start_restarts(quick, remote, monkeypatch):
    monkeypatch.setattr(workers, "OPEN_TIMEOUT", 0.5)
    hangs, release = threading.Lock(), threading.Event()

    def hang(name):
        if hangs.acquire(blocking=False):
            release.wait(LONG)

    found, engine = remote(hang)
    found.wait(LONG)
    assert len(engine.actors) > 2
    release.set()


def test_a_run_starts_with_as_many_workers_as_it_needs_whichever_they_are(remote):
    """Where there are fewer nodes than `max_workers`, any of the workers may have got one."""
    nodes = {"rollout 1", "rollout 2"}

    def fail(name):
        if name not in nodes:
            raise RuntimeError("no node")

    found, _ = remote(fail, max_workers=3)
    found.wait(LONG)
    assert set(found.places()) == {*nodes, TRAINER}


def test_the_death_of_one_process_is_no_error_of_the_other():
    """Of two processes in a collective, the one that is left fails before the loss is known."""
    failed, release = threading.Event(), threading.Event()

    class Half:
        def __init__(self, number):
            self.number = number

        def work(self, serial, method, chunk, weights_version):
            if self.number:
                release.wait(LONG)
            failed.set()
            raise CallFailed("connection closed by peer")

    engine = LocalEngine()
    actors = engine.start(Half, [(0,), (1,)])
    proxy = WorkerProxy(
        "rollout 0", Member(2, "here", 0, "cpu"), actors, engine, TrainerTransfer(engine)
    )
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(proxy.generate, Chunk(0, 0), WeightsVersion(0))
        failed.wait(LONG)
        engine.kill(actors[1])
        release.set()
        with pytest.raises(WorkerDisconnected):
            working.result(LONG)


def test_a_chunk_that_is_dropped_before_its_scoring_begins_has_no_scores():
    """Other threads of the process drop and score, so a later call may be executed first."""
    c, system, _ = in_one_process("two meshes, LoRA")
    kind = driving.process_class(system, toy.brightness, ())
    process = kind("rollout 0", {}, "", [])
    process.open(toy.opened(c), 0)
    process._steps.ensure(0)
    process.drop_chunk(Chunk(0, 0))
    assert process.score(Chunk(0, 0)) is None
    with pytest.raises(CallFailed):
        process.score(Chunk(0, 1))
    process.close()


def test_a_process_sets_its_environment_before_libraries_read_it():
    code = (
        "import sys, digen_jax.distributed.worker_process\n"
        "sys.exit(bool({'jax', 'huggingface_hub'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
