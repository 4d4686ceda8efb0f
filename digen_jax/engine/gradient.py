"""Gradients of passes over a fragment, and their sum: one scan, its gradient taken inside the body."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from digen_jax.algorithms.kl import gaussian_kl, velocity_mse
from digen_jax.algorithms.policy_gradient import PolicyGradient, Samples, policy_gradient_loss
from digen_jax.engine.packing import MicroBatch, Shared, merged, merged_on_device
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.policy import Policy
from digen_jax.flow.sampling import Replay, replay
from digen_jax.flow.steps import Step

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
    """The policy gradient's loss as a function of parameters. `base` is the policy's (see `Policy`)."""

    policy: Policy
    step: Step
    algorithm: PolicyGradient

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
        self,
        tuned: Any,
        base: Any,
        behaviour: Any,
        proximal: Any,
        shared: Shared,
        micro: MicroBatch,
    ) -> Totals:
        """The summed gradient and metrics of one pass.

        `behaviour` sampled the transitions; read only where log-probabilities are recomputed. `proximal`
        are the parameters at the step's start, None: `tuned`; read only where the loss is decoupled.
        """
        recomputed = start = None
        if self.algorithm.old_log_probs == "recomputed":
            recomputed = self._replay(behaviour, base, shared, micro)
        if self.algorithm.decoupled and proximal is not None:
            start = self._replay(proximal, base, shared, micro)

        def loss(tuned):
            new = self._replay(tuned, base, shared, micro)
            samples = self._samples(new, recomputed, micro)
            if self.algorithm.decoupled:
                samples = _decoupled(
                    samples, jax.lax.stop_gradient(new) if start is None else start
                )
            if self.algorithm.kl_coefficient:
                samples = samples._replace(kl=self._kl(new, base, shared, micro))
            return policy_gradient_loss(self.algorithm, samples)

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(tuned)
        return Totals(gradient, sums)

    def linear(self, tuned: Any, base: Any, shared: Shared, micro: MicroBatch) -> GroupSums:
        """The sums of one pass with r_i - m for advantages; old log-probabilities are "current"."""
        policy_only = dataclasses.replace(self.algorithm, adv_clip=jnp.inf, kl_coefficient=0.0)
        with_kl = self.algorithm.kl_coefficient > 0

        def terms(tuned):
            new = self._replay(tuned, base, shared, micro)
            samples = self._samples(new, None, micro)

            def loss(advantages):
                return policy_gradient_loss(policy_only, samples._replace(advantages=advantages))

            centred, sums = loss(micro.advantages)
            plain, _ = loss(jnp.ones_like(micro.advantages))
            for name in OF_ADVANTAGES:
                del sums[name]
            if not with_kl:
                return (centred, plain), sums
            kl = self._kl(new, base, shared, micro)
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
        return replay(velocity, micro.samples, self.step, shared.sigma_max)

    def _samples(self, new: Replay, recomputed: Replay | None, micro: MicroBatch) -> Samples:
        """What the loss reads, the KL apart."""
        t = micro.samples
        match self.algorithm.old_log_probs:
            case "rollout":
                old, old_mean = t.log_prob, t.mean
            case "recomputed":
                old, old_mean = recomputed.log_prob, recomputed.mean
            case "current":
                old, old_mean = jax.lax.stop_gradient((new.log_prob, new.mean))
        dt = t.sigma_next - t.sigma
        known = t.log_prob, micro.advantages, micro.weight, t.sigma, dt
        samples = Samples(new.log_prob, old, *known)
        if self.algorithm.needs_means:
            samples = samples._replace(mean=new.mean, old_mean=old_mean, std=new.std)
        return samples._replace(trajectory=micro.image)

    def _kl(self, new: Replay, base, shared, micro):
        """Of each sample, to the reference."""
        conditioning = jax.tree.map(lambda c: c[micro.rows], shared.conditioning)
        velocity = self.policy.reference(base, conditioning, shared.null)
        t = micro.samples
        reference = replay(velocity, t, self.step, shared.sigma_max)
        match self.algorithm.kl:
            case "velocity":
                return velocity_mse(new.velocity, reference.velocity)
            case "gaussian_dt":
                return gaussian_kl(new.mean, reference.mean, new.std)
            case "gaussian":
                scale = self.step.diffusion(t.sigma, t.sigma_next, shared.sigma_max)
                return gaussian_kl(new.mean, reference.mean, scale)


def _decoupled(samples: Samples, start: Replay) -> Samples:
    """The same with the policy at the step's start for the old one; what sampled stays, for its weight."""
    old_mean = None if samples.mean is None else start.mean
    return samples._replace(
        old_log_prob=start.log_prob, old_mean=old_mean, behaviour_log_prob=samples.old_log_prob
    )


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
