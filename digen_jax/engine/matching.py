"""The gradient of a pass over final images at noise levels of the forward process."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.algorithms.algorithm import Matching, MatchingSamples, Velocities
from digen_jax.algorithms.samples import blanked, weighted_sum
from digen_jax.engine.objective import Policies, Totals, no_totals
from digen_jax.engine.packing import MicroBatch, Shared
from digen_jax.engine.policy import Policy, of_rows
from digen_jax.flow.noising import forward_noise, noised, noised_pairs
from digen_jax.flow.sampling import Velocity


@dataclasses.dataclass(frozen=True)
class MatchingObjective:
    """An algorithm's loss of final images as a function of parameters.

    `base` is the policy's (see `Policy`), with training's guidances. The pass draws the noise from each
    image's key.
    """

    policy: Policy
    algorithm: Matching

    def no_totals(self, tuned: Any) -> Totals:
        """Zero sums, for parameters of this structure."""
        return no_totals(self.algorithm.terms, tuned)

    def gradient(
        self, tuned: Any, base: Any, policies: Policies, shared: Shared, micro: MicroBatch
    ) -> Totals:
        """The summed gradient and metrics of one pass."""
        samples = self._samples(micro)
        rows = jnp.repeat(micro.rows, self.algorithm.images_of_sample)
        conditioning = jax.tree.map(lambda c: c[rows], shared.conditioning)
        null = of_rows(shared.null, rows)

        def velocity(parameters: Any) -> Array:
            policy = self.policy.velocity(parameters, base, conditioning, null)
            return self._at(policy, samples)

        def fixed(parameters: Any) -> Array | None:
            return None if parameters is None else velocity(parameters)

        reference = None
        if self.algorithm.reads_reference:
            reference = self._at(self.policy.reference(base, conditioning, null), samples)
        behaviour, copy = fixed(policies.behaviour), fixed(policies.copy)

        def loss(tuned: Any) -> tuple[Array, dict[str, Array]]:
            v = Velocities(velocity(tuned), behaviour, copy, reference)
            terms = self.algorithm.loss(samples, v)
            sums = {name: weighted_sum(micro.weight, term) for name, term in terms.items()}
            return sums["loss"], sums | {"weight": jnp.sum(micro.weight)}

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(tuned)
        return Totals(gradient, sums)

    def _samples(self, micro: MicroBatch) -> MatchingSamples:
        """The network's inputs and targets."""
        x0, keys, draws, sigma = micro.samples
        trained = micro.weight > 0
        # Before the network sees them: infinite values in its input would not get a zero gradient.
        (x0,) = blanked(trained, x0)
        pairs = self.algorithm.images_of_sample == 2
        noise = forward_noise(keys, draws, x0.shape[2 if pairs else 1 :])
        given = (noised_pairs if pairs else noised)(x0, noise, sigma)
        return MatchingSamples(x0, given.x, given.target, sigma, micro.advantages, trained)

    def _at(self, policy: Velocity, samples: MatchingSamples) -> Float[Array, "n *shape"]:
        """A policy's velocities; pairs are evaluated image by image, with the two images next to each other."""
        x, sigma = samples.x, samples.sigma
        if self.algorithm.images_of_sample == 1:
            return policy(x, sigma)
        return policy(x.reshape(-1, *x.shape[2:]), jnp.repeat(sigma, 2)).reshape(x.shape)
