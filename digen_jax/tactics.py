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


def check_early(config: ConfigDict) -> None:
    """Refuses training before groups are complete where it is not exact, or nothing would be early.

    What the algorithm must be like for it is for `FlowGRPO.check_early` to say.

    Raises:
      ConfigError: ratios that are not 1, groups that may be replaced, or fragments that are not less
        than what has to be waited for otherwise.
    """
    early = f"config.runtime.early_groups = {config.runtime.early_groups}"
    if not config.runtime.early_groups:
        return
    for name, value, needed, why in (
        ("runtime.staleness", config.runtime.staleness, 0, "older weights' ratios are not 1"),
        ("trainer.updates", config.trainer.updates, 1, "behind an update ratios are not 1"),
        (
            "runtime.max_candidates",
            config.runtime.max_candidates,
            0,
            "only of a complete group it is known whether it is replaced",
        ),
    ):
        if value != needed:
            raise ConfigError(
                f"{early} cannot go with config.{name} = {value}, as {why}: set that to {needed}, or "
                "config.runtime.early_groups to 0"
            )
    fragment, images = config.sampler.fragment, config.batch.images
    check_divides(
        "config.sampler.fragment",
        fragment,
        "config.batch.images",
        images,
        f"as with {early} a fragment belongs to one group",
    )
    if config.algorithm.advantage_std == "group" and fragment == images:
        raise ConfigError(
            f"{early} changes nothing where config.sampler.fragment = {fragment} is a whole group: set "
            "that to less, or config.runtime.early_groups to 0"
        )
