"""The config of runs in which something fails: the tiny pipeline, and nearly plain gradient descent.

BASE is the folder of the pipeline and the prompts, SLOW the seconds that the reward takes.
"""

import os
import pathlib
import time

import numpy as np
from ml_collections import ConfigDict

from digen_jax.config.recipe import complete
from tests import tiny_runs

ROLLOUTS = 2


def redness(images: np.ndarray, prompts: list[str], metadata: list[dict]) -> np.ndarray:
    """That of `tiny_runs`, which changes little where images do."""
    time.sleep(float(os.environ["SLOW"]))
    return tiny_runs.redness(images, prompts, metadata)


def get_config() -> ConfigDict:
    """Steps of four fragments, each of which is saved; two meshes sample."""
    c = tiny_runs.tiny_config(pathlib.Path(os.environ["BASE"]), "lora")
    c.steps = 12
    c.rewards = ("tests.run.faulty_config:redness",)
    c.reward_pool = ConfigDict(dict(processes=1))
    c.sampler.fragment = 2
    c.trainer = ConfigDict(dict(micro_batch=2, learning_rate=3.0, eps=1.0, clip_norm=1e3))
    c.evaluation.every = c.pictures.every = 1000
    c.checkpoint = ConfigDict(dict(every=1, keep=20))
    one = dict(data=1, fsdp=1)
    c.placement = ConfigDict(dict(rollout=one | dict(workers=ROLLOUTS), trainer=one))
    return complete(c)
