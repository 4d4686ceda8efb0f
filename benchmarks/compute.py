"""Real compute in two processes pinned to a core each: one samples while the other trains.

A device of this benchmark is a core. Both roles run the same programs, compiled for one core, whether
one process does both in turn or two processes do one each. Only chunks go between them, so no new
weights are published. It shows that sampling and training overlap on separate devices.
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

from benchmarks.processes import Worker
from benchmarks.step import Build, Step
from digen_jax import assemble
from digen_jax.config.load import fit_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, check_positive
from digen_jax.parallel.placement import ONE_DEVICE
from digen_jax.parallel.system import SampledImages
from digen_jax.parallel.trainer import TrainState
from digen_jax.process.job import prepare


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds of a step in every round; the results are medians.

    Attributes:
      sampling, training: the parts of `in_turn`.
      in_turn: one process on one core does both.
      together: two processes on a core each, one samples while the other trains.
    """

    sampling: tuple[float, ...]
    training: tuple[float, ...]
    in_turn: tuple[float, ...]
    together: tuple[float, ...]

    @property
    def speed_up(self) -> float:
        """The speed of two cores over that of one."""
        return median(self.in_turn) / median(self.together)

    @property
    def ideal(self) -> float:
        """The speed-up if the longer part hid the shorter one entirely: (G + T) / max(G, T)."""
        parts = median(self.sampling), median(self.training)
        return sum(parts) / max(parts)

    def describe(self) -> str:
        """The numbers in a few lines."""
        return (
            f"in turn on one core   {median(self.in_turn):.3f} s = sampling {median(self.sampling):.3f} s "
            f"+ training {median(self.training):.3f} s\n"
            f"on a core each        {median(self.together):.3f} s\n"
            f"speed-up              {self.speed_up:.2f}x of at most (G + T) / max(G, T) = {self.ideal:.2f}x, "
            f"per core {self.speed_up / 2:.2f}x of {self.ideal / 2:.2f}x"
        )


def compare(
    recipe: TrainConfig,
    rounds: int,
    went_round: Callable[[], object] = lambda: None,
    build: Build = assemble.build,
) -> Speed:
    """Times a step in turn and together, alternating, so that a machine's drift affects both.

    Args:
      recipe: its placement is not read.
      rounds: number of rounds, of one step in turn and one together each.
      went_round: called after each round.
      build: makes the parts of a run in both processes.

    Raises:
      ConfigError: there are not two cores, or the recipe cannot work.
    """
    check_positive("rounds", rounds)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise ConfigError("two processes need two cores to be pinned to: run it on such a machine")
    recipe = fit_config(recipe.with_meshes(ONE_DEVICE), 1)
    if recipe.algorithm.objective != "transitions":
        raise ConfigError(
            f"config.algorithm.name = {recipe.algorithm.name!r} trains final images, but what is sent from process to "
            "process here are transitions: set it to 'policy_gradient'"
        )
    images, size = recipe.batch.groups * recipe.batch.images, recipe.sampler.chunk
    if images <= size:
        raise ConfigError(
            f"config.sampler.chunk = {size} is a whole step of {images} images, so nothing can overlap: "
            "make it and config.trainer.micro_batch smaller"
        )
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    found: dict[str, list[float]] = {field.name: [] for field in dataclasses.fields(Speed)}
    with (
        closing(Worker(context, serve, cores[0], recipe, sending, build)) as one,
        closing(Worker(context, serve, cores[1], recipe, receiving, build)) as other,
    ):
        # Only the processes hold the ends from now on: if one dies, the other fails, too.
        receiving.close(), sending.close()
        one.answer(), other.answer()  # both have compiled
        for _ in range(rounds):
            begin = time.perf_counter()
            one.ask("both")
            sampling, training = one.answer()
            in_turn = time.perf_counter() - begin
            begin = time.perf_counter()
            other.ask("train")
            one.ask("sample")
            one.answer(), other.answer()
            numbers = sampling, training, in_turn, time.perf_counter() - begin
            for times, seconds in zip(found.values(), numbers, strict=True):
                times.append(seconds)
            went_round()
    return Speed(**{name: tuple(times) for name, times in found.items()})


def serve(
    control: Connection, core: int, recipe: TrainConfig, link: Connection, build: Build
) -> None:
    """The main function of a process: a step for every role that it is sent."""
    os.sched_setaffinity(0, {core})  # before XLA counts the cores
    prepare()
    roles = Roles(recipe, build)
    roles.both(link)
    control.send(())
    while True:
        (what,) = control.recv()
        control.send(getattr(roles, what)(link))


class Roles:
    """A step of sampling, and one of training, by a run's own parts on one device."""

    def __init__(self, recipe: TrainConfig, build: Build = assemble.build):
        self._step = Step(recipe, jax.devices()[:1], build)

    @property
    def state(self) -> TrainState:
        """The trainer's."""
        return self._step.state

    def sample(self, link: Connection) -> tuple[float, ...]:
        """Samples a step's chunks and sends each as soon as it is decoded."""
        begin = time.perf_counter()
        for chunk in self._sampled():
            link.send(chunk)
        return (time.perf_counter() - begin,)

    def train(self, link: Connection) -> tuple[float, ...]:
        """Trains a step's chunks as they come, and updates."""
        begin = time.perf_counter()
        self._step.train(link.recv() for _ in self._step.cuts)
        return (time.perf_counter() - begin,)

    def both(self, link: Connection) -> tuple[float, ...]:
        """A colocated step: samples everything, then trains everything."""
        begin = time.perf_counter()
        made = list(self._sampled())
        middle = time.perf_counter()
        self._step.train(made)
        return middle - begin, time.perf_counter() - middle

    def _sampled(self) -> Iterator[SampledImages]:
        sampler, weights = self._step.system.sampler, self._step.weights
        for rows, made in self._step.generate():
            np.asarray(sampler.decode(weights, made))  # for a reward, which is not used here
            yield jax.device_get(SampledImages(0, rows, made.transitions, made.sigmas))
