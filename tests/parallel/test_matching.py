"""Losses of final images in the trainer, against loops over single samples."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.algorithms.algorithm import OLD_POLICY_DECAYS, LinearDecay
from digen_jax.diffusion.sampling import image_keys
from digen_jax.parallel.accumulate import FinalImages
from digen_jax.parallel.policy import EncodedPrompts
from digen_jax.parallel.system import SampledImages
from digen_jax.runtime import training
from digen_jax.runtime.array_transfer import SyncedWeights
from digen_jax.runtime.steps import Steps, StepScores
from digen_jax.scheduling.settings import Settings
from tests.algorithms.test_advantages import oracle
from tests.parallel import toy
from tests.parallel.chunks import LORA, adapted
from tests.parallel.toy import receive

pytestmark = pytest.mark.usefixtures("exact_and_split")

GROUPS, IMAGES, COUNT = 4, 3, 3
ROWS = np.repeat(np.arange(GROUPS, dtype=np.int32), IMAGES)
# As rewards, those of the third group prefer nothing; as advantages, some are clipped.
JUDGED = np.array([1.5, -0.4, -0.9, 0.2, -2.7, 0.3, 0.8, 0.8, 0.8, 0.1, 2.2, -0.8], np.float32)
SCALE, SAMPLED = 3.0, 4.5  # of LoRA; the sampler's guidance
# The fields of a config, and what they mean: the guidance of the policies, and of the reference.
GUIDANCE = {
    "published": ({}, (1.0, 1.0)),
    "as sampled": (dict(algorithm__guidance=0.0), (SAMPLED, SAMPLED)),
    "own": (dict(algorithm__guidance=2.0, algorithm__reference_guidance=1.5), (2.0, 1.5)),
}
TIMES = dict(count=COUNT, mean=-0.3, std=1.2, shift=2.0)
ODE = dict(sampler__kind="ode", sampler__noise_level=0.0, sampler__window=dict(length=0))
METHODS = {
    "diffusion_nft": dict(beta=0.3, adv_clip=2.0, kl_coefficient=0.2, times=dict(count=COUNT)),
    "awm": dict(clip_range=0.01, adv_clip=2.0, kl_coefficient=0.2, times=TIMES)
    | dict(ema_kl_coefficient=0.7, weighting="sigma", old_log_probs="recomputed"),
    "diffusion_dpo": dict(beta=3.0, times=TIMES),
    "dgpo": dict(beta=3.0, clip_range=0.01, adv_clip=2.0, kl_coefficient=0.2)
    | dict(times=dict(count=2, first=3)),
}
METHODS["crd"] = dict(beta=0.7, adv_clip=2.0, kl_coefficient=0.2, times=METHODS["dgpo"]["times"])
# Of which a complete group is a sample.
GROUPED = ("dgpo", "crd")


def config(name, tuning="full", mesh=(1, 1, 1), micro=4, pack=2, chunk=12, **fields):
    """On a trainer mesh (time, data, fsdp)."""
    algorithm = {f"algorithm__{field}": value for field, value in METHODS[name].items()}
    shape = dict(batch__groups=GROUPS, batch__images=IMAGES, sampler__guidance=SAMPLED)
    meshes = toy.meshes((0, 1), (*mesh[1:], mesh[0]))
    meshes["placement__rules"] = ((".*", "replicate" if tuning == "lora" else "fsdp"),)
    cut = dict(sampler__chunk=chunk, trainer__micro_batch=micro, trainer__pack=pack)
    lora = LORA if tuning == "lora" else {}
    all_fields = ODE | algorithm | shape | meshes | cut | lora | dict(evaluation__batch=12) | fields
    return toy.config(algorithm__name=name, **all_fields)


# ------------------------------------------------------------------------------ the gradient


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X0 = random(1, len(ROWS), 4, 4, 4)
SIGMAS = np.float32([1.0, 0.8, 0.6, 0.3, 0.0])
PROMPTS = EncodedPrompts(
    toy.Conditioning(random(2, GROUPS, toy.LETTERS, toy.TEXT), random(3, GROUPS, toy.TEXT)),
    toy.Conditioning(random(4, 1, toy.LETTERS, toy.TEXT), random(5, 1, toy.TEXT)),
)


def keys():
    return image_keys(jax.random.key(3), ROWS, np.tile(np.arange(IMAGES), GROUPS))


@functools.cache
def parameters(tuning):
    """(trained, behavior, slow copy): three different policies, on the host."""
    start = toy.system(config("diffusion_dpo", tuning), devices=1).start
    return tuple(jax.device_get(toy.moved(start, by)) for by in (0.05, 0.03, -0.04))


def levels(name, key):
    """An image's noise levels, drawn from its key alone."""
    key = jax.random.fold_in(key, 3)
    if name == "diffusion_nft":
        return jax.random.permutation(key, SIGMAS[:-1])[:COUNT]
    if name in GROUPED:
        return jax.random.permutation(key, SIGMAS[:3])[:2]
    u = 1 / (1 + np.exp(-(-0.3 + 1.2 * jax.random.normal(key, (COUNT,)))))
    return 2 * u / (1 + u)


def nft(sample, v, old, copy, reference, r):
    """The public code's loss, as in its paper's supplement: arXiv 2509.16117."""
    (x0, x, sigma, _) = sample

    def off(u):
        difference = (x - sigma * u) - x0
        scale = jnp.maximum(jnp.abs(jax.lax.stop_gradient(difference)).mean(), 1e-5)
        return (difference**2).mean() / scale

    r = 0.5 + jnp.clip(r, -2, 2) / 4
    good, bad = off(old + 0.3 * (v - old)), off(old - 0.3 * (v - old))
    policy, kl = 2 * (r * good + (1 - r) * bad) / 0.3, ((v - reference) ** 2).mean()
    terms = dict(policy_loss=policy, positive_loss=good, negative_loss=bad)
    return terms | dict(old_deviation=((v - old) ** 2).mean(), kl=kl)


def awm(sample, v, old, copy, reference, advantage):
    """arXiv 2509.25050, its weight sigma."""
    *_, sigma, target = sample
    error, old_error = ((v - target) ** 2).mean(), ((old - target) ** 2).mean()
    ratio = jnp.exp(sigma * (old_error - error))
    advantage = jnp.clip(advantage, -2, 2) / 2
    policy = -jnp.minimum(advantage * ratio, advantage * jnp.clip(ratio, 0.99, 1.01))
    kl, ema_kl = ((v - reference) ** 2).mean(), ((v - copy) ** 2).mean()
    terms = dict(policy_loss=policy, matching_error=error, ratio=ratio, kl=kl, ema_kl=ema_kl)
    off = jnp.abs(ratio - 1)
    far = dict(clip_fraction=off > 0.01, approx_kl=jnp.log(ratio) ** 2 / 2)
    # A tenth of the clip range.
    return terms | far | dict(ratio_spread=off, over_spread_limit=off > 0.001)


def dpo(samples, v, reference):
    """Equation 14 of arXiv 2311.12908, of (preferred, dispreferred)."""
    (win, lose), (base_win, base_lose) = (
        [((u - sample[3]) ** 2).mean() for u, sample in zip(us, samples, strict=True)]
        for us in (v, reference)
    )
    margin = -3.0 / 2 * ((win - base_win) - (lose - base_lose))
    terms = dict(loss=-jnp.log(1 / (1 + jnp.exp(-margin))), margin=margin, accuracy=margin > 0)
    return terms | dict(preferred_error=win, dispreferred_error=lose)


def dgpo(samples, v, copy, reference, advantages):
    """The authors' loss of a group (arXiv 2510.08425)."""
    fixed = jax.lax.stop_gradient

    def errors(us):
        return jnp.stack(
            [((u - sample[3]) ** 2).mean() for u, sample in zip(us, samples, strict=True)]
        )

    error, old, advantages = errors(v), errors(copy), jnp.clip(advantages, -2, 2)
    ratio = jnp.exp(old - error)
    beyond = jnp.where(advantages > 0, ratio > 1.01, ratio < 0.99)
    kept = jnp.where(beyond, fixed(error), error)
    weight = fixed(jax.nn.sigmoid(3 * (advantages * (error - errors(reference))).mean()))
    kl = jnp.stack([((a - b) ** 2).mean() for a, b in zip(v, reference, strict=True)]).mean()
    terms = dict(policy_loss=(weight * advantages * kept).mean(), matching_error=error.mean())
    return terms | dict(group_weight=weight, clip_fraction=beyond.mean(), kl=kl)


def crd(samples, v, copy, reference, advantages):
    """Flow-Factory's loss of a group (arXiv 2603.14128), centered in the group."""
    fixed, pairs = jax.lax.stop_gradient, list(zip(v, copy, samples, strict=True))

    def error(u, target):
        return ((u - target) ** 2 / fixed(jnp.abs(u - target).mean())).mean()

    r = jnp.stack([error(old, sample[3]) - error(new, sample[3]) for new, old, sample in pairs])
    a = 0.5 + jnp.clip(advantages, -2, 2) / 4
    off = 0.7 * (r - fixed(r.mean())) - (a - a.mean())
    kls = jnp.stack([((x - y) ** 2).mean() for x, y in zip(v, reference, strict=True)])
    matching = jnp.stack([((new - sample[3]) ** 2).mean() for new, _, sample in pairs]).mean()
    terms = dict(policy_loss=2 / 0.7 * (off**2).mean(), matching_error=matching)
    weighted = ((1e-4 + a * (0.2 - 1e-4)) * kls).mean()
    return terms | dict(implicit_reward=r.mean(), kl=kls.mean(), weighted_kl=weighted)


@functools.cache
def differentiated(name, guidance, with_kl):
    own, of_reference = GUIDANCE[guidance][1]
    start, network = toy.ToyFamily().params()["transformer"], toy.ToyFamily().network

    def velocity(params, x, sigma, prompt, guidance):
        def v(context, pooled):
            return network.apply({"params": params}, x[None], sigma[None], context, pooled)[0]

        if guidance == 1:
            return v(*prompt)
        return v(*PROMPTS.null) + guidance * (v(*prompt) - v(*PROMPTS.null))

    def loss(tuned, behavior, copy, x0s, key, draw, sigma, judged, prompt):
        key = jax.random.fold_in(jax.random.fold_in(key, 2), draw)
        if name == "crd":
            noises = jax.random.normal(key, x0s.shape)
        else:
            noises = [jax.random.normal(key, x0s.shape[1:])] * len(x0s)
        samples = [
            (x0, (1 - sigma) * x0 + sigma * noise, sigma, noise - x0)
            for x0, noise in zip(x0s, noises, strict=True)
        ]
        trees = [adapted(start, tree, SCALE) for tree in (tuned, behavior, copy)]
        v, old, slow, reference = (
            [velocity(tree, x, sigma, prompt, at) for _, x, *_ in samples]
            for tree, at in zip((*trees, start), (own, own, own, of_reference), strict=True)
        )
        if name == "diffusion_dpo":
            terms = dpo(samples, v, reference)
        else:
            if name in GROUPED:
                terms = {"dgpo": dgpo, "crd": crd}[name](samples, v, slow, reference, judged)
            else:
                method = {"diffusion_nft": nft, "awm": awm}[name]
                terms = method(samples[0], v[0], old[0], slow[0], reference[0], judged[0])
            if not with_kl:
                del terms["kl"]
            kl, ema_kl = terms.get("kl", 0), terms.get("ema_kl", 0)
            weighted = terms.pop("weighted_kl", 0.2 * kl)
            terms["loss"] = terms["policy_loss"] + weighted + 0.7 * ema_kl
        return terms["loss"], terms

    return jax.jit(jax.grad(loss, has_aux=True))


def best_and_worst(values, groups):
    """The pairs (preferred, dispreferred) of some groups."""
    members = [range(group * IMAGES, (group + 1) * IMAGES) for group in groups]
    return tuple((max(m, key=values.__getitem__), min(m, key=values.__getitem__)) for m in members)


@functools.cache
def plain(name, tuning, guidance, with_kl, left_out=(), chosen=None):
    """(summed gradient, sums) in float64, by a loop over single samples."""
    trees, found, sums = parameters(tuning), [], []
    pairs = [(i,) for i in range(len(ROWS)) if i not in left_out]
    if name == "diffusion_dpo":
        pairs = chosen or best_and_worst(JUDGED, (0, 1, 3))
    if name in GROUPED:
        pairs = [tuple(np.flatnonzero(group == ROWS)) for group in range(GROUPS)]
    for images in pairs:
        key, prompt = keys()[images[0]], [c[ROWS[images[0]]][None] for c in PROMPTS.conditioning]
        for draw, sigma in enumerate(levels(name, key)):
            judged = JUDGED[list(images)]
            given = X0[list(images)], key, draw, jnp.float32(sigma), judged, prompt
            gradient, terms = differentiated(name, guidance, with_kl)(*trees, *given)
            found.append(jax.tree.map(np.float64, jax.device_get(gradient)))
            sums.append({"weight": 1.0, **{term: float(value) for term, value in terms.items()}})
    gradient = jax.tree.map(lambda *leaves: sum(leaves), *found)
    return gradient, {term: sum(one[term] for one in sums) for term in sums[0]}


def received(parts, part):
    """Some images in the trainer's form."""
    images = SampledImages(0, ROWS[part], FinalImages(X0[part], keys()[part], SIGMAS), SIGMAS)
    return receive(parts, PROMPTS, images, JUDGED[part])


def accumulated(name, tuning, change=lambda train_batch: train_batch, **cut):
    c = config(name, tuning, **cut)
    time, data, fsdp = cut.get("mesh", (1, 1, 1))
    parts = toy.system(c, time * data * fsdp)
    trainer, (tuned, behavior, copy) = parts.trainer, parameters(tuning)
    state = trainer.init(tuned)
    laid = [jax.device_put(tree, trainer.group.params(tree)) for tree in (behavior, copy)]
    state = state._replace(copy=laid[1] if name in ("awm", *GROUPED) else state.copy)
    totals, size = None, c.sampler.chunk
    for first in range(0, len(ROWS), size):
        part = slice(first, first + size)
        train_batch = change(received(parts, part))
        totals = trainer.accumulate(state, parts.base, train_batch, totals, laid[0])
    assert trainer._accumulate._cache_size() == 1
    return totals


def assert_equal(totals, expected):
    gradient, sums = expected
    assert toy.difference(totals.gradient, gradient) < 1e-5
    assert set(totals.sums) == set(sums)
    for term, value in sums.items():
        np.testing.assert_allclose(totals.sums[term], value, rtol=2e-5, atol=1e-5, err_msg=term)


CASES = [
    ("diffusion_nft", "full", "published", False, dict(micro=4, pack=2)),
    ("diffusion_nft", "lora", "own", True, dict(mesh=(2, 2, 1), micro=6, pack=2)),
    ("awm", "full", "as sampled", True, dict(mesh=(1, 1, 2), micro=2, pack=1, chunk=6)),
    ("diffusion_dpo", "lora", "own", True, dict(mesh=(1, 2, 1), micro=4, pack=2)),
    ("dgpo", "lora", "own", True, dict(mesh=(1, 2, 1), micro=6, pack=2)),
    ("crd", "full", "own", True, dict(mesh=(1, 1, 2), micro=6, pack=1)),
]


@pytest.mark.parametrize(("name", "tuning", "guidance", "with_kl", "cut"), CASES)
def test_the_gradient_is_that_of_single_samples(name, tuning, guidance, with_kl, cut):
    """Sampled with guidance: unless the config says otherwise, the published losses are trained without."""
    expected = plain(name, tuning, guidance, with_kl)
    sums = expected[1]
    samples = {"diffusion_dpo": 3 * COUNT, "dgpo": GROUPS * 2, "crd": GROUPS * 2}
    assert sums["weight"] == samples.get(name, COUNT * len(ROWS))
    if name in ("awm", "dgpo"):
        assert 0 < sums["clip_fraction"] < sums["weight"]
    fields = GUIDANCE[guidance][0] | ({} if with_kl else dict(algorithm__kl_coefficient=0.0))
    assert_equal(accumulated(name, tuning, **fields, **cut), expected)


def test_an_image_that_is_left_out_adds_nothing_whatever_it_is():
    def spoilt(train_batch):
        samples, bad = train_batch.samples, np.isin(np.arange(len(ROWS)), (2, 7))
        x0 = jnp.where(bad[:, None, None, None], jnp.nan, samples.x0)
        return train_batch._replace(
            samples=samples._replace(x0=x0),
            advantages=jnp.where(bad, jnp.inf, train_batch.advantages),
            weight=jnp.where(bad, 0.0, train_batch.weight),
        )

    fields = dict(algorithm__kl_coefficient=0.0, micro=12, pack=3)
    totals = accumulated("awm", "lora", spoilt, **fields)
    assert_equal(totals, plain("awm", "lora", "published", False, (2, 7)))


# ------------------------------------------------------------------------------ pairs of several rewards

# Two rewards of which the first varies more. In the second group they cancel out, up to rounding; in the third
# one only the second reward says anything.
FIRST = np.float32([9.0, 5.0, 0.0, 1.0, 0.0, 0.0, 0.5, 0.5, 0.5, 3.0, 0.0, 1.0])
SECOND = np.float32([0.1, 0.9, 0.3, 0.0, 1.0, 1.0, 0.2, 0.7, 0.1, 0.0, 0.4, 0.5])
REWARDS = np.stack([FIRST, SECOND], axis=1)
PAIRS = {
    "rewards": AdvantageSettings(std="group", reward_weights=(1.0, 1.0)),
    "gdpo": AdvantageSettings(std="group", combine="gdpo", reward_weights=(1.0, 1.0)),
    "advantages": AdvantageSettings(std="global", combine="advantages", reward_weights=(1.0, 1.0)),
}
PAIRED = {"rewards": (0, 2, 3), "gdpo": (0, 2, 3), "advantages": (0, 1, 2, 3)}


def chosen_pairs(name):
    """By the advantages from the definitions in float64."""
    return best_and_worst(oracle(PAIRS[name], REWARDS, ROWS.tolist()), PAIRED[name])


@functools.cache
def paired_system():
    return toy.system(config("diffusion_dpo", micro=4, pack=2, chunk=6), 1)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_chosen_by_the_advantage_of_all_rewards(name):
    """Of a step's two chunks, trained by a run's own executor."""
    chosen, settings = chosen_pairs(name), PAIRS[name]
    assert all(chosen_pairs(other) != chosen for other in PAIRS.keys() - {name})
    parts = paired_system()._replace(advantages=settings)
    sizes = Settings(1, GROUPS, IMAGES, 6)
    steps = Steps(sizes, iter([toy.records(GROUPS)]), parts.rng, 0)
    state = parts.trainer.init(parameters("full")[0])

    def part_of(cut):
        return SampledImages(0, ROWS[cut], FinalImages(X0[cut], keys()[cut], SIGMAS), SIGMAS)

    known = StepScores(steps[0], settings)
    known.scores[:], known.scored[:] = REWARDS, True
    totals = toy.trained(parts, steps, state, known, PROMPTS, part_of)
    gradient, sums = plain("diffusion_dpo", "full", "published", True, chosen=chosen)
    assert toy.difference(totals.gradient, gradient) < 1e-5
    assert float(totals.sums["weight"]) == sums["weight"]


# ------------------------------------------------------------------------------ slow copies, versions

# Adam with a large eps: rounding stays rounding.
OPTIMIZER = dict(trainer__learning_rate=3.0, trainer__eps=1.0, trainer__clip_norm=1e3)


def driven(monkeypatch, name, steps, devices=1, **fields):
    """(states after each step, images of each call of the reward, metrics, trees by version) of a run."""
    parts = toy.system(c := config(name, **OPTIMIZER | fields), devices)
    calls, states, versions = [], [], {}
    end_step, add = parts.trainer.end_step, SyncedWeights.add

    def ended(state, updates):
        state = end_step(state, updates)
        states.append((jax.device_get(state), updates))
        return state

    def added(self, weights_version, tree, field=None):
        versions[weights_version.version] = jax.device_get(tree)
        add(self, weights_version, tree, field)

    def reward(images, prompts, metadata):
        calls.append(np.asarray(images))
        return toy.brightness(images, prompts, metadata)

    monkeypatch.setattr(parts.trainer, "end_step", ended)
    monkeypatch.setattr(SyncedWeights, "add", added)
    batches = itertools.cycle(
        itertools.islice(toy.batches(GROUPS), c.algorithm.get("set_steps") or 9)
    )
    _, history, _ = toy.drive(parts, c, steps, reward, batches=batches)
    return parts, states, calls, history, versions


def test_diffusion_nft_publishes_its_old_policy_which_follows(monkeypatch):
    """Of two updates a step: the schedule counts updates, and the copy follows once."""
    slow = LinearDecay(start=0, slope=0.2, largest=0.7)
    monkeypatch.setitem(OLD_POLICY_DECAYS, 1, slow)
    parts, states, calls, history, versions = driven(
        monkeypatch, "diffusion_nft", 2, trainer__updates=2, chunk=6, micro=6
    )
    old = jax.device_get(parts.start)
    assert [updates for _, updates in states] == [2, 4]
    for (state, _), keep in zip(states, (0.4, 0.7), strict=True):
        old = jax.tree.map(lambda a, b, k=keep: k * np.float64(a) + (1 - k) * b, old, state.tuned)
        assert toy.difference(state.copy, old) < 1e-6
        assert toy.difference(state.tuned, old) > 1e-4
    for version, (state, _) in enumerate(states, 1):
        jax.tree.map(np.testing.assert_array_equal, versions[version], state.copy)
    # What the second step was sampled from.
    weights = parts.rollout_weights(states[0][0].copy)
    prompts = parts.sampler.encode(weights, toy.records(GROUPS))
    keys = image_keys(jax.random.key(0), 14 + ROWS[:6], np.tile(np.arange(IMAGES), 2))
    expected, _ = toy.draw_and_show(parts.sampler, weights, prompts, ROWS[:6], keys)
    # The reward gets the nearest bytes.
    np.testing.assert_allclose(calls[2] / 255, expected, rtol=0, atol=0.5 / 255 + 1e-6)
    assert all(line["old_deviation"] > 0 for line in history)  # of the second update


def test_with_asynchrony_the_behavior_is_the_version_that_sampled(monkeypatch):
    seen, ages = [], []
    real = training.make_train_batch

    def noted(system, prompts, images, *judged):
        seen.append(images.version)
        return real(system, prompts, images, *judged)

    fields = toy.meshes((1, 1), (1, 1)) | dict(runtime__max_policy_lag=1, chunk=3, micro=3, pack=3)
    parts = toy.system(c := config("diffusion_nft", **OPTIMIZER | fields), 2)
    accumulate, kept, add = parts.trainer.accumulate, {}, SyncedWeights.add

    def added(self, weights_version, tree, field=None):
        kept[weights_version.version] = jax.device_get(tree)
        add(self, weights_version, tree, field)

    def checked(state, base, train_batch, totals, behavior, proximal, piece):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(behavior), kept[seen[-1]])
        return accumulate(state, base, train_batch, totals, behavior, proximal, piece)

    monkeypatch.setattr(training, "make_train_batch", noted)
    monkeypatch.setattr(SyncedWeights, "add", added)
    monkeypatch.setattr(parts.trainer, "accumulate", checked)
    _, history, _ = toy.drive(parts, c, 3)
    ages = [line["policy_lag"] for line in history]
    assert max(ages) > 0 and ages[0] == 0
    assert all(np.isfinite(line["loss"]) for line in history)


def test_awms_copy_follows_and_is_not_what_is_published(monkeypatch):
    fields = dict(algorithm__ema=dict(start=0, slope=0.3, largest=0.9))
    parts, states, _, history, versions = driven(monkeypatch, "awm", 2, **fields)
    copy = jax.device_get(parts.start)
    for (state, _), keep in zip(states, (0.3, 0.6), strict=True):
        copy = jax.tree.map(lambda a, b, k=keep: k * np.float64(a) + (1 - k) * b, copy, state.tuned)
        assert toy.difference(state.copy, copy) < 1e-6
    for version, (state, _) in enumerate(states, 1):
        jax.tree.map(np.testing.assert_array_equal, versions[version], state.tuned)
    assert history[0]["ema_kl"] == pytest.approx(0, abs=1e-9) and history[1]["ema_kl"] > 0


def test_dgpos_copy_samples_from_some_update_on(monkeypatch):
    """Of two updates a step: versions 1 and 2, after updates 2 and 4, are the trained policy and its copy."""
    slow = LinearDecay(start=1, slope=0.2, largest=0.9)
    monkeypatch.setattr("digen_jax.algorithms.dgpo.SLOW_COPY", slow)
    fields = dict(algorithm__copy_samples_from=3, trainer__updates=2, chunk=6, micro=6)
    parts, states, _, history, versions = driven(monkeypatch, "dgpo", 3, **fields)
    copy = jax.device_get(parts.start)
    for (state, _), keep in zip(states, (0.2, 0.6, 0.9), strict=True):
        copy = jax.tree.map(lambda a, b, k=keep: k * np.float64(a) + (1 - k) * b, copy, state.tuned)
        assert toy.difference(state.copy, copy) < 1e-6
        assert toy.difference(state.tuned, copy) > 1e-4
    jax.tree.map(np.testing.assert_array_equal, versions[1], states[0][0].tuned)
    for version in (2, 3):
        jax.tree.map(np.testing.assert_array_equal, versions[version], states[version - 1][0].copy)
    assert all(0 < line["group_weight"] < 1 for line in history)


def test_crds_two_copies_follow_and_one_samples(monkeypatch):
    fields = dict(
        algorithm__old_policy=dict(start=0, slope=0.2, largest=0.9, first=0.1),
        algorithm__sampling_policy=dict(start=1, slope=0.5, largest=0.7),
    )
    parts, states, _, history, versions = driven(monkeypatch, "crd", 3, **fields)
    copies = [jax.device_get(parts.start)] * 2
    for (state, _), keeps in zip(states, ((0.3, 0.0), (0.5, 0.5), (0.7, 0.7)), strict=True):
        copies = [
            jax.tree.map(lambda a, b, k=keep: k * np.float64(a) + (1 - k) * b, copy, state.tuned)
            for copy, keep in zip(copies, keeps, strict=True)
        ]
        for found, copy in zip((state.copy, state.sampling), copies, strict=True):
            assert toy.difference(found, copy) < 1e-6
    for version, (state, _) in enumerate(states, 1):
        jax.tree.map(np.testing.assert_array_equal, versions[version], state.sampling)
    assert toy.difference(states[-1][0].copy, states[-1][0].sampling) > 1e-4
    assert history[0]["implicit_reward"] == pytest.approx(0, abs=1e-6)


def test_offline_the_images_are_a_set_of_the_start(monkeypatch):
    fields, keys, real = (
        dict(algorithm__set_steps=2, tuning="lora", micro=8),
        [],
        training.make_train_batch,
    )

    def noted(system, prompts, images, *judged):
        keys.append(jax.random.key_data(images.samples.keys))
        return real(system, prompts, images, *judged)

    monkeypatch.setattr(training, "make_train_batch", noted)
    parts, states, calls, _, versions = driven(monkeypatch, "diffusion_dpo", 3, **fields)
    np.testing.assert_array_equal(calls[0], calls[2])
    assert np.abs(calls[1] - calls[0]).max() > 0.01
    start = parts.policy.merged(versions[0], parts.base)
    for version in (1, 2, 3):
        tree = parts.policy.merged(versions[version], parts.base)
        assert toy.difference(tree, start) < 1e-6
    assert toy.difference(states[-1][0].tuned, versions[3]) > 1e-3
    # The same pairs at other noise levels when they come again.
    own = image_keys(jax.random.key(0), 10 + ROWS, np.tile(np.arange(IMAGES), GROUPS))
    np.testing.assert_array_equal(keys[0], jax.random.key_data(own))
    assert not np.isin(keys[2], keys[0]).any()
