"""A run of a system whose other workers are in other processes, as far as they can tell: see `local_engine`."""

import contextlib
import functools
import itertools
import unittest.mock
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from digen_jax.distributed.worker_process import Member, RolloutProcess, TrainingProcess
from digen_jax.distributed.workers import RemoteWorkers
from digen_jax.parallel.placement import Placement
from digen_jax.parallel.system import Rollout, System
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.driver import Driver
from tests.distributed.local_engine import LocalEngine
from tests.parallel import toy


def without_rollouts(system: System) -> System:
    """The system as the trainer's process has it."""
    first, colocated = system.rollouts[0], system.placement.colocated
    rollouts, others = 0 if colocated else len(system.rollouts), len(system.trainers)
    return system._replace(
        rollouts=system.rollouts if colocated else (),
        trainers=(),
        joint_trainer=None,
        placement=Placement((), system.placement.trainer, rollouts, remote_trainers=others),
        sampling_on=lambda group: first.moved(group, system.policy.sampler_base(system.base)),
    )


def process_class(system: System, reward: Any, held_out: Any) -> type[RolloutProcess]:
    """A class of processes that have the system's rollouts, by the numbers in their names."""

    class ToyProcess(RolloutProcess):
        def parts(self) -> Rollout:
            return system.rollouts[int(self._name.split()[-1])]

        def open(self, config: Any, first: int, place: Any = None) -> Member:
            self._pool = RewardPool(alone("mine", reward), 0)
            batches = itertools.islice(toy.batches(config.max_groups), first, None)
            self._build(config, self.parts(), batches, first, list(held_out))
            return Member(1, "here", 0, "cpu")

    return ToyProcess


def training_class(system: System, kind: type[RolloutProcess]) -> type[TrainingProcess]:
    """The same for the system's further training workers; `kind` is that of its rollouts."""

    class ToyTrainingProcess(kind, TrainingProcess):
        def parts(self) -> System:
            return system.on(system.trainers[int(self._name.split()[-1]) - 1])

    return ToyTrainingProcess


@contextlib.contextmanager
def driver(
    system: System,
    config: ConfigDict,
    reward=toy.brightness,
    held_out=(),
    engine: LocalEngine | None = None,
    **options,
) -> Iterator[Driver]:
    """As `toy.driver`, whose `options` these are, with all rollouts in workers of their own."""
    kind = process_class(system, reward, held_out)
    kinds = dict(kind=kind, training_kind=training_class(system, kind))
    workers = RemoteWorkers(toy.opened(config), engine or LocalEngine(), **kinds)
    make = functools.partial(
        toy.driver, without_rollouts(system), config, reward, held_out=held_out, **options
    )
    with contextlib.ExitStack() as stack:
        stack.callback(workers.close)
        yield stack.enter_context(
            workers.driving(
                lambda samplers: stack.enter_context(
                    make(transfer=workers.transfer, samplers=samplers)
                ),
                stops=lambda: False,
            )
        )


def drive(system: System, config: ConfigDict, steps: int, reward=toy.brightness, **options):
    """As `toy.drive`; all workers stay to the end, however long a busy machine keeps one from answering."""
    log = []
    patient = unittest.mock.patch("digen_jax.distributed.workers.PING_TIMEOUT", 120.0)
    with patient, driver(system, config, reward, log=log, **options) as found:
        history = [found.step() for _ in range(steps)]
        rollouts = [name for name in found.executor.samplers if name.startswith("rollout")]
        assert len(rollouts) == len(system.placement.rollouts)
        assert len(found.executor.others) == len(system.trainers)
    for line in history:
        assert (
            min(line[f"flops_per_second_per_device/{kind}"] for kind in ("generate", "train")) > 0
        )
    return found.executor.state, history, log
