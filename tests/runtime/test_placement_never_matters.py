"""The same run on every layout of meshes, division and order of work: the same gradient and the same updates."""

import functools
import time

import jax
import numpy as np
import pytest

from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.scheduling.commands import TRAINER, Generate, Train
from tests.cases import quick
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

STEPS = 3
LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets="inside|outside")
# Size of a rollout worker, of the trainer's, number of rollout workers, images of a chunk and of a micro-batch; TAG.
# A third number of the trainer's is its axis "time", over which as many denoising steps are packed; the one behind,
# of either, "tensor". Behind it all, the number of training meshes, if there are several.
LAYOUTS = {
    "one device": ((0, 1), (1, 1), 1, 24, 12, ""),
    "two workers, chunks across groups": ((2, 1), (1, 2), 2, 6, 6, ""),
    "disaggregated, steps split": ((1, 2), (2, 1, 2), 1, 4, 4, ""),
    "TAG in place": ((2, 1), (1, 2), 1, 4, 4, "in place"),
    "two that do both and split steps, one that samples": (
        (1, 1),
        (1, 1, 2),
        1,
        4,
        2,
        "in place",
        2,
    ),
    "half groups, steps split": ((1, 2), (1, 2, 2), 1, 2, 2, ""),
    "tensor on one side, steps split, TAG resharded": ((2, 1), (1, 1, 2, 2), 2, 4, 4, "resharded"),
}
CASES = [
    ("full", 1, "TAG in place"),
    ("full", 2, "two workers, chunks across groups"),
    ("lora", 1, "disaggregated, steps split"),
    ("full", 1, "tensor on one side, steps split, TAG resharded"),
    ("lora", 2, "two that do both and split steps, one that samples"),
]


@functools.cache
def result(tuning, updates, layout, old_log_probs="rollout", std="group", early=0):
    """(gradient of the first update, the change of what is tuned, commands) of a run."""
    rollout, trainer, workers, chunk, micro, tag, *trainers = LAYOUTS[layout]
    config = toy.config(
        **toy.meshes(rollout, trainer, workers, bool(tag), *trainers),
        **(LORA if tuning == "lora" else {}),
        batch__groups=6,
        batch__images=4,
        sampler__chunk=min(chunk, 24 // updates),
        trainer__micro_batch=micro,
        trainer__updates=updates,
        trainer__pack=trainer[2] if len(trainer) > 2 else 1,
        trainer__learning_rate=3.0,
        trainer__eps=1.0,  # Adam with a large eps is nearly SGD: rounding stays rounding
        trainer__clip_norm=1e3,
        algorithm__clip_range=0.2,
        algorithm__kl_coefficient=0.1,
        algorithm__old_log_probs=old_log_probs,
        advantages__std=std,
        runtime__max_incomplete_groups=early,
        runtime__tag_weights=tag or "in place",
    )
    system = toy.system(config)
    assert system.placement.colocated == (rollout == (0, 1))
    gradients, update = [], system.updater.update

    def spy(state, totals, std):
        gradients.append(toy.mean(totals, std))
        return update(state, totals, std)

    system.updater.update = spy
    start = jax.device_get(system.start)
    state, history, log = toy.drive(system, config, STEPS)
    trained = {c.worker for c in log if isinstance(c, Train)}
    assert len(trained) == (trainers or [1])[0]
    by_trainer = sum(isinstance(c, Generate) and c.worker == TRAINER for c in log)
    assert system.placement.colocated or (by_trainer > 0) == bool(tag)
    if not system.placement.colocated:
        assert (sum(metrics["assisted"] for metrics in history) > 0) == bool(tag)
    change = jax.tree.map(np.subtract, jax.device_get(state.tuned), start)
    return jax.device_get(gradients[0]), change, log


@pytest.mark.parametrize(("tuning", "updates", "layout"), quick(CASES, 1, 2))
def test_the_result_is_that_of_one_device(tuning, updates, layout):
    gradient, change, _ = result(tuning, updates, layout)
    expected_gradient, expected_change, _ = result(tuning, updates, "one device")
    assert toy.difference(gradient, expected_gradient) < 1e-5
    assert toy.difference(change, expected_change) < 1e-4
    wrong = jax.tree.map(lambda g: 1.01 * g, gradient)
    assert toy.difference(wrong, expected_gradient) > 5e-3


@pytest.mark.slow
def test_training_groups_before_they_are_complete_is_training_them_then(monkeypatch):
    real = SamplingExecutor.generate

    def generate(executor, chunk, version):
        real(executor, chunk, version)
        time.sleep(0.05 * (chunk.index % 2))  # the first halves come before the second ones

    monkeypatch.setattr(SamplingExecutor, "generate", generate)
    layout = "half groups, steps split"
    gradient, change, log = result("full", 1, layout, "current", "global", early=2)
    assert all(c.early for c in log if isinstance(c, Train))
    expected_gradient, expected_change, plain = result("full", 1, "one device", std="global")
    assert not any(c.early for c in plain if isinstance(c, Train))
    assert toy.difference(gradient, expected_gradient) < 1e-5
    assert toy.difference(change, expected_change) < 1e-4


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_run_changes_what_is_tuned(tuning):
    _, change, _ = result(tuning, 1, "one device")
    assert np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(change))) > 0.01
