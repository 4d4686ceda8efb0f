"""A step's sampling and training against an eager loop of torch and diffusers, alternating on the same cores or GPU.

Both use the same weights, sigmas, images, transitions, tokens, guidance, micro-batches and precision; both omit the
prompts' encoding, decoding and the reward. Their velocities are compared before anything is timed.
"""

import dataclasses
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int

from benchmarks import eager, load
from benchmarks.eager import EagerLora, Work
from benchmarks.load import Load
from benchmarks.processes import Process, Seconds, answer_requests
from benchmarks.step import Build, Step, advantages
from digen_jax import assemble
from digen_jax.checkpoints.lora import adapted_layers
from digen_jax.config.load import fit_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.diffusion.steps import Ode, ReverseStep
from digen_jax.errors import ConfigError, check_positive
from digen_jax.families import open_pipeline
from digen_jax.models.sd3.family import StableDiffusion3
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.parallel.system import SampledImages
from digen_jax.process.job import prepare

PHASES = "sampling", "training"
SIDES = "ours", "eager"
# Maximum difference of the velocities, as a share of the largest velocity: in float32 on a CPU; on a GPU, with TF32
# products; in bfloat16.
TOLERANCE, TOLERANCE_TF32, TOLERANCE_BFLOAT16 = 1e-4, 1e-2, 5e-2
COMPARED = 4  # number of images whose velocities are compared


@dataclasses.dataclass(frozen=True)
class Round:
    """One step of each side.

    Attributes:
      average: Load average over the minute before the round, which includes the previous round.
      load: Use of the cores by others during the round.
      times: Seconds by phase, then by side.
    """

    average: float
    load: Load
    times: dict[str, dict[str, Seconds]]

    def seconds(self, phase: str, side: str, kind: str) -> float:
        """Returns the "wall" or "cpu" seconds of a phase, or of the "step"."""
        phases = PHASES if phase == "step" else (phase,)
        return sum(getattr(self.times[each][side], kind) for each in phases)

    def ratio(self, phase: str, kind: str) -> float:
        """Returns the eager loop's time divided by ours."""
        return self.seconds(phase, "eager", kind) / self.seconds(phase, "ours", kind)

    def describe(self) -> str:
        """Returns a one-line summary."""
        times = (
            f"{phase} {self.times[phase]['ours'].wall:.2f} s and {self.times[phase]['eager'].wall:.2f} s"
            for phase in PHASES
        )
        return (
            f"load average {self.average:.2f}, others used {self.load.others:.0%} and the host "
            f"{self.load.stolen:.0%} of the cores{'' if self.load.quiet else ': not quiet, so it does not count'}; "
            f"{', '.join(times)}"
        )


@dataclasses.dataclass(frozen=True)
class PeerComparison:
    """All rounds, and the number of trained parameters and the velocity difference, which both sides share."""

    parameters: int
    distance: float
    rounds: tuple[Round, ...]

    @property
    def quiet(self) -> list[Round]:
        """Rounds with valid times."""
        return [one for one in self.rounds if one.load.quiet]

    def ratio(self, phase: str, kind: str = "wall") -> float | None:
        """Returns the median over all rounds of the eager loop's time divided by ours, for a phase or the "step".

        Wall times use only quiet rounds. None means that there are none.
        """
        rounds = self.quiet if kind == "wall" else self.rounds
        return median(one.ratio(phase, kind) for one in rounds) if rounds else None

    def describe(self) -> str:
        """Returns a table of medians; only quiet rounds have a ratio of times."""
        head = f"{'ours':>10}{'eager':>10}{'ratio':>8}"
        lines = [f"{'':10}{head}   {'CPU:' + head[4:]}"]
        for phase in (*PHASES, "step"):
            cells = []
            for kind, rounds in (("wall", self.quiet), ("cpu", self.rounds)):
                ratio, times = self.ratio(phase, kind), [f"{'-':>10}"] * 2
                if rounds:
                    times = [
                        f"{median(one.seconds(phase, side, kind) for one in rounds):8.2f} s"
                        for side in SIDES
                    ]
                cells.append("".join(times) + (f"{'-':>8}" if ratio is None else f"{ratio:7.2f}x"))
            lines.append(f"{phase:10}{'   '.join(cells)}")
        lines.append(
            f"{len(self.quiet)} of {len(self.rounds)} rounds were quiet; the others only count for CPU time."
            if self.quiet
            else "No round was quiet, so there is no ratio of times: other programs slow both sides differently. "
            "Run it on a machine that does nothing else."
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
    if algorithm.objective != "transitions":
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
    config: TrainConfig,
    rounds: int,
    on_round: Callable[[Round], object] = lambda _: None,
    build: Build = assemble.build,
) -> PeerComparison:
    """Times both sides, one after the other, in an order that changes every round.

    Args:
      config: Config from `check`.
      rounds: Number of steps of each side.
      on_round: Callback after each round.
      build: Function that builds the parts of a run.

    Raises:
      RuntimeError: the two sides do not compute the same.
    """
    cores = os.sched_getaffinity(0)
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.5")  # the other half is for torch
    with closing(Process(context, serve, config, len(cores), build)) as ours:
        work = ours.call("work")
        with closing(Process(context, eager.serve, work)) as other:
            sides = dict(zip(SIDES, (ours, other), strict=True))
            parameters, distance = _check_same(ours, other, work)
            for side in sides.values():  # both compile, or fill their caches
                _step(side)
            done = []
            for number in range(rounds):
                average, before = os.getloadavg()[0], load.read(cores)
                order = SIDES if number % 2 == 0 else SIDES[::-1]
                times = {name: _step(sides[name]) for name in order}
                after = load.read(cores)
                own = sum(seconds.cpu for phases in times.values() for seconds in phases.values())
                by_phase = {phase: {side: times[side][phase] for side in SIDES} for phase in PHASES}
                others = load.between(before, after, own, len(cores))
                done.append(Round(average, others, by_phase))
                on_round(done[-1])
    return PeerComparison(parameters, distance, tuple(done))


def _step(process: Process) -> dict[str, Seconds]:
    """Runs a step; returns the seconds of each phase."""
    found = {}
    for phase, method in zip(PHASES, ("sample", "train"), strict=True):
        process.request(method)
        found[phase] = process.answer()[1]
    return found


def _check_same(ours: Process, other: Process, work: Work) -> tuple[int, float]:
    """Returns the number of trained parameters, and the velocity difference with the pipeline's empty tokens."""
    trained = [process.call("parameters") for process in (ours, other)]
    if trained[0] != trained[1]:
        raise RuntimeError(
            f"{trained[0]} parameters are trained here, but {trained[1]} by the eager loop"
        )
    rng, count = np.random.default_rng(0), min(COMPARED, len(work.rows))
    x = rng.standard_normal((count, *work.latent), np.float32)
    sigma = np.linspace(1, 0.1, count, dtype=np.float32)
    inputs = x, sigma, work.rows[-count:]
    found = ours.call("velocity", *inputs)
    expected = other.call("velocity", *inputs, work.empty * StableDiffusion3.default_tokens)
    distance = float(np.abs(found - expected).max() / np.abs(expected).max())
    tolerance = TOLERANCE_TF32 if work.gpu else TOLERANCE
    if work.bfloat16:
        tolerance = TOLERANCE_BFLOAT16
    if not distance <= tolerance:
        raise RuntimeError(
            f"the velocities of both differ by {distance:.2g} of the largest, more than {tolerance:g}"
        )
    return trained[0], distance


def serve(connection: Connection, config: TrainConfig, devices: int, build: Build) -> None:
    """Runs the process of our side."""
    prepare(devices)
    answer_requests(connection, Ours(config, build))


class Ours:
    """Our side, with the methods of the eager loop and the programs of a run."""

    def __init__(self, config: TrainConfig, build: Build):
        devices = jax.devices()
        if _has_gpu():
            if devices[0].platform != "gpu":
                raise RuntimeError("torch has a GPU and JAX has none")
            devices = devices[:1]
        self._config, self.step = config, Step(config, devices, build)

    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.step.state.tuned))

    def velocity(
        self,
        x: Float32[np.ndarray, "b h w c"],
        sigma: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> Float32[np.ndarray, "b h w c"]:
        """Returns the guided velocity."""
        policy, prompts = self.step.system.policy, self.step.prompts

        def velocity(tuned, base, x, sigma):
            conditioning = jax.tree.map(lambda c: c[rows], prompts.conditioning)
            return policy.velocity(tuned, base, conditioning, prompts.null)(x, sigma)

        tuned, base = self.step.state.tuned, self.step.system.base
        return np.asarray(jax.jit(velocity)(tuned, base, x, sigma))

    def sample(self) -> None:
        """Samples a step's images and keeps their transitions."""
        self.chunks = [
            SampledImages(0, rows, one.transitions, jax.block_until_ready(one.sigmas))
            for rows, one in self.step.generate()
        ]

    def train(self) -> None:
        """Computes the gradient of all transitions, pass by pass, and updates."""
        self.step.train(self.chunks)

    def work(self) -> Work:
        """Returns the work of a step, for the eager loop."""
        config, step, system = self._config, self.step, self.step.system
        sampler, family, trainer = system.sampler, system.policy.family, config.trainer
        first, length = step.draws.start, config.noisy_steps
        window = slice(first, first + length)
        context, pooled = jax.device_get(step.prompts.conditioning)
        null = None
        if system.policy.sequences == 2:
            null = tuple(jax.device_get(step.prompts.null))
        lora = None
        if system.policy.lora is not None:
            adapter = system.policy.lora
            layers = adapted_layers(family.shapes(), adapter.targets, family.lists)["transformer"]
            lora = EagerLora(adapter.rank, adapter.alpha, tuple(sorted(layers)))
        return Work(
            open_pipeline(config.model.folder, config.model.without) / "transformer",
            sampler.shape,
            np.asarray(sampler.sigmas, np.float32),
            *coefficients(sampler.settings.step, sampler.sigmas, window),
            window,
            context,
            pooled,
            null,
            system.policy.guidance,
            step.rows,
            advantages(config.sampler.chunk),
            config.sampler.chunk,
            trainer.micro_batch,
            trainer.pack,
            config.algorithm.clip_range,
            trainer.clip_norm,
            dict(
                lr=trainer.learning_rate,
                betas=(trainer.b1, trainer.b2),
                eps=trainer.eps,
                weight_decay=trainer.weight_decay,
            ),
            lora,
            min(1, family.null_tokens),
            len(os.sched_getaffinity(0)),
            gpu=_has_gpu(),
            bfloat16=config.precision.arithmetic == "bfloat16",
            checkpointing=config.model.remat != "none",
        )


def coefficients(
    step: ReverseStep, sigmas: Float[np.ndarray, "sigmas"], window: slice
) -> tuple[Float[np.ndarray, "steps"], ...]:
    """Returns (of_x, of_v, std) of each step of a schedule: `step` in the window, Euler steps elsewhere."""
    sigmas = jnp.asarray(sigmas, jnp.float32)
    count = len(sigmas) - 1
    zero, one = jnp.zeros(count), jnp.ones(count)
    times = sigmas[:-1], sigmas[1:], sigmas[1]
    inside = np.zeros(count, bool)
    inside[window] = True
    rows = []
    for kind in (step, Ode()):
        of_x, std = kind.mean_std(one, zero, *times)
        of_v, _ = kind.mean_std(zero, one, *times)
        rows.append((of_x, of_v, std))
    noisy, euler = rows
    return tuple(
        np.where(inside, a, b).astype(np.float64) for a, b in zip(noisy, euler, strict=True)
    )
