"""The display of progress, with and without a terminal."""

import io
import sys

import numpy as np

from digen_jax.process import terminal as progress
from digen_jax.process.terminal import Progress, track


def test_progress_without_a_terminal_is_a_line_every_few_steps(monkeypatch, capsys):
    clock = iter([100.0, *(110.0 + 2 * i for i in range(20))])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown = Progress(12, done=2, every=5)
    for step in range(3, 13):
        shown.update(step, np.float32(step / 100), 6.25, None if step == 12 else 0.5)
    shown.note("saved")
    shown.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 3 of 12: reward 0.030, 6.2 images/s, devices 50% busy",
        "step 5 of 12: reward 0.050, 6.2 images/s, devices 50% busy, 00:42 left",
        "step 10 of 12: reward 0.100, 6.2 images/s, devices 50% busy, 00:06 left",
        "step 12 of 12: reward 0.120, 6.2 images/s, 00:00 left",
        "saved",
    ]


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "100")
    shown = Progress(4, done=1)
    shown.update(2, 0.5, 3.0, 0.9)
    shown.update(3, 0.625, 3.0, 0.9)
    shown.close()
    last = stream.getvalue().split("\r")[-1]
    assert "75%" in last
    assert "step 3 of 4, reward 0.625, 3.0 images/s, devices 90% busy, 00:00 left" in last


def test_what_takes_long_is_reported_now_and_then_without_a_terminal(monkeypatch, capsys):
    clock = iter(range(0, 1000, 8))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(track("abcdefg", "evaluating", "batch", total=9, done=2)) == list("abcdefg")
    assert capsys.readouterr().err.splitlines() == [
        "evaluating: batch 5 of 9, 00:32 left",
        "evaluating: batch 8 of 9, 00:08 left",
    ]
    assert list(track("ab", "sampling", "batch")) == list("ab")
    assert "sampling" not in capsys.readouterr().err, "nothing is said of what is short"


def test_what_takes_long_has_a_bar_on_a_terminal(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(track(range(4), "sampling", "batch")) == [0, 1, 2, 3]
    assert "sampling:   0%" in stream.getvalue() and "0/4" in stream.getvalue()
