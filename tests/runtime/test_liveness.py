"""Work outside the trainer that hangs or fails: given up or repeated by its deadline, with the same result."""

import threading
import time

import jax
import numpy as np
import pytest

from digen_jax.process.shutdown import Stopped
from digen_jax.runtime import driver as driving
from digen_jax.runtime.array_transfer import ArrayTransfer, SamplesKey
from digen_jax.runtime.clock import Watch, measured, paused
from digen_jax.runtime.executors import Executors
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.scheduling.commands import TRAINER, Encode, Generate, SyncWeights, WeightsVersion
from tests.parallel import toy
from tests.runtime.test_workers import STALE, config, equal_bits, replayed

pytestmark = pytest.mark.usefixtures("exact_and_split")

LONG = 120.0  # seconds: until a test ends
HANGS = dict(runtime__deadline=1.5)


@pytest.fixture(scope="module")
def system(exact_and_split):
    """Two meshes of one device sample, a third device trains."""
    return toy.system(config())


@pytest.fixture(scope="module")
def undisturbed(system):
    return toy.drive(system, config(), 3)


@pytest.fixture
def end():
    """Set at a test's end, so that its hung threads do not hang in others."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def noted(monkeypatch):
    """Threads recorded instead of registered in this process, so that it can end without them."""
    found = []
    monkeypatch.setattr(driving, "mark_hung", found.append)
    return found


@pytest.fixture
def hang(monkeypatch, end, noted):
    """hang(method, workers, call): their call of that number does not return."""

    def arrange(method, workers=(1,), call=2):
        real, calls = getattr(SamplingExecutor, method), [0, 0]

        def hanging(executor, *arguments):
            (device,) = executor.rollout.group.mesh.devices.flat
            worker = jax.devices().index(device)
            if worker in workers:
                calls[worker] += 1
                if calls[worker] == call:
                    end.wait(LONG)
            return real(executor, *arguments)

        monkeypatch.setattr(SamplingExecutor, method, hanging)

    return arrange


def test_a_worker_that_hangs_is_removed_and_changes_nothing(
    system, undisturbed, hang, noted, capfd
):
    hang("generate")
    state, history, log = toy.drive(system, config(**HANGS), 3)
    equal_bits(state, undisturbed[0])
    assert [m["reward"] for m in history] == [m["reward"] for m in undisturbed[1]]
    assert noted == ["rollout 1"]
    said = capfd.readouterr().err
    assert "rollout 1 hangs: generating chunk" in said and "runtime.deadline); reassigning" in said
    assert not any(isinstance(c, Generate) and c.worker == TRAINER for c in log)
    equal_bits(replayed(system, config(), log), state)


def test_late_results_of_a_removed_worker_are_ignored(system, hang, end):
    """By then the chunk belongs to another mesh."""
    hang("decode", call=1)
    with toy.driver(system, config(**HANGS)) as driver:
        late = driver.executor.samplers["rollout 1"]
        driver.step()
        end.set()
        driver.step()
        deadline = time.monotonic() + LONG
        while late._trajectories and time.monotonic() < deadline:
            time.sleep(0.05)
        offered = driver.executor._transfer._trees
    assert late.removed and late.images == {}
    assert not any(isinstance(key, SamplesKey) and key.worker == late.name for key in offered)


def test_without_another_worker_the_trainer_does_everything(system, undisturbed, hang, noted):
    hang("generate", workers=(0, 1))
    state, _, log = toy.drive(system, config(**HANGS), 3)
    assert any(isinstance(c, Generate) and c.worker == TRAINER for c in log)
    assert sorted(noted) == ["rollout 0", "rollout 1"]
    start = jax.device_get(system.start)
    change, expected = (
        jax.tree.map(np.subtract, jax.device_get(done.tuned), start)
        for done in (state, undisturbed[0])
    )
    assert toy.difference(change, expected) < 1e-3


def test_where_the_trainer_cannot_take_over_the_run_stops_by_name(system, hang, monkeypatch):
    hang("generate", workers=(0, 1))
    real = Executors.do

    def do(executors, command):
        if getattr(command, "worker", "") == TRAINER and isinstance(command, SyncWeights | Encode):
            raise MemoryError("no room for a sampler")
        return real(executors, command)

    monkeypatch.setattr(Executors, "do", do)
    with toy.driver(system, config(**HANGS)) as driver:
        with pytest.raises(
            Stopped, match=r"rollout . and rollout . hung.*could not take over.*room"
        ):
            driver.step()
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(driver.executor.state))


def test_a_weight_sync_that_hangs_removes_its_worker_and_no_update(
    system, undisturbed, noted, end, monkeypatch
):
    """An update consumes published arrays: it waits for their readers, but not forever."""
    place = threading.local()

    def take(transfer, key, shardings, taker):
        place.hangs = key == WeightsVersion(1) and taker == "rollout 1"
        return taken(transfer, key, shardings, taker)

    def ready(tree):
        if getattr(place, "hangs", False):
            place.hangs = False
            end.wait(LONG)
        return block(tree)

    taken, block = ArrayTransfer.get, jax.block_until_ready
    monkeypatch.setattr(ArrayTransfer, "get", take)
    monkeypatch.setattr(jax, "block_until_ready", ready)
    state, _, log = toy.drive(system, config(**HANGS), 3)
    equal_bits(state, undisturbed[0])
    assert noted == ["rollout 1"]
    late = [c for c in log if isinstance(c, Generate) and c.chunk.step > 0]
    assert {c.worker for c in late} <= {"rollout 0"}


def test_an_evaluation_that_hangs_is_repeated_by_another_worker(system, end, noted, monkeypatch):
    """One of its two chunks hangs on the first mesh that gets it."""
    real, hung = SamplingExecutor.generate, []

    def generate(executor, chunk, weights_version):
        if chunk.evaluation and chunk.index == 0 and not hung:
            hung.append(executor.name)
            end.wait(LONG)
        return real(executor, chunk, weights_version)

    def evaluated():
        found = {}
        options = dict(held_out=toy.records(16), evaluated=found.__setitem__)
        with toy.driver(system, config(**HANGS), **options) as driver:
            driver.step()
        return found[0]

    hung.append("nobody")
    expected = evaluated()
    hung.clear()
    monkeypatch.setattr(SamplingExecutor, "generate", generate)
    found = evaluated()
    assert len(found.scores) == 16 and noted == hung
    np.testing.assert_array_equal(found.scores, expected.scores)


def test_a_superseded_weight_sync_does_not_count_against_its_worker(system, monkeypatch, capfd):
    """It fails in the end: of the versions published meanwhile its mesh gets the last, and stays."""
    c, release, real = config(**STALE), threading.Event(), ArrayTransfer.get
    c.batch.groups = 1  # rollout 0 generates it

    def take(transfer, key, shardings, taker):
        if key == WeightsVersion(1) and taker == "rollout 1":
            release.wait(LONG)
            raise RuntimeError("what is sent has been freed")
        return real(transfer, key, shardings, taker)

    monkeypatch.setattr(ArrayTransfer, "get", take)
    log = []
    with toy.driver(system, c, log=log) as driver:
        for step in range(6):
            if step == 4:
                release.set()
            driver.step()
        deadline = time.monotonic() + LONG
        weights = driver.executor.samplers["rollout 1"].weights
        while not (held := max((one.version for one in list(weights)), default=0)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    own = (c for c in log if isinstance(c, SyncWeights) and c.worker == "rollout 1")
    sent = [c.weights_version.version for c in own]
    assert sent[:2] == [0, 1] and sent[2] >= 4 and held >= 4
    assert capfd.readouterr().err == ""


# ----------------------------------------------------------------------------------- the watch


def late_in(watch, seconds, block):
    """Whether a block of this duration was late."""
    late = []
    with watch.over(None, late.append):
        block(seconds)
    return late


def test_only_work_counts_until_a_deadline():
    watch = Watch(0.4)
    found, late = [], threading.Event()
    with watch.over(None, lambda seconds: (found.append(seconds), late.set())):
        assert late.wait(LONG)
        time.sleep(0.1)  # for some checks more
    assert found == [0.4]
    assert late_in(watch, 0.01, time.sleep) == []

    def wait(seconds):
        with paused():
            time.sleep(seconds)

    assert late_in(watch, 1.0, wait) == []
    assert late_in(Watch(0), 0.1, time.sleep) == []
    watch.close()


def test_a_compiler_at_work_is_not_late(monkeypatch):
    """Between the event that ends lowering and the one that ends compilation."""
    watch = Watch(0.4)

    def compiles(seconds):
        tell = jax.monitoring.record_event_duration_secs
        tell("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.0)
        time.sleep(seconds)
        tell("/jax/core/compile/backend_compile_duration", seconds)

    assert late_in(watch, 1.0, compiles) == []
    with measured() as stopwatch:
        compiles(1.0)
        time.sleep(0.1)
    assert 0.1 <= stopwatch.seconds < 0.9  # 1.1 with the compilation
    watch.close()


def test_a_process_that_was_stopped_for_a_while_is_not_late(monkeypatch):
    """Its clock continues, but the time between two checks counts at most twice its nominal length."""
    watch = Watch(1.0)
    seen, real, often = [], time.sleep, threading.Event()

    def sleep(seconds):
        real(seconds + 0.6)  # as if the process were suspended in each of them
        seen.append(seconds)
        if len(seen) == 3:
            often.set()

    monkeypatch.setattr("digen_jax.runtime.clock.time.sleep", sleep)
    assert late_in(watch, LONG, often.wait) == [] and often.is_set()
    watch.close()
