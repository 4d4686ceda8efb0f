"""Messages to trackers: with a fake wandb that fails in several ways, and with wandb and trackio offline."""

import json
import os
import pathlib
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from digen_jax.logging import tracking
from digen_jax.logging.metrics import MetricsLog
from digen_jax.logging.tracking import Tracker, TrackerStart
from tests.logging.test_metrics import draw, lines
from tests.pipelines import ROOT

# A fake wandb: writes each call as a line, and fails in the way that the project's name says.
FAKE = """
import json, os, sys, time

def note(*what):
    with open("NOTES", "a") as file:
        print(json.dumps(what), file=file)

class Image:
    def __init__(self, path):
        self.size = os.path.getsize(path)

class Run:
    def log(self, values, step):
        if DO == "hang":
            time.sleep(600)
        if DO == "die":
            os._exit(3)
        if DO == "raise":
            raise OSError("the disk of wandb\\nis full")
        note("log", {k: v.size if isinstance(v, Image) else v for k, v in values.items()}, step)

    def finish(self):
        note("finish")

def init(**options):
    global DO
    DO = options["project"]
    print("Warning: wandb says much on stdout")
    print("and on stderr", file=sys.stderr)
    if DO == "refuse":
        raise ValueError("No API key configured.\\nRun wandb login")
    note("init", options)
    return Run()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Calls of the fake wandb."""
    (tmp_path / "fake").mkdir()
    notes = tmp_path / "notes"
    (tmp_path / "fake" / "wandb.py").write_text(FAKE.replace("NOTES", str(notes)))
    monkeypatch.syspath_prepend(tmp_path / "fake")
    return lambda: [json.loads(line) for line in notes.read_text().splitlines()]


def opened(workdir, project="fine"):
    return MetricsLog(workdir, {"wandb": {"project": project}}, {"seed": 3, "sizes": [1, 2]})


def test_a_tracker_gets_config_metrics_and_images_and_prints_nothing(tmp_path, fake, capfd):
    log = opened(tmp_path / "run")
    image = draw(tmp_path / "run", "step_000001.png")
    log.write(0, {"a": np.float32(0.5)})
    log.image(image)
    log.write(1, {"a": 1.5, "evaluation/b": 2})
    log.image(draw(tmp_path / "run", "before_after.png"), 1)
    log.close()
    (_, options), *sent = fake()
    identity = (tmp_path / "run" / "wandb_id.txt").read_text()
    assert options == {
        "config": {"seed": 3, "sizes": [1, 2]},
        "dir": str(tmp_path / "run"),
        "id": identity,
        "resume": "allow",
        "project": "fine",
    }
    size = image.stat().st_size
    assert sent == [
        ["log", {"a": 0.5}, 0],
        ["log", {"images/step": size}, 1],
        ["log", {"a": 1.5, "evaluation/b": 2.0}, 1],
        ["log", {"images/before_after": size}, 1],
        ["finish"],
    ]
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "run" / "wandb.log").read_text().startswith("Warning: wandb says")
    opened(tmp_path / "run").close()
    assert [one[1]["id"] for one in fake() if one[0] == "init"] == [identity] * 2


@pytest.mark.parametrize(
    ("project", "error"),
    [
        ("refuse", ": No API key configured. ("),
        ("raise", ": the disk of wandb ("),
        ("die", ": exit code 3 ("),
    ],
)
def test_a_failing_tracker_is_reported_once_and_the_metrics_are_complete(
    tmp_path, fake, capfd, project, error
):
    log = opened(tmp_path / "run", project)
    for step in range(500):
        log.write(step, {"a": step})
    (tracker,) = log._trackers
    while not tracker.warned:
        time.sleep(0.01)
    log.write(500, {"a": 500})
    log.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert error in line and str(tmp_path / "run" / "wandb.log") in line
    assert [line["a"] for line in lines(tmp_path / "run")] == list(range(501))


def test_a_tracker_that_hangs_neither_slows_nor_keeps_a_run(tmp_path, fake, capfd, monkeypatch):
    monkeypatch.setattr(tracking, "QUEUE_SIZE", 20)
    start = TrackerStart("wandb", str(tmp_path), {"project": "hang"}, None, -1)
    tracker = Tracker(start, timeout=0.5)
    start_time = time.monotonic()
    for step in range(5000):
        tracker.log({f"metric {i}": 0.5 for i in range(20)}, step)
    assert time.monotonic() - start_time < 200
    tracker.close()
    assert time.monotonic() - start_time < 200 and tracker._process.returncode == -9
    assert len(capfd.readouterr().err.splitlines()) == 1  # that it does not keep up
    tracker = Tracker(start, timeout=0.5)
    tracker.log({"a": 1.0}, 0)
    tracker.close()
    assert tracker._process.returncode == -9
    assert "0.5 s" in capfd.readouterr().err


def test_a_tracker_ends_its_run_where_the_process_that_tells_it_is_killed(tmp_path, fake):
    code = (
        "import os, sys, time\n"
        "from digen_jax.logging.tracking import Tracker, TrackerStart\n"
        "tracker = Tracker(TrackerStart('wandb', sys.argv[1], {'project': 'fine'}, None, -1))\n"
        "tracker.log({'a': 1.0}, 0)\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), 9)"
    )
    path = os.pathsep.join([str(tmp_path / "fake"), str(ROOT)])
    run = [sys.executable, "-c", code, tmp_path]
    assert subprocess.run(run, env=os.environ | {"PYTHONPATH": path}).returncode == -9
    deadline = time.monotonic() + 20
    while not (tmp_path / "notes").exists() or fake()[-1:] != [["finish"]]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert fake()[1] == ["log", {"a": 1.0}, 0]


@pytest.mark.slow
def test_wandb_gets_metrics_images_and_config_and_a_resumed_run_the_same_id(tmp_path):
    image = draw(tmp_path, "step_000001.png")
    for step in range(2):
        trackers = {"wandb": {"project": "digen", "mode": "offline"}}
        log = MetricsLog(tmp_path, trackers, {"seed": 3})
        if step:
            log.image(image)
        log.write(step, {"a": np.float32(step + 0.5)})
        log.close()
        time.sleep(1.1 * (step == 0))  # wandb names the folders of runs by the second
    runs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    identity = (tmp_path / "wandb_id.txt").read_text()
    assert [run.name for run in runs] == [f"run-{identity}.wandb"] * 2
    first, second = (run.read_bytes() for run in runs)
    assert b"seed" in first and b"0.5" in first and b"seed" in second and b"1.5" in second
    assert b"image-file" in second and b"image-file" not in first


@pytest.mark.slow
def test_trackio_gets_metrics_images_and_config_and_a_resumed_run_the_same_name(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing is sent to the hub
    image = draw(tmp_path, "step_000001.png")
    options = {"trackio": {"project": "shapes", "group": "tests"}}
    config = {"seed": 3, "model": {"folder": "x"}}
    log = MetricsLog(tmp_path, options, config)
    log.write(0, {"a": 0.5})
    log.image(image)
    log.write(1, {"a/b": 1.5})
    log.close()
    log = MetricsLog(tmp_path, options, config)
    log.truncate(1)
    for step in (1, 2):  # step 1 again
        log.write(step, {"a/b": step + 0.5})
    log.close()
    with sqlite3.connect(tmp_path / "trackio" / "shapes.db") as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
        settings = database.execute("SELECT config FROM configs").fetchall()
    name = (tmp_path / "trackio_id.txt").read_text()
    assert {row[0] for row in rows} == {name}
    sent = [(step, json.loads(metrics)) for _, step, metrics in rows]
    expected = [(0, "a"), (1, "images/step"), (1, "a/b"), (2, "a/b")]
    assert [(step, *one) for step, one in sent] == expected
    assert [one["a/b"] for _, one in sent[2:]] == [1.5, 2.5]
    image = sent[1][1]["images/step"]
    (file,) = (tmp_path / "trackio").rglob(pathlib.Path(image["file_path"]).name)
    with Image.open(file) as seen:
        assert seen.size == (4, 3)
    assert json.loads(settings[0][0])["model"] == {"folder": "x"}
