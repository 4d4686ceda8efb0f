"""Gradients of passes over a fragment, and their sum: one scan, its gradient taken inside the body."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from digen_jax.algorithms.flow_grpo import FlowGRPO, flow_grpo_loss, gaussian_kl
from digen_jax.flow.sampling import replay
from digen_jax.flow.steps import Step
from digen_jax.runtime.packing import MicroBatch, Shared, merged, merged_on_device
from digen_jax.runtime.placement import DeviceGroup
from digen_jax.runtime.policy import Policy

Metrics = dict[str, Float[Array, ""]]

OF_ADVANTAGES = "loss", "policy_loss"  # the sums that the advantages enter


class Term(NamedTuple):
    """A part of the loss, summed over samples, and its gradient."""

    gradient: Any
    loss: Float[Array, ""]


class Totals(NamedTuple):
    """Sums over all samples so far; divided once, at the update.

    `unscaled` is what groups that were trained before the step's rewards were known still have to
    get divided by the std of these: see `early`.
    """

    gradient: Any
    sums: Metrics
    unscaled: Term | None = None


class GroupSums(NamedTuple):
    """Of a group whose advantages are not known yet, with g_i the gradient of image i for advantage 1."""

    centred: Term  # sum of (r_i - m) g_i, m the mean of the rewards so far
    plain: Term  # sum of g_i
    kl: Term | None  # without its coefficient; None where there is none
    sums: Metrics


@dataclasses.dataclass(frozen=True)
class Objective:
    """The algorithm's loss as a function of parameters. `base` is the policy's (see `Policy`)."""

    policy: Policy
    step: Step
    algorithm: FlowGRPO

    def no_totals(self, tuned: Any) -> Totals:
        """Sums of nothing, for parameters such as these."""
        zeros = {name: jnp.zeros(()) for name in self.algorithm.sums}
        return Totals(jax.tree.map(jnp.zeros_like, tuned), zeros)

    def no_group(self, tuned: Any) -> GroupSums:
        """The same for a group whose advantages are not known yet."""
        gradient, zeros = self.no_totals(tuned)[:2]
        none = Term(gradient, jnp.zeros(()))
        known = {name: zero for name, zero in zeros.items() if name not in OF_ADVANTAGES}
        known.pop("kl", None)
        return GroupSums(none, none, none if self.algorithm.kl_coefficient else None, known)

    def gradient(
        self, tuned: Any, base: Any, behaviour: Any, shared: Shared, micro: MicroBatch
    ) -> Totals:
        """The summed gradient and metrics of one pass.

        `behaviour` sampled the transitions; read only where log-probabilities are recomputed.
        """
        old_log_probs, stored = self.algorithm.old_log_probs, micro.transitions.log_prob
        if old_log_probs == "recomputed":
            recomputed = self._replay(behaviour, base, shared, micro).log_prob

        def loss(tuned):
            new = self._replay(tuned, base, shared, micro)
            if old_log_probs == "recomputed":
                old = recomputed
            else:
                old = stored if old_log_probs == "rollout" else jax.lax.stop_gradient(new.log_prob)
            kl = self._kl(new.mean, base, shared, micro) if self.algorithm.kl_coefficient else None
            return flow_grpo_loss(
                self.algorithm, new.log_prob, old, micro.advantages, micro.weight, kl, stored
            )

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(tuned)
        return Totals(gradient, sums)

    def linear(self, tuned: Any, base: Any, shared: Shared, micro: MicroBatch) -> GroupSums:
        """The sums of one pass with r_i - m for advantages; old log-probabilities are "current"."""
        policy_only = dataclasses.replace(self.algorithm, adv_clip=jnp.inf, kl_coefficient=0.0)
        with_kl = self.algorithm.kl_coefficient > 0

        def terms(tuned):
            new = self._replay(tuned, base, shared, micro)
            old, stored = jax.lax.stop_gradient(new.log_prob), micro.transitions.log_prob

            def loss(advantages):
                return flow_grpo_loss(
                    policy_only, new.log_prob, old, advantages, micro.weight, None, stored
                )

            centred, sums = loss(micro.advantages)
            plain, _ = loss(jnp.ones_like(micro.advantages))
            for name in OF_ADVANTAGES:
                del sums[name]
            if not with_kl:
                return (centred, plain), sums
            kl = self._kl(new.mean, base, shared, micro)
            return (centred, plain, jnp.sum(micro.weight * kl)), sums

        values, pullback, sums = jax.vjp(terms, tuned, has_aux=True)
        units = [[jnp.float32(i == j) for j in range(len(values))] for i in range(len(values))]
        parts = [
            Term(*pullback(tuple(unit)), value) for unit, value in zip(units, values, strict=True)
        ]
        return GroupSums(parts[0], parts[1], parts[2] if with_kl else None, sums)

    def _replay(self, tuned, base, shared, micro):
        conditioning = jax.tree.map(lambda c: c[micro.rows], shared.conditioning)
        velocity = self.policy.velocity(tuned, base, conditioning, shared.null)
        return replay(velocity, micro.transitions, self.step, shared.sigma_max)

    def _kl(self, mean, base, shared, micro):
        conditioning = jax.tree.map(lambda c: c[micro.rows], shared.conditioning)
        reference = self.policy.reference(base, conditioning, shared.null)
        t = micro.transitions
        old = replay(reference, t, self.step, shared.sigma_max)
        scale = self.step.diffusion(t.sigma, t.sigma_next, shared.sigma_max)
        return gaussian_kl(mean, old.mean, scale)


def sum_passes(
    gradient: Callable[..., Any],
    group: DeviceGroup,
    parameters: tuple[Any, ...],
    shared: Shared,
    micros: MicroBatch,
    totals: Any,
    layout: Any,
) -> Any:
    """`totals` + the sum over all passes of gradient(*parameters, shared, pass): memory is that of one.

    Where the parameters are whole on every device, each adds up its own share and the sums are
    reduced once, at the end; else XLA reduces in every pass. `layout` holds the totals' shardings.
    """

    def scan(parameters, shared, micros, totals, merge, laid_out):
        def body(totals, micro):
            new = gradient(*parameters, shared, merge(micro))
            return laid_out(jax.tree.map(jnp.add, totals, new)), None

        return jax.lax.scan(body, totals, micros)[0]

    def on_device(parameters, shared, micros, totals):
        first = jax.lax.axis_index(axes) == 0
        mine = jax.tree.map(lambda a: jnp.where(first, a, 0), totals)
        mine = scan(parameters, shared, micros, mine, merged_on_device, lambda sums: sums)
        return jax.lax.psum(mine, axes)

    axes, whole = group.mesh.axis_names, PartitionSpec()
    if group.mesh.size == 1 or not all(map(group.holds_whole, parameters)):
        return scan(
            parameters,
            shared,
            micros,
            totals,
            lambda micro: merged(micro, group),
            lambda sums: jax.lax.with_sharding_constraint(sums, layout),
        )
    # Unchecked, as the check would make every gradient of whole parameters a sum over all devices.
    return jax.shard_map(
        on_device,
        mesh=group.mesh,
        in_specs=(whole, whole, group.passes(1).spec, whole),
        out_specs=whole,
        check_vma=False,
    )(parameters, shared, micros, totals)
