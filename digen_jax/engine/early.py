"""Training before a group is complete: accumulates its gradient while its advantages are not known.

With the ratio identically 1 ("current" old log-probabilities, fresh chunks, one update a step)
the policy's gradient is linear in the advantages. For rewards r_i with mean m and std s, and the
gradient g_i of image i for advantage 1, it is

    sum((r_i - m) g_i) / (s + eps)

An open group keeps sum((r_i - m) g_i) and sum(g_i), with m the mean of the rewards so far: for a new
mean m', (m - m') times the second sum is added to the first. So when the group is complete the first
sum is centred, and nothing large was ever subtracted from it. The KL does not depend on the
advantages and has its own sum. The global std is known, and divides, only at the update.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from digen_jax.engine.objective import GroupSums, Term, Totals


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    """A group of which some images are trained: their rewards, and the sums over them."""

    rewards: Float[np.ndarray, "n"]
    sums: GroupSums


def recentred(sums: GroupSums, shift: Float[Array, ""]) -> GroupSums:
    """The same sums after the mean of the rewards fell by `shift`."""
    return sums._replace(centred=_add(sums.centred, sums.plain, shift))


def folded(
    totals: Totals, sums: GroupSums, scale: Float[Array, ""] | None, kl_coefficient: float
) -> Totals:
    """Adds a complete group to a step's totals; `scale` is 1 / (std + eps), None while that is not known."""
    if scale is None:
        totals = totals._replace(unscaled=_add(totals.unscaled, sums.centred, 1.0))
    else:
        totals = _with_policy(totals, sums.centred, scale)
    others = dict(sums.sums)
    if sums.kl is not None:
        penalty = _add(Term(totals.gradient, totals.sums["loss"]), sums.kl, kl_coefficient)
        totals = totals._replace(
            gradient=penalty.gradient, sums=totals.sums | {"loss": penalty.loss}
        )
        others["kl"] = sums.kl.loss
    added = {name: totals.sums[name] + value for name, value in others.items()}
    return totals._replace(sums=totals.sums | added)


def settled(totals: Totals, scale: Float[Array, ""]) -> Totals:
    """Totals whose unscaled part is divided by the global std: `scale` is 1 / (std + eps)."""
    return _with_policy(totals._replace(unscaled=None), totals.unscaled, scale)


def _with_policy(totals: Totals, term: Term, scale: Any) -> Totals:
    """Adds `scale` times the policy's part of the loss."""
    gradient = jax.tree.map(lambda a, b: a + scale * b, totals.gradient, term.gradient)
    added = {name: totals.sums[name] + scale * term.loss for name in ("loss", "policy_loss")}
    return totals._replace(gradient=gradient, sums=totals.sums | added)


def _add(a: Term, b: Term, scale: Any) -> Term:
    return jax.tree.map(lambda a, b: a + scale * b, a, b)
