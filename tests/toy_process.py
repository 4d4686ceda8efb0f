"""One process of a run of the toy family, as launch/train.py is one of a real one; tests/test_hosts.py starts it."""

import argparse
import functools
import json
import os
import pathlib
import signal
import sys

import jax
from ml_collections import ConfigDict

from tests.runtime import toy

# "step signal process": a signal that a process gets while a step is scored, which the first one does.
STEP, SIGNAL, PROCESS = map(int, os.environ.get("EVENT", "-1 0 0").split())


def reward(images, prompts, metadata):
    if metadata[0].get("serial") == 2 * (STEP - 1):  # the first of its two groups
        os.kill(int(pathlib.Path(f"process_{PROCESS}").read_text()), SIGNAL)
    return toy.brightness(images, prompts, metadata)


def config(steps: int = 3, **fields) -> ConfigDict:
    """Steps that are seen at once and come near to plain gradient descent; all is saved and evaluated."""
    fields = {
        "prompts__file": "prompts.jsonl",
        "reward__name": "tests.toy_process:reward",
        "reward__processes": 0,
        "evaluation__prompts": "prompts.jsonl",
        "evaluation__every": 1,
        "pictures__images": 3,
        "checkpoint__every": 1,
        "checkpoint__keep": 9,
        "sampler__fragment": 4,
        "trainer__learning_rate": 3.0,
        "trainer__eps": 1.0,
        "trainer__ema": 0.5,
        **toy.meshes((0, 1), (1, 4)),
    } | fields
    c = toy.config(**fields)
    c.steps = steps
    return c


def main() -> int | None:
    parser = argparse.ArgumentParser()
    for name in ("workdir", "fields", "--coordinator"):
        parser.add_argument(name)
    for name in ("--processes", "--process"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()

    from digen_jax.launching import join, prepare

    prepare()
    if SIGNAL == signal.SIGKILL:
        # Else the one that is left takes JAX's 100 seconds to miss the other.
        jax.distributed.initialize = functools.partial(
            jax.distributed.initialize, heartbeat_timeout_seconds=10
        )
    join(given.coordinator, given.processes, given.process)

    from digen_jax import following, run
    from digen_jax.runtime import placement

    pathlib.Path(f"process_{given.process}").write_text(str(os.getpid()))
    placement.FSDP_MIN_SIZE = 16
    for module in (run, following):
        module.build = lambda config, devices: toy.system(config, len(devices))
    return run.train(config(**json.loads(given.fields)), pathlib.Path(given.workdir))


if __name__ == "__main__":
    sys.exit(main())
