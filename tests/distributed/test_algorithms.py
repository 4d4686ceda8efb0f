"""Rollout workers in other processes: the same gradients and updates as in one process.

They are the same bits where the order of sums is the same, and where each image is made on a mesh of the same shape.
"""

import functools
import runpy

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from digen_jax.parallel.trainer import Trainer
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.scheduling.commands import Generate, Update
from tests.distributed import driving
from tests.parallel import toy
from tests.pipelines import ROOT

pytestmark = pytest.mark.usefixtures("exact_and_split")

STEPS = 3
GROUPS, IMAGES = 4, 4
ALGORITHMS = runpy.run_path(str(ROOT / "configs" / "shapes_algorithms.py"))["ALGORITHMS"]
# Adam with a large eps is nearly SGD: rounding stays rounding.
PLAIN = dict(learning_rate=3.0, eps=1.0, clip_norm=1e3)
LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets="inside|outside")
# (rollout mesh, trainer's, number of rollout meshes)
ONE, TWO, SPLIT = ((1, 1), (1, 1), 1), ((1, 1), (1, 1), 2), ((1, 2), (2, 1, 2), 1)


def config(name: str, meshes=ONE, **fields) -> ConfigDict:
    """One of the configs of configs/shapes_algorithms.py, for the toy family, with few images and larger steps."""
    c = ConfigDict(
        dict(
            batch=dict(groups=GROUPS, images=IMAGES),
            sampler=dict(steps=6, window=dict(first=0, length=3), guidance=1.0, chunk=8),
            trainer=dict(micro_batch=8, updates=2) | PLAIN,
        )
    )
    c.update(ALGORITHMS[name])
    c.update(dict(batch=dict(groups=GROUPS, images=IMAGES), trainer=PLAIN))
    stale, few = "runtime" in c, "advantages" in c or c.algorithm.get("beta")
    c.sampler.chunk = 4 if stale else 8
    # Of some only two images of each group are trained.
    c.trainer.micro_batch = 4 if stale or few else 8
    if "best_and_worst" in c.get("advantages", {}):
        c.advantages.best_and_worst = 1
    if "set_steps" in c.algorithm:
        c.algorithm.set_steps = 2
    if c.sampler.window.get("interval"):
        c.sampler.window.interval = 1
    return toy.config(**c.to_dict(), **toy.meshes(*meshes), **fields)


def run(drive, system, c: ConfigDict, **options):
    """(gradient of the first update, the change of what is tuned, metrics, commands) of a run."""
    gradients, update = [], Trainer.update

    def spy(trainer, state, totals, std):
        gradients.append(toy.mean(totals, std))
        return update(trainer, state, totals, std)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", spy)
        state, history, log = drive(system, c, STEPS, **options)
    return jax.device_get(gradients[0]), change(system, state), history, log


def change(system, state):
    start = jax.device_get(system.start)
    return jax.tree.map(np.subtract, jax.device_get(state.tuned), start)


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def replayed(system, c: ConfigDict, log):
    """The change of what is tuned, by the commands of a run in one process."""
    executors = toy.executors(system, c, toy.fresh(system), toy.batches(toy.opened(c).max_groups))
    last = max(i for i, command in enumerate(log) if isinstance(command, Update))
    pool = RewardPool(alone("mine", toy.brightness), 0)
    state = toy.replay(executors, pool, log[: last + 1])
    pool.close()
    return change(system, state)


def assert_same(found, expected, rounding=0.0, once=True) -> None:
    """Up to `rounding`, as a sum has whose order differs; with `once` no chunk was generated twice."""
    (gradient, moved, _, log), (of_one, moved_by_one, *_) = found, expected
    assert norm(of_one) > 1e-4 and norm(moved_by_one) > 1e-3
    assert toy.difference(gradient, of_one) <= rounding
    assert toy.difference(moved, moved_by_one) <= 10 * rounding
    begun = [c.chunk for c in log if isinstance(c, Generate)]
    assert len(begun) == len(set(begun)) or not once


def makers(log) -> set[str]:
    return {command.worker for command in log if isinstance(command, Generate)}


OTHERS = {
    "two meshes, LoRA": ("flow_grpo", TWO, LORA),
    "LoRA, pairs of a set": ("dpo_offline", ONE, LORA),
    "bfloat16, LoRA": ("awm", ONE, LORA | dict(precision__rollout="bfloat16")),
    "old log-probabilities recomputed": (
        "flow_cps",
        ONE,
        dict(algorithm__old_log_probs="recomputed", algorithm__kl_coefficient=0.1),
    ),
    "meshes that split differently, LoRA": ("diffusion_nft", SPLIT, LORA | dict(trainer__pack=2)),
}


@functools.cache
def in_one_process(case: str):
    """(config, system, its run in one process)."""
    name, meshes, fields = OTHERS[case]
    c = config(name, meshes, **fields)
    system = toy.system(c, 6)
    return c, system, run(toy.drive, system, c)


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.slow if i else []) for i, one in enumerate(OTHERS)]
)
def test_meshes_and_types_apart_are_those_of_one_process(case):
    c, system, expected = in_one_process(case)
    found = run(driving.drive, system, c)
    assert_same(found, expected)
    assert makers(found[3]) == {f"rollout {number}" for number in range(OTHERS[case][1][2])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dance_grpo", "mix_grpo", "flow_dppo", "diffusion_dpo", "dgpo", "crd"]
)
def test_each_kind_of_samples_trains_as_in_one_process(name):
    """The other algorithms differ from these, or from those above, on the trainer alone."""
    c = config(name)
    system = toy.system(c, 2)
    assert_same(run(driving.drive, system, c), run(toy.drive, system, c))


STALE = dict(runtime__max_policy_lag=1, runtime__max_off_policy_fraction=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), [("diffusion_nft", LORA | STALE), ("tis", {})])
def test_with_asynchrony_the_log_of_a_run_is_that_of_one_process(name, fields):
    """Timing decides which version generates what."""
    c = config(name, **fields)
    c.sampler.chunk = c.trainer.micro_batch = 4
    system = toy.system(c, 2)
    found = run(driving.drive, system, c)
    assert max(metrics["policy_lag"] for metrics in found[2]) > 0
    expected = run(toy.drive, system, c)[0], replayed(system, c, found[3])
    assert_same(found, expected)
