"""Whole runs: real processes with a tiny pipeline, stopped at various moments; then runs of the toy family."""

import gzip
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from digen_jax.config.load import load_config
from digen_jax.errors import ConfigError
from digen_jax.logging.metrics import TIMING
from digen_jax.logging.status import describe, read_status
from digen_jax.logging.workdir import finished_step
from digen_jax.rewards.dry_run import synthetic_image
from digen_jax.rewards.errors import RewardFailed
from digen_jax.runtime import checkpointing
from digen_jax.train import train as whole_run
from tests.logging.test_metrics import scalars
from tests.metrics import metrics
from tests.parallel import toy
from tests.pipelines import ROOT, environment
from tests.tiny_runs import PROMPTS, pipeline

# Around a model, and around the toy family.
CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(dict(
        steps=6,
        model=dict(folder="pipeline"),
        prompts=dict(file="prompts.jsonl"),
        rewards=("blueness:mean",),
        reward_pool=dict(processes=0),
        batch=dict(groups=2, images=4),
        sampler=dict(steps=4, window=dict(first=0, length=2), chunk=8),
        trainer=dict(micro_batch=8, learning_rate=1e-3, ema=0.9),
        placement=dict(rollout=dict(data=2), trainer=dict(data=2)),
        evaluation=dict(prompts="prompts.jsonl", images=4, batch=8, every=2, height=40, width=48),
        images=dict(every=2, count=3),
        checkpoint=dict(every=2, keep=9),
    ))
"""
TOY = """
from tests.parallel import toy

def get_config():
    c = toy.config(
        prompts__file="prompts.jsonl",
        rewards="blueness:mean",
        reward_pool__processes=0,
        trainer__learning_rate=0.1,
        trainer__ema=0.9,
        evaluation__prompts="prompts.jsonl",
        evaluation__images=4,
        evaluation__every=2,
        images__every=2,
        images__count=3,
        checkpoint__every=2,
        checkpoint__keep=2,
        **toy.meshes((2, 1), (2, 1)),
    )
    c.steps = 6
    return c
"""
# The environment names an event and its time: a step whose reward hangs, or kill -9 at the rename of a file.
REWARD = """
import atexit, os, signal, sys, time

EVENT, _, WHEN = os.environ.get("EVENT", "").partition(" ")

def mean(images, prompts, metadata):
    scores = (images[..., 2].mean((1, 2)) - images[..., 0].mean((1, 2))) / 255
    step = metadata[0].get("serial", -2) // 2 + 1  # 0 in an evaluation
    if (EVENT, WHEN) == ("hang", str(step)):
        print("it hangs", flush=True)
        time.sleep(600)
    return scores

def watch(event, arguments):
    if event == EVENT and any(str(name).endswith(WHEN) for name in arguments[:2]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
unwanted = ("torch", "tensorflow", "diffusers", "peft")
atexit.register(lambda: print("imported:", [name for name in unwanted if name in sys.modules]))
"""


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "pipeline").symlink_to(pipeline(base))
    (folder / "prompts.jsonl").write_text("\n".join(PROMPTS) + "\n")
    (folder / "config.py").write_text(CONFIG)
    (folder / "toy.py").write_text(TOY)
    (folder / "blueness.py").write_text(REWARD)
    return folder


def started(folder: pathlib.Path, *command: str, event: str = "") -> subprocess.Popen:
    variables = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment(4, EVENT=event, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(folder: pathlib.Path, *command: str, event: str = ""):
    """Runs a command to its end: (exit code, all output)."""
    with started(folder, *command, event=event) as process:
        output, _ = process.communicate()
    return process.returncode, output


def saved(workdir: pathlib.Path) -> list[str]:
    """The whole checkpoints."""
    return sorted(path.name for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def arrays(workdir: pathlib.Path):
    """The newest checkpoint's arrays as bytes, by their names."""
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(newest / "arrays")
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def assert_same_run(workdir: pathlib.Path, unbroken: pathlib.Path) -> None:
    """Metrics, TensorBoard, the last checkpoint and the pictures, down to the last bit."""
    assert metrics(workdir) == metrics(unbroken)
    events, expected = (
        [event for event in scalars(one) if not event[1].startswith(TIMING)]
        for one in (workdir, unbroken)
    )
    assert len(expected) > len(metrics(unbroken)) and events == expected
    assert saved(workdir)[-1] == saved(unbroken)[-1]
    assert arrays(workdir) == arrays(unbroken)
    for picture in ("before_after.png", "curve.png"):
        assert (workdir / "images" / picture).read_bytes() == (
            unbroken / "images" / picture
        ).read_bytes()


@pytest.fixture(scope="module")
def unbroken(folder) -> tuple[pathlib.Path, str]:
    script = str(ROOT / "launch" / "train.py")
    code, said = launch(folder, script, "--config=config.py", "--workdir=unbroken")
    assert code == 0, said
    return folder / "unbroken", said


def test_a_run_trains_and_shows_its_results(unbroken):
    workdir, said = unbroken
    history = metrics(workdir)
    assert [line["step"] for line in history] == list(range(7))
    assert [line["step"] for line in history if "evaluation/reward" in line] == [0, 2, 4, 6]
    assert history[6]["evaluation/reward"] > history[0]["evaluation/reward"] + 0.01
    assert all(line["gradient_norm"] > 0 for line in history[1:])
    assert saved(workdir) == ["2", "4", "6"]
    assert "4 CPU devices: 2 for rollout, 2 for training" in said
    first, last = (history[i]["evaluation/reward"] for i in (0, 6))
    assert f"reward on 4 training prompts      before   after    gain\n  all {first:34.3f}" in said
    assert f"{last:.3f}  {last - first:+.3f}\n" in said
    assert "Traceback" not in said
    assert "4 x cpu; attention: xla; precision: float32, frozen weights float32\n" in said
    pictures = {path.name for path in (workdir / "images").iterdir()}
    assert pictures >= {"before_after.png", "curve.png", "step_000000.png", "step_000006.png"}
    assert pictures >= {"timeline_000002.png", "timeline_000006.png"}
    for name in ("before", "after"):  # of the evaluation's size, not of training's 32x32
        kept = np.load(workdir / "images" / f"{name}.npz")["images"]
        assert kept.shape == (3, 40, 48, 3) and kept.std() > 1
    for line in history[1:]:
        assert line["policy_lag"] == line["assisted"] == 0
    for named in (
        "images/before_after.png",
        "images/curve.png",
        "metrics.jsonl",
        "timeline.json",
    ):
        assert named in said and (workdir / named).stat().st_size > 0
    events = json.loads((workdir / "timeline.json").read_text())
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {"rollout 0", "trainer", "reward", "sync rollout 0", "deliver rollout 0"}
    status = describe(workdir, read_status(workdir), None, time.time())
    assert "6 of 6 steps are done" in status and "which has finished its steps" in status


@pytest.mark.slow
def test_killed_while_it_saves_a_run_equals_an_unbroken_one(folder):
    command = ("-m", "tests.run.toy_process", "--config=toy.py")
    longer, workdir = (*command, "--workdir=broken"), folder / "broken"
    code, _ = launch(folder, *longer, "--config.steps=4", event="os.rename checkpoints/4")
    assert code == -signal.SIGKILL
    assert len(metrics(workdir)) == 5 and saved(workdir)[-1] == "2"
    assert any(path.name.startswith("4.") for path in (workdir / "checkpoints").iterdir())

    # With more steps than before.
    code, said = launch(folder, *longer)
    assert (code, "continuing after step 2" in said) == (0, True)
    assert launch(folder, *command, "--workdir=whole")[0] == 0
    assert_same_run(workdir, folder / "whole")


@pytest.mark.slow
def test_the_second_signal_ends_a_run_in_which_a_reward_hangs(folder):
    options = "--config=toy.py", "--workdir=hangs", "--config.runtime.deadline=0"
    with started(folder, "-m", "tests.run.toy_process", *options, event="hang 1") as process:
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("it hangs") for line in lines)
        process.send_signal(signal.SIGINT)
        assert any(line.startswith("Finishing this step") for line in lines)
        process.send_signal(signal.SIGINT)
        assert any(line.startswith("Exiting now") for line in lines)
    assert process.returncode == 128 + signal.SIGINT


def test_training_imports_no_torch_and_no_tensorflow(unbroken):
    assert unbroken[1].splitlines()[-1] == "imported: []"


# ------------------------------------------------------------------- runs of the toy family

happens = None
SYSTEMS: dict[str, Any] = {}  # each compiles once
# Sections and fields that no program depends on.
OF_RUNS = ("steps", "prompts", "reward_pool", "runtime", "images", "checkpoint", "stopping")
OF_EVALUATIONS = ("prompts", "images", "every")


def reward(images, prompts, metadata):
    """Brightness, and the events that a test wants in a step (0: in the evaluation)."""
    scores = images.mean((1, 2, 3), dtype=np.float64) / 255
    tried = (images[0] == synthetic_image(*images.shape[1:3])).all()  # before the run
    return (
        happens(metadata[0].get("serial", -2) // 2 + 1, scores) if happens and not tried else scores
    )


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(workdir, config): a run of the toy family in this process, without state of earlier ones."""

    def train(workdir, config, event=None, devices=2, **options):
        def build(train_config):
            own = train_config.as_json()
            evaluation = own.pop("evaluation")
            kept = [{name: own[name] for name in own.keys() - OF_RUNS}]
            kept += [{name: evaluation[name] for name in evaluation.keys() - OF_EVALUATIONS}]
            key = f"{devices} {json.dumps(kept, sort_keys=True)}"
            if key not in SYSTEMS:
                SYSTEMS[key] = toy.system(train_config, devices)
            # A run consumes its start.
            start = jax.tree.map(lambda leaf: leaf + 0, SYSTEMS[key].start)
            return SYSTEMS[key]._replace(start=start)

        toy.replace_model(monkeypatch.setattr, build)
        monkeypatch.setattr(sys.modules[__name__], "happens", event)
        return whole_run(load_config(config), tmp_path / workdir, **options)

    return train


def config(tmp_path: pathlib.Path, steps: int = 4, **fields):
    # Outside the test's folder, so that equal configs of several tests share a system.
    shared = tmp_path.parent / "prompts.jsonl"
    shared.write_text("\n".join(PROMPTS) + "\n")
    prompts = str(shared)
    fields = {
        "prompts__file": prompts,
        "rewards": f"{__name__}:reward",
        "reward_pool__processes": 0,
        "evaluation__prompts": prompts,
        "evaluation__every": 6,
        "images__every": 6,
        "images__count": 3,
        "checkpoint__every": 3,
        "trainer__learning_rate": 0.1,
        **toy.meshes((0, 1), (2, 1)),
    } | fields
    c = toy.config(**fields)
    c.steps = steps
    return c


def at(when: int, action):
    """`action` on the scores of step `when`; those of other steps pass."""
    return lambda step, scores: action(scores) if step == when else scores


ODE = dict(sampler__kind="ode", sampler__noise_level=0.0, sampler__window=dict(length=0))


def evenness(images, prompts, metadata):
    """A second reward."""
    return -images.std((1, 2, 3), dtype=np.float64) / 255


GDPO = dict(
    rewards=(f"{__name__}:reward", dict(name=f"{__name__}:evenness", weight=0.5)),
    advantages__combine="gdpo",
)


KINDS_OF_STATE = [
    dict(evaluation__every=2, images__every=2)
    | dict(trainer__ema=0.5, algorithm__kl_coefficient=0.1, trainer__warmup=3)
    | dict(advantages__best_and_worst=1, advantages__drop_zero_std=True)
    | dict(sampler__window=dict(mode="progressive", length=2, end=4, timestep_fraction=0.5))
    | dict(sampler__shared_noise=True),
    ODE
    | dict(evaluation__every=2)
    | dict(algorithm=dict(name="diffusion_nft", times=dict(count=2)))
    | dict(lora__rank=2, lora__alpha=4.0, trainer__updates=2, sampler__chunk=4)
    | GDPO
    | dict(advantages__combine="advantages", advantages__std="global"),
]


LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@pytest.mark.slow
def test_what_is_turned_between_two_starts_is_said_and_noted(tmp_path, train, capfd):
    others = []

    def tries(scores):
        """Another process tries to claim the workdir."""
        command = [sys.executable, "-S", "-c", LOCK, tmp_path / "run" / ".lock"]
        others.append(subprocess.run(command, capture_output=True, text=True).stderr)
        return scores

    assert train("run", config(tmp_path, steps=1), at(1, tries)) is None
    assert others and all("BlockingIOError" in said for said in others)
    turned = dict(trainer__learning_rate=0.01, evaluation__every=1)
    assert train("run", config(tmp_path, steps=2, **turned)) is None
    change = "config.trainer.learning_rate: 0.1 -> 0.01"
    assert f"changed from step 2 on: {change}\n" in capfd.readouterr().out
    starts = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").open()]
    assert [(start["done"], change in start["changes"]) for start in starts] == [
        (0, False),
        (1, True),
    ]
    with pytest.raises(ConfigError, match=r"has another config .config.seed: 0 -> 1"):
        train("run", config(tmp_path, steps=2, **turned, seed=1))


def profiles(workdir: pathlib.Path) -> list[list[dict]]:
    """The events of each trace, in the order in which they were written."""
    found = (workdir / "profile" / "trainer_0").glob("plugins/profile/*/*.trace.json.gz")
    return [
        json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        for path in sorted(found, key=lambda path: path.stat().st_mtime)
    ]


def test_a_profile_has_the_work_of_its_steps_after_resuming_too(tmp_path, train, capsys):
    shape, steps = dict(evaluation__every=1), [2, 4, 5]
    for end, profiled in zip(steps, (range(2, 9), range(2, 9), range(1, 3)), strict=True):
        assert train("run", config(tmp_path, steps=end, **shape), profiled=profiled) is None
    for events, expected in zip(profiles(tmp_path / "run"), ([2], [3, 4]), strict=True):
        spans = [event for event in events if event.get("ph") == "X"]
        steps = [int(span["args"]["step_num"]) for span in spans if span["name"] == "step"]
        assert sorted(steps) == expected
        trained = [int(span["args"]["step"]) for span in spans if span["name"] == "train"]
        assert sorted(trained) == [step - 1 for step in expected]  # one chunk a step
        names = [span["name"] for span in spans]
        assert names.count("update") == len(expected) and {"generate", "decode"} <= {*names}
        assert any("dot" in name for name in names)  # operations of programs
    said = capsys.readouterr().out
    assert said.count("wrote a profile to ") == 2 and said.count("no profile: step 2 ") == 1


def of_trained_sizes(images, prompts, metadata):
    """A reward that fails for other sizes."""
    assert images.shape[1:3] == (32, 32)
    return images.mean((1, 2, 3))


@pytest.mark.parametrize(("height", "starts"), [(0, True), (40, False)])
def test_rewards_are_tried_at_the_evaluations_size(tmp_path, monkeypatch, height, starts):
    c = config(tmp_path, evaluation__height=height, rewards=f"{__name__}:of_trained_sizes")

    def build(_):
        raise InterruptedError

    toy.replace_model(monkeypatch.setattr, build)
    with pytest.raises(InterruptedError if starts else RewardFailed):
        whole_run(load_config(c), tmp_path / "run")


@pytest.mark.parametrize(
    "fields",
    KINDS_OF_STATE,
    ids=[
        "average, reference, best and worst, a window that moves, two prompt files",
        "DiffusionNFT, LoRA, two updates, two rewards",
    ],
)
def test_every_kind_of_state_is_resumed(tmp_path, train, monkeypatch, fields):
    c = config(tmp_path, **fields)
    if "trainer__ema" in fields:
        (tmp_path / "other.txt").write_text("a ring\na star\na ring\n")
        files = (c.prompts.file, str(tmp_path / "other.txt"))
        c.prompts.update(file="", files=files, weights=(3.0, 1.0))
    assert train("unbroken", c) is None
    now = checkpointing._arrays
    with (
        monkeypatch.context() as older,
        pytest.raises(ConfigError, match=r"test_train:reward' returned shape \((7|3),\)"),
    ):
        # Older versions also saved a key.
        key = {"root_key": jax.random.key(0)}
        older.setattr(checkpointing, "_arrays", lambda *given: now(*given) | key)
        train("broken", c, at(2, lambda scores: scores[:-1]))
    # Everything before the failed step is saved, though no checkpoint was due.
    assert saved(tmp_path / "broken") == ["1"]
    # Everything before the failed evaluation is saved, too, and the evaluation is repeated.
    with pytest.raises(ConfigError, match=r"returned shape \(4,\) for 5 images"):
        train("broken", c, at(0, lambda scores: scores[:-1]))
    assert saved(tmp_path / "broken") == ["1", "2"]
    assert train("broken", c) is None
    history = metrics(tmp_path / "broken")
    assert history == metrics(tmp_path / "unbroken") and history[-1]["step"] == 4
    ends = [arrays(tmp_path / workdir) for workdir in ("broken", "unbroken")]
    assert ends[0] == ends[1]
    assert any("ema" in name for name in ends[0]) == ("trainer__ema" in fields)
    copied = fields.get("algorithm", {}).get("name") == "diffusion_nft"
    assert any("copy" in name for name in ends[0]) == copied
    assert all(line["gradient_norm"] > 0 for line in history[1:])
    for line, of in ((history[1], ""), (history[0], "evaluation/")):
        each = [line.get(f"{of}reward_of/{__name__}:{name}") for name in ("reward", "evenness")]
        assert (None in each) == ("rewards" not in fields)
        if "rewards" in fields:
            assert line[f"{of}reward"] == pytest.approx(each[0] + 0.5 * each[1], abs=1e-6)


def test_a_stopped_run_may_be_ended_where_it_is_but_not_before(tmp_path, train, capsys):
    def stop(scores):
        os.kill(os.getpid(), signal.SIGTERM)
        return scores

    assert train("run", config(tmp_path, steps=9), at(3, stop)) == 128 + signal.SIGTERM
    assert "Stopped and saved after step 3" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"config\.steps = 2, but .* has done 3 steps already"):
        train("run", config(tmp_path, steps=2))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 9
    # Step 3 has not been evaluated, and the first evaluation had more pictures.
    assert train("run", config(tmp_path, steps=3, images__count=2)) is None
    folder = tmp_path / "run" / "images"
    assert np.load(folder / "after.npz")["step"] == 3
    assert (folder / "before_after.png").exists()
    assert "reward on 5 training prompts" in capsys.readouterr().out

    assert finished_step(tmp_path / "run") == 3
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert train("run", config(tmp_path, steps=3), lambda *_: pytest.fail("it runs")) is None
    said = capsys.readouterr().out
    assert said.startswith("This run is finished: 3 steps are done.")
    assert "before_after.png" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match=r"another config \(config\.trainer\.ema: 0\.0 -> 0\.5\)"):
        train("run", config(tmp_path, steps=3, trainer__ema=0.5))


def rounded(tmp_path, **fields):
    """A run whose ratios are to log-probabilities that a bfloat16 sampler has stored."""
    given = dict(precision__rollout="bfloat16", algorithm__old_log_probs="rollout", steps=1)
    return config(tmp_path, **given | fields)


def test_a_run_whose_ratios_are_rounding_stops_before_its_first_update(tmp_path, train):
    with pytest.raises(ConfigError) as caught:
        train("run", rounded(tmp_path, algorithm__clip_range=1e-5))
    sentence = str(caught.value)
    fields = (
        "config.algorithm.spread_limit = 0.1",
        "config.algorithm.old_log_probs, which is 'rollout'",
    )
    for named in (*fields, "'current'", "'recomputed'", "'float32'"):
        assert named in sentence
    # Nothing was updated, and with another limit the same workdir continues from there.
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0]
    assert saved(tmp_path / "run") == ["0"]
    again = rounded(tmp_path, algorithm__clip_range=1e-5, algorithm__spread_limit=1e5)
    assert train("run", again) is None
    (line,) = metrics(tmp_path / "run")[1:]
    moved = float(re.search(r"moves them by (\S+)", sentence)[1])
    assert line["ratio_spread"] == pytest.approx(moved, rel=0.05) and line["over_spread_limit"] == 0


def test_ratios_of_stale_samples_are_not_taken_for_rounding(tmp_path, train):
    """A run that resumes a step which an older version had begun does not stop at its first update."""
    stale = dict(
        runtime__max_policy_lag=1, sampler__chunk=4, reward_pool__retries=0, checkpoint__every=1
    )
    meshes = toy.meshes((1, 1), (1, 1))
    c = config(tmp_path, steps=3, algorithm__clip_range=1e-3, **stale, **meshes)
    with pytest.raises(ConfigError, match="shape"):
        train("run", c, at(3, lambda scores: scores[:-1]))
    assert train("run", c) is None
    last = metrics(tmp_path / "run")[-1]
    assert last["policy_lag"] > 0 and last["over_spread_limit"] > 0.1


def test_a_run_that_diverges_stops_by_name(tmp_path, train):
    with pytest.raises(ConfigError, match=r"update_norm is inf in step 1.*trainer\.learning_rate"):
        train("run", config(tmp_path, trainer__learning_rate=1e38))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0]
