"""The trainer's objectives: summed gradients and metrics of one pass, as functions of the trained parameters."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from digen_jax.algorithms.algorithm import Algorithm, Matching, MatchingSamples, Samples, Velocities
from digen_jax.algorithms.losses import (
    gaussian_kl,
    mask_rows,
    velocity_kl,
    velocity_mse,
    weighted_sum,
)
from digen_jax.diffusion.noising import forward_noise, noised, noised_together
from digen_jax.diffusion.sampling import Replay, Velocity, replay
from digen_jax.diffusion.steps import ReverseStep
from digen_jax.models.family import Record
from digen_jax.parallel.accumulate import (
    OF_ADVANTAGES,
    GroupSums,
    MicroBatch,
    Policies,
    SharedInputs,
    Term,
    Totals,
)
from digen_jax.parallel.policy import Policy

if TYPE_CHECKING:  # imported if the config names it
    from digen_jax.algorithms.policy_gradient import PolicyGradient
    from digen_jax.algorithms.reward_gradient import RewardAlgorithm


def zero_totals(algorithm: Algorithm, tuned: Any) -> Totals:
    """Returns zero sums for parameters with this structure."""
    zeros = {name: jnp.zeros(()) for name in (*algorithm.terms, "weight")}
    return Totals(jax.tree.map(jnp.zeros_like, tuned), zeros)


@dataclasses.dataclass(frozen=True)
class TransitionObjective:
    """Policy-gradient loss on transitions."""

    policy: Policy
    step: ReverseStep
    algorithm: "PolicyGradient"

    def zero_group(self, tuned: Any) -> GroupSums:
        """Returns zero sums for a group whose advantages are not known yet."""
        gradient, zeros, _ = zero_totals(self.algorithm, tuned)
        none = Term(gradient, jnp.zeros(()))
        known = {name: zero for name, zero in zeros.items() if name not in OF_ADVANTAGES}
        known.pop("kl", None)
        return GroupSums(none, none, none if self.algorithm.kl_coefficient else None, known)

    def gradient(self, policies: Policies, shared: SharedInputs, micro: MicroBatch) -> Totals:
        """Returns the summed gradient and metrics of one pass.

        If the loss is decoupled and `policies.start` is None, `tuned` are the parameters at the start of the step.
        """
        base, recomputed, start = policies.base, None, None
        if self.algorithm.reads_behavior:
            recomputed = self._replay(policies.behavior, base, shared, micro)
        if policies.start is not None:
            start = self._replay(policies.start, base, shared, micro)

        def loss(tuned):
            new = self._replay(tuned, base, shared, micro)
            samples = self._samples(new, recomputed, micro)
            if self.algorithm.decoupled:
                # The old policy is the one at the start of the step; the behavior policy is the one that sampled.
                old = jax.lax.stop_gradient(new) if start is None else start
                samples = samples._replace(
                    old_log_prob=old.log_prob,
                    old_mean=None if samples.mean is None else old.mean,
                    behavior_log_prob=samples.old_log_prob,
                )
            if self.algorithm.kl_coefficient:
                samples = samples._replace(kl=self._kl(new, base, shared, micro))
            return self.algorithm.loss(samples)

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(policies.tuned)
        return Totals(gradient, sums)

    def linear(self, policies: Policies, shared: SharedInputs, micro: MicroBatch) -> GroupSums:
        """Returns the sums of one pass with advantages r_i - m and "current" old log-probabilities."""
        base = policies.base
        policy_only = dataclasses.replace(self.algorithm, adv_clip=jnp.inf, kl_coefficient=0.0)
        with_kl = self.algorithm.kl_coefficient > 0

        def terms(tuned):
            new = self._replay(tuned, base, shared, micro)
            samples = self._samples(new, None, micro)

            def loss(advantages):
                return policy_only.loss(samples._replace(advantages=advantages))

            centred, sums = loss(micro.advantages)
            plain, _ = loss(jnp.ones_like(micro.advantages))
            for name in OF_ADVANTAGES:
                del sums[name]
            if not with_kl:
                return (centred, plain), sums
            kl = self._kl(new, base, shared, micro)
            return (centred, plain, jnp.sum(micro.weight * kl)), sums

        values, pullback, sums = jax.vjp(terms, policies.tuned, has_aux=True)
        units = [[jnp.float32(i == j) for j in range(len(values))] for i in range(len(values))]
        parts = [
            Term(pullback(tuple(unit))[0], value) for unit, value in zip(units, values, strict=True)
        ]
        return GroupSums(parts[0], parts[1], parts[2] if with_kl else None, sums)

    def _replay(self, tuned, base, shared, micro):
        velocity = self.policy.velocity(tuned, base, *shared.prompts.at(micro.rows))
        return replay(velocity, micro.samples, self.step, shared.sigma_max)

    def _samples(self, new: Replay, recomputed: Replay | None, micro: MicroBatch) -> Samples:
        """Returns the inputs of the loss, except the KL."""
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
        samples = Samples(new.log_prob, old, *known, std=new.std)
        if self.algorithm.needs_means:
            samples = samples._replace(mean=new.mean, old_mean=old_mean)
        return samples._replace(trajectory=micro.image)

    def _kl(self, new: Replay, base, shared, micro):
        """Returns the KL to the reference for each sample."""
        t = micro.samples
        velocity = self.policy.reference(base, *shared.prompts.at(micro.rows))
        reference = replay(velocity, t, self.step, shared.sigma_max)
        match self.algorithm.kl:
            case "velocity":
                return velocity_mse(new.velocity, reference.velocity)
            case "gaussian_dt":
                return gaussian_kl(new.mean, reference.mean, new.std)
            case "gaussian":
                scale = self.step.diffusion(t.sigma, t.sigma_next, shared.sigma_max)
                return gaussian_kl(new.mean, reference.mean, scale)


@dataclasses.dataclass(frozen=True)
class MatchingObjective:
    """Loss on final images. `policy` has training's guidance scales.

    A pass generates the noise from each image's key.
    """

    policy: Policy
    algorithm: Matching

    def gradient(self, policies: Policies, shared: SharedInputs, micro: MicroBatch) -> Totals:
        """Returns the summed gradient and metrics of one pass."""
        base, samples = policies.base, self._samples(micro)
        prompts = shared.prompts.at(jnp.repeat(micro.rows, self.algorithm.images_per_sample))

        def velocity(parameters: Any) -> Array:
            policy = self.policy.velocity(parameters, base, *prompts)
            return self._at(policy, samples)

        def fixed(parameters: Any) -> Array | None:
            return None if parameters is None else velocity(parameters)

        reference = None
        if self.algorithm.reads_reference:
            reference = self._at(self.policy.reference(base, *prompts), samples)
        behavior, copy = fixed(policies.behavior), fixed(policies.copy)

        def loss(tuned: Any) -> tuple[Array, dict[str, Array]]:
            v = Velocities(velocity(tuned), behavior, copy, reference)
            terms = self.algorithm.loss(samples, v)
            sums = {name: weighted_sum(micro.weight, term) for name, term in terms.items()}
            return sums["loss"], sums | {"weight": jnp.sum(micro.weight)}

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(policies.tuned)
        return Totals(gradient, sums)

    def _samples(self, micro: MicroBatch) -> MatchingSamples:
        """Returns the network's inputs and targets."""
        x0, keys, draws, sigma = cast(Any, micro.samples)
        trained = micro.weight > 0
        # Mask before the network: infinite values in its input would not get a zero gradient.
        (x0,) = mask_rows(trained, x0)
        together = self.algorithm.images_per_sample > 1 and self.algorithm.shares_noise
        noise = forward_noise(keys, draws, x0.shape[2 if together else 1 :])
        given = (noised_together if together else noised)(x0, noise, sigma)
        return MatchingSamples(x0, given.x, given.target, sigma, micro.advantages, trained)

    def _at(self, policy: Velocity, samples: MatchingSamples) -> Float[Array, "n *shape"]:
        """Evaluates a policy's velocities. The images of a sample are adjacent in the batch."""
        x, sigma, together = samples.x, samples.sigma, self.algorithm.images_per_sample
        if together == 1:
            return policy(x, sigma)
        return policy(x.reshape(-1, *x.shape[2:]), jnp.repeat(sigma, together)).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class DifferentiableRewards:
    """Rewards of latents, with gradient.

    Attributes:
      scorers: Networks of the rewards, each with the reward's weight.
      params: Parameters of the decoder, and a tuple of those of the rewards; replicated on a mesh.
    """

    scorers: tuple[tuple[Any, float], ...]  # of `reward_model.Scorer`
    params: tuple[Any, tuple[Any, ...]]

    def tokenize(self, records: Sequence[Record]) -> tuple[Int[np.ndarray, "p n"], ...]:
        """Returns the token ids of prompts for each reward."""
        prompts = [record["prompt"] for record in records]
        return tuple(scorer.tokenize(prompts) for scorer, _ in self.scorers)

    def placed(self, sharding: Any) -> "DifferentiableRewards":
        """Returns the rewards with their parameters, or shapes, replicated on another mesh."""
        params = jax.device_put(self.params, sharding)
        return dataclasses.replace(self, params=params)


@dataclasses.dataclass(frozen=True)
class RewardObjective:
    """Negative weighted sum of differentiable rewards, plus the KL of the steps that have a gradient."""

    policy: Policy
    algorithm: "RewardAlgorithm"
    rewards: DifferentiableRewards

    def gradient(self, policies: Policies, shared: SharedInputs, micro: MicroBatch) -> Totals:
        """Returns the summed gradient and metrics of one pass."""
        prompts, base = shared.prompts.at(micro.rows), policies.base
        tokens = [ids[micro.rows] for ids in shared.tokens]
        # Mask before the network: infinite values in its input would not get a zero gradient.
        (states,) = mask_rows(micro.weight > 0, cast(Any, micro.samples).x0)
        keys, sigmas = cast(Any, micro.samples).keys, cast(Array, shared.sigmas)
        coefficient = self.algorithm.kl_coefficient
        reference = self.policy.reference(base, *prompts) if coefficient else None

        # The decoder's and the rewards' activations are computed again in the backward pass.
        @jax.checkpoint
        def score(latents: Array) -> Array:
            decoder, each = policies.scoring
            images = self.policy.family.decode(decoder, latents)[:, 0]
            scores = [
                weight * scorer.score(params, images, ids)
                for (scorer, weight), params, ids in zip(
                    self.rewards.scorers, each, tokens, strict=True
                )
            ]
            return jnp.sum(jnp.stack(scores), axis=0)

        def loss(tuned: Any) -> tuple[Array, dict[str, Array]]:
            velocity = self.policy.velocity(tuned, base, *prompts)

            def evaluate(x: Array, sigma: Array) -> tuple[Array, Array]:
                v = velocity(x, sigma)
                if reference is None:
                    return v, jnp.zeros(len(x))
                return v, velocity_kl(v, reference(x, sigma), sigma)

            final = self.algorithm.final(evaluate, states, sigmas, keys)
            reward = score(self.policy.family.complete(final.latents, prompts.conditioning))
            weighted = reward if final.weight is None else final.weight * reward
            terms = {"loss": coefficient * final.kl - weighted, "trained_reward": reward}
            terms |= {"kl": final.kl} if coefficient else {}
            sums = {name: weighted_sum(micro.weight, term) for name, term in terms.items()}
            return sums["loss"], sums | {"weight": jnp.sum(micro.weight)}

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(policies.tuned)
        return Totals(gradient, sums)


Objective = TransitionObjective | MatchingObjective | RewardObjective


def make_objective(
    policy: Policy,
    step: ReverseStep,
    algorithm: Algorithm,
    rewards: DifferentiableRewards | None = None,
) -> Objective:
    """Returns the objective of an algorithm; `step` is the sampler's step."""
    if rewards is not None:
        return RewardObjective(policy, cast(Any, algorithm), rewards)
    if algorithm.objective == "transitions":
        return TransitionObjective(policy, step, algorithm)
    return MatchingObjective(policy, cast(Any, algorithm))
