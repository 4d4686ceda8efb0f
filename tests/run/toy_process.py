"""launch/train.py around the toy family: `python -m tests.run.toy_process` takes that script's options."""

import dataclasses
import functools
import os
import pathlib
import re
import runpy
import signal
import sys
import time

import jax
from ml_collections import ConfigDict

from digen_jax.parallel import mesh
from digen_jax.rewards import built_in
from tests.parallel import toy
from tests.pipelines import ROOT

# "step signal process": a signal that a process gets while the first one scores a step.
STEP, SIGNAL, PROCESS = map(int, os.environ.get("TOLD", "-1 0 0").split())
# The folder of a CLIP with random weights, which is to score, too.
CLIP = os.environ.get("CLIP", "")


def given(option: str) -> str:
    """An option's value on the command line; "0" where it is not there."""
    return (re.findall(rf"--{option}=(\S+)", " ".join(sys.argv)) or ["0"])[0]


def reward(images, prompts, metadata):
    if metadata[0].get("serial") == 2 * (STEP - 1):  # the first of its two groups
        # Then the previous step's background save is whole, even on a busy machine.
        saved = pathlib.Path(given("workdir"), "checkpoints", str(STEP - 1))
        for _ in range(600):
            if saved.exists():
                break
            time.sleep(0.1)
        os.kill(int(pathlib.Path(f"process_{PROCESS}").read_text()), SIGNAL)
    return toy.brightness(images, prompts, metadata)


def get_config(clip: str = CLIP) -> ConfigDict:
    """Steps whose effect is visible and close to plain gradient descent; all are saved and evaluated."""
    c = toy.config(
        prompts__file="prompts.jsonl",
        rewards="tests.run.toy_process:reward",
        reward_pool__processes=0,
        evaluation__prompts="prompts.jsonl",
        evaluation__every=1,
        images__count=3,
        checkpoint__every=1,
        checkpoint__keep=9,
        sampler__chunk=4,
        trainer__learning_rate=3.0,
        trainer__eps=1.0,
        trainer__ema=0.5,
        **toy.meshes((0, 1), (1, 4)),
    )
    c.steps = 3
    if clip:
        # Without weight, so that its rounding does not change the training.
        learned = dict(name="pickscore", weight=0.0, settings=dict(folder=clip, batch=2))
        c.rewards = (learned, *c.rewards)
    return c


def without_sanity_check() -> None:
    """Random weights prefer nothing."""
    known = built_in.BUILT_IN
    known["pickscore"] = dataclasses.replace(known["pickscore"], sanity_check="")


def main() -> None:
    if SIGNAL == signal.SIGKILL:
        # Shorter than JAX's 100 seconds, and longer than a busy machine takes to notice the loss by other means.
        jax.distributed.initialize = functools.partial(
            jax.distributed.initialize, heartbeat_timeout_seconds=60
        )
    pathlib.Path(f"process_{given('process')}").write_text(str(os.getpid()))
    mesh.FSDP_MIN_SIZE = 16
    without_sanity_check()
    toy.replace_model(setattr, lambda config: toy.system(config, jax.device_count()))
    sys.argv[0] = str(ROOT / "launch" / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
