"""A step's sampling and training against an eager loop of torch and diffusers, in turn on the same cores or GPU.

Both work with the same weights, sigmas, images, transitions, tokens, guidance, micro-batches and precision; both leave
out the prompts' encoding, decoding and the reward. Before anything is timed, their velocities are compared.
"""

import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int

from benchmarks import eager, load
from benchmarks.eager import EagerLora, Work
from benchmarks.processes import Seconds, Worker, do_as_asked
from benchmarks.rounds import PHASES, SIDES, Comparison, Round
from benchmarks.step import Build, Step, advantages
from digen_jax import assemble
from digen_jax.checkpoints.lora import adapted_layers
from digen_jax.config.load import fit_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.diffusion.steps import Ode, ReverseStep
from digen_jax.errors import ConfigError, check_positive
from digen_jax.families import open_pipeline
from digen_jax.models.sd3.family import T5_TOKENS
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.parallel.system import SampledImages
from digen_jax.process.job import prepare

# The largest difference of both velocities, as a share of the largest velocity: in float32 on a CPU; on a GPU, where
# products are TF32; in bfloat16.
TOLERANCE, TOLERANCE_TF32, TOLERANCE_BFLOAT16 = 1e-4, 1e-2, 5e-2
COMPARED = 4  # images whose velocities are compared


def check(recipe: TrainConfig, rounds: int) -> TrainConfig:
    """The recipe on one GPU or on one virtual device for each core, which both samples and trains.

    Raises:
      ConfigError: the eager loop does not do what the recipe asks for, or a package is missing.
    """
    check_positive("rounds", rounds)
    if not load.STAT.exists():
        raise ConfigError(f"{load.STAT} tells whether others use the cores: run it on Linux")
    needed = ("torch", "diffusers") + ("peft",) * bool(recipe.lora.rank)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"it compares with {missing[0]}, which is not installed: pip install -r requirements-dev.txt"
        )
    _check_eager(recipe)
    jax.config.update("jax_platforms", "cpu")  # here; the process that is measured has the GPU
    devices = 1 if _has_gpu() else len(os.sched_getaffinity(0))
    rules = MeshSizes(RolloutAxes(data=0), TrainerAxes(data=devices))
    return fit_config(recipe.with_meshes(rules), devices)


def _has_gpu() -> bool:
    """Whether torch sees a GPU, which, unlike JAX, takes no memory of it to say so."""
    import torch

    return torch.cuda.is_available()


def _check_eager(recipe: TrainConfig) -> None:
    algorithm = recipe.algorithm
    if algorithm.objective != "transitions":
        raise ConfigError(
            f"config.algorithm.name = {algorithm.name!r} trains final images, but the eager loop a policy gradient: "
            "set it to 'policy_gradient'"
        )
    for field, is_, must in (
        ("algorithm.kl_coefficient", algorithm.kl_coefficient, 0),
        ("algorithm.old_log_probs", algorithm.old_log_probs, "rollout"),
        ("advantages.best_and_worst", recipe.advantages.best_and_worst, 0),
        ("sampler.window.timestep_fraction", recipe.sampler.window.timestep_fraction, 1),
        ("trainer.updates", recipe.trainer.updates, 1),
        ("model.max_sequence_length", recipe.model.max_sequence_length, 0),
        ("placement.rollout.workers", recipe.placement.rollout.workers, 1),
    ):
        if is_ != must:
            raise ConfigError(
                f"config.{field} = {is_!r} is not what the eager loop does: set it to {must!r}"
            )
    precision = recipe.precision
    if not _has_gpu() and (precision.arithmetic, precision.frozen) != ("float32", "float32"):
        raise ConfigError(
            "config.precision.arithmetic and frozen must be 'float32' on a CPU, on which the eager loop's bfloat16 "
            "would be slow"
        )


def compare(
    recipe: TrainConfig,
    rounds: int,
    went_round: Callable[[Round], object] = lambda _: None,
    build: Build = assemble.build,
) -> Comparison:
    """Times both sides in turn: one waits while the other works, and they swap places every round.

    Args:
      recipe: from `check`.
      rounds: number of steps of each side.
      went_round: called after each round.
      build: makes the parts of a run.

    Raises:
      RuntimeError: both sides do not do the same.
    """
    cores = os.sched_getaffinity(0)
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.5")  # the other half is torch's
    with closing(Worker(context, serve, recipe, len(cores), build)) as ours:
        work = _ask(ours, "work")
        with closing(Worker(context, eager.serve, work)) as other:
            sides = dict(zip(SIDES, (ours, other), strict=True))
            parameters, distance = _check_same(ours, other, work)
            for side in sides.values():  # both compile, or fill their caches
                _step(side)
            done = []
            for number in range(rounds):
                order = SIDES if number % 2 == 0 else SIDES[::-1]
                done.append(_round({name: sides[name] for name in order}, cores))
                went_round(done[-1])
    return Comparison(parameters, distance, tuple(done))


def _ask(worker: Worker, what: str, *arguments: Any) -> Any:
    worker.ask(what, *arguments)
    return worker.answer()[0]


def _step(worker: Worker) -> dict[str, Seconds]:
    """The seconds of each phase of a step."""
    found = {}
    for phase, what in zip(PHASES, ("sample", "train"), strict=True):
        worker.ask(what)
        found[phase] = worker.answer()[1]
    return found


def _round(sides: dict[str, Worker], cores: set[int]) -> Round:
    average, before = os.getloadavg()[0], load.read(cores)
    times = {name: _step(worker) for name, worker in sides.items()}
    after = load.read(cores)
    own = sum(seconds.cpu for phases in times.values() for seconds in phases.values())
    by_phase = {phase: {side: times[side][phase] for side in SIDES} for phase in PHASES}
    return Round(average, load.between(before, after, own, len(cores)), by_phase)


def _check_same(ours: Worker, other: Worker, work: Work) -> tuple[int, float]:
    """The number of trained parameters, and the distance of both velocities with the pipeline's empty tokens."""
    trained = [_ask(worker, "parameters") for worker in (ours, other)]
    if trained[0] != trained[1]:
        raise RuntimeError(
            f"{trained[0]} parameters are trained here, but {trained[1]} by the eager loop"
        )
    rng, count = np.random.default_rng(0), min(COMPARED, len(work.rows))
    x = rng.standard_normal((count, *work.latent), np.float32)
    sigma = np.linspace(1, 0.1, count, dtype=np.float32)
    inputs = x, sigma, work.rows[-count:]
    here = _ask(ours, "velocity", *inputs)
    there = _ask(other, "velocity", *inputs, work.empty * T5_TOKENS)
    distance = float(np.abs(here - there).max() / np.abs(there).max())
    tolerance = TOLERANCE_TF32 if work.gpu else TOLERANCE
    if work.bfloat16:
        tolerance = TOLERANCE_BFLOAT16
    if not distance <= tolerance:
        raise RuntimeError(
            f"the velocities of both differ by {distance:.2g} of the largest, more than {tolerance:g}"
        )
    return trained[0], distance


def serve(control: Connection, recipe: TrainConfig, devices: int, build: Build) -> None:
    """The main function of our process."""
    prepare(devices)
    do_as_asked(control, Ours(recipe, build))


class Ours:
    """The same methods as the eager loop's, by a run's own programs."""

    def __init__(self, recipe: TrainConfig, build: Build):
        devices = jax.devices()
        if _has_gpu():
            if devices[0].platform != "gpu":
                raise RuntimeError("torch has a GPU and JAX has none")
            devices = devices[:1]
        self._recipe, self.step = recipe, Step(recipe, devices, build)

    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.step.state.tuned))

    def velocity(
        self,
        x: Float32[np.ndarray, "b h w c"],
        sigma: Float32[np.ndarray, "b"],
        rows: Int[np.ndarray, "b"],
    ) -> Float32[np.ndarray, "b h w c"]:
        """The guided velocity."""
        policy, prompts = self.step.system.policy, self.step.prompts

        def velocity(tuned, base, x, sigma):
            conditioning = jax.tree.map(lambda c: c[rows], prompts.conditioning)
            return policy.velocity(tuned, base, conditioning, prompts.null)(x, sigma)

        tuned, base = self.step.state.tuned, self.step.system.base
        return np.asarray(jax.jit(velocity)(tuned, base, x, sigma))

    def sample(self) -> None:
        """Samples a step's images and keeps their transitions."""
        self.chunks = [
            SampledImages(0, rows, made.transitions, jax.block_until_ready(made.sigmas))
            for rows, made in self.step.generate()
        ]

    def train(self) -> None:
        """A gradient of all transitions, one pass after another, and an update."""
        self.step.train(self.chunks)

    def work(self) -> Work:
        """The work of a step, for the eager loop."""
        recipe, step, system = self._recipe, self.step, self.step.system
        sampler, family, trainer = system.sampler, system.policy.family, recipe.trainer
        first, length = step.drawn.start, recipe.noisy_steps
        window = slice(first, first + length)
        context, pooled = jax.device_get(step.prompts.conditioning)
        null = None
        if system.policy.sequences == 2:
            null = tuple(jax.device_get(step.prompts.null))
        lora = None
        if system.policy.lora is not None:
            config = system.policy.lora
            layers = adapted_layers(family.shapes(), config.targets, family.lists)["transformer"]
            lora = EagerLora(config.rank, config.alpha, tuple(sorted(layers)))
        return Work(
            open_pipeline(recipe.model.folder, recipe.model.without) / "transformer",
            sampler.shape,
            np.asarray(sampler.sigmas, np.float32),
            *coefficients(sampler.settings.step, sampler.sigmas, window),
            window,
            context,
            pooled,
            null,
            system.policy.guidance,
            step.rows,
            advantages(recipe.sampler.chunk),
            recipe.sampler.chunk,
            trainer.micro_batch,
            trainer.pack,
            recipe.algorithm.clip_range,
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
            bfloat16=recipe.precision.arithmetic == "bfloat16",
            checkpointing=recipe.model.remat != "none",
        )


def coefficients(
    step: ReverseStep, sigmas: Float[np.ndarray, "sigmas"], window: slice
) -> tuple[Float[np.ndarray, "steps"], ...]:
    """(of_x, of_v, std) of each step of a schedule: `step` in the window, Euler steps elsewhere."""
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
