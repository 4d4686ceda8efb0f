"""How a process ends whose threads do not: in processes of their own, in which one hangs that Python would wait for."""

import signal
import subprocess
import sys
import time

import pytest

from digen_jax.process.shutdown import STOPPED
from tests.pipelines import ROOT, environment

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


def run(folder, script):
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment(1, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("pass", 0, ""),
        ("return 130", 130, ""),
        ("raise shutdown.Stopped('the reward hangs')", STOPPED, "script.py: the reward hangs\n"),
        ("raise ConfigError('give a reward')", 2, "script.py: give a reward\n"),
        ("sys.exit('it was asked to')", 1, "it was asked to\n"),
        ("raise KeyError('a bug')", 1, "KeyError: 'a bug'\n"),
    ],
)
def test_a_script_ends_with_its_code_and_all_that_it_said_though_a_thread_hangs(
    tmp_path, what, code, said
):
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


@pytest.mark.parametrize(
    ("what", "code"), [("pass", 0), ("return 75", 75), ("raise KeyError('a bug')", 1)]
)
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
def test_the_first_thread_that_says_why_a_process_ends_says_it_for_all(tmp_path, what):
    done = run(tmp_path, RACE.format(what=what))
    assert (done.returncode, done.stderr) == (75, "a thread: the leader is lost\n")


def test_the_last_word_is_one_line_however_many_threads_have_it(tmp_path):
    done = run(
        tmp_path,
        "import sys, threading\n"
        "from digen_jax.process.shutdown import log_fatal, exit_now\n"
        "sys.setswitchinterval(1e-6)\n"
        "together = threading.Barrier(8)\n"
        "def work():\n"
        "    together.wait()\n"
        "    exit_now(log_fatal('the leader is lost', 75))\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "for one in threads: one.start()\n"
        "for one in threads: one.join()\n",
    )
    assert (done.returncode, done.stderr) == (75, "the leader is lost\n")


@pytest.mark.parametrize("heard", [True, False])
def test_a_process_that_a_library_aborts_has_time_to_say_why(tmp_path, heard):
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


def test_the_last_word_does_not_wait_for_a_full_pipe(tmp_path):
    (tmp_path / "script.py").write_text(
        "from digen_jax.process.shutdown import log_fatal, exit_now\nexit_now(log_fatal('x' * 2**20, 75))\n"
    )
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(1, PYTHONPATH=str(ROOT)),
        stderr=subprocess.PIPE,
    ) as process:
        assert process.wait(20) == 75  # nothing reads


def test_leaving_waits_for_nobody(tmp_path):
    (tmp_path / "script.py").write_text(
        "import time\n"
        "from digen_jax.process import shutdown\n"
        "shutdown.before_exit(lambda: time.sleep(300))\n"
        "shutdown.exit_now(7)\n"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment(1, PYTHONPATH=str(ROOT))
    )
    assert done.returncode == 7 and time.monotonic() - begin < 200


@pytest.mark.parametrize(
    ("where", "code", "calls"),
    [
        ("reward(None, [], [])", 75, "script.py, line 8"),
        ("called(reward, RewardSettings('r'), np.zeros((1, 8, 8, 3)), ['x'], [{}])", 2, "'r'"),
        ("thread(reward)", 75, "script.py, line 8"),
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
        "from digen_jax.rewards.call import called\n"
        "from digen_jax.rewards.settings import RewardSettings\n"
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
