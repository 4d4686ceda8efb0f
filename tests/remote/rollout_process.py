"""A real sampling mesh's process; the environment says what it makes (KIND), how (LINK), and for whom (LEADER).

REWARD names what its rewards do.
"""

import functools
import importlib
import os
import pathlib
from contextlib import closing

import jax
import numpy as np
from ml_collections import ConfigDict

from digen_jax import assemble
from digen_jax.config.command_line import run_main
from digen_jax.config.door import open_recipe
from digen_jax.config.recipe import Recipe
from digen_jax.engine.system import System
from digen_jax.remote.identity import Identity, job_token
from digen_jax.remote.opening import join, open_pulls
from digen_jax.remote.outline import nodes
from digen_jax.remote.relay import Relay
from digen_jax.remote.serving import Sampling, serve
from digen_jax.remote.wire import Wire
from digen_jax.rewards import NamedReward, Rewards, alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.settings import RewardSettings
from digen_jax.run.driving import scheduled
from digen_jax.runtime.evaluation import HeldOut
from digen_jax.runtime.judging import Judge
from digen_jax.runtime.link import Link
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import Steps
from tests import tiny_runs
from tests.engine import toy

NAME = "rollout 0"


def edges(images, prompts, metadata):
    """Two scores, one of which is only shown."""
    dark = 1 - toy.brightness(images, prompts, metadata)
    return {"edges": dark, "longest": np.asarray([len(prompt) for prompt in prompts])}


def failing_once():
    """Brightness that fails when it is asked first, in training and in evaluation."""
    failed = set()

    def brightness(images, prompts, metadata):
        if len(images) not in failed:
            failed.add(len(images))
            raise ValueError("not in the mood")
        return toy.brightness(images, prompts, metadata)

    return brightness


def dying(images, prompts, metadata):
    os._exit(9)


def judging(reward: str) -> tuple[Rewards, tuple[float, ...]]:
    """(rewards, their weights) by the name of what they do."""
    if reward == "two":  # of which one is computed on the mesh
        return Rewards(
            (
                NamedReward(RewardSettings("brightness"), toy.brightness, on_mesh=True),
                NamedReward(RewardSettings("edges"), edges),
            )
        ), (1.0, 0.25)
    called = {
        "one": toy.brightness,
        "fails once": failing_once(),
        "nonsense": lambda images, *_: np.full(len(images), np.nan),
        # By the name by which the process of a reward imports it.
        "dies": importlib.import_module("tests.remote.rollout_process").dying,
    }
    return alone("mine", called[reward]), (1.0,)


def config(kind: str, folder: pathlib.Path) -> ConfigDict:
    if kind == "toy":  # of which the two meshes split parameters differently
        sizes = toy.meshes((1, 2), (1, 1))
        return toy.config(
            precision__published="bfloat16",
            evaluation__every=1,
            algorithm=dict(name="diffusion_nft", times=dict(count=2)),
            sampler__kind="ode",
            sampler__noise_level=0.0,
            sampler__window=dict(length=0),
            pictures__every=1,
            pictures__images=2,
            **sizes,
        )
    found = tiny_runs.tiny_config(folder, kind)
    found.evaluation.every = 1
    found.pictures.every = 1 if kind == "full" else 100
    return found


class Parts:
    """What either process makes of the config: the whole system, and the data of the steps."""

    def __init__(self, kind: str, folder: pathlib.Path):
        asked = config(kind, folder)
        self.recipe: Recipe = toy.opened(asked) if kind == "toy" else open_recipe(asked)
        self.system: System = (
            toy.system(asked, 3)
            if kind == "toy"
            else assemble.build(self.recipe, jax.devices()[:2])
        )
        shape = self.recipe.batch.images, self.recipe.sampler.fragment
        batches = toy.batches(self.recipe.batch.groups)
        self.steps = Steps(batches, *shape, self.system.draws, 0)
        self.held_out = toy.records(3)
        self.settings = scheduled(self.recipe, self.held_out)
        self._of_evaluation = HeldOut(self.held_out, self.settings)
        # A family's conditioning, by its own encoder.
        self.known = nodes(
            self.system.sampler.encoded(
                self.system.rollouts[0].weights(self.system.start), toy.records(2)
            )
        )

    def judge(self, pool: RewardPool, weights: tuple[float, ...]) -> Judge:
        return Judge(pool, weights, self.steps, self._of_evaluation, self.settings)

    def executor(self, link: Link, found: Rewards) -> SamplingExecutor:
        scorers = {number: one for number, one in enumerate(found.members) if one.on_mesh}
        rollout = self.system.rollouts[0]
        return SamplingExecutor(NAME, rollout, self.steps, self._of_evaluation, link, scorers)


def main() -> None:
    kind, folder = os.environ["KIND"], pathlib.Path(os.environ["FOLDER"])
    parts = Parts(kind, folder)
    wire = Wire(Identity.of({"kind": kind}, job_token()))
    pulls = open_pulls(os.environ["LINK"], "127.0.0.1")
    found, weights = judging(os.environ["REWARD"])
    joining = functools.partial(join, wire, os.environ["LEADER"], NAME, 1, "127.0.0.1")
    with (
        closing(RewardPool(found, int(os.environ["PROCESSES"]))) as pool,
        joining(parts.known, pulls, 60) as (following, link),
    ):
        relay = Relay(link, link, following, gives=True)
        executor, judge = parts.executor(relay, found), parts.judge(pool, weights)
        serve(following, Sampling(executor, parts.steps, link, judge, relay))


if __name__ == "__main__":
    run_main(main)
