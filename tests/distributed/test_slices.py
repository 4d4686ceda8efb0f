"""Workers of several processes on TPU slices, on nodes of Ray that only claim to have TPUs."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from digen_jax.distributed.engine import RayEngine
from digen_jax.errors import ConfigError
from tests.distributed.test_nodes import OPEN, nodes, pytestmark  # noqa: F401
from tests.processes import begin  # noqa: F401

LONG = 300.0  # seconds in which everything happens
TPUS = {"TPU": 4}


class Process:
    """Returns the slice of its node."""

    def slice(self):
        from ray.util.tpu import get_current_pod_name

        return get_current_pod_name()


def placed(address):
    """The slices of two workers, those of one that follows the first, and why one of three hosts is refused."""
    engine = RayEngine(address, show=False)

    def slices(worker):
        return {engine.call(actor, "slice", group="work").result(LONG) for actor in worker}

    try:
        engine.start(Process, [()] * 3, TPUS)
    except ConfigError as error:
        refused = str(error)
    workers = [engine.start(Process, [(), ()], TPUS) for _ in range(2)]
    found = [slices(worker) for worker in workers]
    for actor in workers[0]:
        engine.kill(actor)
    found.append(slices(engine.start(Process, [(), ()], TPUS)))
    engine.close()
    return found, refused


def test_the_processes_of_a_worker_are_on_one_slice(nodes, monkeypatch):  # noqa: F811
    nodes.variables |= OPEN
    for name, value in OPEN.items():
        monkeypatch.setenv(name, value)
    nodes.add("--num-cpus=0")
    nodes.variables |= dict(TPU_TOPOLOGY="2x2x2", TPU_ACCELERATOR_TYPE="v5p-16")
    for host in ("0", "1"):  # so that the nodes of one slice do not follow each other
        for name in ("first", "second"):
            nodes.variables |= dict(TPU_NAME=name, TPU_WORKER_ID=host)
            nodes.add('--resources={"TPU": 4}')
    # Ray reads the variables of authentication once in a process.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        (one, other, after), refused = process.submit(placed, nodes.address).result(LONG)
    assert sorted(map(sorted, (one, other))) == [["first"], ["second"]] and after == one
    assert "8 chips (4 per host)" in refused and "config.placement" in refused
