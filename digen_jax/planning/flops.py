"""FLOPs that a program's work needs, and FLOPs of the traced program.

Needed: a forward pass of a sequence takes `Family.flops`; an image is one sequence, or two with guidance. The backward
pass of a product with weights takes two products of the same size: for the gradients of its input and of its weights.
With LoRA the weights get no gradient, so it takes one; products of the LoRA factors are not counted. The backward
pass of attention, whose products have no weights, always takes two. Repeated forward passes (remat) are not needed,
but the traced program has them.
"""

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from digen_jax.config.train_config import TrainConfig
from digen_jax.models.family import Family, Size
from digen_jax.models.linear import FLOAT32_PRODUCTS
from digen_jax.parallel.policy import Policy
from digen_jax.planning.hardware import CHIPS
from digen_jax.policies import evaluation_policy, make_policy, trained_policy

ATTENTION = "attention"  # stream of products without weights
# bfloat16 passes of the matrix units that take as long as one float32 product. GPUs compute TF32 at half the rate of
# bfloat16, and exact float32 at a sixteenth; TPUs add products of bfloat16 parts. XLA's attention rounds factors.
PASSES = {
    "gpu": {"DEFAULT": 2, "HIGH": 2, "HIGHEST": 16, "BF16_BF16_F32": 1, "F16_F16_F32": 1},
    "tpu": {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6, "BF16_BF16_F32": 1, "F16_F16_F32": 1},
}

Work = dict[str, float]  # needed FLOPs by stream of the model, summed over all devices


class Flops(NamedTuple):
    """FLOPs summed over all devices; a multiply-add counts as two.

    Attributes:
      count: FLOPs of matrix products, convolutions and kernels.
      weighted: The same, each multiplied by its number of bfloat16 passes.
    """

    count: float = 0.0  # type: ignore[assignment]
    weighted: float = 0.0

    def times(self, runs: float) -> "Flops":
        """Returns the FLOPs of `runs` runs."""
        return Flops(runs * self.count, runs * self.weighted)

    def plus(self, other: "Flops") -> "Flops":
        """Returns the sum."""
        return Flops(self.count + other.count, self.weighted + other.weighted)


def program_flops(jaxpr: Any, platform: str, used: Sequence[bool] | None = None) -> Flops:
    """Counts matrix products, convolutions and attention kernels of a jaxpr, multiplied by loop lengths.

    Unused results do not count, as the compiler removes them. A conditional counts its largest branch. A Pallas kernel
    counts by its cost estimate, or else by its body at every step of its grid, as if no mask skipped any.

    Args:
      jaxpr: `jax.stages.Traced.jaxpr`, or a part of one.
      platform: Platform that it runs on: "gpu", "tpu" or "cpu".
      used: Whether each of its results is used. None means all.

    Raises:
      ValueError: A loop with products has no static length.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    results = jaxpr.outvars if used is None else itertools.compress(jaxpr.outvars, used)
    live, total = set(map(id, results)), Flops()
    for equation in reversed(jaxpr.eqns):
        read = [id(one) in live for one in equation.outvars]
        if any(read) or equation.effects:
            live.update(map(id, equation.invars))
            total = total.plus(_of_equation(equation, platform, read))
    return total


def _of_equation(equation: Any, platform: str, read: list[bool]) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name == "scan":  # the next iteration uses the carry, whose results have the body's shape
        (body,) = _jaxprs(params)
        results = zip(equation.outvars, body.outvars, read, strict=True)
        read = [one.aval.shape == inside.aval.shape or used for one, inside, used in results]
    inner, total = [], Flops()
    for one in _jaxprs(params):
        same = len(one.outvars) == len(read) and name not in ("while", "pallas_call")
        inner.append(program_flops(one, platform, read if same else None))
        total = total.plus(inner[-1])
    match name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            count = 2.0 * equation.outvars[0].aval.size * math.prod(left[d] for d in contracted)
            return _weighted(count, equation, platform)
        case "conv_general_dilated":
            return _weighted(_convolution(equation), equation, platform)
        case "scan":
            return total.times(params["length"])
        case "while" if total.count:
            raise ValueError("a loop with matrix products has no static length")
        case "cond":
            return max(inner)
        case "shard_map":
            return total.times(params["mesh"].size)
        case "pallas_call" if (stated := params["cost_estimate"]) is not None:
            return _weighted(float(stated.flops), equation, platform)
        case "pallas_call":
            return total.times(math.prod(params["grid_mapping"].grid))
    if attention := re.match(r"dot_product_attention_(fwd|bwd)", name):  # cuDNN kernels
        queries, keys = (one.aval.shape for one in equation.invars[:2])  # [b s h d], [b t g d]
        products = 2 if attention[1] == "fwd" else 5  # the backward pass recomputes the scores
        count = 2.0 * products * math.prod(queries) * keys[1]
        return Flops(count, count)
    return total


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                yield getattr(one, "jaxpr", one)


def _weighted(count: float, equation: Any, platform: str) -> Flops:
    dtypes = {one.aval.dtype.name for one in equation.invars[:2]}
    if "float32" not in dtypes or platform not in PASSES:
        return Flops(count, count)
    # Float32 products in kernels are exact.
    default = "HIGHEST" if equation.primitive.name == "pallas_call" else "DEFAULT"
    given = equation.params.get("precision")
    precision = given[0] if isinstance(given, tuple) else given
    return Flops(count, count * PASSES[platform][getattr(precision, "name", default)])


def _convolution(equation: Any) -> float:
    """Returns the FLOPs of a convolution, including products with padding and with gaps of a dilated input."""
    kernel = equation.invars[1].aval.shape
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    # A batch group sums over its part of the batch only.
    sums = math.prod(kernel) // features / equation.params["batch_group_count"]
    return 2.0 * equation.outvars[0].aval.size * sums


def sampling_work(policy: Policy, size: Size, steps: int, images: int, stored: int = 0) -> Work:
    """Returns the needed FLOPs of sampling; `policy` has the sampler's guidance.

    If the policy also samples the reference, this evaluates the `stored` steps again.
    """
    passes = steps * policy.sequences
    passes += stored * policy.reference_sequences * policy.samples_reference
    return _times(_forward(policy.family, size), passes * images)


def trained_samples(config: TrainConfig) -> int:
    """Returns the number of images, pairs or groups that the trainer gets from a chunk."""
    chunk, images = config.sampler.chunk, config.batch.images
    if config.algorithm.images_per_sample > 1:
        return chunk // images  # a group, or one pair of it
    return config.advantages.kept(chunk, images)


def training_work(config: TrainConfig, family: Family, samples: int, update: int = 0) -> Work:
    """Returns the needed FLOPs of the gradient of `samples` images, pairs or groups of a chunk.

    `update` counts the updates before it in its step.
    """
    algorithm = config.algorithm
    policy = trained_policy(make_policy(config, family), algorithm)
    forward = _forward(family, config.model.size)
    count = samples * algorithm.images_per_sample * config.trained_steps
    count *= max(1, algorithm.gradient_steps)
    trained = _times(forward, count * policy.sequences)
    needed: Any = Counter(trained)
    for stream, flops in trained.items():
        needed[stream] += flops * (1 if policy.lora and stream != ATTENTION else 2)
    # Forward passes without gradients: the behavior policy, the policy at the start of the step if an update has
    # changed it, and the slow copy unless it is the behavior policy.
    fixed = algorithm.reads_behavior + (algorithm.reads_start and update > 0)
    fixed += algorithm.reads_copy
    needed.update(_times(trained, fixed))
    if algorithm.reads_reference:
        needed.update(_times(forward, count * policy.reference_sequences))
    return dict(needed)


class RunFlops(NamedTuple):
    """Needed FLOPs of the sampling and training commands of a run.

    Attributes:
      image: Of sampling an image for training.
      evaluated: Of sampling an image of an evaluation.
      chunk: Of the gradient of a chunk before the first update of a step, and after it.
    """

    image: float
    evaluated: float
    chunk: tuple[float, float]

    @classmethod
    def of(cls, config: TrainConfig, policy: Policy) -> "RunFlops":
        """Counts the FLOPs for a run's sampling policy."""
        size, steps = config.model.size, config.sampler.steps
        evaluated = evaluation_policy(config, policy.family)
        evaluation = config.evaluation_size, config.evaluation_steps
        sampled = 0 if config.algorithm.given_images else 1
        found = [sampling_work(policy, size, steps, sampled, config.noisy_steps)]
        found += [sampling_work(evaluated, *evaluation, 1)]
        samples = trained_samples(config)
        found += [training_work(config, policy.family, samples, update) for update in (0, 1)]
        image, evaluated_image, first, later = (sum(work.values()) for work in found)
        return cls(image, evaluated_image, (first, later))


def peak_flops(kind: str, dtype: str) -> float:
    """Returns the peak FLOP/s of products in a dtype on a `jax.Device.device_kind`; NaN if it is unknown.

    The peak of float32 is that of the precision in which the networks multiply float32 factors, such as TF32.
    """
    chip = CHIPS.get(kind)
    if chip is None or dtype != "float32":
        return math.nan if chip is None else chip.flops
    precision = jax.config.jax_default_matmul_precision or FLOAT32_PRODUCTS
    with contextlib.suppress(ValueError):  # algorithms such as "BF16_BF16_F32" are no precision
        precision = jax.lax.Precision(precision).name
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    return chip.flops / PASSES[platform].get(precision, math.nan)


def _forward(family: Family, size: Size) -> Work:
    """Returns the FLOPs of a forward pass of a sequence, by stream, summed over components."""
    total: Counter[str] = Counter()
    for streams in family.flops(size).values():
        total.update(streams)
    return dict(total)


def _times(flops: Work, count: int) -> Work:
    return {stream: count * one for stream, one in flops.items()}
