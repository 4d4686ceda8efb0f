"""A step's sampling and training against an eager loop of torch and diffusers, alternating on the same cores or GPU.

Both use the same weights, sigmas, images, transitions, tokens, guidance, micro-batches and precision; both omit the
prompts' encoding, decoding and the reward. Their velocities are compared before anything is timed.
"""

import dataclasses
import importlib.util
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int

from benchmarks.eager import EagerLoop, EagerWork
from benchmarks.processes import Load, Process, Seconds, load_between, read_cores
from digen_jax import assemble
from digen_jax.algorithms.policy_gradient import PolicyGradient
from digen_jax.checkpoints.lora import adapted_layers
from digen_jax.config.load import fit_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_files
from digen_jax.diffusion.steps import Ode, ReverseStep
from digen_jax.errors import ConfigError, check_positive
from digen_jax.families import open_pipeline
from digen_jax.models.sd3.family import StableDiffusion3
from digen_jax.parallel.accumulate import Totals
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.parallel.system import (
    SampledImages,
    make_train_batch,
    move_to_trainer,
    select_images,
)
from digen_jax.process.job import prepare

PHASES = "sampling", "training"
SIDES = "ours", "eager"
# Maximum difference of the velocities, as a share of the largest velocity: in float32 on a CPU; on a GPU, with TF32
# products; in bfloat16.
TOLERANCE, TOLERANCE_TF32, TOLERANCE_BFLOAT16 = 1e-4, 1e-2, 5e-2
COMPARED = 4  # number of images whose velocities are compared


@dataclasses.dataclass(frozen=True)
class Round:
    """One step of each side: use of the cores by others meanwhile, and seconds by phase, then by side."""

    load: Load
    times: dict[str, dict[str, Seconds]]

    def seconds(self, phase: str, side: str, kind: str) -> float:
        """Returns the "wall" or "cpu" seconds of a phase, or of the "step"."""
        phases = PHASES if phase == "step" else (phase,)
        return sum(getattr(self.times[each][side], kind) for each in phases)

    def describe(self) -> str:
        """Returns a one-line summary."""
        times = (
            f"{phase} {self.times[phase]['ours'].wall:.2f} s and {self.times[phase]['eager'].wall:.2f} s"
            for phase in PHASES
        )
        return (
            f"others used {self.load.others:.0%} and the host {self.load.stolen:.0%} of the cores"
            f"{'' if self.load.quiet else ': not quiet, so it does not count'}; {', '.join(times)}"
        )


@dataclasses.dataclass(frozen=True)
class PeerComparison:
    """All rounds, and the number of trained parameters and the velocity difference, which both sides share."""

    parameters: int
    distance: float
    rounds: tuple[Round, ...]

    def counted(self, kind: str) -> list[Round]:
        """Returns the rounds that count: for "wall" seconds only quiet ones, for "cpu" seconds all."""
        return [one for one in self.rounds if kind == "cpu" or one.load.quiet]

    def ratio(self, phase: str, kind: str = "wall") -> float | None:
        """Returns the median of the eager loop's time divided by ours, for a phase or the "step".

        None means that no round counts.
        """
        ratios = [
            one.seconds(phase, "eager", kind) / one.seconds(phase, "ours", kind)
            for one in self.counted(kind)
        ]
        return median(ratios) if ratios else None

    def describe(self) -> str:
        """Returns a table of medians; only quiet rounds have a ratio of times."""
        head = f"{'ours':>10}{'eager':>10}{'ratio':>8}"
        lines = [f"{'':10}{head}   {'CPU:' + head[4:]}"]
        for phase in (*PHASES, "step"):
            cells = []
            for kind in ("wall", "cpu"):
                cell = f"{'-':>10}{'-':>10}{'-':>8}"
                if rounds := self.counted(kind):
                    times = (median(one.seconds(phase, s, kind) for one in rounds) for s in SIDES)
                    cell = "".join(f"{time:8.2f} s" for time in times)
                    cell += f"{self.ratio(phase, kind):7.2f}x"
                cells.append(cell)
            lines.append(f"{phase:10}{'   '.join(cells)}")
        lines.append(
            f"{len(self.counted('wall'))} of {len(self.rounds)} rounds were quiet. Others count only for CPU time, "
            "because other programs slow both sides differently."
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Returns all numbers."""
        ratios = {
            phase: {kind: self.ratio(phase, kind) for kind in ("wall", "cpu")}
            for phase in (*PHASES, "step")
        }
        return dataclasses.asdict(self) | {"ratios": ratios}


def check(config: TrainConfig, rounds: int) -> TrainConfig:
    """Returns the config on one GPU, or on one virtual device per core, which both samples and trains.

    Raises:
      ConfigError: the eager loop does not support the config, or a package is missing.
    """
    check_positive("rounds", rounds)
    if sys.platform != "linux":
        raise ConfigError("it measures whether others use the cores: run it on Linux")
    needed = ("torch", "diffusers") + ("peft",) * bool(config.lora.rank)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"it compares with {missing[0]}, which is not installed: pip install -r requirements-dev.txt"
        )
    algorithm, precision = config.algorithm, config.precision
    if not isinstance(algorithm, PolicyGradient):
        raise ConfigError(
            f"config.algorithm.name = {algorithm.name!r} trains final images, but the eager loop a policy gradient: "
            "set it to 'policy_gradient'"
        )
    for field, value, required in (
        ("algorithm.kl_coefficient", algorithm.kl_coefficient, 0),
        ("algorithm.old_log_probs", algorithm.old_log_probs, "rollout"),
        ("advantages.best_and_worst", config.advantages.best_and_worst, 0),
        ("sampler.window.timestep_fraction", config.sampler.window.timestep_fraction, 1),
        ("trainer.updates", config.trainer.updates, 1),
        ("model.max_sequence_length", config.model.max_sequence_length, 0),
        ("placement.rollout.workers", config.placement.rollout.workers, 1),
    ):
        if value != required:
            raise ConfigError(
                f"config.{field} = {value!r} is not what the eager loop does: set it to {required!r}"
            )
    if not _has_gpu() and (precision.arithmetic, precision.frozen) != ("float32", "float32"):
        raise ConfigError(
            "config.precision.arithmetic and frozen must be 'float32' on a CPU, on which the eager loop's bfloat16 "
            "would be slow"
        )
    jax.config.update("jax_platforms", "cpu")  # here only; the measured process has the GPU
    devices = 1 if _has_gpu() else len(os.sched_getaffinity(0))
    sizes = MeshSizes(RolloutAxes(data=0), TrainerAxes(data=devices))
    return fit_config(config.with_meshes(sizes), devices)


def _has_gpu() -> bool:
    """Returns whether torch finds a GPU; unlike JAX, torch does not reserve its memory for this check."""
    import torch

    return torch.cuda.is_available()


def compare(
    config: TrainConfig, rounds: int, on_round: Callable[[Round], object]
) -> PeerComparison:
    """Times both sides, one after the other, in an order that changes every round.

    Args:
      config: Config from `check`.
      rounds: Number of steps of each side.
      on_round: Callback after each round.

    Raises:
      RuntimeError: the two sides do not compute the same.
    """
    cores = os.sched_getaffinity(0)
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.5")  # the other half is for torch
    with closing(Process(context, _open_ours, config, len(cores))) as ours:
        work, _ = ours.call("work")
        with closing(Process(context, EagerLoop, work)) as other:
            sides = dict(zip(SIDES, (ours, other), strict=True))
            parameters, distance = _check_same(ours, other, work)
            for side in sides.values():  # both compile, or fill their caches
                _step(side)
            done = []
            for number in range(rounds):
                before = read_cores(cores)
                order = SIDES if number % 2 == 0 else SIDES[::-1]
                times = {name: _step(sides[name]) for name in order}
                own = sum(seconds.cpu for phases in times.values() for seconds in phases.values())
                load = load_between(before, read_cores(cores), own, len(cores))
                by_phase = {phase: {side: times[side][phase] for side in SIDES} for phase in PHASES}
                done.append(Round(load, by_phase))
                on_round(done[-1])
    return PeerComparison(parameters, distance, tuple(done))


def _step(process: Process) -> dict[str, Seconds]:
    """Runs a step; returns the seconds of each phase."""
    return dict(zip(PHASES, (process.call(name)[1] for name in ("sample", "train")), strict=True))


def _check_same(ours: Process, other: Process, work: EagerWork) -> tuple[int, float]:
    """Returns the number of trained parameters, and the velocity difference with the pipeline's empty tokens."""
    trained, expected = (process.call("parameters")[0] for process in (ours, other))
    if trained != expected:
        raise RuntimeError(
            f"{trained} parameters are trained here, but {expected} by the eager loop"
        )
    rng, count = np.random.default_rng(0), min(COMPARED, len(work.rows))
    x = rng.standard_normal((count, *work.latent), np.float32)
    inputs = x, np.linspace(1, 0.1, count, dtype=np.float32), work.rows[-count:]
    found, _ = ours.call("velocity", *inputs)
    expected, _ = other.call("velocity", *inputs, work.empty * StableDiffusion3.default_tokens)
    distance = float(np.abs(found - expected).max() / np.abs(expected).max())
    tolerance = TOLERANCE_TF32 if work.gpu else TOLERANCE
    if work.bfloat16:
        tolerance = TOLERANCE_BFLOAT16
    if not distance <= tolerance:
        raise RuntimeError(
            f"the velocities of both differ by {distance:.2g} of the largest, more than {tolerance:g}"
        )
    return trained, distance


def _open_ours(config: TrainConfig, cores: int) -> "Ours":
    prepare(cores)
    devices = jax.devices()
    if _has_gpu():
        if devices[0].platform != "gpu":
            raise RuntimeError("torch has a GPU and JAX has none")
        devices = devices[:1]
    return Ours(config, devices)


class Ours:
    """Our side, with the methods of the eager loop: the programs of a run's first step, with fixed advantages."""

    def __init__(self, config: TrainConfig, devices: Sequence[jax.Device]):
        self._config, self.system = config, assemble.build(config, devices)
        self.state = self.system.trainer.init(self.system.start)
        batch = config.batch
        known = [*itertools.chain(*read_prompt_files(config.prompts.paths))]
        records = [known[i % len(known)] for i in range(batch.groups)]
        weights = self.system.rollout_weights(self.state.tuned)
        self._prompts = self.system.sampler.encode(weights, records)
        self._rows = np.repeat(np.arange(batch.groups, dtype=np.int32), batch.images)
        numbers = np.tile(np.arange(batch.images), batch.groups)
        self._draws = self.system.rng.draw(0, self._rows, numbers)

    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.tuned))

    def velocity(
        self,
        x: Float32[np.ndarray, "b h w c"],
        sigma: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> Float32[np.ndarray, "b h w c"]:
        """Returns the guided velocity."""
        policy, prompts = self.system.policy, self._prompts

        def velocity(tuned, base, x, sigma):
            conditioning = jax.tree.map(lambda c: c[rows], prompts.conditioning)
            return policy.velocity(tuned, base, conditioning, prompts.null)(x, sigma)

        return np.asarray(jax.jit(velocity)(self.state.tuned, self.system.base, x, sigma))

    def sample(self) -> None:
        """Samples a step's images and keeps their transitions."""
        weights, self.chunks = self.system.rollout_weights(self.state.tuned), []
        for start in range(0, len(self._rows), self._config.sampler.chunk):
            chunk = slice(start, start + self._config.sampler.chunk)
            rows, draws = self._rows[chunk], self._draws.subset(chunk)
            made = self.system.sampler.generate(weights, self._prompts, rows, *draws)
            sigmas = jax.block_until_ready(made.sigmas)
            self.chunks.append(SampledImages(0, rows, made.transitions, sigmas))

    def train(self) -> None:
        """Computes the gradient of all transitions, pass by pass, and updates."""
        first, *others = self.chunks
        totals = jax.block_until_ready(self.accumulate(first))
        for images in others:
            totals = jax.block_until_ready(self.accumulate(images, totals))
        self.state, _ = self.system.trainer.update(self.state, totals)
        jax.block_until_ready(self.state)

    def accumulate(self, images: SampledImages, totals: Totals | None = None) -> Totals:
        """Adds the gradient of a chunk."""
        trainer, mesh = self.system.trainer, self.system.placement.trainer
        images = move_to_trainer(images, mesh)
        trained = self.system.advantages.kept(len(images.rows), self._config.batch.images)
        if trained < len(images.rows):
            images = select_images(images, np.arange(trained), mesh)
        batch = make_train_batch(self.system, self._prompts, images, _advantages(trained))
        return trainer.accumulate(self.state, self.system.base, batch, totals, self.state.tuned)

    def work(self) -> EagerWork:
        """Returns the work of a step, for the eager loop."""
        config, system = self._config, self.system
        sampler, policy = system.sampler, system.policy
        window = slice(self._draws.start, self._draws.start + config.noisy_steps)
        of_x, of_v, std = coefficients(sampler.settings.step, sampler.sigmas, window)
        # torch reads no bfloat16 of numpy.
        context, pooled = (np.asarray(c, np.float32) for c in self._prompts.conditioning)
        null = lora = None
        if policy.sequences == 2:
            context_0, pooled_0 = cast(Any, self._prompts.null)
            null = np.asarray(context_0, np.float32), np.asarray(pooled_0, np.float32)
        if policy.lora is not None:
            family, adapter = policy.family, policy.lora
            layers = adapted_layers(family.shapes(), adapter.targets, family.lists)["transformer"]
            lora = adapter.rank, adapter.alpha, tuple(sorted(layers))
        return EagerWork(
            config=config,
            transformer=open_pipeline(config.model.folder, config.model.without) / "transformer",
            latent=sampler.shape,
            sigmas=np.asarray(sampler.sigmas, np.float32),
            of_x=of_x,
            of_v=of_v,
            std=std,
            window=window,
            context=context,
            pooled=pooled,
            null=null,
            guidance=policy.guidance,
            rows=self._rows,
            advantages=_advantages(config.sampler.chunk),
            lora=lora,
            empty=min(1, cast(Any, policy.family).null_tokens),
            threads=len(os.sched_getaffinity(0)),
            gpu=_has_gpu(),
        )


def _advantages(images: int) -> Float32[np.ndarray, "b"]:
    return np.linspace(-1, 1, images, dtype=np.float32)


def coefficients(
    step: ReverseStep, sigmas: Float[np.ndarray, "sigmas"], window: slice
) -> tuple[Float[np.ndarray, "steps"], ...]:
    """Returns (of_x, of_v, std) of each step of a schedule: `step` in the window, Euler steps elsewhere."""
    count, known = len(sigmas) - 1, jnp.asarray(sigmas, jnp.float32)
    zero, one = jnp.zeros(count), jnp.ones(count)
    times = known[:-1], known[1:], known[1]
    inside = np.zeros(count, bool)
    inside[window] = True
    rows = []
    for kind in (step, Ode()):
        of_x, std = kind.mean_std(one, zero, *times)
        of_v, _ = kind.mean_std(zero, one, *times)
        rows.append((of_x, of_v, std))
    return tuple(np.where(inside, *pair).astype(np.float64) for pair in zip(*rows, strict=True))
