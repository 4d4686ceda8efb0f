"""What a complete config must be like: all checks that need no model to be built.

They run before anything compiles. Each mistake is a sentence of a `ConfigError`, and all that can be told at once are.
"""

import dataclasses
import functools
import operator
import re
from typing import Any, get_args

from ml_collections import ConfigDict

from digen_jax import rewards
from digen_jax.config.algorithm_section import kind
from digen_jax.config.checks.algorithm import check_algorithm, check_algorithm_choices
from digen_jax.config.checks.groups import (
    check_advantage_choices,
    check_advantages,
    check_candidates,
    check_early,
    check_early_fragments,
    check_weights,
    smaller_fragments,
)
from digen_jax.config.checks.numbers import check_numbers
from digen_jax.config.checks.sampler import check_sampler
from digen_jax.config.recipe import SIZES
from digen_jax.config.sections import advantage_settings, scheduler_settings
from digen_jax.engine.placement import TACTICS, mesh_sizes
from digen_jax.errors import ConfigError, blame, check_choice, check_divides, together
from digen_jax.flow.steps import make_step
from digen_jax.prompts.files import read_prompt_file
from digen_jax.weights.lora import Init


def check(config: ConfigDict, devices: int | None = None) -> None:
    """Refuses what cannot work; `config` is complete. Reads the prompt files, nothing slow.

    A check is a function of the config that raises `ConfigError` with one sentence. A new one goes into one of
    the STAGES at the end of this module: all checks of a stage are made, those of a later stage only if the
    stages before found nothing. A check with several independent sentences collects them by `together`.

    Args:
      config: complete.
      devices: how many there are, where the meshes are to be checked, too.

    Raises:
      ConfigError: the sentences of all mistakes that can be told at once.
    """
    fields, groups, cuts, step = STAGES
    if devices is not None:
        groups = *groups, functools.partial(_check_meshes, devices=devices)
        step = *step, functools.partial(check_devices, devices=devices)
    with together() as one:
        with one():
            _check_given(config)
        for stage in (fields, groups, cuts, step):
            with together() as each:
                for refuse in stage:
                    with each():
                        refuse(config)


def _check_given(config: ConfigDict) -> None:
    """What has to be given: the model's folder, prompt files that can be read, and a reward."""
    with together() as one:
        for name in ("model.folder", "prompts.file", "reward.name", "evaluation.prompts"):
            with one():
                if not _value(config, name):
                    raise ConfigError(
                        f"config.{name} is not given: add --config.{name}=... to the command"
                    )
                if name == "reward.name":
                    with blame("config.reward.name: ", (ConfigError,)):
                        rewards.resolve(config.reward.name)
                elif name != "model.folder":
                    with blame(f"config.{name}: "):
                        read_prompt_file(_value(config, name))


def _check_decay(config: ConfigDict) -> None:
    trainer = config.trainer
    updates, rising = config.steps * trainer.updates, trainer.warmup + trainer.decay
    if trainer.decay and updates > rising:
        raise ConfigError(
            f"config.trainer.warmup + config.trainer.decay = {rising} updates, after which the learning rate is 0, are "
            f"fewer than the run's {updates}: set config.trainer.decay to {updates - trainer.warmup} or more, or to 0"
        )


def _check_average(config: ConfigDict) -> None:
    trainer = config.trainer
    if not trainer.ema and (trainer.ema_warm_up or trainer.ema_every * trainer.ema_repeats > 1):
        raise ConfigError(
            "config.trainer.ema = 0 keeps no average that ema_warm_up, ema_every or ema_repeats could be "
            "about: give it a decay such as 0.9, or leave these at False, 1 and 1"
        )


def _check_choices(config: ConfigDict) -> None:
    with together() as one:
        for name, choices in (
            ("model.dtype", ("float32", "bfloat16")),
            ("sampler.dtype", ("", "float32", "bfloat16")),
            ("runtime.tag_weights", ("in place", "resharded")),
            ("lora.init", get_args(Init)),
            ("runtime.ordered", ("auto", "yes", "no")),
            ("wandb.mode", ("online", "offline", "disabled", "shared")),
            ("placement.sizes", SIZES),
        ):
            with one():
                check_choice(f"config.{name}", _value(config, name), choices)


def _check_start(config: ConfigDict) -> None:
    """Refuses a LoRA to continue where none is tuned."""
    if config.lora.start and not config.lora.rank:
        raise ConfigError(
            f"config.lora.start = {config.lora.start!r} is a LoRA to continue, but config.lora.rank = 0 tunes "
            "all weights: set config.lora.rank, config.lora.alpha and config.lora.targets to that LoRA's"
        )


def _value(config: ConfigDict, name: str) -> Any:
    """The value of a dotted name."""
    return functools.reduce(operator.getitem, name.split("."), config)


def _check_batches(config: ConfigDict) -> None:
    """Every cut of a step's images: into update sets, fragments, micro-batches, devices."""
    batch, trainer, fragment = config.batch, config.trainer, config.sampler.fragment
    check_divides(
        "config.trainer.updates",
        trainer.updates,
        "config.batch.groups",
        batch.groups,
        "as each update trains its own groups",
    )
    images = batch.groups * batch.images // trainer.updates
    check_divides(
        "config.sampler.fragment",
        fragment,
        "config.batch.groups * config.batch.images / config.trainer.updates",
        images,
        "as a fragment belongs to one update",
    )
    count = config.advantages.best_and_worst
    if count:
        check_divides(
            "config.batch.images",
            batch.images,
            "config.sampler.fragment",
            fragment,
            f"as with config.advantages.best_and_worst = {count} a fragment holds whole groups",
        )
    if kind(config).images_of_sample == 1:
        trained = advantage_settings(config).kept(fragment, batch.images)
        chosen = ""
        if trained < fragment:
            chosen = " / config.batch.images * 2 * config.advantages.best_and_worst"
        check_divides(
            "config.trainer.micro_batch",
            trainer.micro_batch,
            f"config.sampler.fragment{chosen}",
            trained,
            "as micro-batches are cut from a fragment",
        )


def _check_stale(config: ConfigDict) -> None:
    runtime, settings = config.runtime, scheduler_settings(config)
    if not runtime.staleness or settings.stale_units:
        return
    images = settings.groups * settings.images // settings.updates
    sizes = [
        size
        for size in range(1, settings.fragment_images)
        if images % size == 0 and dataclasses.replace(settings, fragment_images=size).stale_units
    ]
    room = smaller_fragments(config, sizes) if sizes else "config.runtime.stale_share higher"
    raise ConfigError(
        f"config.runtime.staleness = {runtime.staleness} changes nothing, as config.runtime.stale_share = "
        f"{runtime.stale_share} of a step is less than config.sampler.fragment = {config.sampler.fragment} "
        f"images or a group: set {room}, or config.runtime.staleness to 0"
    )


def _check_scheduler(config: ConfigDict) -> None:
    with blame("config.runtime.", (ConfigError,)):
        scheduler_settings(config).check()
    _check_stale(config)


def _check_noise_level(config: ConfigDict) -> None:
    with blame("config.sampler."):
        make_step(config.sampler.kind, config.sampler.noise_level)


def _check_rules(config: ConfigDict) -> None:
    for rule in config.placement.rules:
        if not (isinstance(rule, tuple | list) and [type(part) for part in rule] == [str, str]):
            raise ConfigError(
                "config.placement.rules must hold pairs such as ('.*', 'replicate'), a regular "
                f"expression and a tactic, not {rule!r}"
            )
        pattern, tactic = rule
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"config.placement.rules: {pattern!r} is no regular expression: {error}"
            ) from error
        check_choice(f"the tactic of {pattern!r} in config.placement.rules", tactic, tuple(TACTICS))


def _check_meshes(config: ConfigDict, devices: int) -> None:
    mesh_sizes(config.placement, devices)


def check_devices(config: ConfigDict, devices: int) -> None:
    """Refuses meshes that `devices` do not suffice for, and batches that a mesh cannot divide."""
    rollout, trainer = mesh_sizes(config.placement, devices)
    sampling = ("rollout", rollout) if rollout else ("trainer", trainer)
    time = config.placement.trainer.time if devices > 1 else 1
    training = (
        "trainer / config.placement.trainer.time" if time > 1 else "trainer",
        trainer // time,
    )
    tag = [(("trainer", trainer), "sampler.fragment")] if config.runtime.tag_fragments else []
    for (mesh, size), name in (
        *tag,
        (sampling, "sampler.fragment"),
        (sampling, "evaluation.batch"),
        (training, "trainer.micro_batch"),
    ):
        value, name = _value(config, name), f"config.{name}"
        if name == "config.trainer.micro_batch" and kind(config).images_of_sample == 2:
            value, name = value // 2, f"{name} / 2, the pairs of a pass,"
        check_divides(
            f"the number of devices of config.placement.{mesh}",
            size,
            name,
            value,
            "as images are split evenly over a mesh's devices",
        )


def _check_wandb(config: ConfigDict) -> None:
    given = [name for name, value in config.wandb.items() if value and name != "mode"]
    if given and not config.wandb.project:
        raise ConfigError(
            f"config.wandb.{given[0]} does nothing without config.wandb.project: name the project, too"
        )


STAGES = (
    # Each field alone.
    (
        check_numbers,
        _check_choices,
        _check_wandb,
        check_weights,
        check_advantage_choices,
        check_algorithm_choices,
        _check_rules,
    ),
    # What a group is, and what is sampled of an image.
    (_check_decay, _check_average, _check_start, check_advantages, check_sampler, check_early),
    # How a step is cut, and what the algorithm demands of that.
    (_check_batches, check_candidates, check_early_fragments, check_algorithm),
    # A step as a whole.
    (_check_noise_level, _check_scheduler),
)
