"""Experts: networks of equal form, of which one computes the velocity at a noise level, as in Wan 2.2."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from digen_jax import policies
from digen_jax.checkpoints.lora import LoraConfig
from digen_jax.diffusion.sampling import Transitions, image_keys
from digen_jax.errors import ConfigError
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import steps_of_experts
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

PARTS = "transformer", "transformer_2"
BOUNDARY = 0.5  # of four steps, two are above
LORA = LoraConfig(rank=2, alpha=6.0, targets="inside|outside")
GUIDANCE, SECOND = 3.0, 2.0


@dataclasses.dataclass(frozen=True)
class TwoExperts(toy.ToyFamily):
    """One network for high noise levels and one of the same form for low ones."""

    frozen: dict = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, ("places",)))
    trained: ClassVar = PARTS
    lists: ClassVar = dict.fromkeys(PARTS, toy.ToyFamily.lists["transformer"])

    def expert(self, sigma):
        return jnp.asarray(sigma < BOUNDARY).astype(int)

    def params(self):
        found, rng = super().params(), np.random.default_rng(1)

        def moved(leaf):
            return leaf + 0.5 * toy.draw(rng, leaf.shape)

        return found | {"transformer_2": jax.tree.map(moved, found["transformer"])}


@dataclasses.dataclass(frozen=True)
class OneTree(toy.ToyFamily):
    """The same velocity from one component with both networks, which computes both for every sample.

    The policy's guidance is that of high noise levels. At low ones the two passes are moved such that it gives SECOND.
    """

    frozen: dict = dataclasses.field(
        default_factory=lambda: {"transformer": tuple(f"{part}/places" for part in PARTS)}
    )

    def velocity(self, variables, x, sigma, conditioning, guidance=None):
        trees = variables["transformer"]["params"]
        high, low = (
            self.network.apply({"params": trees[part]}, x, sigma, *conditioning) for part in PARTS
        )
        null, prompt = low[0::2], low[1::2]
        prompt = null + SECOND / GUIDANCE * (prompt - null)
        low = jnp.stack([null, prompt], 1).reshape(low.shape)
        return jnp.where((sigma < BOUNDARY)[:, None, None, None], low, high)

    def params(self):
        found = TwoExperts().params()
        return found | {"transformer": {part: found.pop(part) for part in PARTS}}


EXPERTS, TREE, SINGLE = TwoExperts(), OneTree(), toy.ToyFamily()
FAMILIES = {"experts": EXPERTS, "tree": TREE}


KL, ONE = dict(algorithm__kl_coefficient=0.3), (1, 1, 1)


def config(mesh=ONE, **fields):
    data, fsdp, time = mesh
    meshes = toy.meshes((0, 1), (data, fsdp, time))
    window = dict(sampler__window=dict(first=1, length=2), sampler__guidance=GUIDANCE)
    return toy.config(**meshes | window | fields)


@functools.cache
def system(name="experts", mesh=ONE, **fields):
    return toy.system(config(mesh, **fields), int(np.prod(mesh)), FAMILIES[name])


@functools.cache
def sampled(name):
    """(prompts, images) on the host, of a window with a step of each expert."""
    fields = dict(sampler__guidance_2=SECOND if name == "experts" else 0.0)
    asked, parts = config(**fields), system(name, ONE, **KL, **fields)
    prompts, (images,) = toy.rollout(parts, asked, parts.start)
    return jax.device_get((prompts, images))


def totals(parts, steps=slice(None)):
    """Sums of some of the steps of the experts' images; the parameters have moved since."""
    state = parts.trainer.init(jax.tree.map(lambda leaf: 1.02 * leaf, parts.start))
    prompts, images = sampled("experts")
    cut = jax.tree.map(lambda a: a[steps], images.samples)
    advantages = np.float32([1.5, -0.4, -0.9, 0.2, -1.7, 0.3, 0.8, 0.6])
    batch = toy.receive(parts, prompts, images._replace(samples=cut), advantages)
    return jax.device_get(parts.trainer.accumulate(state, parts.base, batch, None))


# ------------------------------------------------------------------------------ sampling


def test_a_schedule_is_split_where_the_experts_change():
    sigmas = np.float32([1, 0.7, 0.6, 0.4, 0])
    assert steps_of_experts(EXPERTS, sigmas) == (3, 1)
    assert steps_of_experts(EXPERTS, sigmas[:3]) == (2, 0)
    assert steps_of_experts(EXPERTS, sigmas[3:]) == (0, 1)
    assert steps_of_experts(SINGLE, sigmas) == (4,)


def test_the_sampler_takes_each_step_by_its_expert_with_its_guidance():
    """Bit for bit at the first step; the one-tree family multiplies by other numbers at the later ones."""
    (_, found), (_, expected) = sampled("experts"), sampled("tree")
    t, wanted = found.samples, expected.samples
    assert isinstance(t, Transitions) and (t.sigma > BOUNDARY).tolist() == [True, False]
    np.testing.assert_array_equal(t.x[0], wanted.x[0])
    for one, other in zip(t[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", PARTS)
def test_the_kl_of_a_step_is_that_of_its_expert(part):
    """One expert is moved, so that the KL is 0 at the noise levels of the other."""
    asked = config(advantages__kl_reward=1.0, sampler__guidance_2=SECOND)
    parts = toy.system(asked, 1, EXPERTS)
    tuned = dict(parts.start) | {part: toy.moved(parts.start[part])}
    weights = parts.rollout_weights(tuned)
    prompts = parts.sampler.encode(weights, toy.records(2))
    rows = np.array([0, 1], np.int32)
    keys = image_keys(jax.random.key(0), rows, rows)
    found = parts.sampler.generate(weights, prompts, rows, keys, start=1)
    assert found.transitions.mean is None
    moved, other = found.kl if part == PARTS[0] else found.kl[::-1]
    assert moved.min() > 1e-4 and other.max() < 1e-9


# ------------------------------------------------------------------------------ training


@functools.cache
def of_one_tree():
    return totals(system("tree", ONE, **KL, sampler__guidance_2=0.0))


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        (ONE, dict()),
        ((2, 2, 1), dict(trainer__pack=2)),  # the pass has samples of both
        ((2, 1, 2), dict(trainer__pack=2, placement__rules=((".*", "replicate"),))),
    ],
)
def test_a_window_across_the_boundary_trains_both_experts(mesh, fields):
    """By the gradients of the one-tree family, whose samples go through both networks."""
    found = totals(system("experts", mesh, **KL, sampler__guidance_2=SECOND, **fields))
    expected = of_one_tree()
    gradient = expected.gradient["transformer"]
    assert toy.difference(found.gradient, gradient) < 1e-5
    for part in PARTS:
        assert toy.difference(found.gradient[part], gradient[part]) < 1e-5
    for name, value in expected.sums.items():
        np.testing.assert_allclose(found.sums[name], value, rtol=1e-4, err_msg=name)
    assert float(found.sums["weight"]) == 16


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_trains_its_expert_alone(step):
    found = totals(system(), slice(step, step + 1))
    norms = [sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(found.gradient[p])) for p in PARTS]
    assert norms[1 - step] == 0 < norms[step]


@pytest.mark.parametrize("lora", [False, True])
def test_one_expert_can_be_tuned_alone(lora):
    fields = dict(model__trained=("transformer_2",), algorithm__kl_coefficient=0.1)
    if lora:
        fields |= dict(lora__rank=2, lora__alpha=6.0)
    parts = system(**fields)
    assert parts.start.keys() == {"transformer_2"}
    found = totals(parts)
    assert found.gradient.keys() == {"transformer_2"}
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found.gradient))
    merged = parts.policy.merged(toy.moved(parts.start), parts.base)
    start = EXPERTS.params()
    jax.tree.map(np.testing.assert_array_equal, merged["transformer"], start["transformer"])
    assert merged.keys() == {*PARTS}


def test_matching_algorithms_train_the_expert_of_each_noise_level():
    """Both have the algorithm's guidance, unless that is the sampler's."""
    asked = config(sampler__guidance_2=SECOND, sampler__window=dict(length=0))
    asked.sampler.kind, asked.sampler.noise_level = "ode", 0.0
    for given, expected in ((0.0, (GUIDANCE, SECOND)), (1.5, (1.5, 1.5))):
        asked.algorithm = dict(name="awm", guidance=given)
        parts = toy.system(asked, 1, EXPERTS)
        found = parts.trainer.policy.experts
        assert tuple(policy.guidance for policy in found) == expected
        assert tuple(policy._of_reference for policy in found) == expected
    prompts, (images,) = toy.rollout(parts, asked, parts.start)
    batch = toy.receive(parts, prompts, images, np.ones(8, np.float32))
    sums = parts.trainer.accumulate(parts.trainer.init(parts.start), parts.base, batch, None)
    for part in PARTS:
        assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(sums.gradient[part]))


# ------------------------------------------------------------------------------ policies


def test_a_lora_adapts_each_expert_with_factors_of_its_own():
    trained = {part: EXPERTS.params()[part] for part in PARTS}
    policy, key = Policy(EXPERTS, 1.0, LORA), jax.random.key(0)
    tuned, _ = policy.split(key, trained, reference=False)
    assert tuned.keys() == {*PARTS}
    a = [tree["inside"]["a"] for tree in tuned.values()]
    assert np.abs(a[0] - a[1]).max() > 0.1
    # The sorting of names by a program does not matter either.
    for part, tree in jax.jit(lambda p: policy.split(key, p, False)[0])(trained).items():
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), tree, tuned[part])
    one = dataclasses.replace(LORA, targets=r"transformer_2\..*side")
    tuned, _ = Policy(EXPERTS, 1.0, one).split(key, trained, reference=False)
    assert tuned.keys() == {"transformer_2"}


def test_of_two_experts_all_leaves_are_tuned_but_each_ones_frozen():
    trained = {part: EXPERTS.params()[part] for part in PARTS}
    policy = Policy(TwoExperts(frozen={"transformer_2": ("places",)}))
    tuned, base = policy.split(jax.random.key(0), trained, reference=False)
    assert flatten_dict(base).keys() == {("transformer_2", "places")}
    assert flatten_dict(tuned).keys() == flatten_dict(trained).keys() - flatten_dict(base).keys()
    jax.tree.map(np.testing.assert_array_equal, policy.merged(tuned, base), trained)


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        (SINGLE, dict(sampler__guidance_2=2.0), "config.sampler.guidance_2"),
        (EXPERTS, dict(evaluation__guidance_2=2.0), "config.evaluation.guidance_2"),
        (SINGLE, dict(model__trained=("transformer_2",)), "config.model.trained"),
        (EXPERTS, dict(algorithm__ratio="sequence_mean"), "config.algorithm.ratio"),
    ],
)
def test_what_experts_do_not_support_is_refused(family, fields, named):
    asked = toy.opened(config(**fields))
    placement = toy.system(config(), 1, family).placement
    with pytest.raises(ConfigError) as caught:
        policies.check_model(asked, family, placement)
    assert str(caught.value).startswith(named)
