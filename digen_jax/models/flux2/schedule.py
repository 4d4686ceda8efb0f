"""FLUX.2's sigmas, whose shift depends on the tokens of an image and on the number of steps."""

import numpy as np
from jaxtyping import Float32

from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas

# Lines (slope, offset) of mu over the tokens of an image, for 10 and for 200 steps, and the tokens above which the
# second holds for any number of steps: `compute_empirical_mu` of diffusers' pipeline_flux2_klein.py.
FEW, OF_FEW = 10, (8.73809524e-05, 1.89833333)
MANY, OF_MANY = 200, (0.00016927, 0.45666666)
LARGE = 4300


def empirical_mu(tokens: int, steps: int) -> float:
    """The shift of an image of so many tokens in so many steps, linear in the steps."""
    many = OF_MANY[0] * tokens + OF_MANY[1]
    if tokens > LARGE:
        return many
    few = OF_FEW[0] * tokens + OF_FEW[1]
    slope = (many - few) / (MANY - FEW)
    return slope * steps + (many - MANY * slope)


def sigmas(config: SchedulerConfig, steps: int, tokens: int) -> Float32[np.ndarray, "sigmas"]:
    """From 1 to 1/steps before the shift, then 0; a scheduler with a static shift has that instead."""
    return make_sigmas(config, steps, spacing="uniform", mu=empirical_mu(tokens, steps))
