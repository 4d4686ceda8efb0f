"""The gradient of a pass over final images at noise levels of the forward process."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.algorithms.awm import AWM, awm_loss, matching_log_prob
from digen_jax.algorithms.demands import ForwardProcess, images_of_sample, needs_reference
from digen_jax.algorithms.diffusion_nft import DiffusionNFT, diffusion_nft_loss
from digen_jax.algorithms.preference import DiffusionDPO, diffusion_dpo_loss
from digen_jax.algorithms.samples import blanked, weighted_sum
from digen_jax.engine.gradient import Totals
from digen_jax.engine.packing import MicroBatch, Shared
from digen_jax.engine.policy import Policy
from digen_jax.flow.noising import Noised, forward_noise, noised, noised_pairs
from digen_jax.flow.sampling import Velocity


@dataclasses.dataclass(frozen=True)
class MatchingObjective:
    """The loss of DiffusionNFT, AWM or diffusion DPO as a function of parameters.

    `base` is the policy's (see `Policy`), whose guidances are those of training. The noise is drawn in the
    pass, from each image's key.
    """

    policy: Policy
    algorithm: ForwardProcess

    def no_totals(self, tuned: Any) -> Totals:
        """Sums of nothing, for parameters such as these."""
        zeros = {name: jnp.zeros(()) for name in (*self.algorithm.terms, "weight")}
        return Totals(jax.tree.map(jnp.zeros_like, tuned), zeros)

    def gradient(
        self, tuned: Any, base: Any, behaviour: Any, copy: Any, shared: Shared, micro: MicroBatch
    ) -> Totals:
        """The summed gradient and metrics of one pass.

        `behaviour` sampled the images, `copy` is the slow copy; None where the algorithm reads none.
        """
        trained = micro.weight > 0
        # Before the network sees them: what is infinite in it has no gradient of 0.
        (x0,) = blanked(trained, micro.samples.x0)
        given = self._noised(micro, x0)
        rows = jnp.repeat(micro.rows, images_of_sample(self.algorithm))
        conditioning = jax.tree.map(lambda c: c[rows], shared.conditioning)

        def velocity(parameters: Any) -> Array:
            policy = self.policy.velocity(parameters, base, conditioning, shared.null)
            return self._at(policy, given.x, micro.samples.sigma)

        def fixed(parameters: Any) -> Array | None:
            return None if parameters is None else velocity(parameters)

        reference = None
        if needs_reference(self.algorithm):
            policy = self.policy.reference(base, conditioning, shared.null)
            reference = self._at(policy, given.x, micro.samples.sigma)
        others = fixed(behaviour), fixed(copy), reference

        def loss(tuned: Any) -> tuple[Array, dict[str, Array]]:
            terms = self._terms(velocity(tuned), given, x0, others, micro)
            sums = {name: weighted_sum(micro.weight, term) for name, term in terms.items()}
            return sums["loss"], sums | {"weight": jnp.sum(micro.weight)}

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(tuned)
        return Totals(gradient, sums)

    def _noised(self, micro: MicroBatch, x0: Array) -> Noised:
        """What the network is given, and what it should answer."""
        _, keys, draws, sigma = micro.samples
        pairs = images_of_sample(self.algorithm) == 2
        noise = forward_noise(keys, draws, x0.shape[2 if pairs else 1 :])
        return (noised_pairs if pairs else noised)(x0, noise, sigma)

    def _at(self, policy: Velocity, x: Array, sigma: Float[Array, "n"]) -> Array:
        """A policy's velocities at x; of pairs one by one, each image beside the other."""
        if images_of_sample(self.algorithm) == 1:
            return policy(x, sigma)
        return policy(x.reshape(-1, *x.shape[2:]), jnp.repeat(sigma, 2)).reshape(x.shape)

    def _terms(
        self,
        v: Array,
        given: Noised,
        x0: Array,
        others: tuple[Array | None, Array | None, Array | None],
        micro: MicroBatch,
    ) -> dict[str, Float[Array, "n"]]:
        """The algorithm's terms of each sample."""
        settings, sigma, trained = self.algorithm, micro.samples.sigma, micro.weight > 0
        behaviour, copy, reference = others
        match settings:
            case DiffusionNFT():
                return diffusion_nft_loss(
                    settings,
                    x0,
                    given.x,
                    sigma,
                    v,
                    behaviour,
                    reference,
                    micro.advantages,
                    trained,
                )
            case AWM():
                old = None
                if behaviour is not None:
                    old = matching_log_prob(settings, behaviour, given.target, sigma)
                return awm_loss(
                    settings,
                    v,
                    given.target,
                    sigma,
                    micro.advantages,
                    trained,
                    old,
                    reference,
                    copy,
                )
            case DiffusionDPO():
                return diffusion_dpo_loss(settings, v, reference, given.target, trained)
