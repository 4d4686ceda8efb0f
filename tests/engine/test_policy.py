import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from digen_jax.engine.policy import Policy
from digen_jax.weights.lora import LoraConfig
from tests.cases import said
from tests.engine import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

FAMILY = toy.ToyFamily()
LORA = LoraConfig(rank=2, alpha=6.0, targets="inside|outside")


@pytest.fixture(scope="module")
def start():
    return jax.tree.map(jax.numpy.asarray, FAMILY.params()["transformer"])


@pytest.fixture(scope="module")
def inputs():
    """(x, sigma, conditioning of 3 prompts, conditioning of the empty prompt)."""
    params = FAMILY.params()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *FAMILY.size)).astype(np.float32)
    sigma = np.array([0.9, 0.5, 0.1], np.float32)
    encoded = (
        FAMILY.encode(params, FAMILY.tokenize(said(*p))) for p in (["red", "a", "xyz"], [""])
    )
    return jax.tree.map(jax.numpy.asarray, (x, sigma, *encoded))


def network(params, x, sigma, conditioning):
    return np.asarray(FAMILY.network.apply({"params": params}, x, sigma, *conditioning))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def split(policy, start, reference=False):
    return policy.split(jax.random.key(0), start, reference)


def test_guidance_extrapolates_from_the_empty_prompt(start, inputs):
    x, sigma, prompts, null = inputs
    policy = Policy(FAMILY, 3.0)
    v = policy.velocity(*split(policy, start), prompts, null)(x, sigma)
    by_itself = network(start, x, sigma, prompts)
    empty = network(start, x, sigma, jax.tree.map(lambda c: c.repeat(3, 0), null))
    assert np.abs(by_itself - empty).max() > 0.1
    close(v, empty + 3 * (by_itself - empty))


def test_guidance_1_is_the_prompt_alone(start, inputs):
    x, sigma, prompts, _ = inputs
    policy = Policy(FAMILY, 1.0)
    v = policy.velocity(*split(policy, start), prompts, None)(x, sigma)
    close(v, network(start, x, sigma, prompts))


@pytest.mark.parametrize("reference", [False, True])
def test_full_tuning_leaves_out_what_the_family_never_trains(start, reference):
    policy = Policy(FAMILY)
    tuned, base = split(policy, start, reference)
    assert flatten_dict(tuned).keys() == flatten_dict(start).keys() - {("places",)}
    assert base.keys() == (start.keys() if reference else {"places"})
    assert policy.sampler_base(base).keys() == {"places"}
    jax.tree.map(np.testing.assert_array_equal, policy.transformer(tuned, base), start)


def test_what_is_tuned_shares_no_array_with_its_reference(start):
    """The trainer's updates consume what is tuned."""
    tuned, base = split(Policy(FAMILY), start, reference=True)
    places = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(base)}
    assert not any(leaf.unsafe_buffer_pointer() in places for leaf in jax.tree.leaves(tuned))


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_reference_stays_the_start_when_what_is_tuned_moves(start, inputs, lora):
    x, sigma, prompts, null = inputs
    policy = Policy(FAMILY, 1.0, lora)
    tuned, base = split(policy, start, reference=True)
    at_start = network(start, x, sigma, prompts)
    close(policy.velocity(tuned, base, prompts, null)(x, sigma), at_start)
    moved = toy.moved(tuned, 0.5)
    assert np.abs(policy.velocity(moved, base, prompts, null)(x, sigma) - at_start).max() > 0.1
    close(policy.reference(base, prompts, null)(x, sigma), at_start)


def test_a_lora_trains_its_factors_only_and_exports_whole_weights(start, inputs):
    x, sigma, prompts, null = inputs
    policy = Policy(FAMILY, 2.0, LORA)
    tuned, base = split(policy, start)
    assert {path[-1] for path in flatten_dict(tuned)} == {"a", "b"}
    assert tuned.keys() == {"inside", "outside"}
    assert base is start and policy.sampler_base(base) is start
    moved = toy.moved(tuned, 0.5)
    whole = policy.transformer(moved, base)
    a, b = moved["inside"]["a"], moved["inside"]["b"]
    close(whole["inside"]["kernel"], start["inside"]["kernel"] + 3 * a @ b)
    full = Policy(FAMILY, 2.0)
    expected = full.velocity(*split(full, whole), prompts, null)(x, sigma)
    close(policy.velocity(moved, base, prompts, null)(x, sigma), expected)
