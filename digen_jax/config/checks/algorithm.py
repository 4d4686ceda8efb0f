"""Checks of a config's algorithm: a part of `checks`."""

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.algorithms.old_log_probs import choose_old_log_probs
from digen_jax.config.checks.choices import WITHOUT_NOISE
from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError, blame, check_divides


def check_algorithm(recipe: Recipe) -> None:
    """Refuses settings of the algorithm that cannot go together."""
    algorithm = recipe.algorithm
    with blame("config.algorithm."):
        _check_old_log_probs(recipe)
    _check_nested(recipe, algorithm)
    with blame("config.algorithm."):
        algorithm.check()
        algorithm.check_kind(recipe.sampler.kind)
        if recipe.runtime.max_incomplete_groups:
            algorithm.check_early(recipe.advantages, recipe.batch.images, recipe.batch.groups)
    if algorithm.of_trajectories:
        _check_trajectories(recipe)
    if algorithm.objective == "matching":
        _check_final_images(recipe)
    if algorithm.ranks:
        _check_ranking(recipe)
    if algorithm.images_of_sample == 2:
        _check_pairs(recipe)


def _check_old_log_probs(recipe: Recipe) -> None:
    """Refuses old_log_probs "current" where ratios are not 1."""
    choice = recipe.asked.get("old_log_probs", "auto")
    if choice != "auto":
        choose_old_log_probs(
            choice,
            float32=True,
            stale=recipe.runtime.max_policy_lag > 0,
            updates=recipe.trainer.updates,
            stored=recipe.algorithm.objective == "transitions",
        )


def _check_nested(recipe: Recipe, algorithm: Algorithm) -> None:
    """Checks the nested settings of the algorithm."""
    if algorithm.times is not None:
        with blame("config.algorithm.times."):
            algorithm.times.check(recipe.sampler.steps)
    if "ema" in recipe.asked:
        with blame("config.algorithm.ema."):
            algorithm.ema.check()


def _check_trajectories(recipe: Recipe) -> None:
    """Ratios of whole trajectories need all steps of an image in one pass."""
    pack, steps = recipe.trainer.pack, recipe.trained_steps
    if pack < steps:
        raise ConfigError(
            f"{_ratio(recipe)}, so that a pass has to hold them all: set config.trainer.pack to {steps}, and "
            "config.trainer.micro_batch as much lower as memory needs"
        )


def check_whole_trajectories(recipe: Recipe) -> None:
    """Refuses to split an image's steps over devices where ratios are of whole trajectories."""
    time = recipe.placement.trainer.time
    if recipe.algorithm.of_trajectories and time > 1:
        raise ConfigError(
            f"{_ratio(recipe)}, but config.placement.trainer.time = {time} splits them: set that to 1"
        )


def _ratio(recipe: Recipe) -> str:
    return (
        f"config.algorithm.ratio = {recipe.algorithm.ratio!r} puts the steps of an image together"
    )


def _check_final_images(recipe: Recipe) -> None:
    """Refuses a noisy sampler where final images are trained: the noise would only cost quality."""
    name, sampler = recipe.algorithm.name, recipe.sampler
    if recipe.noisy_steps or sampler.kind not in WITHOUT_NOISE:
        raise ConfigError(
            f"config.algorithm.name = {name!r} trains final images, which are sampled without noise: set "
            "config.sampler.window.length to 0, config.sampler.kind to 'ode' or 'dpm2', and "
            "config.sampler.noise_level to 0"
        )
    if recipe.precision.trajectory != "float32":
        raise ConfigError(
            f"config.precision.trajectory = {recipe.precision.trajectory!r} is the type of stored transitions, but "
            f"config.algorithm.name = {name!r} trains final images: set it to 'float32'"
        )


def _check_ranking(recipe: Recipe) -> None:
    """Refuses settings of `advantages` without an effect: a pair depends only on the order of a group's images."""
    section = recipe.advantages
    without = dict(baseline="group_mean", ddof=0, best_and_worst=0, drop_zero_std=False)
    if section.combine == "rewards":
        without["std"] = "group"
    idle = {name: value for name, value in without.items() if getattr(section, name) != value}
    if idle:
        given = " and ".join(
            f"config.advantages.{name} = {getattr(section, name)!r}" for name in idle
        )
        it = "it" if len(idle) == 1 else "them"
        raise ConfigError(
            f"{given} cannot change which pair of each group {recipe.algorithm.name} trains, its best and "
            f"its worst image: set {it} to {' and '.join(map(repr, idle.values()))}"
        )


def _check_pairs(recipe: Recipe) -> None:
    """A chunk holds whole groups, one pair of each is trained, and a micro-batch holds whole pairs."""
    images, chunk, micro = (
        recipe.batch.images,
        recipe.sampler.chunk,
        recipe.trainer.micro_batch,
    )
    name = recipe.algorithm.name
    check_divides(
        "config.batch.images",
        images,
        "config.sampler.chunk",
        chunk,
        f"as {name} chooses a pair of each group of a chunk",
    )
    if micro % 2:
        raise ConfigError(
            f"config.trainer.micro_batch = {micro} must be even, as {name} trains pairs of images"
        )
    check_divides(
        "config.trainer.micro_batch",
        micro,
        "twice the groups of a chunk",
        2 * chunk // images,
        f"as {name} trains one pair of images of each group",
    )
