"""What the section `placement` must be like: a part of `checks`."""

import math
import operator
import re
from collections.abc import Sequence

from ml_collections import ConfigDict

from digen_jax.config.recipe import Recipe
from digen_jax.engine.axes import MODEL, PARAMETERS, TIME
from digen_jax.engine.placement import ONE_DEVICE, RolloutAxes, TrainerAxes, mesh_sizes
from digen_jax.engine.sharding import TACTICS
from digen_jax.errors import ConfigError, check_choice, check_divides
from digen_jax.models.logical_axes import NAMES


def check_placement(config: ConfigDict) -> None:
    """Refuses rules that cannot be.

    Raises:
      ConfigError: the first of them.
    """
    for rule in config.placement.rules:
        kinds = [type(part) for part in rule] if isinstance(rule, tuple | list) else []
        if kinds not in ([str] * 2, [str] * 3):
            raise ConfigError(
                "config.placement.rules must hold pairs such as ('.*', 'replicate'), a regular expression and a "
                f"tactic, and triples such as ('.*', 'mlp', 'tensor'), where axes follow it, not {rule!r}"
            )
        pattern, *about = rule
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"config.placement.rules: {pattern!r} is not a regular expression: {error}"
            ) from error
        choices = (TACTICS,) if len(about) == 1 else (tuple(NAMES), PARAMETERS)
        kinds = ("tactic",) if len(about) == 1 else ("logical axis", "mesh axis")
        for kind, value, known in zip(kinds, about, choices, strict=True):
            check_choice(f"the {kind} of {pattern!r} in config.placement.rules", value, known)


def check_devices(recipe: Recipe, devices: int) -> None:
    """Refuses meshes that `devices` do not suffice for, and batches that a mesh cannot divide."""
    sizes = recipe.placement.meshes if devices > 1 else ONE_DEVICE
    mesh_sizes(sizes, devices)
    trainer = _split("trainer", sizes.trainer, MODEL)
    sampling = _split("rollout", sizes.rollout, MODEL) if sizes.rollout.data else trainer
    training = _split("trainer", sizes.trainer, (TIME, *MODEL))
    tag = [(trainer, "sampler.chunk")] if sizes.trainer.samples else []
    for (mesh, size), name in (
        *tag,
        (sampling, "sampler.chunk"),
        (sampling, "evaluation.batch"),
        (training, "trainer.micro_batch"),
    ):
        value, name = operator.attrgetter(name)(recipe), f"config.{name}"
        if name == "config.trainer.micro_batch" and recipe.algorithm.images_of_sample == 2:
            value, name = value // 2, f"{name} / 2, the pairs of a pass,"
        check_divides(
            f"the number of devices of config.placement.{mesh}",
            size,
            name,
            value,
            "as images are split evenly over a mesh's devices",
        )


def _split(mesh: str, axes: RolloutAxes | TrainerAxes, others: Sequence[str]) -> tuple[str, int]:
    """The devices over which a mesh splits images, which `others` of its axes do not, in words and how many."""
    sizes = {axis: getattr(axes, axis) for axis in others}
    words = [mesh, *(f"config.placement.{mesh}.{axis}" for axis, n in sizes.items() if n > 1)]
    return " / ".join(words), axes.devices // math.prod(sizes.values())
