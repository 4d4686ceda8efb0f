"""A second start of a run compiles nothing: counted in processes of their own."""

import ast
import re
import signal
import subprocess
import sys

import pytest

from tests.pipelines import environment
from tests.tiny_runs import prompt_file

PROGRAM = """
import collections, os, pathlib, signal, sys
from digen_jax.process.job import prepare
prepare()
import jax
from digen_jax.config.load import load_config
from digen_jax.train import train
from tests.parallel import toy
from tests.run.toy_process import get_config

workdir = pathlib.Path(sys.argv[1])
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.split("/")[-1]]))
toy.replace_model(setattr, lambda config: toy.system(config, jax.device_count()))
config = get_config()
config.prompts.file = config.evaluation.prompts = sys.argv[2]
config.steps = int(sys.argv[3])
train(load_config(config), workdir)
names = "compile_requests_use_cache", "cache_hits", "cache_misses"
print({name: events[name] for name in names}, flush=True)
# A thread of a library has once aborted the interpreter at its end, which is not tested here.
os.kill(os.getpid(), signal.SIGKILL)
"""


def started(base, cache, workdir, steps):
    """(the first line about the cache, counts of events) of a run in its own process."""
    own = {
        name: value
        for name, value in environment(4, XDG_CACHE_HOME=str(cache)).items()
        if not name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, workdir, prompt_file(base), str(steps)],
        capture_output=True,
        text=True,
        env=own,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    line = re.search(r"^compiled programs are .*$", done.stdout, re.MULTILINE)[0]
    return line, ast.literal_eval(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_start_compiles_nothing(base, tmp_path):
    """The run continues in another workdir: it initializes the same state as a new run."""
    first, other = tmp_path / "first", tmp_path / "other"
    line, counts = started(base, tmp_path, first, 1)
    folder = re.escape(str(tmp_path / "digen_jax" / "xla"))
    expected = rf"compiled programs are kept in {folder} \([\d.]+ MiB\)"
    assert re.fullmatch(expected, line)
    assert counts["cache_misses"] > 10
    first.rename(other)
    line, counts = started(base, tmp_path, other, 2)
    assert re.fullmatch(expected, line)
    assert counts["cache_misses"] == 0
    assert counts["cache_hits"] == counts["compile_requests_use_cache"] > 10
