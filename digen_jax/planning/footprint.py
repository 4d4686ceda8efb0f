"""The sizes of a recipe's model, from which the planner computes the memory of a device."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from digen_jax.assemble import parameter_shapes, recipe_model
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import negatives_differ
from digen_jax.learned_rewards.on_mesh import read_shapes
from digen_jax.models.family import Family, Params, Record
from digen_jax.parallel.encoding import example_record
from digen_jax.parallel.mesh import axis_sizes, make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sharding import Layout
from digen_jax.parallel.system import shapes_in_dtype
from digen_jax.policies import make_policy
from digen_jax.rewards.built_in import on_mesh
from digen_jax.scheduling.layouts import Footprint, OnDevice


def model_footprint(recipe: TrainConfig) -> Footprint:
    """The sizes of a recipe's model, from shapes only: nothing is read or allocated.

    The temporary memory of programs is not in them: `programs.measured_programs` compiles to find it.

    Raises:
      ConfigError: the model's folder cannot be used.
    """
    (_, family), algorithm = recipe_model(recipe), recipe.algorithm
    policy, shapes = make_policy(recipe, family), parameter_shapes(recipe, family)
    tuned, base, frozen, ahead = shapes
    sent = tuned, jax.eval_shape(policy.sampler_base, base)
    if recipe.precision.rollout:
        sent = shapes_in_dtype(sent, recipe.precision.rollout)
    latent = family.latent_shape(recipe.model.size)
    placement = recipe.placement
    layout = Layout.of(placement.rules, family.axes())
    one_device = DeviceGroup(make_mesh(jax.devices()[:1]), layout)
    scorers = read_shapes(on_mesh(recipe.rewards), one_device)
    # By a number, too, as a reward may be asked for twice with different files.
    networks = {f"{one.name}/{number}": one.params for number, one in enumerate(scorers)}

    def sizes(tree: Params) -> OnDevice:
        return functools.cache(
            lambda fsdp, tensor: layout.bytes(tree, axis_sizes(fsdp=fsdp, tensor=tensor))
        )

    return Footprint(
        tuned=sizes(tuned),
        published=sizes(sent[0]),
        base=sizes(base),
        sampler_base=sizes(sent[1]),
        frozen=sizes(frozen),
        copies=(recipe.trainer.ema > 0) + (algorithm.slow_copy is not None),
        trajectory=stored_bytes(recipe, latent),
        conditioning=_encoded(policy, step_records(recipe, family), frozen | ahead),
        trainer_fsdp=placement.trainer.fsdp,
        worker_fsdp=placement.rollout.fsdp,
        ahead=sizes(ahead) if ahead else None,
        rewards=sizes(networks) if networks else None,
    )


def stored_bytes(recipe: TrainConfig, latent: tuple[int, ...]) -> int:
    """Bytes that are stored for an image until it is trained."""
    size = math.prod(latent)
    if recipe.algorithm.objective == "matching":
        return 4 * (size + 2)  # the image and its key
    images = 2 * size * jnp.dtype(recipe.precision.trajectory).itemsize  # x, x_next
    mean = 4 * size if recipe.algorithm.stores_means else 0
    return recipe.noisy_steps * (images + mean + 4)  # log_prob


def step_records(recipe: TrainConfig, family: Family) -> list[Record]:
    """As many records as a step has prompts; programs depend on their number, and on whether negative ones differ."""
    records = [example_record(family)] * recipe.drawn_groups
    if not negatives_differ(recipe.prompts.paths):
        return records
    return [{**record, "negative_prompt": str(i)} for i, record in enumerate(records)]


def _encoded(policy: Policy, records: Sequence[Record], frozen: Params) -> int:
    """Bytes of the conditioning of a step's prompts, which every device has whole."""
    family = policy.family
    tokens = [family.tokenize(records)]
    if policy.reads_null:
        tokens.append(family.tokenize_null(records))
    shapes = [jax.eval_shape(family.encode, frozen, each) for each in tokens]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
