"""How a process ends: with hung threads, by signals, and out of memory; in separate processes."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import pytest

from digen_jax.process.shutdown import STOPPED, Interrupt, during, out_of_memory
from tests.pipelines import ROOT, environment
from tests.scripts import ends

SCRIPT = """
import sys, threading, time
from absl import app
from digen_jax.process import shutdown
from digen_jax.config.command_line import run_main
from digen_jax.errors import ConfigError

threading.Thread(target=time.sleep, args=(300,)).start()
shutdown.mark_hung("reward")
shutdown.before_exit(lambda: print("last"))

def main():
    print("done")
    {what}

run_main(main)
"""


def command(folder, script, *arguments):
    """The arguments of a process that runs a script."""
    (folder / "script.py").write_text(script)
    env = environment(1, PYTHONPATH=str(ROOT))
    return dict(args=[sys.executable, "script.py", *arguments], cwd=folder, env=env, text=True)


def run(folder, script, *arguments, **options):
    options |= command(folder, script, *arguments)
    return subprocess.run(capture_output=True, timeout=120, **options)


def default_ctrl_c():
    """Where the tests run in the background, their processes ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise shutdown.Stopped('the reward hangs')", STOPPED, "script.py: the reward hangs\n"),
        ("raise ConfigError('give a reward')", 2, "script.py: give a reward\n"),
        ("sys.exit('it was asked to')", 1, "it was asked to\n"),
        ("raise KeyError('a bug')", 1, "KeyError: 'a bug'\n"),
    ],
)
def test_a_script_with_a_hung_thread_ends_with_its_code_and_output(tmp_path, what, code, said):
    done = run(tmp_path, SCRIPT.format(what=what))
    assert (done.returncode, done.stdout) == (code, "done\nlast\n")
    assert done.stderr.endswith(said)
    assert ("Traceback" in done.stderr) == what.startswith("raise KeyError")


COMPLETE = """
import atexit, sys, threading, time
from digen_jax.config.command_line import run_main

class Last:
    def __del__(self):
        print("finalized")

last = Last()
sys.modules["kept"] = last

def late():
    time.sleep(0.5)
    print("a thread")

def main():
    threading.Thread(target=late).start()
    atexit.register(print, "an exit handler")
    print("done")
    {what}

run_main(main)
"""


@pytest.mark.parametrize(("what", "code"), [("return 75", 75), ("raise KeyError('a bug')", 1)])
def test_threads_and_exit_handlers_are_awaited_but_the_interpreter_is_not_finalized(
    tmp_path, what, code
):
    """Native threads may abort a process whose interpreter is finalized."""
    done = run(tmp_path, COMPLETE.format(what=what))
    assert (done.returncode, done.stdout) == (code, "done\na thread\nan exit handler\n")
    assert ("Traceback" in done.stderr) == (code == 1)


RACE = """
from digen_jax.process.shutdown import log_fatal, exit_now
from digen_jax.config.command_line import run_main
from digen_jax.errors import ConfigError

def main():
    log_fatal("a thread: the leader is lost", 75)
    {what}

run_main(main)
"""


@pytest.mark.parametrize(
    "what",
    [
        "raise ConfigError('the leader is lost')",
        "exit_now(log_fatal('another thread: the leader is lost', 2))",
    ],
)
def test_the_first_fatal_error_determines_message_and_exit_code(tmp_path, what):
    done = run(tmp_path, RACE.format(what=what))
    assert (done.returncode, done.stderr) == (75, "a thread: the leader is lost\n")


@pytest.mark.parametrize("heard", [True, False])
def test_an_abort_by_a_library_leaves_time_to_log_the_reason(tmp_path, heard):
    """Whether a thread says it or not, it ends."""
    done = run(
        tmp_path,
        "import ctypes, threading, time\n"
        "from digen_jax.process.shutdown import abort_later, log_fatal, exit_now\n"
        "abort_later()\n"
        "threading.Thread(target=ctypes.CDLL(None).abort).start()\n"
        f"time.sleep({1 if heard else 60})\n"
        "exit_now(log_fatal('the leader is lost', 75))\n",
    )
    found = done.returncode, done.stderr
    assert found == ((75, "the leader is lost\n") if heard else (-signal.SIGABRT, ""))


def test_logging_a_fatal_error_does_not_wait_for_a_full_pipe(tmp_path):
    script = "from digen_jax.process.shutdown import log_fatal, exit_now\nexit_now(log_fatal('x' * 2**20, 75))\n"
    with subprocess.Popen(**command(tmp_path, script), stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 75  # nothing reads


def test_exiting_does_not_wait_for_actions(tmp_path):
    done = run(
        tmp_path,
        "import time\n"
        "from digen_jax.process import shutdown\n"
        "shutdown.before_exit(lambda: time.sleep(300))\n"
        "shutdown.exit_now(7)\n",
    )
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("where", "code", "calls"),
    [
        ("reward(None, [], [])", 75, "script.py, line 7"),
        ("alone('r', reward).score(np.zeros((1, 8, 8, 3)), ['x'], [{}])", 2, "'r'"),
        ("thread(reward)", 75, "script.py, line 7"),
        ("child(reward)", 0, ""),
    ],
)
def test_an_exit_of_a_users_code_is_never_silent(tmp_path, where, code, calls):
    """In a reward, in a thread that it starts, and in a forked child, which exits as before."""
    done = run(
        tmp_path,
        "import multiprocessing, threading\n"
        "import numpy as np\n"
        "from digen_jax.config.command_line import run_main\n"
        "from digen_jax.rewards import alone\n"
        "def reward(images, prompts, metadata):\n"
        "    from os import _exit\n"
        "    _exit(0)\n"
        "def thread(target):\n"
        "    thread = threading.Thread(target=target, args=(None, [], []))\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "def child(target):\n"
        "    process = multiprocessing.get_context('fork').Process(target=target, args=(None, [], []))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    assert process.exitcode == 0\n"
        f"run_main(lambda: {where})\n",
    )
    assert done.returncode == code, done.stderr
    assert calls in done.stderr and "Traceback" not in done.stderr


# The last word says what hangs; everything else is as in a run: the pool of rewards, threads, the exit.
HANGS = """
import os, pathlib, sys, threading, time; import numpy as np
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
        pool.score(np.zeros((1, 2, 2, 3), np.uint8), ["x"], [{}])
    elif what == "process":
        pool = RewardPool(alone("hanging:for_ever", hanging.for_ever), 1)
        pool.score(np.zeros((1, 2, 2, 3), np.uint8), ["x"], [{}])  # which says that it is ready
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
    elif what == "lost":
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            pass
        raise AttributeError("an object that was not finished has no attribute")
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


@pytest.mark.parametrize("what", ["before", "import", "collected", "call", "cleaned", "lost"])
def test_ctrl_c_ends_a_script_wherever_its_main_thread_is(tmp_path, what):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    done = run(tmp_path, STARTING, what, preexec_fn=default_ctrl_c)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "script.py: stopped by Ctrl-C\n"
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
        preexec_fn=default_ctrl_c,
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


def test_the_first_signal_is_noted():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [*map(signal.getsignal, numbers), signal.set_wakeup_fd(-1)]
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested == signal.SIGTERM
    assert [*map(signal.getsignal, numbers), signal.set_wakeup_fd(-1)] == before


@pytest.mark.parametrize("what", ["thread", "process", "mesh", "exit", "call"])
def test_the_second_signal_ends_the_process_whatever_hangs(tmp_path, what):
    (tmp_path / "hanging.py").write_text(textwrap.dedent(HANGING))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(**command(tmp_path, HANGS, what), **pipes)
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


# Errors of JAX's own class, as XLA raises them for compilations, runs and messages.
OF_TPU = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21G of 15G"


def failed(text: str, kind: type[Exception] = jax.errors.JaxRuntimeError) -> Exception:
    with pytest.raises(kind) as caught, during("training"):
        raise kind(text)
    return caught.value


def test_an_out_of_memory_summary_has_the_work_and_the_first_line():
    found = out_of_memory(failed(f"{OF_TPU}.\n\nTotal hbm usage >= 21.0G"))
    assert found == f"a device ran out of memory during training ({OF_TPU})"
    bare = jax.errors.JaxRuntimeError(f"{OF_TPU} {'x' * 900}")
    assert out_of_memory(bare).startswith("a device ran out of memory (RESOURCE_EXHAUSTED: XLA:TPU")
    assert len(out_of_memory(bare)) < 400


@pytest.mark.parametrize(
    "error",
    [
        failed("RESOURCE_EXHAUSTED: Received message larger than max (9 vs. 4)"),
        failed("INTERNAL: out of memory"),
        failed(OF_TPU, ValueError),
    ],
    ids=str,
)
def test_other_errors_are_not_out_of_memory(error):
    assert out_of_memory(error) is None and not getattr(error, "__notes__", [])
