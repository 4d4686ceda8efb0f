"""The floating-point operations that a recipe's programs need, by the streams of its model.

A forward pass of a sequence is the family's (`Family.flops`); an image is one sequence, or two with guidance. The
backward pass of a product with weights takes two products as large: one for the gradient of its input, one for that
of its weights. Under a LoRA the weights get none, so it takes one; the factors' own products are not counted. The
backward pass of attention, whose products have no weights, always takes two for each of the forward pass. A forward
pass that is only repeated to save memory (remat) is not needed.
"""

from collections import Counter

from digen_jax.config.train_config import TrainConfig
from digen_jax.models.family import Family, Size
from digen_jax.parallel.policy import Policy
from digen_jax.policies import make_policy, trained_policy

ATTENTION = "attention"  # the stream whose products have no weights


Work = dict[str, float]  # FLOPs by stream, on all devices together, a multiply-add as two


def sampling_work(policy: Policy, size: Size, steps: int, images: int) -> Work:
    """Of sampling so many images; `policy` has the sampler's guidance."""
    forward = _forward(policy.family, size)
    return _times(forward, steps * images * policy.sequences)


def training_work(recipe: TrainConfig, family: Family, samples: int) -> Work:
    """Of the gradient of so many images, or pairs of images, of a chunk."""
    algorithm = recipe.algorithm
    policy = trained_policy(make_policy(recipe, family), algorithm)
    forward = _forward(family, recipe.model.size)
    count = samples * algorithm.images_per_sample * recipe.trained_steps
    trained = _times(forward, count * policy.sequences)
    needed = Counter(trained)
    for stream, flops in trained.items():
        needed[stream] += flops * (1 if policy.lora and stream != ATTENTION else 2)
    # Without gradients: the policy that sampled, and the slow copy, unless that is the one that sampled.
    fixed = algorithm.reads_behavior
    fixed += algorithm.slow_copy is not None and not algorithm.samples_from_copy
    needed.update(_times(trained, fixed))
    if algorithm.reads_reference:
        needed.update(_times(forward, count * policy.reference_sequences))
    return dict(needed)


def _forward(family: Family, size: Size) -> Work:
    """Of a sequence, by stream; those of several components are added."""
    total: Counter[str] = Counter()
    for streams in family.flops(size).values():
        total.update(streams)
    return dict(total)


def _times(flops: Work, count: int) -> Work:
    return {stream: count * one for stream, one in flops.items()}
