"""status.json of a run, and its table."""

import os
import re
import socket
import threading
import time

import pytest

from digen_jax.errors import ConfigError
from digen_jax.logging import status
from digen_jax.logging.status import FILE, describe, read_status, status_updates, write_status
from digen_jax.process import terminal

HERE = socket.gethostname()
WORK = "training on chunk 3 of step 12"
TRAINER = dict(devices=4, lost=None, does=WORK, waits=None, since=998.0, holds=[11, 12], arrives=[])
REMOTE = TRAINER | dict(devices=16, does=None, waits="sync", since=880.0, arrives=[13])
SNAPSHOT = dict(
    step=12,
    steps=60,
    scoring=2,
    workers={
        "trainer": TRAINER,
        "rollout 0": REMOTE | dict(holds=[9, 10, 11, 12]),
        "rollout 1": dict(devices=16, lost=940.0),
    },
)
PLACES = {
    "trainer": dict(processes=2),
    "rollout 0": dict(host="host-of-a-rather-long-name", process=77, heard=993.5),
    "rollout 1": dict(host="other", process=78, heard=900.0),
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A state that was written at 1000 s."""
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    terminal._lines.clear()
    line = "rollout 1 hangs: generating chunk 2 of step 12 " + "for long " * 5
    terminal._lines.append((939.0, line))
    write_status(tmp_path, SNAPSHOT, PLACES)
    yield read_status(tmp_path)
    terminal._lines.clear()


def test_the_table_fits_the_terminal(written):
    me = os.getpid()
    text = describe("runs/x", written, me, 1001.5)
    assert text.splitlines() == [
        "runs/x: 12 of 60 steps are done",
        f"written 1.5 s ago by process {me} on {HERE}; it holds the workdir's lock",
        "worker     process                     devices  weights        for",
        "  at that time",
        f"trainer    {f'{me} and 1 more':<26}  4        11 12          2.0 s",
        f"  {WORK}",
        "rollout 0  77 on host-of-a-rather-...  16       ... 11 12 +13  2 min",
        "  no heartbeat for 6.5 s; waits for sync",
        "rollout 1  78 on other                 16                      60 s",
        "  disconnected",
        "reward",
        "  scoring 2 batches",
        "last lines of standard error:",
        "  62 s ago: rollout 1 hangs: generating chunk 2 of step 12 for long for long for",
        "    long for long for long",
    ]
    lines = describe("runs/x", written, me, 1001.5, 200).splitlines()
    assert lines[3].endswith(f"2.0 s  {WORK}")
    assert lines[6] == f"reward{'scoring 2 batches':>81}"

    long = TRAINER | dict(does="generating chunk 12 of the evaluation of version 120", holds=[])
    workers = {"trainer": {"host": HERE, "process": 5, "processes": 1, "heard": None, **long}}
    text = describe("x", {**written, "workers": workers, "scoring": 0, "lines": []}, 5, 1001.5)
    assert text.splitlines()[2:] == [
        "worker   process  devices  weights  for    at that time",
        "trainer  5        4                 2.0 s  generating chunk 12 of the evaluation",
        "                                           of version 120",
    ]


def test_the_table_says_whether_the_process_is_alive(written):
    cases = [
        ({}, 5, "; it holds"),
        ({}, 0, "; it holds"),
        ({}, 6, "; process 6 holds"),
        ({}, None, ", which has died"),
        ({"ended": ""}, None, ", which has finished"),
        ({"ended": "SaveFailed: the disk is full"}, 5, ", which failed with SaveFailed: the"),
        ({"host": "other"}, None, ": check there"),
    ]
    for changed, holder, expected in cases:
        text = describe("x", {**written, "process": 5, **changed}, holder, 1001.5, 200)
        assert f"by process 5 on {changed.get('host', HERE)}{expected}" in text.splitlines()[1]


def test_the_state_is_written_repeatedly_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "EVERY", 0.01)
    calls = []

    def snapshot():
        calls.append(1)
        return SNAPSHOT | {"step": len(calls)}

    with status_updates(tmp_path, snapshot, lambda: PLACES):
        deadline = time.monotonic() + 20
        while len(calls) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = read_status(tmp_path)
        assert found["ended"] is None and found["process"] == os.getpid()
        assert found["workers"]["rollout 0"]["host"] == PLACES["rollout 0"]["host"]
        assert found["workers"]["trainer"]["host"] == HERE
    ended = read_status(tmp_path)
    assert ended["ended"] == "" and ended["step"] == len(calls) >= 5
    assert [one.name for one in tmp_path.iterdir()] == [FILE]

    with pytest.raises(RuntimeError), status_updates(tmp_path, snapshot):
        raise RuntimeError("no more")
    assert read_status(tmp_path)["ended"] == "RuntimeError: no more"


def test_a_blocked_snapshot_or_missing_folder_does_not_block_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "TIMEOUT", 0.1)
    with status_updates(tmp_path / "none", lambda: SNAPSHOT):
        pass
    free, start = threading.Event(), time.monotonic()
    with status_updates(tmp_path, lambda: free.wait(60) and SNAPSHOT):
        pass
    assert time.monotonic() - start < 50
    free.set()


def test_control_characters_are_escaped(written):
    lines = [(990.0, "a\x1b[2Jb\x9bc\x07 \u202ed ä")]
    odd = written | {"ended": "\x1b]0;x\x07", "lines": lines}
    odd["workers"] = {"\x1b[31mred": written["workers"]["trainer"]}
    text = describe("runs/x", odd, None, 1001.5)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert r"a\x1b[2Jb\x9bc\x07 \u202ed ä" in text and r"\x1b[31mred" in text


HUGE = '{"step": 1, "steps": 2, "workers": {}, "scoring": 0, "lines": [], "ended": null, '
HUGE += f'"host": "a", "process": 3, "written": {"1" * 4000}}}'


@pytest.mark.parametrize("content", ["", "[]", '{"step": 3}', "{", "[" * 10**5, HUGE])
def test_an_invalid_file_is_named(tmp_path, content):
    assert read_status(tmp_path) is None
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"status\.json"):
        read_status(tmp_path)
