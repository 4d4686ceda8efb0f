"""The sizes of a recipe's model, from which the planner computes the memory of a device."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.assemble import load_family, make_policy, open_pipeline, trained_of, trained_policy
from digen_jax.config.recipe import Recipe
from digen_jax.engine.axes import axis_sizes
from digen_jax.engine.sharding import Layout
from digen_jax.errors import blame
from digen_jax.models.family import Params, Size, Tokens
from digen_jax.scheduling.planner.problem import Footprint, OnDevice


def model_footprint(recipe: Recipe) -> Footprint:
    """The sizes of a recipe's model, from shapes only: nothing is read or allocated.

    Activations are the data that the backward pass keeps for one transition, before the compiler saves
    any of them; they include the pass of training's guidance.

    Raises:
      ConfigError: the model's folder cannot be used.
    """
    with blame("config.model.folder: "):
        family = load_family(
            open_pipeline(recipe.model.folder), recipe.precision.arithmetic, recipe.model.remat
        )
    policy, shapes = make_policy(recipe, family), family.shapes()
    algorithm = recipe.algorithm
    split = functools.partial(policy.split, reference=algorithm.reads_reference)
    tuned, base = jax.eval_shape(split, jax.random.key(0), trained_of(family, shapes))
    frozen = {part: tree for part, tree in shapes.items() if part not in family.trained}
    base, frozen = _in_dtype((base, frozen), recipe.precision.frozen)
    sent = tuned, jax.eval_shape(policy.sampler_base, base)
    if recipe.precision.published:
        sent = _in_dtype(sent, recipe.precision.published)
    latent = family.latent_shape(Size(recipe.model.height, recipe.model.width))
    placement = recipe.placement
    layout = Layout.of(placement.rules, family.axes())

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
        activations=_residuals(trained_policy(policy, algorithm), tuned, base, frozen, latent),
        trajectory=_stored(algorithm, recipe.noisy_steps, latent),
        micro_batch=recipe.trainer.micro_batch,
        trainer_fsdp=placement.trainer.fsdp,
        worker_fsdp=placement.rollout.fsdp,
    )


def _in_dtype(tree: Params, dtype: str) -> Params:
    """Shapes of the same parameters in another dtype."""
    return jax.tree.map(lambda leaf: leaf.update(dtype=dtype), tree)


def _stored(algorithm: Algorithm, steps: int, latent: tuple[int, ...]) -> int:
    """Bytes that are stored for an image until it is trained, in float32."""
    size = math.prod(latent)
    if algorithm.objective == "matching":
        return 4 * (size + 2)  # the image and its key
    return 4 * steps * ((3 if algorithm.stores_means else 2) * size + 1)  # x, x_next, log_prob


def _residuals(policy: Any, tuned: Any, base: Any, frozen: Any, latent: tuple[int, ...]) -> int:
    """Bytes of the velocity's pullback for one more transition."""

    def encoded(tokens: Tokens, frozen: Any) -> Any:
        return policy.family.encode(frozen, jax.tree.map(jnp.asarray, tokens))

    def pullback(count: int, tuned: Any, base: Any, frozen: Any) -> Any:
        records = [{"prompt": ""}] * count
        texts = encoded(policy.family.tokenize(records), frozen)
        null = None
        if policy.reads_null:
            null = encoded(policy.family.tokenize_null(records), frozen)
        x, sigma = jnp.zeros((count, *latent)), jnp.ones(count)
        return jax.vjp(lambda tuned: policy.velocity(tuned, base, texts, null)(x, sigma), tuned)[1]

    def held(count: int) -> int:
        shapes = jax.eval_shape(functools.partial(pullback, count), tuned, base, frozen)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    return held(2) - held(1)
