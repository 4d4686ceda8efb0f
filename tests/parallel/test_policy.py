import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from digen_jax.checkpoints.lora import LoraConfig
from digen_jax.parallel.policy import Policy
from tests.cases import said
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

FAMILY = toy.ToyFamily()
KEY = jax.random.key(0)
LORA = LoraConfig(rank=2, alpha=6.0, targets="inside|outside")


@pytest.fixture(scope="module")
def start():
    params = jax.tree.map(jax.numpy.asarray, FAMILY.params())
    return {part: params[part] for part in FAMILY.trained}


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
    return np.asarray(
        FAMILY.network.apply({"params": params["transformer"]}, x, sigma, *conditioning)
    )


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def split(policy, start, reference=False):
    return policy.split(KEY, start, reference)


@pytest.mark.parametrize("reference", [False, True])
def test_full_tuning_leaves_out_what_the_family_never_trains(start, reference):
    policy = Policy(FAMILY)
    tuned, base = split(policy, start, reference)
    assert flatten_dict(tuned).keys() == flatten_dict(start).keys() - {("transformer", "places")}
    frozen = {"places"}
    assert base["transformer"].keys() == (start["transformer"].keys() if reference else frozen)
    assert policy.sampler_base(base)["transformer"].keys() == frozen
    jax.tree.map(np.testing.assert_array_equal, policy.merged(tuned, base), start)


def test_what_is_tuned_shares_no_array_with_its_reference(start):
    """The trainer's updates consume the tuned parameters."""
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
    assert tuned["transformer"].keys() == {"inside", "outside"}
    assert base is start and policy.sampler_base(base) is start
    moved = toy.moved(tuned, 0.5)
    whole = policy.merged(moved, base)
    a, b = (moved["transformer"]["inside"][factor] for factor in "ab")
    kernel = start["transformer"]["inside"]["kernel"]
    close(whole["transformer"]["inside"]["kernel"], kernel + 3 * a @ b)
    full = Policy(FAMILY, 2.0)
    expected = full.velocity(*split(full, whole), prompts, null)(x, sigma)
    close(policy.velocity(moved, base, prompts, null)(x, sigma), expected)
