"""Runs on several nodes of Ray, all on this machine: one that is lost and replaced, and the loss of the head."""

import contextlib
import os
import signal

import pytest

from digen_jax.process.shutdown import STOPPED
from tests.distributed.test_launch import (
    LONG,
    ONE,
    Run,
    assert_same_steps,
    ends,
    pytestmark,  # noqa: F401
    unbroken,  # noqa: F401
)
from tests.metrics import metrics
from tests.pipelines import ROOT
from tests.ports import free_port
from tests.processes import Begun, begin  # noqa: F401

TOKEN = dict(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123456789abcdef" * 4)
OPEN = dict(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="")
# Seconds after which a node ends that does not reach the head; and as docs/several-hosts.md says, so that workers are
# not slower than other processes of this machine.
NODE = dict(RAY_gcs_rpc_server_reconnect_timeout_s="10", RAY_worker_niceness="0")


class Nodes:
    """A run's cluster; each node is a `ray start` with one CPU core, enough for one process."""

    def __init__(self, start, base, folder):
        self.run = Run(start, base, folder)
        self.address = f"127.0.0.1:{free_port()}"
        self._start, self.started = start, []
        self.variables = TOKEN | NODE | dict(BASE=str(base), HOLDS=str(self.run.holds))

    def add(self, *options: str) -> Begun:
        """Starts a node, the first one as the head."""
        port = self.address.partition(":")[2]
        head = "--head", f"--port={port}", "--include-dashboard=false"
        where = [f"--address={self.address}"] if self.started else head
        arguments = "start", "--block", "--num-cpus=1", *where, *options
        node = self._start("ray.scripts.scripts", 1, (), arguments, **self.variables)
        self.started.append(node)
        node.until("Ray runtime started")
        return node

    def begin(self, *options: str, **variables: str) -> Begun:
        return self.run.begin(f"--ray={self.address}", *options, **TOKEN | variables)


def lose(node: Begun) -> None:
    """Kills all processes of a node."""
    for number in node.started():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


@pytest.fixture
def nodes(begin, base, tmp_path):  # noqa: F811
    found = Nodes(begin, base, tmp_path)
    yield found
    for node in found.started:
        lose(node)


def test_a_worker_moves_when_its_node_dies_and_the_death_of_the_head_ends_all(
    nodes,
    unbroken,  # noqa: F811
    tmp_path,
):
    """Before the run begins, a wrong token and another version of Ray are refused."""
    head = nodes.add()
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.59.0'\n")
    for variables, named in (
        (dict(RAY_AUTH_TOKEN="f" * 64), nodes.address),
        (dict(PYTHONPATH=f"{tmp_path}:{ROOT}"), "2.59.0"),
    ):
        code, errors = nodes.begin(**variables).ends(LONG)
        assert code == 2 and named in errors and "Traceback" not in errors

    for step in (2, 3, 4):
        nodes.run.hold(step)
    process = nodes.begin(ONE, "--config.placement.rollout.max_workers=2")
    process.until("waiting for rollout 0")  # the trainer has the only node
    other = nodes.add()
    nodes.run.held(2, process)
    lose(other)
    nodes.run.release(2)
    process.until("restarting it in 1 s")
    nodes.add(), nodes.add()
    joined = {process.until("joins"), process.until("joins")}
    assert joined == {"rollout 0 joins", "rollout 1 joins"}
    nodes.run.release(3)
    nodes.run.held(4, process)
    lose(head)
    ends(process, STOPPED)
    assert len(metrics(nodes.run.workdir)) == 4
    assert_same_steps(nodes.run.workdir, unbroken, 3)
