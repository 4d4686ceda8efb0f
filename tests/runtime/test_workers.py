"""Several workers: what fails or hangs, asynchrony, their part of a checkpoint, and the replayed log."""

import re
import threading
import time
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards import Scores, alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime import driver as runtime_driver
from digen_jax.runtime.array_transfer import ArrayTransfer, SamplesKey, TransferError
from digen_jax.runtime.checkpointing import InFlight
from digen_jax.runtime.driver import WorkerDisconnected
from digen_jax.runtime.executors import Executors
from digen_jax.runtime.sampling import SamplingExecutor, failed
from digen_jax.runtime.steps import ScoredChunk
from digen_jax.runtime.training import TrainingExecutor
from digen_jax.scheduling.commands import (
    TRAINER,
    Encode,
    Generate,
    SyncWeights,
    Train,
    Update,
    WeightsVersion,
)
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

GROUPS = 4
STALE = dict(runtime__max_policy_lag=1, runtime__max_off_policy_fraction=0.5)


def config(**fields):
    return toy.config(
        **toy.meshes((1, 1), (1, 1), workers=2),
        batch__groups=GROUPS,
        batch__images=4,
        sampler__chunk=4,
        trainer__micro_batch=4,
        trainer__learning_rate=0.02,
        **fields,
    )


@pytest.fixture(scope="module")
def system(exact_and_split):
    """Two meshes of one device sample, a third device trains."""
    return toy.system(config())


@pytest.fixture(scope="module")
def undisturbed(system):
    return toy.drive(system, config(), 3)


def intercept(monkeypatch, method, act, *names, of=SamplingExecutor):
    """Calls `act(name, n)` before call n of a method on the workers `names`; returns the counts of calls."""
    real, calls = getattr(of, method), dict.fromkeys(names, 0)

    def intercepted(executor, *arguments):
        if executor.name in calls:
            calls[executor.name] += 1
            act(executor.name, calls[executor.name])
        return real(executor, *arguments)

    monkeypatch.setattr(of, method, intercepted)
    return calls


def equal_bits(state, other):
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()


def replayed(system, config, log, **options):
    """The state after a log's last command."""
    pool = RewardPool(alone("mine", toy.brightness), 0)
    options = {"state": toy.fresh(system), "batches": toy.batches(GROUPS)} | options
    executors = toy.executors(system, config, **options)
    last = max(i for i, c in enumerate(log) if isinstance(c, Update))
    state = toy.replay(executors, pool, log[: last + 1])
    pool.close()
    return state


# ------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("method", ["generate", "decode", "encode"])
@pytest.mark.parametrize("times", [1, 99])
def test_a_worker_that_fails_changes_nothing(
    system, undisturbed, monkeypatch, capfd, method, times
):
    def fail(name, call):
        if 1 < call <= 1 + times:
            text = "RESOURCE_EXHAUSTED: worker 1 is out of memory\nBuffers: many"
            raise jax.errors.JaxRuntimeError(text)

    calls = intercept(monkeypatch, method, fail, "rollout 1")
    state, history, log = toy.drive(system, config(), 3)
    equal_bits(state, undisturbed[0])
    assert [m["reward"] for m in history] == [m["reward"] for m in undisturbed[1]]
    said = capfd.readouterr().err
    assert calls["rollout 1"] > 1 and "Traceback" not in said and "Buffers" not in said
    # An encoding is for the chunk that it begins.
    sentence = r"rollout 1: a device ran out of memory during generating chunk \d of step \d \("
    assert re.search(sentence + "RESOURCE_EXHAUSTED: worker 1 is out of memory\\)\n", said)
    assert ("rollout 1 has failed 2 times in a row; reassigning" in said) == (times == 99)
    assert not any(isinstance(c, Generate) and c.worker == TRAINER for c in log)


def test_a_transfer_error_is_logged_in_one_line(system, undisturbed, monkeypatch, capfd):
    real, failed = TrainingExecutor.deliver, []

    def deliver(executor, command):
        if not failed:
            failed.append(command.worker)
            raise TransferError("the samples have not come: the connection is refused")
        return real(executor, command)

    monkeypatch.setattr(TrainingExecutor, "deliver", deliver)
    monkeypatch.setattr(runtime_driver, "DISCONNECT_TIMEOUT", 0.01)
    state, *_ = toy.drive(system, config(), 3)
    equal_bits(state, undisturbed[0])
    said = capfd.readouterr().err
    line = f"{failed[0]}: the samples have not come: the connection is refused\n"
    assert line in said and "Traceback" not in said and "reassigning" not in said


def test_missing_arrays_of_a_disconnected_process_are_no_failure(
    system, undisturbed, monkeypatch, capfd
):
    """Its connections break before the leader knows that it is lost."""
    real, drivers = TrainingExecutor.deliver, []

    def deliver(executor, command):
        if command.worker == "rollout 1":
            threading.Timer(0.2, drivers[0].disconnected, (command.worker, "is lost")).start()
            raise TransferError("the samples have not come: the connection is refused")
        return real(executor, command)

    monkeypatch.setattr(TrainingExecutor, "deliver", deliver)
    with toy.driver(system, config()) as driver:
        drivers.append(driver)
        for _ in range(3):
            driver.step()
        equal_bits(driver.executor.state, undisturbed[0])
    said = capfd.readouterr().err
    assert "rollout 1 is lost; reassigning its work\n" in said
    assert "have not come" not in said and "times in a row" not in said


def test_a_failure_of_a_removed_worker_does_not_end_the_run(system, undisturbed, monkeypatch):
    """What it was at fails by that, in words that would end the run."""
    drivers = []

    def leave(name, call):
        drivers[0].disconnected(name, "leaves, because it was asked to stop")
        raise Stopped("its prompts have not come")

    intercept(monkeypatch, "generate", leave, "rollout 1")
    with toy.driver(system, config()) as driver:
        drivers.append(driver)
        for _ in range(3):
            driver.step()
        equal_bits(driver.executor.state, undisturbed[0])


def test_a_worker_that_cannot_join_ends_the_run_with_the_reason(system, monkeypatch):
    def join(executors, sampler):
        raise RuntimeError("there is no room for it")

    monkeypatch.setattr(Executors, "join", join)
    with toy.driver(system, config()) as driver:
        driver.join(object())
        with pytest.raises(RuntimeError, match="there is no room for it"):
            for _ in range(3):
                driver.step()


@pytest.mark.parametrize("late", [False, True])
def test_scores_of_a_removed_worker_are_ignored(system, undisturbed, monkeypatch, capfd, late):
    """They fail as the mesh's, or come when another mesh has made their chunk again."""
    real, held, lost, drivers, noted = SamplingExecutor.score, [], [], [], []
    there, note = threading.Event(), Executors.scored

    def score(executor, chunk, judge):
        found = real(executor, chunk, judge)
        if executor.name == "rollout 1" and not lost:
            lost.append(chunk)
            held.append(
                Future() if late else failed(WorkerDisconnected("it has lost its connection"))
            )
            assert there.wait(60)
            driver = drivers[0]
            dead = driver._workers[executor.name], "is lost"
            threading.Thread(target=driver._remove, args=dead, daemon=True).start()
            return held[0]
        if late and [chunk] == lost:
            wrong = Scores(np.full((4, 1), 7, np.float32), {})
            held[0].set_result(ScoredChunk(wrong, wrong.columns[:, 0]))
        return found

    def scored(executors, command, judged):
        noted.append((command.chunk, command.maker))
        note(executors, command, judged)

    monkeypatch.setattr(SamplingExecutor, "score", score)
    monkeypatch.setattr(Executors, "scored", scored)
    with toy.driver(system, config()) as driver:
        drivers.append(driver)
        there.set()
        history = [driver.step() for _ in range(3)]
        equal_bits(driver.executor.state, undisturbed[0])
    assert [m["reward"] for m in history] == [m["reward"] for m in undisturbed[1]]
    assert [maker for chunk, maker in noted if chunk == lost[0]] == ["rollout 0"]
    assert "it is called again" not in capfd.readouterr().err


# --------------------------------------------------------------------------- what hangs until a deadline

LONG = 120.0  # seconds: until a test ends
HANGS = dict(runtime__deadline=1.5)


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
    monkeypatch.setattr(runtime_driver, "mark_hung", found.append)
    return found


@pytest.fixture
def hang(monkeypatch, end, noted):
    """hang(method, worker, ..., call=2): this call of each of these workers does not return."""

    def arrange(method, *names, call=2):
        def wait(name, number):
            if number == call:
                end.wait(LONG)

        intercept(monkeypatch, method, wait, *names)

    return arrange


def test_a_worker_that_hangs_is_removed_and_changes_nothing(
    system, undisturbed, hang, noted, capfd
):
    hang("generate", "rollout 1")
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
    hang("decode", "rollout 1", call=1)
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
    hang("generate", "rollout 0", "rollout 1")
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
    hang("generate", "rollout 0", "rollout 1")
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


# --------------------------------------------------------------------------------- replay, order


def test_trained_in_order_whoever_is_faster(undisturbed):
    for step in range(3):
        trained = [c for c in undisturbed[2] if isinstance(c, Train) and c.chunk.step == step]
        assert [c.chunk.index for c in trained] == list(range(GROUPS))


# ----------------------------------------------------------------------------------- asynchrony


@pytest.fixture(scope="module")
def asynchronous(system):
    return toy.drive(system, config(**STALE), 4)


def test_the_tail_of_a_step_begins_the_next_within_the_bounds(asynchronous):
    _, history, log = asynchronous
    assert history[0]["policy_lag"] == 0 and max(m["policy_lag"] for m in history) > 0
    ages = {}
    for command in log:
        if isinstance(command, Generate):
            step = command.chunk.step
            ages.setdefault(step, []).append(step - command.weights_version.version)
    for age in ages.values():
        assert set(age) <= {0, 1} and sum(age) <= GROUPS / 2
    # A stale chunk's ratios are to the version that generated it.
    for metrics in history:
        assert (metrics["ratio_deviation"] > 1e-4) == (metrics["policy_lag"] > 0)


def test_a_replayed_log_gives_the_same_bits_with_asynchrony(system, asynchronous):
    state, history, log = asynchronous
    equal_bits(replayed(system, config(**STALE), log), state)
    assert sum(metrics["policy_lag"] for metrics in history) > 0


def test_a_checkpoint_of_the_scheduler_before_this_one_is_refused(system):
    in_flight = InFlight({"is": "SchedulerState", "batches": {"is": "dict", "items": []}}, {})
    with (
        pytest.raises(ConfigError, match="an older version of digen_jax"),
        toy.driver(system, config(), first=1, in_flight=in_flight),
    ):
        pass
