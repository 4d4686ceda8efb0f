"""The trainer's objectives: sums of gradients and metrics over passes of a chunk."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.engine.packing import MicroBatch, Shared

Metrics = dict[str, Float[Array, ""]]


class Term(NamedTuple):
    """A part of the loss, summed over samples, and its gradient."""

    gradient: Any
    loss: Float[Array, ""]


class Totals(NamedTuple):
    """Sums over all samples so far; divided once, at the update.

    `unscaled` is the part of the groups that were trained before the step's rewards were known; it is
    divided by their std later: see `early`.
    """

    gradient: Any
    sums: Metrics
    unscaled: Term | None = None


class GroupSums(NamedTuple):
    """Sums of a group whose advantages are not known yet; g_i is the gradient of image i for advantage 1."""

    centred: Term  # sum of (r_i - m) g_i, m the mean of the rewards so far
    plain: Term  # sum of g_i
    kl: Term | None  # without its coefficient; None: no KL
    sums: Metrics


class Policies(NamedTuple):
    """Other parameters than those being trained; None: the algorithm does not read them, or they are the same.

    Attributes:
      behaviour: the parameters that sampled.
      start: the parameters at the step's start.
      copy: the algorithm's slow copy.
    """

    behaviour: Any = None
    start: Any = None
    copy: Any = None


@runtime_checkable
class Objective(Protocol):
    """A loss as a function of parameters. `base` is the policy's (see `Policy`)."""

    def no_totals(self, tuned: Any) -> Totals:
        """Zero sums, for parameters of this structure."""

    def gradient(
        self, tuned: Any, base: Any, policies: Policies, shared: Shared, micro: MicroBatch
    ) -> Totals:
        """The summed gradient and metrics of one pass."""


@runtime_checkable
class LinearObjective(Objective, Protocol):
    """An objective that is linear in the advantages, so that groups may train before these are known."""

    def no_group(self, tuned: Any) -> GroupSums:
        """Zero sums for a group."""

    def linear(self, tuned: Any, base: Any, shared: Shared, micro: MicroBatch) -> GroupSums:
        """The sums of one pass with r_i - m as advantages."""


def no_totals(terms: tuple[str, ...], tuned: Any) -> Totals:
    """Zero sums, for parameters of this structure."""
    zeros = {name: jnp.zeros(()) for name in (*terms, "weight")}
    return Totals(jax.tree.map(jnp.zeros_like, tuned), zeros)
