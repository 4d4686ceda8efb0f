"""What each program of a recipe's step takes: estimated for a slice that is not here, or timed on devices here."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.config.train_config import TrainConfig
from digen_jax.planning.answers import Answer, Answers, answer_of
from digen_jax.planning.chips import Chip
from digen_jax.planning.compiled import Program, programs
from digen_jax.planning.costs import Estimate, estimate_answer, flops_of
from digen_jax.policies import on_devices

REPEATS = 3  # timed calls after one that is not; their median counts


@dataclasses.dataclass(frozen=True)
class Assessed:
    """A program on its mesh.

    Attributes:
      program: what it does.
      answer: what the compiler said.
      seconds: of a run, estimated or measured.
      flops: on one device, of its products, convolutions and kernels.
      repeated: those of them that remat runs again.
      estimate: what the seconds are spent on; None: they are measured, or the program does not fit.
    """

    program: Program
    answer: Answer
    seconds: float
    flops: float
    repeated: float
    estimate: Estimate | None

    @property
    def fits(self) -> bool:
        """Whether a device has the memory; if not, nothing but that memory is known."""
        return bool(self.answer.text)

    @property
    def needed(self) -> float | None:
        """FLOPs on one device that it needs; None: the model's family does not say."""
        work = self.program.work
        return None if work is None else sum(work.values()) / self.program.devices


def assess(
    recipe: TrainConfig, devices: Sequence[jax.Device], chip: Chip, answers: Answers
) -> list[Assessed]:
    """The estimates of a recipe's programs, compiled for a slice.

    The gradient, which needs the most memory, is compiled first. The first program that does not fit is the last one,
    because a large model's programs take minutes.

    Raises:
      ConfigError: the recipe's meshes do not fit the slice, or the model's folder cannot be used.
    """
    order = list(programs(on_devices(recipe, len(devices)), devices))
    found: dict[str, Assessed] = {}
    for program in sorted(order, key=lambda program: program.name != "train"):
        answer = answers(program.name, program.lower())
        if not answer.text:
            found[program.name] = Assessed(program, answer, math.nan, math.nan, math.nan, None)
            break
        guess = estimate_answer(answer, chip)
        known = guess.seconds, guess.flops, guess.repeated, guess
        found[program.name] = Assessed(program, answer, *known)
    return [found[program.name] for program in order if program.name in found]


def assess_here(
    recipe: TrainConfig, devices: Sequence[jax.Device], note: Callable[[str], None]
) -> list[Assessed]:
    """The same programs, run and timed on available devices, with arrays of small numbers instead of weights.

    Raises:
      ConfigError: as `assess`.
    """
    found = []
    for program in programs(on_devices(recipe, len(devices)), devices):
        note(f"{program.name}: compiling and timing")
        lowered = program.lower()
        compiled = lowered.compile()
        answer, seconds = answer_of(compiled), timed(lowered, compiled)
        note(f"{program.name}: {seconds:.4g} s")
        found.append(Assessed(program, answer, seconds, *flops_of(answer.text), None))
    return found


def timed(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> float:
    """Median seconds of a program; every call has new arguments, because a program may consume them."""
    seconds = []
    for _ in range(1 + REPEATS):
        arguments = jax.block_until_ready(_arguments(lowered, compiled))
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _arguments(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> Any:
    """Arrays of a program's shapes that lie where it wants them: keys, zeros, or the number 0.01."""
    shapes, lying = lowered.args_info[0], compiled.input_shardings[0]

    def filled(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        return jnp.full(
            leaf.shape, 0.01 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0, leaf.dtype
        )

    leaves, tree = jax.tree.flatten(shapes)
    pairs = zip(_with_none(shapes), _with_none(lying), strict=True)
    wanted = [place for leaf, place in pairs if leaf is not None]
    # Of an argument that the program does not read the compiler does not say where it lies.
    meshes = [place.mesh for place in wanted if isinstance(place, NamedSharding)]
    places = [place or NamedSharding(meshes[0], PartitionSpec()) for place in wanted]
    made = jax.jit(lambda: [filled(leaf) for leaf in leaves], out_shardings=places)()
    return jax.tree.unflatten(tree, made)


def _with_none(tree: Any) -> list[Any]:
    """The leaves of a tree, None among them."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
