"""The distance of ratios from 1 before the first update, where only rounding can have caused it."""

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.algorithms.old_log_probs import SPREAD_SHARE
from digen_jax.engine.objective import Metrics
from digen_jax.errors import ConfigError


def check_spread(algorithm: Algorithm, sums: Metrics) -> None:
    """Checks how far rounding moves the ratios of a step's first update, if the algorithm has any.

    For "divergence" these are the KLs to the policy that sampled, which should be 0.

    Args:
      algorithm: of the trainer.
      sums: over chunks that were all sampled with the parameters with which they are compared.

    Raises:
      ConfigError: more than a hundredth of them are further from 1 than the config's share of their bound.
    """
    bound = algorithm.ratio_bound
    if bound is None:
        return
    weight = max(float(sums["weight"]), 1.0)
    mean, over = (float(sums[name]) / weight for name in ("ratio_spread", "over_spread_limit"))
    limit = algorithm.spread_limit * bound
    if over <= SPREAD_SHARE:
        return
    raise ConfigError(
        f"before the first update, where all ratios should be 1, rounding moves them by {mean:.1e} in the mean, "
        f"and {over:.1%} of them by more than {limit:.1e}, which is config.algorithm.spread_limit = "
        f"{algorithm.spread_limit:g} of their bound {bound:g}: set config.algorithm.old_log_probs, which is "
        f"{algorithm.old_log_probs!r}, to 'current' for one update a step of fresh samples or to 'recomputed' for "
        "several, or config.precision.arithmetic and config.precision.published to 'float32', or raise "
        "config.algorithm.spread_limit"
    )
