"""Real compute in two processes, each pinned to a core: one samples while the other trains.

A device of this benchmark is a core. Both roles run the same programs, compiled for one core, whether one process runs
both alternately or two processes run one each. The processes exchange only chunks; no weights are synced. It shows that
sampling and training overlap on separate devices.
"""

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from statistics import median

import jax
import numpy as np

from benchmarks.processes import Process, answer_requests
from benchmarks.step import Build, Step
from digen_jax import assemble
from digen_jax.config.load import fit_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, check_positive
from digen_jax.parallel.placement import ONE_DEVICE
from digen_jax.parallel.system import SampledImages
from digen_jax.process.job import prepare


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds per step, for each round.

    `sampling` and `training` are parts of `alternating`, in which one process on one core runs both; in `overlapped`,
    two processes on a core each run them at the same time.
    """

    sampling: tuple[float, ...]
    training: tuple[float, ...]
    alternating: tuple[float, ...]
    overlapped: tuple[float, ...]

    @property
    def speed_up(self) -> float:
        """Speed of two cores relative to one."""
        return median(self.alternating) / median(self.overlapped)

    @property
    def ideal(self) -> float:
        """Speed-up if the longer part completely hid the shorter one: (G + T) / max(G, T)."""
        parts = median(self.sampling), median(self.training)
        return sum(parts) / max(parts)

    def describe(self) -> str:
        """Returns a summary of the numbers in a few lines."""
        return (
            f"alternating on a core {median(self.alternating):.3f} s = sampling {median(self.sampling):.3f} s "
            f"+ training {median(self.training):.3f} s\n"
            f"on a core each        {median(self.overlapped):.3f} s\n"
            f"speed-up              {self.speed_up:.2f}x of at most (G + T) / max(G, T) = {self.ideal:.2f}x, "
            f"per core {self.speed_up / 2:.2f}x of {self.ideal / 2:.2f}x"
        )


def compare(
    config: TrainConfig,
    rounds: int,
    on_round: Callable[[], object] = lambda: None,
    build: Build = assemble.build,
) -> Speed:
    """Times a step in one process and in two, alternating, so that drift of the machine affects both.

    Args:
      config: Config, whose placement is not read.
      rounds: Number of rounds, with one step each way.
      on_round: Callback after each round.
      build: Function that builds the parts of a run in both processes.

    Raises:
      ConfigError: there are fewer than two cores, or the config is invalid.
    """
    check_positive("rounds", rounds)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise ConfigError("two processes need two cores to be pinned to: run it on such a machine")
    config = fit_config(config.with_meshes(ONE_DEVICE), 1)
    if config.algorithm.objective != "transitions":
        raise ConfigError(
            f"config.algorithm.name = {config.algorithm.name!r} trains final images, but what is sent from process to "
            "process here are transitions: set it to 'policy_gradient'"
        )
    images, size = config.batch.groups * config.batch.images, config.sampler.chunk
    if images <= size:
        raise ConfigError(
            f"config.sampler.chunk = {size} is a complete step of {images} images, so nothing can overlap: "
            "make it and config.trainer.micro_batch smaller"
        )
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    found = []
    with (
        closing(Process(context, serve, cores[0], config, sending, build)) as one,
        closing(Process(context, serve, cores[1], config, receiving, build)) as other,
    ):
        # From here only the processes hold the pipe ends: if one dies, the other fails, too.
        receiving.close(), sending.close()
        for process in (one, other):  # both compile
            process.request("both")
        one.answer(), other.answer()
        for _ in range(rounds):
            start = time.perf_counter()
            sampling, training = one.call("both")
            middle = time.perf_counter()
            other.request("train"), one.request("sample")
            one.answer(), other.answer()
            found.append((sampling, training, middle - start, time.perf_counter() - middle))
            on_round()
    return Speed(*zip(*found, strict=True))


def serve(
    connection: Connection, core: int, config: TrainConfig, link: Connection, build: Build
) -> None:
    """Runs a process that executes the requested roles of a step."""
    os.sched_setaffinity(0, {core})  # before XLA counts the cores
    prepare()
    answer_requests(connection, Roles(config, link, build))


class Roles:
    """Sampling and training of a step, with a run's parts on one device; `link` transfers chunks."""

    def __init__(self, config: TrainConfig, link: Connection, build: Build = assemble.build):
        self.step, self._link = Step(config, jax.devices()[:1], build), link

    def sample(self) -> None:
        """Samples a step's chunks and sends each as soon as it is decoded."""
        for chunk in self._sampled():
            self._link.send(chunk)

    def train(self) -> None:
        """Trains a step's chunks as they arrive, and updates."""
        self.step.train(self._link.recv() for _ in self.step.chunks)

    def both(self) -> tuple[float, float]:
        """Samples everything, then trains everything; returns the seconds of each."""
        start = time.perf_counter()
        chunks = list(self._sampled())
        middle = time.perf_counter()
        self.step.train(chunks)
        return middle - start, time.perf_counter() - middle

    def _sampled(self) -> Iterator[SampledImages]:
        sampler, weights = self.step.system.sampler, self.step.weights
        for rows, trajectory in self.step.generate():
            np.asarray(
                sampler.decode(weights, trajectory)
            )  # as for a reward, which is not used here
            yield jax.device_get(SampledImages(0, rows, trajectory.transitions, trajectory.sigmas))
