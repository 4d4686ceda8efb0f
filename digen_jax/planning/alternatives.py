"""Changes of a recipe that does not fit on a slice, each with less memory than the one before."""

import dataclasses
from collections.abc import Iterator
from typing import get_args

from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.models.remat import Remat
from digen_jax.parallel.mesh import FSDP
from digen_jax.planning.plan import step_settings
from digen_jax.policies import on_devices
from digen_jax.scheduling.layouts import divisors

SPLIT = ((".*", FSDP),)


def smaller(recipe: TrainConfig, devices: int) -> Iterator[TrainConfig]:
    """The recipe with more remat, then with split parameters, too, then with fewer and fewer images in a pass.

    A change that the recipe has already, or that its batch does not allow, is left out.
    """
    by_memory = get_args(Remat)
    for remat in by_memory[by_memory.index(recipe.model.remat) + 1 :]:
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, remat=remat))
        yield recipe
    if not any(FSDP in rule for rule in recipe.placement.rules):
        placement = dataclasses.replace(recipe.placement, rules=SPLIT)
        recipe = dataclasses.replace(recipe, placement=placement)
        yield recipe
    whole = recipe.algorithm.images_per_sample
    trainer = on_devices(recipe, devices).placement.trainer
    each = recipe.trainer.micro_batch // (whole * trainer.images)
    for fewer in sorted(divisors(each), reverse=True)[1:]:
        images = fewer * whole * trainer.images
        changed = dataclasses.replace(
            recipe,
            sampler=dataclasses.replace(recipe.sampler, chunk=recipe.sampler.chunk * fewer // each),
            trainer=dataclasses.replace(recipe.trainer, micro_batch=images),
            evaluation=dataclasses.replace(
                recipe.evaluation, batch=min(recipe.evaluation.batch, images)
            ),
        )
        if _works(changed, devices):
            yield changed


def _works(recipe: TrainConfig, devices: int) -> bool:
    try:
        step_settings(recipe)
        on_devices(recipe, devices)
    except ConfigError:
        return False
    return True
