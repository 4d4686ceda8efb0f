"""Several processes that train together on one machine, each with its own devices, against one with all of them."""

import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from digen_jax.checkpoints.checkpointer import read_checkpoint
from digen_jax.config.load import load_config
from digen_jax.logging.metrics import read_metrics
from digen_jax.logging.workdir import finished_step
from digen_jax.process import shutdown as ending
from digen_jax.rewards import built_in
from digen_jax.train import train
from tests.learned_rewards.folders import write
from tests.metrics import assert_same_metrics, metrics
from tests.parallel import toy
from tests.pipelines import ROOT, environment
from tests.ports import free_port
from tests.run import toy_process
from tests.tiny_runs import PROMPTS

STOPPED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "prompts.jsonl").write_text("\n".join(PROMPTS) + "\n")
    write(folder)
    return folder


def without_gloo(said: str) -> str:
    """The output of a process, without Gloo's lines, whose threads may interleave them."""
    lines = said.splitlines(keepends=True)
    return "".join(x for x in lines if not re.search(r"Gloo|peer ranks|^\s*\d*\s*$", x))


def together(folder: pathlib.Path, command: list[str | pathlib.Path], event: str = "-1 0 0"):
    """A command in two processes of two devices each: [(exit code, stdout, stderr), ...]."""
    port = free_port()
    begun = [
        subprocess.Popen(
            [
                *(sys.executable, *command),
                *(f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}"),
            ],
            cwd=folder,
            env=environment(
                2,
                TOLD=event,
                CLIP=str(folder / "clip"),
                PYTHONPATH=str(ROOT),
                JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    said = [process.communicate() for process in begun]
    return [
        (process.returncode, without_gloo(out), errors)
        for process, (out, errors) in zip(begun, said, strict=True)
    ]


def toy_run(workdir: str) -> list[str]:
    config = ROOT / "tests" / "run" / "toy_process.py"
    return ["-m", "tests.run.toy_process", f"--config={config}", f"--workdir={workdir}"]


def alone(folder: pathlib.Path, workdir: str) -> None:
    """The same run in this process, on four of its devices."""
    clip = str(folder / "clip")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(built_in, "BUILT_IN", dict(built_in.BUILT_IN))
        toy_process.without_sanity_check()
        patch.setattr("digen_jax.parallel.mesh.FSDP_MIN_SIZE", 16)
        toy.replace_model(patch.setattr, lambda config: toy.system(config, 4))
        assert train(load_config(toy_process.get_config(clip)), folder / workdir) is None


def tuned(workdir: pathlib.Path, like: dict) -> dict:
    """The tuned parameters of the last checkpoint."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), like)
    found = read_checkpoint(workdir / "checkpoints", {"tuned": template})
    assert found.step == 3
    return found.arrays["tuned"]


def assert_same_run(workdir: pathlib.Path, unbroken: pathlib.Path, start: dict) -> None:
    """Up to float32's rounding: every number of every line, and the changes of the parameters."""
    found, expected = metrics(workdir), metrics(unbroken)
    assert len(expected) == 4 and [line["step"] for line in found] == [0, 1, 2, 3]
    assert "reward_of/pickscore" in found[1] and "evaluation/reward_of/pickscore" in found[0]
    assert_same_metrics(found, expected, rel=1e-5)
    ends = [tuned(one, start) for one in (workdir, unbroken)]
    moves = [jax.tree.map(lambda end, begin: end - begin, end, start) for end in ends]
    assert toy.difference(*moves) < 1e-3


@pytest.fixture(scope="module")
def unbroken(folder) -> tuple[pathlib.Path, dict]:
    """(the workdir of a run of one process, the parameters that it started from)."""
    alone(folder, "one")
    history = read_metrics(folder / "one" / "metrics.jsonl")
    assert history[3]["evaluation/reward"] > history[0]["evaluation/reward"] + 0.001
    assert all(line["gradient_norm"] > 0.001 for line in history[1:])
    start = toy.ToyFamily().params()["transformer"]
    tuned = {name: layer for name, layer in start.items() if name != "places"}
    return folder / "one", {"transformer": tuned}


@pytest.mark.slow
def test_two_processes_killed_stopped_and_continued_train_as_one_does(folder, unbroken):
    """Also scores with a learned reward, whose weights are sharded over both processes."""
    # The second process is killed in the second step: the first one ends, too, with a message.
    (code, said, errors), (killed, *_) = together(folder, toy_run("two"), f"2 {signal.SIGKILL:d} 1")
    assert (killed, code) == (-signal.SIGKILL, ending.STOPPED), errors
    assert "which ends the run: the same command continues from the last checkpoint" in errors
    assert said.startswith("4 CPU devices of 2 processes for rollout and training alternately\n")
    assert len(read_metrics(folder / "two" / "metrics.jsonl")) == 2, errors

    # The second process gets a signal: both finish the step and save it.
    first, second = together(folder, toy_run("two"), f"2 {signal.SIGTERM:d} 1")
    assert (first[0], second[0]) == (STOPPED, STOPPED), first[2] + second[2]
    assert "continuing after step 1\n" in first[1] and second[1] == ""
    assert "Stopped and saved after step 2; the same command continues." in first[1]
    assert {"1", "2"} <= {path.name for path in (folder / "two" / "checkpoints").iterdir()}

    first, second = together(folder, [*toy_run("two"), "--profile=3"])
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    profiled = (folder / "two" / "profile").glob("*/plugins/profile/*/*.xplane.pb")
    assert sorted(path.parents[3].name for path in profiled) == ["trainer_0", "trainer_1"]
    assert "reward on 5 training prompts" in first[1] and second[1] == ""
    assert finished_step(folder / "two") == 3
    assert_same_run(folder / "two", *unbroken)
    for shown in ("after.npz", "before.npz"):
        images = [np.load(folder / one / "images" / shown)["images"] for one in ("two", "one")]
        assert np.abs(np.subtract(*images, dtype=np.int32)).max() <= 1
