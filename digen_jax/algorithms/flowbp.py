"""LeapAlign (arXiv 2604.15311) and FlowBP (arXiv 2606.11075): surrogates of the path of a reward's gradient.

The decoded latents have the values of the sampled ones. Only some velocities of the path to them have a gradient, each
computed from the sampled latents. The formulas are those of RuoyuWang-2077/FlowBP (flowbp/trainers/sd35, 93b220a),
whose path is a sum of velocities times the lengths of their steps, so that only the steps with a gradient matter here.
There all images of a batch have the same steps; here each image draws its own.
"""

import dataclasses
from typing import Annotated, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Key

from digen_jax.algorithms.reward_gradient import (
    Evaluate,
    Final,
    RewardAlgorithm,
    check_at_most,
    expand,
)
from digen_jax.diffusion.noising import times_keys
from digen_jax.errors import NonNegativeFloat, PositiveFloat, PositiveInt, Range, Share


class Drawn(NamedTuple):
    """Steps with a gradient of n images: a steps and, for some algorithms, an anchor, which is one step more."""

    steps: Int[Array, "n a"]
    anchor: Int[Array, "n"] | None = None


class Surrogate(NamedTuple):
    """Factors of the velocities of these steps in the path to the final latents, and the weight of each image."""

    steps: Float[Array, "n a"]
    anchor: Float[Array, "n"] | None = None
    anchor_gradient: float = 0.0  # factor of the gradient through the anchor's latents
    image: Float[Array, "n"] | None = None  # in the loss; None means 1


@dataclasses.dataclass(frozen=True)
class Connected(RewardAlgorithm):
    """Algorithms with the values of the sampled latents and the gradient of a surrogate.

    A step before the anchor also moves the latents from which the anchor's velocity is computed.
    """

    def draw(self, keys: Key[Array, "n"], steps: int) -> Drawn:
        """Draws the steps of each image."""
        raise NotImplementedError

    def surrogate(
        self, drawn: Drawn, states: Float[Array, "n t ..."], sigmas: Float[Array, "t"]
    ) -> Surrogate:
        """Returns the factors of the drawn steps."""
        raise NotImplementedError

    def final(
        self,
        evaluate: Evaluate,
        states: Float[Array, "n t ..."],
        sigmas: Float[Array, "t"],
        keys: Key[Array, "n"],
    ) -> Final:
        """Returns the sampled latents with the gradient of the surrogate."""
        drawn, rows = self.draw(keys, len(sigmas) - 1), jnp.arange(len(keys))
        factors = self.surrogate(drawn, states, sigmas)

        def move(factor, v):
            """Zeros with the gradient of a part of the path."""
            return expand(factor, v) * (v - jax.lax.stop_gradient(v))

        def one(steps):
            return evaluate(states[rows, steps], sigmas[steps])

        v, kl = jax.lax.map(one, drawn.steps.T)
        moves = jax.vmap(move)(factors.steps.T, v)
        x = states[:, -1] + jnp.sum(moves, axis=0)
        if drawn.anchor is None:
            return Final(x, jnp.mean(kl, axis=0), factors.image)
        early = expand(drawn.anchor > drawn.steps.T, moves)
        to_anchor = jnp.sum(jnp.where(early, moves, 0), axis=0)
        nested = states[rows, drawn.anchor] + factors.anchor_gradient * to_anchor
        v, kl_of_anchor = evaluate(nested, sigmas[drawn.anchor])
        kl = (jnp.sum(kl, axis=0) + kl_of_anchor) / (len(kl) + 1)
        return Final(x + move(factors.anchor, v), kl, factors.image)


@dataclasses.dataclass(frozen=True)
class LeapAlign(Connected):
    """LeapAlign: two leaps, from a random step to the anchor, a later one, and from there to the image.

    The loss of an image has the weight 1 / (max(d_1, tau) + max(d_2, tau)), where d_1 and d_2 are the mean absolute
    differences between where the leaps lead and the sampled latents.
    """

    name: ClassVar[str] = "leap_align"
    gradient_steps: ClassVar = 2  # type: ignore[misc]

    # factor of the gradient through the latents from which the second leap's velocity is computed
    anchor_gradient: Share = 0.3
    # least distance between a leap and the sampled latents
    tau: PositiveFloat = 0.1

    def check_steps(self, steps: int) -> None:
        """Raises ValueError if the sampler has one step."""
        if steps < 2:
            raise ValueError(
                f"name is {self.name!r}, but config.sampler.steps is {steps}: set that to 2 or more"
            )

    def draw(self, keys: Key[Array, "n"], steps: int) -> Drawn:
        """Draws two steps without replacement; the later one is the anchor."""
        first, anchor = _two_steps(keys, steps)
        return Drawn(first[:, None], anchor)

    def surrogate(
        self, drawn: Drawn, states: Float[Array, "n t ..."], sigmas: Float[Array, "t"]
    ) -> Surrogate:
        """Returns the lengths of the leaps and the weight of each image."""
        first, anchor = drawn.steps[:, 0], cast(Array, drawn.anchor)
        last, at = jnp.full(len(first), len(sigmas) - 1), jnp.arange(len(first))

        def distance(start, end):
            """Mean absolute difference between a leap by the sampled velocity and the latents it leads to."""
            x, following, target = states[at, start], states[at, start + 1], states[at, end]
            share = (sigmas[end] - sigmas[start]) / (sigmas[start + 1] - sigmas[start])
            leap = x + expand(share, x) * (following - x)
            return jnp.mean(jnp.abs(leap - target), axis=tuple(range(1, x.ndim)))

        leaps = (first, anchor), (anchor, last)
        one, other = (jnp.maximum(distance(*leap), self.tau) for leap in leaps)
        lengths = [sigmas[end] - sigmas[start] for start, end in leaps]
        return Surrogate(lengths[0][:, None], lengths[1], self.anchor_gradient, 1 / (one + other))


@dataclasses.dataclass(frozen=True)
class FlowBpSparse(Connected):
    """FlowBP-Sparse: some steps, drawn without replacement, and no anchor."""

    name: ClassVar[str] = "flowbp_sparse"

    # steps that have a gradient
    gradient_steps: PositiveInt = 4
    # step i of 1, 2, ... is drawn with a probability proportional to i ** late_bias
    late_bias: NonNegativeFloat = 1.0
    # 1 multiplies the gradients by the length of the path over that of these steps; 0 does not
    rescale: Share = 0.5

    def check_steps(self, steps: int) -> None:
        """Raises ValueError if the sampler has fewer steps."""
        check_at_most("gradient_steps", self.gradient_steps, steps)

    def draw(self, keys: Key[Array, "n"], steps: int) -> Drawn:
        """Draws steps without replacement."""
        scores = _scores(keys, jnp.arange(steps), self.late_bias)
        return Drawn(jax.lax.top_k(scores, self.gradient_steps)[1])

    def surrogate(
        self, drawn: Drawn, states: Float[Array, "n t ..."], sigmas: Float[Array, "t"]
    ) -> Surrogate:
        """Returns the rescaled lengths of the steps."""
        lengths = jnp.diff(sigmas)[drawn.steps]
        share = jnp.sum(lengths, axis=1, keepdims=True) / (sigmas[-1] - sigmas[0])
        return Surrogate((1 + self.rescale * (1 / share - 1)) * lengths)


@dataclasses.dataclass(frozen=True)
class FlowBpBridge(Connected):
    """FlowBP-Bridge: some steps before a random anchor move its latents, the anchor and some after it the image."""

    name: ClassVar[str] = "flowbp_bridge"

    # steps that have a gradient: the anchor, and at least one before it
    gradient_steps: Annotated[int, Range(2)] = 5
    # step i of 1, 2, ... on either side of the anchor is drawn with a probability proportional to i ** late_bias
    late_bias: NonNegativeFloat = 4.0
    # factor of the gradient through the latents from which the anchor's velocity is computed
    anchor_gradient: Share = 0.5

    def check_steps(self, steps: int) -> None:
        """Raises ValueError if the sampler has fewer steps."""
        check_at_most("gradient_steps", self.gradient_steps, steps)

    def draw(self, keys: Key[Array, "n"], steps: int) -> Drawn:
        """Draws the anchor, the later one of two steps, and the steps on both of its sides."""
        at, anchors = jnp.arange(steps), _two_steps(keys, steps)[1]
        before = jnp.asarray([self.before_anchor(anchor, steps) for anchor in range(steps)])

        def draw(key, j):
            early = at < j
            scores = _scores(key[None], jnp.where(early, at, at - j - 1), self.late_bias)[0]
            # The rank of each step on its side of the anchor.
            higher = (scores[None] > scores[:, None]) & (early[None] == early[:, None])
            rank = jnp.sum(higher & (at != j)[None], axis=1)
            count = jnp.where(early, before[j], self.gradient_steps - 1 - before[j])
            chosen = (rank < count) & (at != j)
            return jnp.nonzero(chosen, size=self.gradient_steps - 1)[0]

        return Drawn(jax.vmap(draw)(keys, anchors), anchors)

    def surrogate(
        self, drawn: Drawn, states: Float[Array, "n t ..."], sigmas: Float[Array, "t"]
    ) -> Surrogate:
        """Returns the lengths of the steps."""
        lengths = jnp.diff(sigmas)
        anchor = lengths[cast(Array, drawn.anchor)]
        return Surrogate(lengths[drawn.steps], anchor, self.anchor_gradient)

    def before_anchor(self, anchor: int, steps: int) -> int:
        """Returns the number of steps before the anchor: their share of all, and at least one on each side."""
        count, after = self.gradient_steps, steps - anchor
        first = min(max(round(count * anchor / steps), 1), anchor)
        return max(min(first, count - 1), count - after)


@dataclasses.dataclass(frozen=True)
class FlowBpLagrange(Connected):
    """FlowBP-Lagrange: two leaps by several velocities each, whose weights integrate their interpolating polynomial.

    These steps are evenly spaced, and the first one and the next one have a gradient. The lengths of the schedule after
    the anchor, between the leaps' starts and before the first one are drawn from a Dirichlet distribution. The loss of
    an image is weighted as in LeapAlign.
    """

    name: ClassVar[str] = "flowbp_lagrange"
    gradient_steps: ClassVar = 4  # type: ignore[misc]

    # velocities of a leap, of which at most two have a gradient
    order: PositiveInt = 3
    # factor of the gradient of the second one
    second_gradient: Share = 0.25
    # factor of the gradient through the latents from which the anchor's velocity is computed
    anchor_gradient: Share = 0.1
    # least distance between a leap and the sampled latents
    tau: PositiveFloat = 0.2
    # concentration of the Dirichlet distribution for the part of the schedule after the anchor
    after_anchor: PositiveFloat = 2.5
    # the same for the part between the starts of the leaps
    between: PositiveFloat = 6.0
    # the same for the part before the first leap
    before_first: PositiveFloat = 2.0
    # the anchor is one of this number of last steps
    last_steps: Annotated[int, Range(2)] = 10

    def check_steps(self, steps: int) -> None:
        """Raises ValueError if the sampler has fewer than three steps."""
        if steps < 3:
            raise ValueError(
                f"name is {self.name!r}, but config.sampler.steps is {steps}: set that to 3 or more"
            )

    def draw(self, keys: Key[Array, "n"], steps: int) -> Drawn:
        """Draws the two steps at which a leap starts, and returns the second step of each leap with them."""
        concentrations = jnp.asarray([self.after_anchor, self.between, self.before_first])

        def starts(key):
            shares = jax.random.dirichlet(key, concentrations)
            lengths = jnp.round(shares * steps).astype(int)
            lengths = lengths.at[jnp.argmax(shares)].add(steps - jnp.sum(lengths))
            lengths = jnp.maximum(lengths, 1)
            lengths = lengths.at[jnp.argmax(lengths)].add(steps - jnp.sum(lengths))
            after = jnp.minimum(lengths[0], self.last_steps - 1)
            return jnp.stack([steps - 1 - after - lengths[1], steps - 1 - after])

        first, anchor = jax.vmap(starts, out_axes=1)(times_keys(keys))
        return self.leaps(first, anchor, steps)

    def leaps(self, first: Int[Array, "n"], anchor: Int[Array, "n"], steps: int) -> Drawn:
        """Returns the steps with a gradient of leaps that start at given ones."""
        seconds = (self.supports(*ends)[0][:, 1] for ends in ((first, anchor), (anchor, steps)))
        return Drawn(jnp.stack([first, *seconds], axis=1), anchor)

    def surrogate(
        self, drawn: Drawn, states: Float[Array, "n t ..."], sigmas: Float[Array, "t"]
    ) -> Surrogate:
        """Returns the weights of the velocities and of each image."""
        first, anchor = drawn.steps[:, 0], cast(Array, drawn.anchor)
        end = jnp.full(len(first), len(sigmas) - 1)
        rows = jnp.arange(len(first))[:, None]

        def leap(start, target):
            """The weights, and the distance of where they lead to the sampled latents."""
            supports, is_one = self.supports(start, target)
            weights = integrals(sigmas[supports], is_one, sigmas[start], sigmas[target])
            lengths = sigmas[supports + 1] - sigmas[supports]
            changes = states[rows, supports + 1] - states[rows, supports]
            moved = states[rows[:, 0], start] + jnp.sum(
                expand(weights / lengths, changes) * changes, axis=1
            )
            apart = jnp.abs(moved - states[rows[:, 0], target])
            return weights, jnp.mean(apart, axis=tuple(range(1, apart.ndim)))

        (one, d), (other, e) = leap(first, anchor), leap(anchor, end)
        weights = jnp.stack(
            [one[:, 0], self.second_gradient * one[:, 1], self.second_gradient * other[:, 1]], 1
        )
        image = 1 / (jnp.maximum(d, self.tau) + jnp.maximum(e, self.tau))
        return Surrogate(weights, other[:, 0], self.anchor_gradient, image)

    def supports(
        self, start: Int[Array, "n"], target: Int[Array, "n"] | int
    ) -> tuple[Int[Array, "n o"], Bool[Array, "n o"]]:
        """Returns the steps of a leap, and which there are if there are fewer steps than the order."""
        steps, places = (target - start)[:, None], jnp.arange(max(2, self.order))
        spaced = jnp.round(places * (steps - 1) / max(1, self.order - 1)).astype(int)
        few = steps <= self.order
        there = places < jnp.minimum(steps, self.order)
        return start[:, None] + jnp.where(there, jnp.where(few, places, spaced), 0), there


def integrals(
    points: Float[Array, "n o"],
    there: Bool[Array, "n o"],
    start: Float[Array, "n"],
    end: Float[Array, "n"],
) -> Float[Array, "n o"]:
    """Returns the integrals from start to end of the Lagrange polynomials of the points that are there."""
    nodes, weights = np.polynomial.legendre.leggauss(points.shape[1])  # exact for their degree
    half = (end - start) / 2
    s = (start + half)[:, None] + half[:, None] * nodes
    gaps = points[:, :, None] - points[:, None]
    other = there[:, None] & ~np.eye(points.shape[1], dtype=bool)
    above = jnp.where(other[:, None], s[:, :, None, None] - points[:, None, None], 1)
    values = jnp.prod(above / jnp.where(other, gaps, 1)[:, None], axis=-1)
    return jnp.where(there, half[:, None] * jnp.einsum("q,nqo->no", weights, values), 0)


def _two_steps(keys: Key[Array, "n"], steps: int) -> Int[Array, "2 n"]:
    """Draws two steps without replacement and returns the earlier and the later ones."""

    def draw(key):
        return jnp.sort(jax.random.permutation(key, steps)[:2])

    return jax.vmap(draw, out_axes=1)(times_keys(keys))


def _scores(keys: Key[Array, "n"], places: Int[Array, "s"], bias: float) -> Float32[Array, "n s"]:
    """Returns numbers whose k largest mark k places, drawn without replacement.

    The probability of a place is proportional to (place + 1) ** bias (the Gumbel-max trick).
    """
    own = jax.vmap(lambda key: jax.random.fold_in(key, 1))(times_keys(keys))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, places.shape))(own)
    return bias * jnp.log(jnp.maximum(places + 1, 1)) + noise
