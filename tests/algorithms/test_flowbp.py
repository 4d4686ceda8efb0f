"""ReFL, LeapAlign and FlowBP: draws against brute force, latents and gradients against the authors' code."""

import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.flowbp import (
    Drawn,
    FlowBpBridge,
    FlowBpLagrange,
    FlowBpSparse,
    LeapAlign,
    integrals,
)
from digen_jax.algorithms.reward_gradient import Refl

# See README.md there.
GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "data" / "flowbp.json").read_text())
SIGMAS = jnp.asarray(GOLDEN["sigmas"])
READ = jnp.asarray([0.5, -1.0, 2.0, 0.25])
CONDITION, NULL, GUIDANCE = jnp.asarray([0.3, -0.2]), jnp.asarray([0.1, 0.05]), 2.5
ALGORITHMS = {
    "refl": Refl(last_steps=5, detach_unconditional=True),
    "leap_align": LeapAlign(),
    "flowbp_sparse": FlowBpSparse(detach_unconditional=True),
    "flowbp_bridge": FlowBpBridge(detach_unconditional=True),
    "flowbp_lagrange": FlowBpLagrange(detach_unconditional=True, tau=0.004),
}


def velocity(p, x, sigma, detach):
    """The network of the golden numbers, with guidance."""

    def one(condition):
        return p[0] * jnp.tanh(p[1] * x + p[2] * sigma[:, None]) + condition[:, None] * x

    null = one(NULL)
    null = jax.lax.stop_gradient(null) if detach else null
    return null + GUIDANCE * (one(CONDITION) - null)


def trajectory(p, start):
    """The latents of Euler's method at all noise levels, `[n t ...]`."""
    states = [jnp.asarray(start)]
    for sigma, following in itertools.pairwise(SIGMAS):
        v = velocity(p, states[-1], jnp.full(2, sigma), False)
        states.append(states[-1] + (following - sigma) * v)
    return jnp.stack(states, axis=1)


def fixed(algorithm, drawn):
    """The algorithm with given steps, for both images."""
    both = {name: jnp.asarray([value, value]) for name, value in drawn.items()}
    if "step" in both:
        methods = {"drawn": lambda *_: both["step"]}
    elif "first" in both:
        methods = {"draw": lambda _, keys, steps: algorithm.leaps(**both, steps=steps)}
    else:
        methods = {"draw": lambda *_: Drawn(**both)}
    found = type("Fixed", (type(algorithm),), methods)
    return found(**dataclasses.asdict(algorithm))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_latents_and_gradients_are_the_authors(case):
    algorithm = fixed(ALGORITHMS[case["name"]], case["drawn"])
    parameters = jnp.asarray([0.9, 1.3, -0.7])
    states, keys = trajectory(parameters, case["start"]), jax.random.split(jax.random.key(0))

    def loss(p):
        def evaluate(x, sigma):
            return velocity(p, x, sigma, algorithm.detach_unconditional), sigma

        final = algorithm.final(evaluate, states, SIGMAS, keys)
        weight = jnp.ones(2) if final.weight is None else final.weight
        return -jnp.mean(weight * (jnp.tanh(final.latents) @ READ)), (final, weight)

    gradient, (final, weight) = jax.jit(jax.grad(loss, has_aux=True))(parameters)
    np.testing.assert_allclose(final.latents, case["latents"], atol=2e-6)
    np.testing.assert_allclose(weight, case["weight"], rtol=1e-4)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-4, atol=1e-6)
    # What is averaged over the steps as their KL is here their noise level.
    if "step" in case["drawn"]:
        steps = [case["drawn"]["step"]]
    else:
        drawn = algorithm.draw(keys, len(SIGMAS) - 1)
        steps = [*drawn.steps[0], *([] if drawn.anchor is None else drawn.anchor[:1])]
    np.testing.assert_allclose(final.kl, np.mean(SIGMAS[jnp.asarray(steps)]), rtol=1e-6)


def test_steps_before_the_anchor_are_as_many_as_the_authors():
    for setting, expected in GOLDEN["before_anchor"].items():
        count, steps = map(int, setting.split(","))
        algorithm = FlowBpBridge(gradient_steps=count)
        assert [algorithm.before_anchor(anchor, steps) for anchor in range(1, steps)] == expected


def test_velocities_of_a_leap_are_the_authors_and_integrate_polynomials():
    for setting, cases in GOLDEN["supports"].items():
        order, steps = map(int, setting.split(","))
        algorithm = FlowBpLagrange(order=order)
        start, target = (jnp.asarray(column) for column in list(zip(*cases, strict=True))[:2])
        supports, there = jax.jit(algorithm.supports)(start, target)
        found = [list(map(int, row[of])) for row, of in zip(supports, there, strict=True)]
        assert found == [expected for *_, expected in cases]
        sigmas = jnp.linspace(1, 0, steps + 1) ** 0.7
        ends = sigmas[start], sigmas[target]
        weights = np.asarray(jax.jit(integrals)(sigmas[supports], there, *ends), np.float64)
        assert not weights[~np.asarray(there)].any()
        for power in range(order):
            known = there.sum(axis=1) > power  # a polynomial of less degree than there are points
            integral = (ends[1] ** (power + 1) - ends[0] ** (power + 1)) / (power + 1)
            by_weights = np.sum(weights * np.asarray(sigmas[supports]) ** power, axis=1)
            np.testing.assert_allclose(by_weights[known], integral[known], atol=2e-5)


# ------------------------------------------------------------------------------------------ draws

KEYS = 40_000


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(5), KEYS)


def shares(*columns):
    """Share of the images with each combination of values."""
    rows, counts = np.unique(np.stack(columns, axis=-1), axis=0, return_counts=True)
    return {tuple(map(int, row)): count / KEYS for row, count in zip(rows, counts, strict=True)}


def in_any_order(weights, count):
    """Probability of each set of places that are drawn without replacement, by enumeration."""
    found = {}
    for order in itertools.permutations(range(len(weights)), count):
        probability, left = 1.0, sum(weights)
        for place in order:
            probability *= weights[place] / left
            left -= weights[place]
        found[tuple(sorted(order))] = found.get(tuple(sorted(order)), 0.0) + probability
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(value, abs=0.012) for key, value in expected.items())


def test_one_of_the_last_steps_is_drawn(keys):
    found = jax.jit(Refl(last_steps=3).drawn, static_argnums=1)(keys, 5)
    same(shares(found), {(step,): 1 / 3 for step in (2, 3, 4)})


def test_leaps_begin_at_two_steps(keys):
    drawn = jax.jit(LeapAlign().draw, static_argnums=1)(keys, 4)
    pairs = itertools.combinations(range(4), 2)
    same(shares(drawn.steps[:, 0], drawn.anchor), dict.fromkeys(pairs, 1 / 6))


def test_late_steps_are_drawn_more_often(keys):
    algorithm = FlowBpSparse(gradient_steps=2, late_bias=1.5)
    drawn = jax.jit(algorithm.draw, static_argnums=1)(keys, 5)
    expected = in_any_order([place**1.5 for place in range(1, 6)], 2)
    same(shares(*np.sort(drawn.steps, axis=1).T), expected)


def test_each_side_of_the_anchor_has_its_steps(keys):
    count, steps, bias = 4, 6, 2.0
    algorithm = FlowBpBridge(gradient_steps=count, late_bias=bias)
    drawn = jax.jit(algorithm.draw, static_argnums=1)(keys, steps)
    expected = {}
    for anchor in range(1, steps):
        before = algorithm.before_anchor(anchor, steps)
        early = in_any_order([(i + 1) ** bias for i in range(anchor)], before)
        late = in_any_order(
            [(i + 1) ** bias for i in range(steps - anchor - 1)], count - 1 - before
        )
        for (a, p), (b, q) in itertools.product(early.items(), late.items()):
            places = *a, *(anchor + 1 + place for place in b)
            expected[(anchor, *places)] = 2 * anchor / (steps * (steps - 1)) * p * q
    found = shares(drawn.anchor, *np.sort(drawn.steps, axis=1).T)
    assert set(found) <= set(expected)
    same({key: found.get(key, 0.0) for key in expected}, expected)


def test_leaps_are_drawn_as_by_the_authors(keys):
    """Shares of 20,000 of the authors' draws."""
    drawn = jax.jit(FlowBpLagrange(last_steps=3).draw, static_argnums=1)(keys, 8)
    expected = {tuple(map(int, key.split(","))): value for key, value in GOLDEN["leaps"].items()}
    found = shares(drawn.steps[:, 0], drawn.anchor)
    assert sum(found.get(key, 0) for key in expected) > 0.999
    same({key: found.get(key, 0.0) for key in expected}, expected)


def test_draws_depend_on_the_key_alone(keys):
    draw = jax.jit(FlowBpBridge().draw, static_argnums=1)
    few, one = draw(keys[:3], 8), draw(keys[2:3], 8)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[2:], b), few, one)
