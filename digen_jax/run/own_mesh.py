"""The parts of a run in a process that has one of its meshes: the trainer's, or a rollout mesh."""

from collections.abc import Sequence

import jax

from digen_jax.assemble import (
    Parts,
    make_rollout,
    make_system,
    open_parts,
    parameter_shapes,
    split,
)
from digen_jax.config.recipe import Recipe
from digen_jax.engine.encoding import Stored
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.system import Rollout, System
from digen_jax.errors import blame
from digen_jax.families import check_parts, read_parts
from digen_jax.learned_rewards.on_mesh import read
from digen_jax.policies import make_policy
from digen_jax.prompt_store import is_ahead, stored
from digen_jax.rewards.built_in import on_mesh


def build_trainer(recipe: Recipe, devices: Sequence[jax.Device]) -> System:
    """As `assemble.build` in the trainer's process: components that only sampling needs are read if it has to sample.

    Raises:
      ConfigError: the model's first mistake, or devices that do not suffice.
    """
    folder, family, placement, lora = parts = open_parts(recipe, devices, "trainer")
    with blame("config.model.folder: "):
        check_parts(family, folder, family.trained)
        own = recipe.precision.frozen if recipe.lora.rank else "float32"
        trained = read_parts(family, folder, family.trained, placement.trainer, own)
    start, base = split(recipe, family, trained, placement.trainer)
    policy = make_policy(recipe, family)
    encoded = stored(recipe, folder, family) if is_ahead(recipe, family) else None

    def sampling_on(group: DeviceGroup) -> Rollout:
        print("the trainer reads what sampling needs beside its own parameters", flush=True)
        return _rollout(recipe, parts, group, policy.sampler_base(base), encoded)

    start = start if lora is None else lora
    return make_system(recipe, placement, policy, start, base, (), sampling_on)


def build_rollout(recipe: Recipe, devices: Sequence[jax.Device], encoded: Stored | None) -> Rollout:
    """A rollout mesh with all parameters but the tuned ones, in its process.

    `encoded` are prompts in the text encoders' place.

    Raises:
      ConfigError: as `build_trainer`.
    """
    folder, family, placement, _ = parts = open_parts(recipe, devices, "rollout")
    group, policy = placement.rollout, make_policy(recipe, family)
    with blame("config.model.folder: "):
        check_parts(family, folder, family.trained)
        own = recipe.precision.frozen if recipe.lora.rank else "float32"
        trained = read_parts(family, folder, family.trained, group, own)
    # What is tuned comes from the trainer.
    _, base = split(recipe, family, trained, group)
    return _rollout(recipe, parts, group, policy.sampler_base(base), encoded)


def _rollout(
    recipe: Recipe, parts: Parts, group: DeviceGroup, base: object, encoded: Stored | None
) -> Rollout:
    folder, family, *_ = parts
    with blame("config.model.folder: "):
        shapes = parameter_shapes(recipe, family).frozen
        check_parts(family, folder, shapes)
        frozen = read_parts(family, folder, shapes, group, recipe.precision.frozen)
    found = make_rollout(recipe, make_policy(recipe, family), group, base, frozen, encoded)
    return found._replace(scorers=read(on_mesh(recipe.rewards), group))
