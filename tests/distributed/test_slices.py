"""Workers of several processes on TPU slices, on nodes of Ray that only claim to have TPUs."""

import importlib.util

import pytest

from digen_jax.distributed.engine import RayEngine, Resources
from digen_jax.errors import ConfigError
from tests.distributed.test_nodes import TOKEN, nodes  # noqa: F401
from tests.processes import begin  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray not installed"),
]
LONG = 300.0  # seconds in which everything happens


class Process:
    """Returns the slice of its node."""

    def slice(self):
        from ray.util.tpu import get_current_pod_name

        return get_current_pod_name()


def test_the_processes_of_a_worker_are_on_one_slice(nodes, monkeypatch):  # noqa: F811
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    nodes.add("--num-cpus=0")
    common = dict(TPU_TOPOLOGY="2x2x2", TPU_ACCELERATOR_TYPE="v5p-16")
    for host in ("0", "1"):  # so that the nodes of one slice do not follow each other
        for name in ("first", "second"):
            nodes.variables |= common | dict(TPU_NAME=name, TPU_WORKER_ID=host)
            nodes.add('--resources={"TPU": 4}')
    engine = RayEngine(nodes.address, show=False)
    try:
        with pytest.raises(ConfigError, match=r"8 chips with 4 a host.*config\.placement"):
            engine.start(Process, [(), (), ()], Resources("TPU", 4))
        workers = [engine.start(Process, [(), ()], Resources("TPU", 4)) for _ in range(2)]

        def slices(worker):
            return {engine.call(actor, "slice", group="work").result(LONG) for actor in worker}

        assert sorted(map(sorted, map(slices, workers))) == [["first"], ["second"]]
        (lost,) = slices(workers[0])
        for actor in workers[0]:
            engine.kill(actor)
        assert slices(engine.start(Process, [(), ()], Resources("TPU", 4))) == {lost}
    finally:
        engine.close()
