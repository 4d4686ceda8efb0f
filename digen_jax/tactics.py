"""What the tactics of config.runtime need of the rest of a config."""

from ml_collections import ConfigDict

from digen_jax.settings import ConfigError, check_divides


def check_candidates(config: ConfigDict) -> None:
    """Refuses dynamic sampling that cannot work.

    Raises:
      ConfigError: fewer candidates than groups, or groups that share fragments.
    """
    most, redundant = config.runtime.max_candidates, config.runtime.redundant_groups
    least = config.batch.groups + redundant
    if redundant and not most:
        raise ConfigError(
            f"config.runtime.redundant_groups = {redundant} is for dynamic sampling, which is off: set "
            f"config.runtime.max_candidates to {least} or more, or config.runtime.redundant_groups to 0"
        )
    if not most:
        return
    if most < least:
        raise ConfigError(
            f"config.runtime.max_candidates = {most} must be at least config.batch.groups + "
            f"config.runtime.redundant_groups = {least}, or 0 for no dynamic sampling"
        )
    check_divides(
        "config.sampler.fragment",
        config.sampler.fragment,
        "config.batch.images",
        config.batch.images,
        "as with config.runtime.max_candidates a group that is replaced must not share a fragment",
    )
