"""What a complete config says of the steps that are sampled and trained: the checks that need no model."""

from typing import get_args

from ml_collections import ConfigDict

from digen_jax.config import sections
from digen_jax.config.algorithm_section import kind
from digen_jax.errors import ConfigError, blame, check_choice, check_divides
from digen_jax.flow.steps import KINDS, Ode
from digen_jax.flow.windows import Mode


def check_sampler(config: ConfigDict) -> None:
    """Refuses a window, a share of it, start noise or passes that cannot work.

    Raises:
      ConfigError: names the field and what to change.
    """
    if sections.noisy_steps(config) or kind(config).objective == "transitions":
        _check_window(config)
    _check_noise(config)
    _check_pack(config)


def _check_window(config: ConfigDict) -> None:
    window = config.sampler.window
    check_choice("config.sampler.window.mode", window.mode, get_args(Mode))
    if (window.mode == "fixed") != (window.end == 0):
        raise ConfigError(
            f"config.sampler.window.end = {window.end} with config.sampler.window.mode = {window.mode!r}: a "
            "window that moves needs the step before which it stops, a fixed one has none, which is 0"
        )
    with blame("config.sampler.window."):
        sections.window(config).check(config.sampler.steps)
        sections.trained_steps(config)


def _check_noise(config: ConfigDict) -> None:
    """One start noise for a whole group makes its images equal where nothing else is random."""
    kind = config.sampler.kind
    if config.sampler.shared_noise and issubclass(KINDS.get(kind, object), Ode):
        raise ConfigError(
            "config.sampler.shared_noise = True makes all images of a group equal, as a sampler of "
            f"config.sampler.kind = {kind!r} adds no noise: set it to False"
        )


def _check_pack(config: ConfigDict) -> None:
    """A pass takes `pack` steps, split over the mesh axis "time"; none of its parts is only padding."""
    pack, time = config.trainer.pack, config.placement.trainer.time
    check_divides(
        "config.placement.trainer.time",
        time,
        "config.trainer.pack",
        pack,
        "as the steps of a pass are split evenly over that axis",
    )
    steps = sections.trained_steps(config)
    most = steps + -steps % time
    if pack > most:
        where = (
            "noise levels of config.algorithm.times"
            if kind(config).objective == "matching"
            else "trained steps of config.sampler.window"
        )
        raise ConfigError(
            f"config.trainer.pack = {pack} is more than the {steps} {where} fill: set it to {most} or less"
        )
