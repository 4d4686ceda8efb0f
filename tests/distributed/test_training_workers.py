"""Training workers in other processes: the same updates as in one process, also where one is lost."""

import functools
import time

import pytest

from digen_jax.distributed.worker_process import TrainingProcess
from digen_jax.scheduling.commands import TRAINER, Generate, Train, Update
from tests import cases
from tests.distributed import driving
from tests.distributed.local_engine import LocalEngine
from tests.distributed.test_algorithms import LORA, assert_same, config, run
from tests.distributed.test_workers import quick, until  # noqa: F401
from tests.parallel import toy
from tests.runtime import test_training_workers as one_process
from tests.runtime.test_training_workers import alone, changed, equal_bits, trained_by  # noqa: F401

pytestmark = pytest.mark.usefixtures("exact_and_split")

# Four workers sample and train, or two sample and two others train.
POOL, APART = ((0, 1), (1, 1), 1, False, 4), ((1, 1), (1, 1), 2, False, 2)
# The policy that is trained, what is tuned, and the weights that are read.
CASES = {
    "NFT, LoRA, apart": ("diffusion_nft", APART, LORA),
    "all weights and a KL to the start, a pool": ("flow_dppo", POOL, {}),
    "pairs, apart": ("dpo_offline", APART, LORA),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_updates_have_the_bits_of_those_of_one_process(case):
    name, meshes, fields = CASES[case]
    c = config(name, meshes, **fields)
    c.trainer.micro_batch = c.trainer.micro_batch * 4 // c.sampler.chunk
    c.sampler.chunk = 4
    system = toy.system(c, 4)._replace(
        joint_trainer=None
    )  # the home worker updates alone, as on Ray
    expected, found = run(toy.drive, system, c), run(driving.drive, system, c)
    assert_same(found, expected)
    assert trained_by(found[3]) == {
        TRAINER,
        *(f"worker {n + 1}" for n in range(len(system.trainers))),
    }
    for one, other in zip(found[2], expected[2], strict=True):
        same = {name for name in one if name.startswith(("reward", "gradient", "loss", "ratio"))}
        assert {name: one[name] for name in same} == {name: other[name] for name in same}


# ------------------------------------------------------------------------------------ workers that are lost


@pytest.fixture(scope="module")
def systems(exact_and_split):
    """The system of a layout, whose programs all tests here use."""
    return functools.cache(
        lambda apart: toy.system(lost_config(apart), 4)._replace(joint_trainer=None)
    )


def lost_config(apart: bool):
    return one_process.config(toy.meshes(*(APART if apart else POOL)))


# The lost worker's call in which its process is killed: in a piece, and with the sums of another one that it was sent,
# or that it was to send to another one.
MOMENTS = {
    "in a piece": (True, "worker 1", "train"),
    "while it adds others": (False, "worker 1", "offer_sums"),
    "while another one waits for it": (False, "worker 3", "offer_sums"),
}


@pytest.mark.parametrize("moment", cases.quick([(moment,) for moment in MOMENTS], 2))
def test_a_worker_that_dies_changes_nothing_and_rejoins(
    alone,  # noqa: F811
    systems,
    quick,  # noqa: F811
    monkeypatch,
    moment,
):
    apart, worker, method = MOMENTS[moment]
    engine, killed, real = LocalEngine(), [], getattr(TrainingProcess, method)

    def kill(process, *arguments):
        if process._name == worker and not killed:
            killed.append(process)
            (actor,) = (one for one in engine.actors if one.object is process)
            engine.kill(actor)
        return real(process, *arguments)

    monkeypatch.setattr(TrainingProcess, method, kill)
    c, system, log = lost_config(apart), systems(apart), []
    with driving.driver(system, c, engine=engine, log=log) as driver:
        history = [driver.step()]
        until(lambda: worker in driver.executor.others)
        history += [driver.step() for _ in range(2)]
        state = driver.executor.state
    expected, of_one = alone
    assert killed
    assert toy.difference(changed(system, state), expected) < 1e-4
    rewards = [metrics["reward"] for metrics in history]
    assert rewards == pytest.approx([metrics["reward"] for metrics in of_one], abs=1e-5)
    updates = [command for command in log if isinstance(command, Update)]
    assert len(updates) == 3 + (method == "offer_sums")
    last = [command for command in log if isinstance(command, Train) and command.chunk.step == 2]
    assert worker in {command.worker for command in last}


@pytest.mark.slow
def test_a_worker_that_rejoins_before_the_update_has_no_sums(alone, systems, quick, monkeypatch):  # noqa: F811
    """The trainer may be late, as when it saves a checkpoint."""
    c, system, engine, late = lost_config(False), systems(False), LocalEngine(), []
    with driving.driver(system, c, engine=engine) as driver:
        executor, update = driver.executor, driver.executor._update

        def wait(command):
            if not late:
                late.append(executor.others["worker 2"])
                (actor,) = (one for one in engine.actors if repr(one) == "worker 2")
                engine.kill(actor)
                until(lambda: executor.others.get("worker 2") not in (None, *late))
            update(command)

        monkeypatch.setattr(executor, "_update", wait)
        for _ in range(3):
            driver.step()
        state = executor.state
    expected, _ = alone
    assert late and toy.difference(changed(system, state), expected) < 1e-4


@pytest.mark.slow
def test_nothing_is_left_of_a_step_that_has_ended(systems, monkeypatch):
    """One worker is slow, so that others train what it has generated."""
    c, engine, train = lost_config(False), LocalEngine(), TrainingProcess.train

    def slow(process, *arguments):
        time.sleep(0.5 if process._name == "worker 1" else 0)
        return train(process, *arguments)

    monkeypatch.setattr(TrainingProcess, "train", slow)
    c.runtime.deterministic_order = "no"
    with driving.driver(systems(False), c, engine=engine, log=(log := [])) as driver:
        for _ in range(2):
            driver.step()
    of_slow = {c.chunk for c in log if isinstance(c, Generate) and c.worker == "worker 1"}
    assert any(c.worker != "worker 1" for c in log if isinstance(c, Train) and c.chunk in of_slow)
    held = [driver.executor.trainer, *(one.object._training for one in engine.actors)]
    links = [driver.executor._transfer, *(one.object._transfer for one in engine.actors)]

    def kept():
        samples = [chunk for one in held for chunk in one.samples]
        offered = [getattr(key, "chunk", None) for transfer in links for key in transfer._trees]
        return [one for one in (*samples, *offered) if one is not None and one.step < 2]

    until(lambda: not kept())  # workers free them while others go on
