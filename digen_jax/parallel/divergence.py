"""Detects a run whose numbers are not finite. It imports no JAX, since processes of Ray workers start with it."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Num


class DivergedError(ArithmeticError):
    """Names a value that is not finite, as the beginning of a sentence, such as "gradient_norm is nan"."""


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Raises DivergedError for a metric of a step that is not finite; it names losses and norms first.

    The norms of gradient and update are finite only if every parameter is.
    """
    wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    first = [name for name in ("loss", "gradient_norm", "update_norm") if name in wrong]
    if wrong:
        name = (first or list(wrong))[0]
        raise DivergedError(f"{name} is {wrong[name]}")


def check_images(images: Num[np.ndarray, "..."]) -> None:
    """Raises DivergedError for NaN in images, which are numbers in [0, 1]; bytes hold none."""
    if images.dtype != np.uint8 and np.isnan(images.sum(dtype=np.float32)):
        raise DivergedError("an image that the trained model drew holds NaN")
