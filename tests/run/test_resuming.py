"""Runs of the toy family that continue on other devices, from damaged files, or after a full disk."""

import json
import pathlib
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest

from digen_jax.checkpoints.checkpointer import SaveFailed
from digen_jax.errors import ConfigError
from digen_jax.logging.command_log import read_log
from digen_jax.logging.metrics import read_metrics
from digen_jax.process.shutdown import Stopped
from tests.metrics import assert_same_metrics, metrics
from tests.parallel import toy
from tests.run import test_train
from tests.run.test_train import arrays, at, config, saved

train = test_train.train

# Adam with a large eps is nearly SGD: rounding stays rounding.
PLAIN = dict(
    steps=3,
    trainer__learning_rate=3.0,
    trainer__eps=1.0,
    trainer__clip_norm=1e3,
    checkpoint__keep=9,
)
ELSEWHERE = toy.meshes((1, 1), (1, 1, 2), workers=2) | dict(
    sampler__chunk=2, trainer__micro_batch=2, trainer__pack=2
)


def stopped(train, workdir, c, step, **options):
    """A run whose reward returns something wrong in a step."""
    with pytest.raises(ConfigError, match="returned shape"):
        train(workdir, c, at(step, lambda scores: scores[:-1]), **options)


def moves(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """The tuned parameters at the end of a run."""
    start = {"transformer": toy.ToyFamily().params()["transformer"]}
    places = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(start)}
    return {
        name: np.frombuffer(data, np.float32) - places[name.removeprefix("['tuned']")].ravel()
        for name, data in arrays(workdir).items()
        if name.startswith("['tuned']")
    }


@pytest.mark.slow
def test_a_run_goes_on_with_other_meshes_and_cuts_to_the_same_result(tmp_path, train, monkeypatch):
    monkeypatch.setattr("digen_jax.parallel.mesh.FSDP_MIN_SIZE", 16)
    assert train("unbroken", config(tmp_path, **PLAIN)) is None
    stopped(train, "broken", config(tmp_path, **PLAIN), 2)
    assert saved(tmp_path / "broken") == ["1"]
    expected, history = moves(tmp_path / "unbroken"), metrics(tmp_path / "unbroken")
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in expected.values()))
    assert norm > 0.01
    c = config(tmp_path, **PLAIN | ELSEWHERE)
    assert train("broken", c, devices=4) is None
    assert_same_metrics(metrics(tmp_path / "broken"), history, rel=1e-4, abs=1e-6)
    found = moves(tmp_path / "broken")
    off = sum(np.sum(np.square(found[leaf] - expected[leaf])) for leaf in expected)
    assert 0 < np.sqrt(off) < 1e-4 * norm


@pytest.mark.slow
def test_work_in_flight_of_two_workers_is_continued_by_others(tmp_path, train):
    """Half of a step has begun with older weights, which the checkpoint contains; then one device does everything."""
    apart = toy.meshes((1, 1), (1, 1), workers=2)
    fields = dict(runtime__max_policy_lag=1, sampler__chunk=4, trainer__micro_batch=4)
    stopped(train, "run", config(tmp_path, **fields | apart), 3, devices=3)
    (step,) = map(int, saved(tmp_path / "run"))
    c = config(tmp_path, **fields, reward_pool__processes=0)
    assert train("run", c, devices=2) is None
    history = metrics(tmp_path / "run")
    assert [line["step"] for line in history] == list(range(5))
    assert history[step + 1]["policy_lag"] == 0.5
    # The step after that may have been begun; nothing is in progress any more.
    assert all(line["policy_lag"] == 0 for line in history[step + 3 :])
    first, commands = read_log(tmp_path / "run" / "commands.jsonl")
    assert first == step and {getattr(c, "worker", "trainer") for c in commands} == {"trainer"}


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_its_steps_and_files_are_cut_back(tmp_path, train, capsys):
    c = config(tmp_path, steps=6, checkpoint__every=1, checkpoint__keep=2)
    assert train("unbroken", c) is None
    first, commands = read_log(tmp_path / "unbroken" / "commands.jsonl")
    assert first in (4, 5) and {command.chunk.step for command in trained(commands)} <= {4, 5}
    timeline = json.loads((tmp_path / "unbroken" / "timeline.json").read_text())
    steps = {event["args"].get("step") for event in timeline if event["ph"] == "X"}
    assert steps - {None} == set(range(first, 7))  # the last are of the last version's evaluation

    stopped(train, "broken", c, 5)
    assert saved(tmp_path / "broken") == ["3", "4"]
    folder = tmp_path / "broken" / "checkpoints"
    flip(max((folder / "4").glob("arrays/ocdbt.process_0/d/*"), key=lambda p: p.stat().st_size))
    with (tmp_path / "broken" / "commands.jsonl").open("a") as file:
        file.write('{"is": "Gene')
    (tmp_path / "broken" / "images" / "before.npz").write_bytes(b"nonsense")
    capsys.readouterr()
    assert train("broken", c) is None
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if "is damaged (" in line]
    assert len(said) == 1 and said[0].startswith("checkpoint 4 is damaged (arrays/ocdbt")
    assert said[0].endswith("has another checksum): 3 is used")
    assert "continuing after step 3\n" in out
    assert "before.npz is missing or damaged" in out
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "unbroken")
    assert (folder / "damaged_4").is_dir()
    shutil.rmtree(folder / "damaged_4")
    assert arrays(tmp_path / "broken") == arrays(tmp_path / "unbroken")


def trained(commands):
    return [command for command in commands if command.kind == "train"]


# ----------------------------------------------------------------------------------- the disk


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own with 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: pathlib.Path) -> None:
    """Takes all the remaining space."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


@pytest.mark.slow
def test_a_full_disk_costs_no_step_and_the_same_command_continues(
    tmp_path, train, small_disk, monkeypatch
):
    c = config(tmp_path, steps=3, checkpoint__every=3, evaluation__every=1, images__every=1)
    assert train("unbroken", c) is None

    def full(scores):
        fill(small_disk)
        return scores

    run = small_disk / "run"
    with pytest.raises(SaveFailed) as caught:
        train("disk/run", c, at(2, full))
    assert str(caught.value) == (
        f"the disk of {run} is full: free some space, and the same command continues after step 2, which is saved"
    )
    assert saved(run) == ["2"] and len(read_metrics(run / "metrics.jsonl")) == 3
    assert json.loads((run / "timeline.json").read_text())
    with pytest.raises(
        SaveFailed, match=r"there is no space for the next checkpoint in \S+disk/run"
    ):
        train("disk/run", c)
    (small_disk / "ballast").unlink()
    assert train("disk/run", c) is None
    assert metrics(run) == metrics(tmp_path / "unbroken")
    assert arrays(run) == arrays(tmp_path / "unbroken")
    assert not list(run.rglob("*unfinished*")) and not list(run.rglob("room*"))


def test_a_disk_that_is_full_before_the_start_is_reported(tmp_path, train, small_disk):
    fill(small_disk)
    for workdir in ("disk/run", "disk"):
        with pytest.raises((SaveFailed, ConfigError)):
            train(workdir, config(tmp_path))
    (small_disk / "ballast").unlink()
    assert train("disk/run", config(tmp_path, steps=1)) is None


# -------------------------------------------------------------------------------- the workdir


def test_a_workdir_that_cannot_be_used_is_named(tmp_path, train):
    c = config(tmp_path)
    (tmp_path / "file").write_text("")
    for workdir in ("file", "file/in", "/proc/run"):
        with pytest.raises(ConfigError, match=workdir):
            train(workdir, c)


def test_a_run_whose_workdir_is_moved_stops_and_continues_at_its_new_place(tmp_path, train):
    c = config(tmp_path, checkpoint__every=1)
    run, moved = tmp_path / "run", tmp_path / "moved"

    def move(scores):
        run.rename(moved)
        return scores

    with pytest.raises(Stopped):
        train("run", c, at(3, move))
    assert not (run / "metrics.jsonl").exists() and not list(run.glob("checkpoints/*"))
    assert train("moved", c) is None
    assert [line["step"] for line in read_metrics(moved / "metrics.jsonl")] == [*range(5)]


@pytest.fixture
def workdir(tmp_path):
    """workdir(config, step): the workdir of a run with metrics up to a step."""

    def write(c, step):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(toy.opened(c).as_json()))
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}, "seconds/clock": 0}}\n')
        return folder

    return write


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", b"\x93\xff"),
        ("config.json", b"[1]"),
        ("finished.json", b"{"),
        ("finished.json", b'{"step": "x"}'),
        ("metrics.jsonl", b"nonsense\n"),
        ("commands.jsonl", b"nonsense\n"),
    ],
)
def test_a_damaged_file_of_a_workdir_is_named(tmp_path, train, workdir, file, content):
    c = config(tmp_path)
    damaged = workdir(c, 0) / file
    damaged.unlink(missing_ok=True)
    if content is not None:
        damaged.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(file)):
        train("run", c, lambda *_: pytest.fail("it runs"))


@pytest.mark.parametrize(("step", "every"), [(0, 3), (4, 3), (8, 60)])
def test_a_run_without_its_folder_of_checkpoints_is_refused(tmp_path, train, workdir, step, every):
    folder = workdir(config(tmp_path, steps=9, checkpoint__every=every), step)
    metrics = (folder / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=re.escape(str(folder / "checkpoints"))):
        train("run", config(tmp_path, steps=9, checkpoint__every=1))
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path, train, workdir):
    """Then a folder that is no checkpoint counts as no steps done; without all checkpoints it does not start again."""
    checkpoints = workdir(config(tmp_path, checkpoint__every=60), 2) / "checkpoints"
    checkpoints.mkdir()
    assert train("run", config(tmp_path, steps=1, checkpoint__every=1)) is None
    (checkpoints / "99").mkdir()
    assert train("run", config(tmp_path, steps=2, checkpoint__every=1)) is None
    assert saved(tmp_path / "run") == ["1", "2"]
    for folder in checkpoints.iterdir():
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=re.escape(str(checkpoints))):
        train("run", config(tmp_path, steps=3, checkpoint__every=1))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
