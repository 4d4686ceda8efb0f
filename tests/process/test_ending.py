"""How a process ends whose threads do not: in processes of their own, in which one hangs that Python would wait for."""

import subprocess
import sys
import time

import pytest

from digen_jax.process.ending import STOPPED
from tests.pipelines import ROOT, environment

SCRIPT = """
import sys, threading, time
from absl import app
from digen_jax.process import ending
from digen_jax.config.command_line import run_main
from digen_jax.errors import ConfigError

threading.Thread(target=time.sleep, args=(300,)).start()
ending.hangs("reward")
ending.at_leaving(lambda: print("last"))

def main():
    print("done")
    {what}

run_main(main)
"""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("pass", 0, ""),
        ("return 130", 130, ""),
        ("raise ending.Stopped('the reward hangs')", STOPPED, "script.py: the reward hangs\n"),
        ("raise ConfigError('give a reward')", 2, "script.py: give a reward\n"),
        ("sys.exit('it was asked to')", 1, "it was asked to\n"),
        ("raise KeyError('a bug')", 1, "KeyError: 'a bug'\n"),
    ],
)
def test_a_script_ends_with_its_code_and_all_that_it_said_though_a_thread_hangs(
    tmp_path, what, code, said
):
    (tmp_path / "script.py").write_text(SCRIPT.format(what=what))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(1, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (code, "done\nlast\n")
    assert done.stderr.endswith(said)
    assert ("Traceback" in done.stderr) == what.startswith("raise KeyError")


def test_leaving_waits_for_nobody(tmp_path):
    (tmp_path / "script.py").write_text(
        "import time\n"
        "from digen_jax.process import ending\n"
        "ending.at_leaving(lambda: time.sleep(300))\n"
        "ending.leave(7)\n"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment(1, PYTHONPATH=str(ROOT))
    )
    assert done.returncode == 7 and time.monotonic() - begin < 20
