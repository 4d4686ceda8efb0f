"""Whole runs in which something hangs: real processes around the toy family, and how they end."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.pipelines import ROOT, environment
from tests.tiny_runs import PROMPTS

pytestmark = pytest.mark.slow

CONFIG = """
from tests.parallel import toy

def get_config():
    c = toy.config(
        prompts__file="prompts.jsonl",
        rewards="hanging:mean",
        trainer__learning_rate=0.1,
        evaluation__prompts="prompts.jsonl",
        evaluation__images=4,
        evaluation__every=9,
        images__every=9,
        images__count=3,
        checkpoint__every=2,
        sampler__chunk=4,
        runtime__deadline=10.0,
        **toy.meshes((1, 1), (1, 1), workers=2),
    )
    c.steps = 4
    return c
"""
# The environment says which processes hang or die, in which step, and whether always or only the first time.
HANGING = """
import os, pathlib, signal, time

EVENTS = [event.split() for event in os.environ["EVENTS"].split(";") if event]

def happens(who, step):
    for name, what, when, often in EVENTS:
        done = pathlib.Path(f"happened_{name}")
        if (name, when) != (who, str(step)) or often == "once" and done.exists():
            continue
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL) if what == "dies" else time.sleep(600)

def mean(images, prompts, metadata):
    happens("reward", metadata[0].get("serial", -2) // 2)
    return images.mean((1, 2, 3), dtype="float64") / 255
"""
SCRIPT = """
import hanging
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.training import TrainingExecutor
from tests.run import toy_process

def hanging_in(executor, name, who):
    real = getattr(executor, name)

    def call(self, what, *rest):
        hanging.happens(who, getattr(what, "chunk", what).step)
        return real(self, what, *rest)

    setattr(executor, name, call)

if __name__ == "__main__":
    hanging_in(SamplingExecutor, "generate", "mesh")
    hanging_in(TrainingExecutor, "train", "trainer")
    toy_process.main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("stopping")
    (folder / "prompts.jsonl").write_text("\n".join(PROMPTS) + "\n")
    for name, text in (("config", CONFIG), ("hanging", HANGING), ("script", SCRIPT)):
        (folder / f"{name}.py").write_text(text)
    return folder


def begin(folder: pathlib.Path, workdir: str, events: str, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "script.py", "--config=config.py", f"--workdir={workdir}", *options],
        cwd=folder,
        env=environment(
            3,
            EVENTS=events,
            PYTHONPATH=str(ROOT),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_second_signal_ends_a_run_in_which_something_hangs(folder):
    (folder / "happened_reward").unlink(missing_ok=True)
    process = begin(folder, "signalled", "reward hangs 1 always", "--config.runtime.deadline=0")
    try:
        while not (folder / "happened_reward").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        lines = [process.stdout.readline()]
        while not lines[-1].startswith("Finishing"):
            assert lines[-1], lines
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    # The step that was recorded meanwhile may be printed between them.
    words = [line.partition(" ")[0] for line in said.splitlines()]
    assert "Exiting" in words and "Finishing" not in words, said
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
