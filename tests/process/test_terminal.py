"""Lines on a terminal: broken between words, above a bar; and all that a real run shows on one."""

import errno
import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading

import numpy as np
import pytest
from tqdm import tqdm

from digen_jax.process import terminal
from digen_jax.process.terminal import (
    Output,
    Progress,
    complete_lines,
    log_tail,
    print_error,
    track,
    wrapped,
)
from tests.pipelines import ROOT, environment
from tests.run.test_train import TOY
from tests.tiny_runs import PROMPTS

COLUMNS = 80


class Screen:
    """What a terminal of unlimited height shows of some output, without its automatic breaks."""

    def __init__(self, output=""):
        self.lines, self.column, self.widest = [""], 0, 0
        self.write(output)

    def write(self, output):
        output = output.replace("\x1b[A", "\x1bA").replace("\x1b[K", "\x1bK")
        pieces = iter(output)
        for piece in pieces:
            if piece == "\x1b":
                command = next(pieces)
                assert command in "AK", f"{command!r} is no command of this terminal"
                if command == "K":
                    self.lines[-1] = self.lines[-1][: self.column]
                continue
            if piece == "\n":
                self.lines.append("")
                self.column = 0
            elif piece == "\r":
                self.column = 0
            else:
                line = self.lines[-1].ljust(self.column)
                self.lines[-1] = line[: self.column] + piece + line[self.column + 1 :]
                self.column += 1
                self.widest = max(self.widest, self.column)

    @property
    def shown(self):
        return [line.rstrip() for line in self.lines]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch, columns="40"):
    """What stands for stdout and stderr, on one screen; not a fixture, as pytest sets both after these."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", columns)
    return stream


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("", [""]),
        ("x" * 40, ["x" * 40]),
        ("one " * 12, ["one one one one one one one one one one", "  one one"]),
        (
            "  name:  " + "word " * 8,
            ["  name:  word word word word word word", "         word word"],
        ),
        (f"see {'x' * 50} there", ["see", f"  {'x' * 50}", "  there"]),
        (
            "    indented " + "word " * 7,
            ["    indented word word word word word", "      word word"],
        ),
    ],
)
def test_lines_are_broken_between_words_under_what_they_continue(line, lines):
    assert wrapped(line, 40).split("\n") == lines


def test_prints_do_not_break_a_bar(monkeypatch):
    shown_ = on_terminal(monkeypatch)
    with complete_lines():
        bar = tqdm(total=4, file=sys.stderr, ncols=30, bar_format="{n_fmt}/{total_fmt}|{bar}|")
        print("a", "line", end=" of ", flush=True)
        bar.update(1)
        print("several pieces which is longer than a terminal is wide")
        print("another\nand a third", file=sys.stderr)
        bar.close()
        print("no end", end="")
    assert sys.stdout is shown_
    screen = Screen(shown_.getvalue())
    assert screen.shown[:4] == [
        "a line of several pieces which is longer",
        "  than a terminal is wide",
        "another",
        "and a third",
    ]
    assert screen.shown[4].startswith("1/4|") and screen.shown[5] == "no end"
    assert screen.widest <= 40


def test_what_is_no_terminal_has_the_lines_as_they_are(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    with complete_lines(external_bar=True):
        print("word " * 20)
    print_error("word " * 20)
    assert capsys.readouterr() == ("word " * 20 + "\n",) * 2


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_line_of_a_thread_is_whole_wherever_others_print(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)

    def say():
        print("one", end=" ")
        others.wait()
        print("line")

    others = threading.Barrier(3)
    with complete_lines():
        threads = [threading.Thread(target=say) for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert stream.getvalue() == "one line\n" * 3


@pytest.mark.parametrize(
    ("columns", "ends"),
    [
        ("80", "| step 1000 of 2000, reward -0.125, 1234.5 images/s, 2:46:40 left"),
        (
            "99",
            "| step 1000 of 2000, reward -0.125, 1234.5 images/s, devices 100% busy, 2:46:40 left",
        ),
        ("60", "| step 1000 of 2000, reward -0.125, 2:46:40 left"),
        ("50", "| step 1000 of 2000, reward -0.125"),
    ],
)
def test_a_bar_has_what_fits(monkeypatch, columns, ends):
    shown_ = on_terminal(monkeypatch, columns)
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    shown = Progress(2000, done=998)
    for step in (999, 1000):
        shown.update(step, -0.125, ["1234.5 images/s", "devices 100% busy"])
    shown.close()
    last = Screen(shown_.getvalue()).shown[0]
    assert last.endswith(ends) and len(last) <= int(columns)


def test_progress_without_a_terminal_is_a_line_every_few_steps(monkeypatch, capsys):
    clock = iter([100.0, *(110.0 + 2 * i for i in range(20))])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    shown = Progress(12, done=2, every=5)
    for step in range(3, 13):
        speed = ["6.2 images/s", "devices 50% busy"][: 1 if step == 12 else 2]
        shown.update(step, np.float32(step / 100), speed)
    shown.note("saved")
    shown.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 3 of 12: reward 0.030, 6.2 images/s, devices 50% busy",
        "step 5 of 12: reward 0.050, 6.2 images/s, devices 50% busy, 00:42 left",
        "step 10 of 12: reward 0.100, 6.2 images/s, devices 50% busy, 00:06 left",
        "step 12 of 12: reward 0.120, 6.2 images/s, 00:00 left",
        "saved",
    ]


def test_what_takes_long_is_reported_now_and_then_without_a_terminal(monkeypatch, capsys):
    clock = iter(range(0, 1000, 8))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    assert list(track("abcdefg", "evaluating", "batch", total=9, done=2)) == list("abcdefg")
    assert capsys.readouterr().err.splitlines() == [
        "evaluating: batch 5 of 9, 00:32 left",
        "evaluating: batch 8 of 9, 00:08 left",
    ]
    assert list(track("ab", "sampling", "batch")) == list("ab")
    assert "sampling" not in capsys.readouterr().err, "nothing is said of what is short"


def test_the_last_lines_are_kept_without_progress(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with complete_lines():
        print("step 3 of 9: reward 0.5", file=sys.stderr)
        print("\r 50%|##\r", end="", file=sys.stderr)
        print("rollout 0 hangs", "and is given up", file=sys.stderr)
        print("\n x", end="", file=sys.stderr)
        print("on stdout")
        assert sys.stderr.getvalue().count("\n") == 3 and not sys.stderr.isatty()
    assert [line for _, line in log_tail()] == ["rollout 0 hangs and is given up"]
    assert sys.stderr is stream
    assert stream.getvalue().startswith("step 3 of 9: reward 0.5\n\r 50%|##\rrollout 0")


REWARD = """
import sys, warnings

def mean(images, prompts, metadata):
    print("this reward tells of", len(prompts), "pictures, which is more than fits into a line of eighty columns")
    return images.mean((1, 2, 3)) / 255
"""


@pytest.mark.slow
def test_all_that_a_run_shows_fits_a_terminal(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(PROMPTS * 3) + "\n")
    config = TOY.replace("steps = 6", "steps = 3").replace("processes=0", "processes=1")
    (tmp_path / "config.py").write_text(config)
    (tmp_path / "blueness.py").write_text(REWARD)
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    variables = {name: value for name, value in environment(4).items() if name != "COLUMNS"}
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.run.toy_process", "--config=config.py", "--workdir=run"],
        cwd=tmp_path,
        env=variables | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
        stdin=there,
        stdout=there,
        stderr=there,
    )
    os.close(there)
    output = b""
    try:
        while piece := os.read(here, 2**16):
            output += piece
    except OSError:  # Linux's end of a terminal
        pass
    finally:
        os.close(here)
    screen = Screen(output.decode())
    text = "\n".join(screen.shown)
    assert run.wait(60) == 0, text
    assert screen.widest <= COLUMNS, text
    assert max(map(len, screen.shown)) > 60, text
    assert "warn" not in text.lower(), text
    bars = [line for line in screen.shown if "%" in line and "| step" in line]
    assert len(bars) == 1 and "step 3 of 3, reward" in bars[0], text
    flat = " ".join(text.split())
    assert "more than fits into a line of eighty columns" in flat
    assert "reward on 4 training prompts before after gain" in flat


# ------------------------------------------------------------------------------- without a reader

UNREAD = """
import pathlib, subprocess, sys
from digen_jax.config.command_line import run_main

def main():
    for name in ("stdout", "stderr"):
        for _ in range(3):
            print("x" * 10_000, file=getattr(sys, name), flush=True)
        assert not getattr(sys, name).isatty()
    subprocess.run(["echo", "a child"], check=True)
    pathlib.Path("numbers").write_text("done")
    print("the end")  # which Python writes as it ends
    return 3

run_main(main)
"""


@pytest.mark.parametrize(
    "closed", ["stdout", "stderr", "both", "from the start", "in the background"]
)
def test_a_script_works_on_without_a_reader_of_its_output(tmp_path, closed):
    (tmp_path / "script.py").write_text(UNREAD)
    reads, writes = os.pipe()
    os.close(reads)
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    streams |= {name: writes for name in streams if closed in (name, "both")}
    command = [sys.executable, "script.py"]
    if closed in ("from the start", "in the background"):
        # A shell starts commands in the background with Ctrl-C ignored.
        before = "trap '' INT; " * (closed == "in the background")
        command = ["sh", "-c", f"{before}exec {' '.join(command)} >&- 2>&-"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(1, PYTHONPATH=str(ROOT)), check=False, **streams
    )
    os.close(writes)
    assert done.returncode == 3
    assert (tmp_path / "numbers").read_text() == "done"
    if closed == "stderr":
        assert done.stdout.endswith(b"a child\nthe end\n")
    elif closed == "stdout":
        assert len(done.stderr) == 3 * 10_001


def test_a_status_that_is_followed_ends_with_its_reader(tmp_path):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "launch/status.py", "--follow", f"--workdir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(1), stdout=writes, timeout=120)
    os.close(writes)
    assert done.returncode == 128 + signal.SIGPIPE


def test_a_full_disk_is_no_missing_reader():
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError) as caught:
        Output(full).write(b"x")
    os.close(full)
    assert caught.value.errno == errno.ENOSPC
