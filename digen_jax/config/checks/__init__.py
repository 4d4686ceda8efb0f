"""All checks of a config that need no model. The door makes them before anything compiles.

A check is a function that raises a `ConfigError`; each mistake is one of its sentences, and all mistakes that can be
found at once are reported at once. A check with several independent sentences collects them with `together`.

Each rule is stated once. What a single field may be is said here: its type lists its choices (`choices`), its range
is in `numbers.RANGES`, and a check of another kind goes into EACH and gets the complete config. Numbers of the section
`algorithm`, and fields that must fit together, are checked by the object that has them, where there is one (`check` of
an algorithm, `AdvantageSettings`, `Window` and the scheduler's `Settings`); other checks of several fields go into one
of the STAGES and get the recipe. All checks of a stage run; a later stage runs only if the stages before it found
nothing. Last, `check_machine` checks what a config says about the machine.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from ml_collections import ConfigDict

from digen_jax.config.checks.algorithm import check_algorithm, check_whole_trajectories
from digen_jax.config.checks.choices import check_choices
from digen_jax.config.checks.groups import (
    check_advantages,
    check_candidates,
    check_early,
    check_early_chunks,
    smaller_chunks,
)
from digen_jax.config.checks.numbers import check_numbers
from digen_jax.config.checks.placement import check_devices, check_placement
from digen_jax.config.checks.prompts import check_files
from digen_jax.config.checks.rewards import check_named, check_watched, check_weights, needs_of
from digen_jax.config.checks.sampler import check_pack, check_sampler
from digen_jax.config.recipe import SCHEDULED, Recipe
from digen_jax.errors import ConfigError, blame, check_divides, together
from digen_jax.flow.steps import make_step
from digen_jax.prompts.files import check_pictures, read_prompt_file
from digen_jax.prompts.needs import check_needs
from digen_jax.rewards.built_in import resolve


def check_each(config: ConfigDict) -> None:
    """Refuses values that a field of a complete config cannot have, independent of other fields.

    Raises:
      ConfigError: one sentence for each such field.
    """
    _all(EACH, config)


def check_rules(recipe: Recipe) -> None:
    """Refuses fields that cannot go together, whatever the devices.

    Args:
      recipe: of a config that has passed `check_each`.

    Raises:
      ConfigError: one sentence for each mistake that can be found at once.
    """
    for stage in STAGES:
        _all(stage, recipe)


def check_machine(recipe: Recipe, devices: int) -> None:
    """Refuses what is missing on this machine, such as files, and meshes that `devices` devices cannot form.

    Args:
      recipe: with the sizes of its meshes, and with fields that can go together.
      devices: how many there are.

    Raises:
      ConfigError: one sentence for each mistake that can be found at once.
    """
    on_meshes = functools.partial(check_meshes, devices=devices)
    _all((check_given, _check_installed, on_meshes), recipe)


def check_meshes(recipe: Recipe, devices: int) -> None:
    """Refuses meshes that do not fit the devices or a pass; the rest is as in `check_machine`."""
    on_devices = functools.partial(check_devices, devices=devices)
    _all((check_pack, check_whole_trajectories, on_devices), recipe)


def _all(checks: Iterable[Callable[[Any], None]], value: Any) -> None:
    with together() as one:
        for refuse in checks:
            with one():
                refuse(value)


def check_given(recipe: Recipe) -> None:
    """Refuses a recipe without a model folder, readable prompt files and a reward.

    Reads the files and imports the reward.

    Raises:
      ConfigError: names what is missing or cannot be used.
    """
    with together() as one:
        for name in ("model.folder", "prompts.file", "rewards", "evaluation.prompts"):
            with one():
                if not _given(recipe, name):
                    raise ConfigError(
                        f"config.{name} is not given: add --config.{name}=... to the command"
                    )
                if name == "rewards":
                    with blame("", (ConfigError,)):
                        resolve(recipe.rewards)
                elif name != "model.folder":
                    read = check_pictures if recipe.model.source else read_prompt_file
                    s = "s" if name == "prompts.file" and recipe.prompts.files else ""
                    for file in _given(recipe, name):
                        with one(), blame(f"config.{name}{s}: "):
                            read(file)
                            check_named(file, recipe.rewards, name == "prompts.file")
                            check_needs([file], needs_of(recipe.rewards))


def _check_installed(recipe: Recipe) -> None:
    """Refuses trackers that are not installed; imports nothing."""
    with together() as one:
        for name in recipe.trackers:
            with one():
                if importlib.util.find_spec(name) is None:
                    raise ConfigError(
                        f"config.{name}.project asks for {name}, which is not installed: run pip install {name}, or "
                        "set the field to ''"
                    )


def _given(recipe: Recipe, name: str) -> tuple[str, ...]:
    """The values of a dotted name that must have one; none if it is empty."""
    if name == "prompts.file":
        return recipe.prompts.paths
    value = _value(recipe, name)
    return (value,) if isinstance(value, str) and value else value or ()


def _check_decay(recipe: Recipe) -> None:
    trainer = recipe.trainer
    updates, rising = recipe.steps * trainer.updates, trainer.warmup + trainer.decay
    if trainer.decay and updates > rising:
        raise ConfigError(
            f"config.trainer.warmup + config.trainer.decay = {rising} updates, after which the learning rate is 0, are "
            f"fewer than the run's {updates}: set config.trainer.decay to {updates - trainer.warmup} or more, or to 0"
        )


def _check_average(recipe: Recipe) -> None:
    trainer = recipe.trainer
    asked = trainer.ema_unit != "update" or trainer.ema_warm_up
    if not trainer.ema and (asked or trainer.ema_every * trainer.ema_repeats > 1):
        raise ConfigError(
            "config.trainer.ema = 0 keeps no average, so that ema_unit, ema_warm_up, ema_every and ema_repeats have no "
            "effect: set config.trainer.ema to a decay such as 0.9, or leave these out"
        )


def _check_source(recipe: Recipe) -> None:
    """Refuses half of a size of the pictures to edit."""
    model = recipe.model
    if (model.source_height > 0) != (model.source_width > 0):
        raise ConfigError(
            f"config.model.source_height = {model.source_height} and config.model.source_width = {model.source_width} "
            "are no size: set both, or both to 0 where prompts have no pictures"
        )


def _check_stopping(recipe: Recipe) -> None:
    """Refuses an early stop by a reward that no evaluation shows."""
    check_watched(recipe.stopping.reward, recipe.rewards)


def _check_start(recipe: Recipe) -> None:
    """Refuses a LoRA to continue where no LoRA is tuned."""
    if recipe.lora.start and not recipe.lora.rank:
        raise ConfigError(
            f"config.lora.start = {recipe.lora.start!r} is a LoRA to continue, but config.lora.rank = 0 tunes "
            "all weights: set config.lora.rank, config.lora.alpha and config.lora.targets to that LoRA's"
        )


def _value(holder: Any, name: str) -> Any:
    """The value of a dotted name."""
    return functools.reduce(getattr, name.split("."), holder)


def _check_batches(recipe: Recipe) -> None:
    """Checks every division of a step's images: into update sets, chunks, micro-batches, devices."""
    batch, trainer, chunk = recipe.batch, recipe.trainer, recipe.sampler.chunk
    recipe.scheduler.check(SCHEDULED)
    count = recipe.advantages.best_and_worst
    if count:
        check_divides(
            "config.batch.images",
            batch.images,
            "config.sampler.chunk",
            chunk,
            f"as with config.advantages.best_and_worst = {count} a chunk holds whole groups",
        )
    if recipe.algorithm.images_of_sample == 1:
        trained = recipe.advantages.kept(chunk, batch.images)
        chosen = ""
        if trained < chunk:
            chosen = " / config.batch.images * 2 * config.advantages.best_and_worst"
        check_divides(
            "config.trainer.micro_batch",
            trainer.micro_batch,
            f"config.sampler.chunk{chosen}",
            trained,
            "as micro-batches are cut from a chunk",
        )


def _check_stale(recipe: Recipe) -> None:
    runtime, settings = recipe.runtime, recipe.scheduler
    if not runtime.max_policy_lag or settings.off_policy_units:
        return
    images = settings.groups * settings.images // settings.updates
    sizes = [
        size
        for size in range(1, settings.chunk_images)
        if images % size == 0 and dataclasses.replace(settings, chunk_images=size).off_policy_units
    ]
    room = (
        smaller_chunks(recipe, sizes) if sizes else "config.runtime.max_off_policy_fraction higher"
    )
    raise ConfigError(
        f"config.runtime.max_policy_lag = {runtime.max_policy_lag} changes nothing, as "
        f"config.runtime.max_off_policy_fraction = {runtime.max_off_policy_fraction} of a step is less than "
        f"config.sampler.chunk = {recipe.sampler.chunk} images or a group: set {room}, or "
        "config.runtime.max_policy_lag to 0"
    )


def _check_noise_level(recipe: Recipe) -> None:
    with blame("config.sampler."):
        make_step(recipe.sampler.kind, recipe.sampler.noise_level)


def _check_trackers(config: ConfigDict) -> None:
    with together() as one:
        for tracker in ("wandb", "trackio"):
            given = [name for name, value in config[tracker].items() if value and name != "mode"]
            with one():
                if given and not config[tracker].project:
                    raise ConfigError(
                        f"config.{tracker}.{given[0]} does nothing without config.{tracker}.project: name the "
                        "project, too"
                    )


EACH = (
    check_numbers,
    check_choices,
    _check_trackers,
    check_weights,
    check_files,
    check_placement,
)
STAGES = (
    # Groups, and what is sampled for an image.
    (
        _check_decay,
        _check_average,
        _check_source,
        _check_start,
        _check_stopping,
        check_advantages,
        check_sampler,
        check_early,
    ),
    # How a step is divided, and what the algorithm requires of that.
    (_check_batches, check_candidates, check_early_chunks, check_algorithm),
    # A step as a whole.
    (_check_noise_level, _check_stale),
)
