"""The four kinds of guidance, with a family whose velocity can be computed by hand."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax import policies
from digen_jax.algorithms.reward_gradient import Refl
from digen_jax.diffusion.sampling import start_noise
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.inference.model import Model, all_devices, defaults_of_run
from digen_jax.models.family import Size
from digen_jax.parallel.mesh import ShardingRules
from digen_jax.parallel.placement import make_placement
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from tests.cases import said
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

# With one prompt and without, as `Linear.encode` gives them.
PROMPT, NULL, W = 3.0, 2.0, 0.5
NFT = dict(name="diffusion_nft", kl_coefficient=0.1)


@dataclasses.dataclass(frozen=True)
class Linear(toy.ToyFamily):
    """v = w (c x + g / 10), with c the length of the prompt and g an embedded guidance; without a prompt c is 2."""

    size: tuple[int, int, int] = (1, 1, 1)
    frozen: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def tokenize(self, records):
        return np.array([float(len(record["prompt"])) for record in records], np.float32)

    def tokenize_null(self, records):
        assert self.guidance in ("classifier-free", "both"), "nobody reads it"
        return np.array([NULL], np.float32)

    def encode(self, params, lengths):
        return jnp.asarray(lengths)

    def velocity(self, variables, x, sigma, conditioning, guidance=None):
        given = 0.0 if guidance is None else guidance / 10
        assert (guidance is not None) == (self.guidance in ("embedded", "both"))
        w = variables["transformer"]["params"]["w"]
        return w * (conditioning[:, None, None, None] * x + given)

    def decode(self, params, latents):
        return jnp.repeat(latents, 3, -1)[:, None]


# kind, guidance, true guidance, and of v = w (c x + e): c, e
KINDS = [
    ("none", 1.0, 1.0, PROMPT, 0.0),
    ("embedded", 4.0, 1.0, PROMPT, 0.4),
    ("classifier-free", 5.0, 1.0, NULL + 5 * (PROMPT - NULL), 0.0),
    ("classifier-free", 1.0, 1.0, PROMPT, 0.0),
    ("classifier-free", 0.0, 1.0, PROMPT, 0.0),
    ("classifier-free", 0.9, 1.0, PROMPT, 0.0),
    ("none", 0.0, 0.0, PROMPT, 0.0),
    ("both", 4.0, 1.0, PROMPT, 0.4),
    ("both", 0.5, 0.0, PROMPT, 0.05),
    ("both", 4.0, 5.0, NULL + 5 * (PROMPT - NULL), 0.4),
]


@pytest.mark.parametrize(("kind", "guidance", "true_cfg_scale", "c", "e"), KINDS)
def test_every_kind_of_guidance_samples_and_trains_by_its_formula(
    kind, guidance, true_cfg_scale, c, e
):
    policy = Policy(Linear(guidance=kind), guidance, true_cfg_scale=true_cfg_scale)
    assert policy.reads_null == (kind == "classifier-free" or true_cfg_scale > 1)
    assert policy.sequences == policy.reference_sequences == 1 + (c > PROMPT)
    start = {"transformer": {"w": jnp.float32(W)}}
    tuned, base = policy.split(jax.random.key(0), start, reference=True)
    sampler = Sampler(policy, all_devices(jax.devices()[:1]), SamplerSettings(Size(8, 8), 4, Ode()))
    weights = Weights(tuned, policy.sampler_base(base), {})
    prompts = sampler.encode(weights, said("a" * int(PROMPT)))
    assert (prompts.null is None) == (not policy.reads_null)

    x = jnp.array([0.5, -2.0]).reshape(2, 1, 1, 1)
    rows = prompts.conditioning[np.zeros(2, int)]

    def total(tuned):
        return policy.velocity(tuned, base, rows, prompts.null)(x, jnp.ones(2)).sum()

    value, gradient = jax.value_and_grad(total)(tuned)
    by_hand = c * (0.5 - 2.0) + 2 * e
    np.testing.assert_allclose(
        [value, gradient["transformer"]["w"]], [W * by_hand, by_hand], rtol=1e-6
    )
    reference = policy.reference(base, rows, prompts.null)(x, jnp.ones(2))
    np.testing.assert_allclose(reference, W * (c * x + e), rtol=1e-6)
    # v = s (c x + e) + (1 - s) (null x + e) with the gradient of the first summand.
    policy = policies.trained_policy(policy, Refl(detach_unconditional=True))
    scale = 5.0 if policy.sequences == 2 else 1.0
    detached = jax.value_and_grad(total)(tuned)
    conditional = scale * (PROMPT * (0.5 - 2.0) + 2 * e)
    found = detached[0], detached[1]["transformer"]["w"]
    np.testing.assert_allclose(found, [W * by_hand, conditional], rtol=1e-6)

    keys = jax.random.split(jax.random.key(1), 2)
    trajectory = sampler.generate(weights, prompts, np.zeros(2, np.int32), keys)
    image = np.asarray(start_noise(keys, (1, 1, 1)), np.float64)
    for sigma, after in zip(sampler.sigmas[:-1], sampler.sigmas[1:], strict=True):
        image = image + W * (c * image + e) * (float(after) - float(sigma))
    np.testing.assert_allclose(trajectory.latents, image, rtol=1e-5)


class Both(toy.ToyFamily):
    """A family that reads both scales."""

    def velocity(self, variables, x, sigma, conditioning, guidance=None):
        return super().velocity(variables, x, sigma, conditioning) * (1 + guidance / 10)


def test_the_first_updates_ratios_are_1_with_both_scales_and_negative_prompts(monkeypatch):
    """With a row of the null conditioning for each prompt, and with one for all; with another one they are not."""
    plain = toy.records
    own = [dict(negative_prompt=one) for one in ("dark", "light")]
    monkeypatch.setattr(
        toy, "records", lambda count: [r | n for r, n in zip(plain(count), own, strict=True)]
    )
    config = toy.config(
        sampler__guidance=2.0, sampler__true_cfg_scale=3.0, algorithm__clip_range=1e-5
    )
    system = toy.system(config, family=Both(guidance="both"))
    state = system.trainer.init(system.start)
    prompts, (chunk,) = toy.rollout(system, config, state.tuned)
    assert len(prompts.null.context) == 2

    def far_ratios(prompts):
        given = toy.receive(system, prompts, chunk, np.linspace(-1, 1, 8, dtype=np.float32))
        totals = system.trainer.accumulate(state, system.base, given, None)
        return int(totals.sums["clip_fraction"])

    assert far_ratios(prompts) == 0
    wrong = jax.tree.map(lambda rows: rows + 0.1, prompts.null)
    assert far_ratios(prompts._replace(null=wrong)) == chunk.samples.log_prob.size == 16


def test_the_references_guidance_is_the_embedded_one():
    policy = Policy(Linear(guidance="both"), 4.0, reference_guidance=7.0, true_cfg_scale=5.0)
    start, one = {"transformer": {"w": jnp.float32(W)}}, jnp.ones((1, 1, 1, 1))
    v = policy.reference(start, jnp.array([PROMPT]), jnp.array([NULL]))(one, jnp.ones(1))
    np.testing.assert_allclose(v, W * (NULL + 5 * (PROMPT - NULL) + 0.7), rtol=1e-6)


def checked(fields, family):
    config = toy.opened(toy.config(**fields))
    layout = ShardingRules(config.placement.rules)
    placement = make_placement(config.placement.meshes, layout, jax.devices())
    policies.check_model(config, family, placement)


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("none", dict(sampler__guidance=3.0), "sampler.guidance"),
        ("none", dict(evaluation__guidance=2.0), "evaluation.guidance"),
        ("none", dict(algorithm=dict(NFT, guidance=2.0)), "algorithm.guidance"),
        ("none", dict(algorithm=dict(NFT, reference_guidance=2.0)), "algorithm.reference_guidance"),
        ("classifier-free", dict(sampler__true_cfg_scale=2.0), "sampler.true_cfg_scale"),
        ("embedded", dict(evaluation__true_cfg_scale=2.0), "evaluation.true_cfg_scale"),
        ("none", dict(sampler__guidance=0.0, evaluation__true_cfg_scale=0.0), None),
        ("both", dict(sampler__true_cfg_scale=2.0), None),
    ],
)
def test_a_guidance_that_the_model_has_not_is_refused(kind, fields, field):
    fields, family = dict(sampler__guidance=1.0) | fields, toy.ToyFamily(guidance=kind)
    if field is None:
        return checked(fields, family)
    with pytest.raises(ConfigError, match=rf"^config\.{field} = .*{kind!r}"):
        checked(fields, family)


@pytest.mark.parametrize(
    ("kind", "fields", "refused"),
    [
        ("none", {}, True),
        ("embedded", {}, True),
        ("both", {}, True),
        ("classifier-free", {}, True),
        ("classifier-free", dict(sampler__guidance=0.5), True),
        ("both", dict(evaluation__true_cfg_scale=2.0), False),
        ("classifier-free", dict(algorithm=dict(NFT, reference_guidance=2.0)), False),
    ],
)
def test_a_negative_prompt_that_nothing_reads_is_refused(tmp_path, kind, fields, refused):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "negative_prompt"}\n\n{"prompt": "a", "negative_prompt": ""}\n')
    given = dict(sampler__guidance=1.0, prompts=dict(encoding="each_step", file=str(file)))
    family = toy.ToyFamily(guidance=kind)
    if not refused:
        return checked(given | fields, family)
    with pytest.raises(ConfigError, match=r"^config\.prompts\.file: .*line 3"):
        checked(given | fields, family)


class NoSingleStep(toy.ToyFamily):
    """A family whose schedule has two steps or more, as one with a terminal shift."""

    def sigmas(self, steps, size):
        if steps == 1:
            raise ValueError("one step is too few")
        return super().sigmas(steps, size)


def test_steps_of_an_evaluation_that_the_schedule_has_not_are_refused():
    with pytest.raises(ConfigError, match=r"^config\.evaluation\.steps:"):
        checked(dict(evaluation__steps=1), NoSingleStep())


def test_an_opened_model_is_sampled_at_both_of_its_runs_guidances():
    config = toy.opened(toy.config(evaluation__guidance=4.0, evaluation__true_cfg_scale=2.0))
    group, defaults = all_devices(jax.devices()[:1]), defaults_of_run(config)

    def policy(kind, guidance):
        model = Model(toy.ToyFamily(guidance=kind), group, None, defaults, None)
        return model.sampler(dict(guidance=guidance)).policy

    own, given = policy("both", None), policy("both", 3.0)
    asked = Model(toy.ToyFamily(guidance="both"), group, None, defaults, None)
    assert asked.sampler(dict(true_cfg_scale=1.5)).policy.true_cfg_scale == 1.5
    assert (own.guidance, own.true_cfg_scale) == (4.0, 2.0)
    assert (given.guidance, given.true_cfg_scale) == (3.0, 2.0)
    with pytest.raises(ConfigError, match="true_cfg_scale"):
        policy("embedded", None)
