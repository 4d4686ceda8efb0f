"""Sizes of a config's model in device memory, for the planner."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from digen_jax.assemble import parameter_shapes, pipeline_of
from digen_jax.config.train_config import TrainConfig
from digen_jax.learned_rewards.on_mesh import read
from digen_jax.models.family import Params, Record
from digen_jax.parallel.mesh import ShardingRules, axis_sizes, make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.system import shapes_in_dtype
from digen_jax.planning.programs import step_records
from digen_jax.policies import make_policy
from digen_jax.rewards.built_in import on_mesh
from digen_jax.scheduling.layouts import Footprint, OnDevice


def model_footprint(config: TrainConfig) -> Footprint:
    """Returns the sizes of a config's model, from shapes only: nothing is read or allocated.

    Temporary memory of programs is not included: see `plan.best_plan`.

    Raises:
      ConfigError: The model's folder cannot be used.
    """
    (_, family), algorithm = pipeline_of(config), config.algorithm
    policy = make_policy(config, family)
    tuned, base, frozen, encode = parameter_shapes(config, family)
    sent = tuned, jax.eval_shape(policy.sampler_base, base)
    if config.precision.rollout:
        sent = shapes_in_dtype(sent, config.precision.rollout)
    placement = config.placement
    layout = ShardingRules.of(placement.rules, family.axes())
    one_device = DeviceGroup(make_mesh(jax.devices()[:1]), layout)
    scorers = read(on_mesh(config.rewards), one_device, weights=False)
    # Numbered, because a reward may occur twice with different files.
    networks = {f"{one.name}/{number}": one.params for number, one in enumerate(scorers)}

    def sizes(tree: Params) -> OnDevice:
        return functools.cache(
            lambda fsdp, tensor: layout.bytes(tree, axis_sizes(fsdp=fsdp, tensor=tensor))
        )

    return Footprint(
        tuned=sizes(tuned),
        synced=sizes(sent[0]),
        base=sizes(base),
        sampler_base=sizes(sent[1]),
        frozen=sizes(frozen),
        copies=(config.trainer.ema > 0)
        + (algorithm.slow_copy is not None)
        + (algorithm.sampling_copy is not None),
        trajectory=stored_bytes(config, family.latent_shape(config.model.size)),
        conditioning=_encoded_bytes(policy, step_records(config, family), frozen | encode),
        trainer_fsdp=placement.trainer.fsdp,
        worker_fsdp=placement.rollout.fsdp,
        encode=sizes(encode) if encode else None,
        rewards=sizes(networks) if networks else None,
    )


def stored_bytes(config: TrainConfig, latent: tuple[int, ...]) -> int:
    """Returns the bytes stored per image until it is trained."""
    size = math.prod(latent)
    if config.algorithm.objective == "matching":
        stored = config.algorithm.stored_latents(config.sampler.steps)
        return 4 * (max(1, len(stored)) * size + 2)  # the image, or latents before it, and its key
    images = 2 * size * jnp.dtype(config.precision.trajectory).itemsize  # x, x_next
    mean = 4 * size if config.algorithm.stores_means else 0
    return config.noisy_steps * (images + mean + 4)  # log_prob


def _encoded_bytes(policy: Policy, records: Sequence[Record], frozen: Params) -> int:
    """Returns the bytes of the conditioning of a step's prompts, which is replicated on every device."""
    family = policy.family
    tokens = [family.tokenize(records)]
    if policy.reads_null:
        tokens.append(family.tokenize_null(records))
    return sum(_bytes(jax.eval_shape(family.encode, frozen, each)) for each in tokens)


def _bytes(shapes: Params) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
