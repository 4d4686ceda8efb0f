import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from digen_jax.process.interrupt import Interrupt
from tests.pipelines import ROOT, environment
from tests.scripts import ends

# The last word says what hangs; everything else is as in a run: the pool of rewards, threads, the exit.
SCRIPT = """
import os, pathlib, sys, threading, time
from digen_jax.process.interrupt import Interrupt
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
        from digen_jax.runtime.worker import WorkerThreads
        worker = WorkerThreads("rollout 0")
        worker.thread.submit(hanging.for_ever)
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


def test_the_first_interrupt_is_noted():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [*map(signal.getsignal, numbers), signal.set_wakeup_fd(-1)]
    with Interrupt() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked == signal.SIGTERM
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
    assert len(lines) == 1 + noted and lines[-1].startswith("ended at once"), errors
    assert out == ""
    assert ends(int(ready.read_text()))  # where the reward's process hangs, it is that one
