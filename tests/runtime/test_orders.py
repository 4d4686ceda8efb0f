"""Waits of several processes for one another."""

import math
import subprocess
import sys
import types

import jax
import pytest

from digen_jax.process.ending import Stopped
from digen_jax.runtime import orders
from tests.pipelines import ROOT, environment
from tests.run.test_hosts import free_port

LATE = """
import sys, time
from digen_jax.process.ending import Stopped
from digen_jax.process.launching import join
from digen_jax.runtime.orders import meet

process = int(sys.argv[2])
join(sys.argv[1], 2, process)
meet("the start", 60)
time.sleep(6 * process)
try:
    meet("storing prompts", 2)
except Stopped as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "DEADLINE_EXCEEDED: Barrier timed out",
            r"is not there within 5 seconds \(config.runtime.deadline\) after storing prompts: look",
        ),
        ("UNAVAILABLE: the service has ended", "^another process is gone after storing prompts: "),
    ],
)
def test_a_process_that_does_not_come_is_told(monkeypatch, said, sentence):
    waits = []

    def wait(name, milliseconds):
        waits.append((name, milliseconds))
        if milliseconds == 5000:
            raise jax.errors.JaxRuntimeError(said)

    state = types.SimpleNamespace(
        client=types.SimpleNamespace(wait_at_barrier=wait), num_processes=2, process_id=1
    )
    monkeypatch.setattr(orders.distributed, "global_state", state)
    orders.meet("storing prompts", math.inf)
    with pytest.raises(Stopped, match=sentence):
        orders.meet("storing prompts", 5)
    assert waits[0][1] == 10**9 and waits[0][0] != waits[1][0]
    state.num_processes = 1
    orders.meet("storing prompts", 5)
    assert len(waits) == 2


@pytest.mark.slow
def test_a_process_that_comes_late_is_told_of_by_the_other():
    command = [sys.executable, "-c", LATE, f"127.0.0.1:{free_port()}"]
    begun = [
        subprocess.Popen(
            [*command, str(process)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(1, PYTHONPATH=str(ROOT)),
        )
        for process in range(2)
    ]
    said = [process.communicate()[0] for process in begun]
    assert said[0].startswith("another process is not there within 2 seconds (config.runtime.")
