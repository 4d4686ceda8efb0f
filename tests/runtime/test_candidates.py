"""Dynamic sampling: a step consists of its first groups with variance, on any mesh and in any order."""

import functools
import itertools
import random
import threading
import time

import jax
import numpy as np
import pytest

from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import Steps
from digen_jax.scheduling.commands import Chunk, DropChunks, Generate, Train
from tests.cases import quick
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

GROUPS, MOST, STEPS = 3, 7, 3
# The candidates of each step whose rewards are all equal: some, too many, none.
FLAT = [{0, 3, 4}, {0, 2, 3, 4, 5}, set()]
# Size of a rollout worker, of the trainer's, number of rollout workers, images of a chunk.
LAYOUTS = {
    "one device": ((0, 1), (1, 1), 1, 4),
    "two workers, half groups": ((1, 1), (1, 1), 2, 2),
    "a mesh each": ((1, 2), (2, 1), 1, 4),
}


def some_equal(images, prompts, metadata):
    """Brightness, or the fixed reward of the prompts of `FLAT`."""
    scores = toy.brightness(images, prompts, metadata)
    for i, record in enumerate(metadata):
        step, candidate = divmod(record["serial"] - 10, MOST)
        if candidate in FLAT[step % STEPS]:
            scores[i] = 0.25
    return scores


def chosen(step, records):
    """The records of the groups that form a step, by their definition."""
    flat = [record for i, record in enumerate(records) if i in FLAT[step % STEPS]]
    return ([record for record in records if record not in flat] + flat)[:GROUPS]


def config(layout, most=MOST, **fields):
    rollout, trainer, workers, chunk = LAYOUTS[layout]
    fields = dict(runtime__oversampled_groups=1 if most else 0) | fields
    return toy.config(
        **toy.meshes(rollout, trainer, workers),
        batch__groups=GROUPS,
        batch__images=4,
        sampler__chunk=chunk,
        trainer__micro_batch=chunk,
        # Adam with a large eps is nearly SGD: rounding stays rounding.
        trainer__learning_rate=3.0,
        trainer__eps=1.0,
        trainer__clip_norm=1e3,
        algorithm__clip_range=0.2,
        algorithm__kl_coefficient=0.1,
        runtime__max_candidates=most,
        **fields,
    )


@functools.cache
def system(layout, most=MOST, std="group"):
    return toy.system(config(layout, most, advantages__std=std))


@pytest.fixture
def late(monkeypatch):
    """Random durations of chunks."""
    dice, real = random.Random(time.time_ns()), SamplingExecutor.generate

    def generate(executor, chunk, version):
        time.sleep(dice.choice([0, 0, 0.02, 0.06]))
        real(executor, chunk, version)

    monkeypatch.setattr(SamplingExecutor, "generate", generate)


def run(layout, std="group", most=MOST, steps=STEPS, **options):
    """(gradient of the first update, change of what is tuned, metrics, commands)."""
    parts, gradients = system(layout, most, std), []
    update = parts.trainer.update

    def spy(state, totals, *rest):
        gradients.append(jax.tree.map(lambda g: g / totals.sums["weight"], totals.gradient))
        assert float(totals.sums["weight"]) == GROUPS * 4 * 2
        return update(state, totals, *rest)

    start = jax.device_get(parts.start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.trainer, "update", spy)
        c = config(layout, most, advantages__std=std)
        state, history, log = toy.drive(parts, c, steps, some_equal, **options)
    change = jax.tree.map(np.subtract, jax.device_get(state.tuned), start)
    return jax.device_get(gradients[0]), change, history, log


@functools.cache
def plain(std):
    """The same for a run that gets only the chosen groups."""
    steps = zip(itertools.count(), toy.batches(MOST), strict=False)
    given = (chosen(step, records) for step, records in steps)
    return run("one device", std, most=0, batches=given)


@pytest.mark.parametrize(
    ("layout", "std"), quick([("two workers, half groups", "group"), ("a mesh each", "global")], 0)
)
def test_a_step_is_that_of_the_chosen_groups_alone(late, layout, std):
    gradient, change, history, log = run(layout, std)
    expected_gradient, expected_change, expected_history, _ = plain(std)
    assert toy.difference(gradient, expected_gradient) < 1e-5
    assert toy.difference(change, expected_change) < 1e-4
    for metrics, expected in zip(history, expected_history, strict=True):
        names = [n for n in expected if n.startswith(("reward", "zero_std", "gradient", "kl"))]
        assert len(names) > 6
        for name in names:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    assert [metrics["zero_std_groups"] for metrics in history] == [0, pytest.approx(1 / 3), 0]
    begun = [{c.chunk.index // (4 // LAYOUTS[layout][3]) for c in log if isinstance(c, Generate)
              and c.chunk.step == step} for step in range(STEPS)]  # fmt: skip
    assert [metrics["candidates"] for metrics in history] == list(map(len, begun))
    assert begun[0] >= set(range(6)) and len(begun[1]) == 7 and len(begun[2]) <= 4


def test_neither_order_nor_bits_depend_on_arrival(monkeypatch):
    """Half of the first member comes after the others, or all come in their order of generation."""
    real, found = SamplingExecutor.generate, []
    for seconds in (0.2, 0):

        def generate(executor, chunk, version, seconds=seconds):
            real(executor, chunk, version)
            time.sleep(seconds * (chunk.index == 2))

        monkeypatch.setattr(SamplingExecutor, "generate", generate)
        _, change, _, log = run("two workers, half groups")
        trained = [c.chunk for c in log if isinstance(c, Train)]
        for step, groups in enumerate([(1, 2, 5), (1, 6, 0), (0, 1, 2)]):
            halves = [2 * group + half for group in groups for half in (0, 1)]
            assert [f.index for f in trained if f.step == step] == halves
        found.append(change)
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_chunk_that_is_dropped_during_generation_is_not_kept(monkeypatch):
    """The redundant candidate's chunks come after the end of their step."""
    over, real, end = threading.Event(), SamplingExecutor.generate, Steps.forget
    last = Chunk(2, GROUPS * 2)

    def generate(executor, chunk, version):
        real(executor, chunk, version)
        assert chunk != last or over.wait(300)

    def ended(steps, before):
        if before == last.step + 1:
            over.set()
        return end(steps, before)

    monkeypatch.setattr(SamplingExecutor, "generate", generate)
    monkeypatch.setattr(Steps, "forget", ended)
    c, log = config("two workers, half groups"), []
    with toy.driver(system("two workers, half groups"), c, some_equal, log=log) as driver:
        history = [driver.step() for _ in range(4)]
        workers = list(driver.executor.samplers.values())
    dropped = {f for c in log if isinstance(c, DropChunks) for f in c.chunks}
    assert last in dropped and history[2]["candidates"] == GROUPS + 1
    assert sum(isinstance(c, Generate) and c.chunk == last for c in log) == 1
    kept = {f for worker in workers for f in worker._trajectories}
    assert not kept & dropped and {f.step for f in kept} <= {4}
    assert set(driver.executor.steps._steps) <= {4}
