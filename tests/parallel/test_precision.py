"""The config's section `precision`: in which types parameters are kept, computed with, and gathered."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from digen_jax.checkpoints.quantization import SCALE, quantize
from digen_jax.diffusion.sampling import image_keys
from digen_jax.parallel.policy import jit_as_written
from digen_jax.parallel.system import SampledImages
from digen_jax.planning.programs import trace_gradient, trained_samples
from digen_jax.scheduling.commands import TRAINER
from tests.cases import said
from tests.parallel import toy
from tests.parallel.test_axes import ADVANTAGES, ROWS, outlined, system_of
from tests.parallel.test_axes import config as tiny_config

pytestmark = pytest.mark.usefixtures("exact_and_split")

HALF = jnp.dtype("bfloat16")


def built(base, tuning, **precision):
    c = tiny_config(base, tuning, "one device")
    c.precision = precision
    return system_of(c)


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def types(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_what_is_never_trained_is_nowhere_in_float32(base, tuning):
    others = jax.live_arrays()  # kept, so that no new one gets the identity of one that is gone
    before = {id(array) for array in others}
    system = built(base, tuning, frozen="bfloat16")
    rollout = system.rollouts[0]
    assert types((system.base, rollout.base, rollout.frozen)) == {HALF}
    assert types(system.start) == {jnp.dtype("float32")}
    new = [array for array in jax.live_arrays() if id(array) not in before]
    kept = sum(array.nbytes for array in new if array.dtype == jnp.float32)
    tuned = sum(leaf.nbytes for leaf in jax.tree.leaves(system.start))
    assert tuned <= kept < 1.1 * tuned


@pytest.mark.slow
def test_trajectories_in_half_precision_are_replayed_as_sampled(base):
    """The log-probability is that of the rounded image, and the next step starts from it."""
    c = tiny_config(base, "full", "one device", algorithm__old_log_probs="rollout")
    c.precision = dict(trajectory="bfloat16")
    system = system_of(c)
    weights = system.rollout_weights(system.start)
    prompts = system.sampler.encode(weights, said("a photo of a star", "two rings"))
    keys = image_keys(jax.random.key(1), ROWS, np.arange(8) % 4)
    made = system.sampler.generate(weights, prompts, ROWS, keys)
    x, x_next = made.transitions.x, made.transitions.x_next
    assert types((x, x_next, made.latents)) == {HALF}
    np.testing.assert_array_equal(x[1], x_next[0])

    def deviation(transitions):
        images = SampledImages(0, ROWS, transitions, made.sigmas)
        train_batch = toy.receive(system, prompts, images, ADVANTAGES)
        state = system.trainer.init(jax.tree.map(jnp.copy, system.start))
        sums = system.trainer.accumulate(state, system.base, train_batch, None).sums
        return sums["ratio_deviation"] / sums["weight"]

    assert deviation(made.transitions) < 2e-6
    off = made.transitions._replace(x_next=x_next.astype(jnp.float32) * 1.002)
    assert deviation(off) > 1e-4


# --------------------------------------------------------------------------- casts before gathers


def gathered_kernels(text):
    """Of each layer whose kernel a compiled program gathers: whether it was rounded to bfloat16 before.

    A CPU has no products in bfloat16 and gathers the rounded numbers in float32.
    """
    bodies, instructions, body = collections.defaultdict(list), {}, None
    for line in map(str.strip, text.splitlines()):
        if found := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{", line):
            body = found[1]
        elif found := re.match(r"(?:ROOT )?%([\w.\-]+) = (.*)", line):
            instructions[found[1]] = found[2]
            bodies[body].append(line)

    def rounded(name, depth=4):
        line = instructions.get(name, "")
        called = re.search(r"calls=%([\w.\-]+)", line)
        if "bf16[" in line or (called and any("bf16[" in inner for inner in bodies[called[1]])):
            return True
        operands = re.findall(r"%([\w.\-]+)", line.split("(", 1)[-1].split(")")[0])
        moves = re.match(r"\S+ (copy|bitcast|transpose|reshape|fusion|convert)\(", line)
        return bool(moves and depth and any(rounded(one, depth - 1) for one in operands))

    kernels = collections.defaultdict(list)
    for line in instructions.values():
        found = re.match(r"\w+\[\d+,\d+\]\S* all-gather\(%([\w.\-]+)\).*op_name=\"([^\"]*)\"", line)
        if found and (
            layer := re.search(r"((?:attn|ff|ff_context)/\S+)/sharding_constraint", found[2])
        ):
            kernels[layer[1]].append(rounded(found[1]))
    return kernels


@pytest.mark.slow
def test_parameters_are_rounded_before_they_are_gathered(base):
    config = tiny_config(base, "full", "fsdp")
    config.precision = dict(arithmetic="bfloat16")
    train_config, system = outlined(config)
    lowered = trace_gradient(system, train_config, trained_samples(train_config)).lower()
    found = gathered_kernels(lowered.compile().as_text())
    assert {"attn/to_q", "attn/to_out_0", "ff/net_0/proj", "ff/net_2"} <= set(found)
    assert all(one for kernel in found.values() for one in kernel)


# ------------------------------------------------------- a sampler in bfloat16 with a trainer in float32

LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets="inside|outside")


def rounded_config(dtype="bfloat16", **fields):
    layout = toy.meshes((2, 1), (1, 2), samples=True)
    return toy.config(precision__rollout=dtype, **layout, **fields)


@pytest.mark.parametrize("lora", [{}, LORA])
@pytest.mark.parametrize("weights", ["in place", "resharded"])
def test_parameters_are_rounded_for_every_sampler_and_for_nobody_else(lora, weights):
    c = rounded_config(runtime__tag_weights=weights, **lora)
    system = toy.system(c)
    state = toy.fresh(system)
    executors = toy.executors(system, c, state, toy.batches(2))
    for worker in ("rollout 0", TRAINER):
        sent = executors.sampling(worker).rollout.weights(state.tuned)
        assert types(sent.tuned) == {jnp.dtype("bfloat16")} and types(sent.base) <= types(
            sent.tuned
        )
        assert types(sent.frozen) == {jnp.dtype("float32")}
        expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), state.tuned)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(sent.tuned), expected)
    assert types((state, system.base)) <= {jnp.dtype("float32"), jnp.dtype("int32")}


def test_it_samples_by_the_rounded_network():
    """Its latents are those of the plain network, given rounded parameters and activations."""
    c = rounded_config(sampler__window=dict(first=0, length=4))
    system = toy.system(c)
    prompts, (chunk,) = toy.rollout(system, c, system.start)
    t = jax.tree.map(jnp.asarray, jax.device_get(chunk.samples))
    step, sigmas = system.sampler.settings.step, chunk.sigmas
    rounded = system.rollout_weights(system.start)
    conditioning = jax.tree.map(lambda leaf: leaf[chunk.rows], prompts.conditioning)
    family = toy.ToyFamily(toy.Network(dtype=jnp.bfloat16))
    means = []
    for parameters, network in ((rounded.tuned, family), (system.start, toy.ToyFamily())):
        policy = system.policy.__class__(network, c.sampler.guidance)
        given = jax.device_get((parameters, rounded.base, conditioning, prompts.null))
        velocity = jit_as_written(policy.velocity(*jax.tree.map(jnp.asarray, given)))
        v = velocity(t.x[1], jnp.full(len(t.x[1]), t.sigma[1]))
        mean, std = step.mean_std(t.x[1], v, t.sigma[1], t.sigma_next[1], sigmas[1])
        means.append((step.log_prob(t.x_next[1], mean, std), mean))
    (found, of_rounded), (_, exact) = means
    np.testing.assert_allclose(found, t.log_prob[1], atol=2e-3)
    assert 1e-3 < np.abs(of_rounded - exact).max() < 0.1


def test_rounding_is_seen_in_the_ratios_and_clips_nothing():
    c = rounded_config(algorithm__clip_range=1e-3, algorithm__adv_clip=5.0)
    _, (found,), _ = toy.drive(toy.system(c), c, 1)
    # Without rounding the deviation of a first update is below 1e-5: see runtime/test_driver.py.
    assert found["ratio_deviation"] > 3e-4 and found["clip_fraction"] == 0


# -------------------------------------------------------------------------------- quantized weights


class Quantized(toy.ToyFamily):
    """The transformer has quantized kernels, or dequantized ones."""

    dtype, wide = jnp.dtype("int8"), False

    def params(self):
        params = super().params()
        kernels = flatten_dict(params["transformer"])
        for path in [path for path in kernels if path[-1] == "kernel"]:
            q, scale = quantize(kernels[path], self.dtype)
            quantized = {path: q, (*path[:-1], SCALE): scale}
            kernels |= {path: q * scale} if self.wide else quantized
        return params | {"transformer": unflatten_dict(kernels)}


class Dequantized(Quantized):
    wide = True


def test_samples_and_gradient_are_those_of_dequantized_weights():
    """On meshes that split kernels, with a LoRA that has moved, and a KL to the weights without it."""
    layout = toy.meshes((1, 2), (2, 2))
    c = toy.config(**layout, **LORA, algorithm__kl_coefficient=0.1)
    found = []
    for family in (Quantized(), Dequantized()):
        system = toy.system(c, family=family)
        held = jax.device_get((system.base, system.rollouts[0].base))
        jax.tree.map(np.testing.assert_array_equal, *held)
        tuned = toy.moved(system.start)
        prompts, (chunk,) = toy.rollout(system, c, tuned)
        batch = toy.receive(system, prompts, chunk, ADVANTAGES)
        totals = system.trainer.accumulate(system.trainer.init(tuned), system.base, batch, None)
        sums = {name: float(value / totals.sums["weight"]) for name, value in totals.sums.items()}
        found.append((system, jax.device_get(chunk.samples), toy.mean(totals), sums))
    (system, samples, gradient, sums), (_, expected, of_wide, expected_sums) = found
    kernel = system.base["transformer"]["inside"]["kernel"]
    assert kernel.dtype == Quantized.dtype and not kernel.sharding.is_fully_replicated
    np.testing.assert_allclose(samples.x, expected.x, atol=1e-5)
    assert toy.difference(gradient, of_wide) < 1e-4
    assert sums["ratio_deviation"] < 1e-5 < 1e-3 < sums["kl"]
    assert sums["kl"] == pytest.approx(expected_sums["kl"], rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_weights_are_never_cast(dtype):
    """Neither for samplers in another dtype, nor on another mesh."""
    c = toy.config(**toy.meshes((1, 2), (2, 2)), **LORA, precision__rollout=dtype)
    system = toy.system(c, family=Quantized())
    base, sent = (tree["transformer"]["text"] for tree in (system.base, system.rollouts[0].base))
    for name, leaf in base.items():
        kept = leaf.dtype if name != "bias" else jnp.dtype(dtype)
        assert sent[name].dtype == kept
        np.testing.assert_array_equal(sent[name], leaf.astype(kept))
    assert base["kernel"].dtype == Quantized.dtype and base[SCALE].dtype == np.float32


def test_a_models_text_encoders_are_quantized_and_its_autoencoder_is_not(base):
    """Shapes that are planned with are those that are read."""
    system = built(base, "lora", frozen="float8")
    held = {"base": system.base, **system.rollouts[0].frozen}
    float8 = jnp.dtype("float8_e4m3fn")
    assert types(held.pop("vae")) == {HALF}
    found = flatten_dict(held)
    for path, leaf in found.items():
        linear = path[-1] == "kernel" and leaf.ndim < 4
        assert linear == (path[-1] == "kernel" and (*path[:-1], SCALE) in found)
        expected = float8 if linear else np.float32 if path[-1] == SCALE else HALF
        assert leaf.dtype == expected, path
    c = tiny_config(base, "lora", "one device")
    c.precision = dict(frozen="float8")
    _, planned = outlined(c)
    for one, other in zip(
        (system.base, system.rollouts[0].frozen),
        (planned.base, planned.rollouts[0].frozen),
        strict=True,
    ):
        assert described(one) == described(other)

    def wide(tree):
        flat = flatten_dict(tree)
        for *path, leaf in flat:
            if leaf == "kernel" and (scale := flat.get((*path, SCALE))) is not None:
                flat[*path, leaf] = flat[*path, leaf].astype(jnp.float32) * scale[..., None, :]
        return unflatten_dict(flat)

    family, prompts = system.policy.family, said("a photo of a star", "two rings")
    found = system.sampler.encode(system.rollout_weights(system.start), prompts).conditioning
    tokens = family.tokenize(prompts)
    encoders = {part: wide(tree) for part, tree in held.items() if part != "base"}
    for one, other in zip(found, jax.jit(family.encode)(encoders, tokens), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
