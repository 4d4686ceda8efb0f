import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from digen_jax.process.shutdown import Interrupt
from tests.pipelines import ROOT, environment
from tests.scripts import ends

# The last word says what hangs; everything else is as in a run: the pool of rewards, threads, the exit.
SCRIPT = """
import os, pathlib, sys, threading, time
from digen_jax.process.shutdown import Interrupt
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
import hanging

what = sys.argv[1]

def ready():
    pathlib.Path("ready").write_text(str(os.getpid()))

with Interrupt() as interrupt:
    if what == "thread":
        pool = RewardPool(alone("hanging:for_ever", hanging.for_ever), 0)
        ready()
        pool.score([[]], ["x"], [{}])
    elif what == "process":
        pool = RewardPool(alone("hanging:for_ever", hanging.for_ever), 1)
        pool.score([[]], ["x"], [{}])  # which says that it is ready
    elif what == "mesh":
        from digen_jax.runtime.driver import SerialThread
        worker = SerialThread("rollout 0")
        worker.submit(hanging.for_ever)
        while not pathlib.Path("ready").exists():
            time.sleep(0.01)
        worker.close()
    elif what == "exit":
        thread = threading.Thread(target=hanging.for_ever)
        thread.start()  # Python's exit waits for it, and so does the end of this block
        ready()
        thread.join()
    elif what == "call":
        # Deaf to signals as in a call of the devices' runtime, which no Python runs in.
        import ctypes
        lock = ctypes.CDLL(None).pthread_mutex_lock
        mutex = ctypes.create_string_buffer(64)
        lock(mutex)
        ready()
        lock(mutex)
"""
HANGING = """
import pathlib, os, time

def for_ever(*batch):
    pathlib.Path("ready").write_text(str(os.getpid()))
    time.sleep(300)
"""

# A moment at which Ctrl-C comes: before `run_main`, or where KeyboardInterrupt is lost or must wait.
STARTING = """
import digen_jax.process.ctrl_c
import signal, sys

what = sys.argv.pop(1)
if what == "before":
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass

from digen_jax.config.command_line import run_main
from digen_jax.process import shutdown

shutdown.CTRL_C_PATIENCE = 0.2

class Collected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def main():
    if what == "collected":
        Collected()
    elif what == "import":
        try:
            import interrupted
        except ImportError:
            pass
    elif what == "call":
        import ctypes, os, threading
        lock = ctypes.CDLL(None).pthread_mutex_lock
        mutex = ctypes.create_string_buffer(64)
        lock(mutex)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        lock(mutex)
    elif what == "cleaned":
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            print("cleaned up")
    import time
    time.sleep(300)

run_main(main)
"""
INTERRUPTED = """
import signal

try:
    signal.raise_signal(signal.SIGINT)
except BaseException as error:
    raise ImportError from error
"""


@pytest.mark.parametrize("what", ["before", "import", "collected", "call", "cleaned"])
def test_ctrl_c_ends_a_script_wherever_its_main_thread_is(tmp_path, what):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    (tmp_path / "script.py").write_text(STARTING)
    done = subprocess.run(
        [sys.executable, "script.py", what],
        cwd=tmp_path,
        env=environment(1, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
        # Where the tests run in the background, their processes ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.splitlines()[-1] == "script.py: stopped by Ctrl-C"
    assert done.stdout == "cleaned up\n" * (what == "cleaned")


@pytest.mark.parametrize("mapped", ["_multiarray_umath", "array_record_module"])
def test_ctrl_c_ends_a_run_that_is_starting(tmp_path, mapped):
    process = subprocess.Popen(
        [
            sys.executable,
            "launch/train.py",
            "--config=configs/shapes_demo.py",
            f"--workdir={tmp_path}/run",
        ],
        cwd=ROOT,
        env=environment(1),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    maps, deadline = pathlib.Path(f"/proc/{process.pid}/maps"), time.monotonic() + 120
    try:
        while mapped not in maps.read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "train.py: stopped by Ctrl-C\n")


def test_the_first_interrupt_is_noted():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [*map(signal.getsignal, numbers), signal.set_wakeup_fd(-1)]
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested == signal.SIGTERM
    assert [*map(signal.getsignal, numbers), signal.set_wakeup_fd(-1)] == before


@pytest.mark.parametrize("what", ["thread", "process", "mesh", "exit", "call"])
def test_the_second_ends_at_once_whatever_hangs_and_says_no_more_than_that(tmp_path, what):
    (tmp_path / "hanging.py").write_text(textwrap.dedent(HANGING))
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py", what],
        cwd=tmp_path,
        env=environment(1, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ready = tmp_path / "ready"
    while not (ready.exists() and ready.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert process.returncode == 128 + signal.SIGINT
    lines = [line for line in errors.splitlines() if line]
    noted = what != "call"  # which Python's own handler does not get into
    assert len(lines) == 1 + noted and lines[-1].startswith("Exiting now"), errors
    assert out == ""
    assert ends(int(ready.read_text()))  # where the reward's process hangs, it is that one
