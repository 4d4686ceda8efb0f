"""The config of runs with separate rollout workers: a tiny pipeline, and a reward whose scores a test can hold back.

BASE is the folder of the pipeline and the prompts, HOLDS the folder by which steps are held.
"""

import os
import pathlib
import time

import numpy as np
from ml_collections import ConfigDict

from digen_jax.config.load import complete
from tests import tiny_runs

GROUPS, STEPS = 2, 6


def redness(images: np.ndarray, prompts: list[str], metadata: list[dict]) -> np.ndarray:
    """That of `tiny_runs`; scores nothing of a step that is held."""
    step = metadata[0].get("serial", -GROUPS) // GROUPS + 1
    holds = pathlib.Path(os.environ["HOLDS"])
    hold = holds / f"hold {step}"
    if step > 0 and hold.exists():
        (holds / f"held {step}").touch()
        for _ in range(1200):
            if not hold.exists():
                break
            time.sleep(0.1)
    return tiny_runs.redness(images, prompts, metadata)


def get_config() -> ConfigDict:
    """Steps of two chunks, all of which are saved; two meshes sample."""
    c = tiny_runs.tiny_config(pathlib.Path(os.environ["BASE"]), "lora")
    c.steps = STEPS
    c.rewards = ("tests.distributed.held_config:redness", *c.rewards[1:])
    c.reward_pool = ConfigDict(dict(processes=0))
    c.sampler.chunk = 4
    c.trainer.micro_batch = 4
    one = dict(data=1, fsdp=1)
    c.placement = ConfigDict(dict(rollout=one | dict(workers=2), trainer=one))
    c.checkpoint = ConfigDict(dict(every=1, keep=9))
    return complete(c)
