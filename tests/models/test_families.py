"""All families against diffusers' own pipelines, on folders of random weights."""

import dataclasses
import fnmatch
import functools
import inspect
import json
import shutil

import diffusers
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from digen_jax.checkpoints.folder import copy_pipeline, open_tensors, write_params
from digen_jax.checkpoints.lora import LoraConfig, adapted_layers, lora_init
from digen_jax.checkpoints.lora_files import FILE, read_lora, write_lora
from digen_jax.checkpoints.quantization import SCALE, quantized_layers
from digen_jax.checkpoints.tensors import tensor_names
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.errors import ConfigError
from digen_jax.families import load_family, open_pipeline
from digen_jax.files import read_json
from digen_jax.inference.model import all_devices
from digen_jax.models.family import Size, frozen_shapes
from digen_jax.models.pipeline_family import tokenizer_of
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights, steps_of_experts
from digen_jax.policies import trained_of
from tests.cases import quick, said
from tests.models.families import (
    ALL,
    LONG,
    NEGATIVES,
    PROMPTS,
    STEPS,
    diffusers_pipeline,
    sigmas_and_timesteps,
)
from tests.models.flux import spec as flux
from tests.models.flux2 import spec as flux2
from tests.models.hunyuan import spec as hunyuan
from tests.models.hunyuan import spec15 as hunyuan15
from tests.models.qwen_image import spec as qwen_image
from tests.models.sd3 import spec as sd3
from tests.models.wan import spec as wan
from tests.models.zimage import spec as zimage
from tests.pipelines import decode_floats

pytestmark = pytest.mark.usefixtures("exact")
FAMILIES = {
    "sd3": sd3.PIPELINE,
    "flux": flux.PIPELINE,
    "flux2": flux2.PIPELINE,
    "zimage": zimage.PIPELINE,
    "qwen_image": qwen_image.PIPELINE,
    "wan": wan.PIPELINE,
    "hunyuan": hunyuan.PIPELINE,
    "hunyuan15": hunyuan15.PIPELINE,
}
# Wan's class with another autoencoder, or with two transformers: only in tests of what differs.
WAN_2_2 = {"wan_5b": wan.PIPELINE_5B, "wan_experts": wan.PIPELINE_EXPERTS}
ALL_PIPELINES = FAMILIES | WAN_2_2
each_family = pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
each_pipeline = pytest.mark.parametrize("spec", ALL_PIPELINES.values(), ids=ALL_PIPELINES)
# One pass is a part of two, and of the slow tests but for one family.
VARIANTS = [
    pytest.param(
        *(spec, variant),
        marks=[pytest.mark.slow] * (variant == "plain" and name != "flux"),
        id=f"{name}-{variant}",
    )
    for name, spec in ALL_PIPELINES.items()
    for variant in spec.variants
    if name in FAMILIES or variant != "plain"
]


@pytest.fixture
def folder(base, spec):
    return spec.folder(base, spec.kinds[0])


@pytest.fixture
def copy(folder, tmp_path):
    """A copy without weights, because JSON files alone decide."""
    ignore = shutil.ignore_patterns("*.safetensors")
    return shutil.copytree(folder, tmp_path / "pipeline", ignore=ignore)


def close(found, expected, tolerance: float = 1e-5) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert not found.size or np.abs(found - expected).max() < tolerance * np.abs(expected).max()


def rows(family, conditioning) -> dict[str, list[np.ndarray]]:
    """The conditioning's fields, a list by prompt, without masked padding."""
    found = {k: [*np.asarray(v)] for k, v in conditioning._asdict().items()}
    for field, mask in family.masked.items():
        masks = found.pop(mask)
        assert not any(valid[valid.sum() :].any() for valid in masks)
        found[field] = [row[valid] for row, valid in zip(found[field], masks, strict=True)]
    return found


def policy_of(family, variant) -> Policy:
    options = dict(true_cfg_scale=variant.true, guidance_2=variant.second)
    return Policy(family, variant.guidance, **options)


def our_latents(policy, tuned, fixed, prompts, null, x, size):
    """Latents after each step."""
    family, x = policy.family, jnp.asarray(x)
    sigmas = jnp.asarray(family.sigmas(STEPS, size))

    @functools.partial(jax.jit, static_argnums=4)
    def step(tuned, x, i, last, expert):
        velocity = policy.experts[expert].velocity(tuned, fixed, prompts, null)
        return family.solver.advance(x, velocity(x, jnp.full(len(x), sigmas[i])), sigmas, i, last)

    last, i = family.solver.init_last(x), 0
    for expert, steps in enumerate(steps_of_experts(family, np.asarray(sigmas))):
        for _ in range(steps):
            x, last = step(tuned, x, i, last, expert)
            i += 1
            yield np.asarray(x)


def records_of(variant) -> list[dict]:
    records = said(*PROMPTS)
    if variant.negative:
        for record, negative in zip(records, NEGATIVES, strict=True):
            record["negative_prompt"] = negative
    return records


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("flux", "flux2", "zimage")))
        for name in ("sd3", "flux", "flux2", "zimage", "qwen_image")
    ],
)
def test_images_are_encoded_to_the_latents_that_the_pipelines_decoder_reads(base, name):
    """Decoded again, they are what diffusers' autoencoder makes of the means of its own latents."""
    spec = FAMILIES[name]
    folder = spec.folder(base, spec.kinds[0])
    family, params, _ = spec.ours(folder)
    side = 2 * family.factor * family.patch
    images = np.random.default_rng(0).uniform(size=(2, side, side, 3)).astype(np.float32)
    latents = jax.jit(family.encode_images)(params, images)
    assert latents.shape[1:] == family.latent_shape(Size(side, side))
    found = jax.jit(family.decode)(params, latents)[:, 0]
    vae, given = diffusers_pipeline(folder).vae, torch.tensor(images).movedim(-1, 1) * 2 - 1
    with torch.no_grad():
        given = given[:, :, None] if name == "qwen_image" else given
        expected = vae.decode(vae.encode(given).latent_dist.mode()).sample
    expected = expected[:, :, 0] if name == "qwen_image" else expected
    close(found, (expected.movedim(1, -1) / 2 + 0.5).clamp(0, 1).numpy(), 1e-4)


def test_families_of_clips_have_no_latents_of_images(base):
    for spec in (wan.PIPELINE, hunyuan.PIPELINE, hunyuan15.PIPELINE):
        family = load_family(spec.folder(base, spec.kinds[0]))
        with pytest.raises(ValueError):
            family.encode_images({}, np.zeros((1, 32, 32, 3), np.float32))


# --------------------------------------------------------------------------------------- prompts


@each_family
def test_prompts_are_encoded_as_by_the_pipeline(spec, folder):
    """Twice the same, a prompt alone as beside longer ones, and the pass without a prompt."""
    family, params, encode = spec.ours(folder)
    pipe, records = diffusers_pipeline(folder), said(*ALL)
    expected = spec.encoded(pipe, ALL, spec.tokens)
    tokens = family.tokenize(records)
    found = encode(params, tokens)
    again = encode(params, family.tokenize(records))
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert records == said(*ALL) and found.context.shape[1] == family.context_tokens
    by_prompt = rows(family, found)
    assert by_prompt.keys() == expected.keys()
    for name, wanted in expected.items():
        scale = max(np.abs(row).max(initial=0) for row in wanted)
        for row, other in zip(by_prompt[name], wanted, strict=True):
            assert row.shape == other.shape
            assert np.abs(row - other).max(initial=0) < spec.tolerance * scale
        assert np.abs(wanted[0].sum(0) - wanted[1].sum(0)).max() > 1e-3
    alone = encode(params, family.tokenize(records[:1] * len(records)))  # in the same program
    for name, values in rows(family, alone).items():
        close(values[0], by_prompt[name][0], 1e-5)
    assert family.is_truncated([PROMPTS[0], LONG, ""]).tolist() == [False, True, False]
    null = encode(params, family.tokenize_null(records))
    wanted = spec.encoded(pipe, [family.negative_prompt], spec.tokens)
    for name, values in rows(family, null).items():
        assert len(values) == 1
        close(values[0], wanted[name][0], spec.tolerance)


# ------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("spec", "name", "sides"),
    [
        pytest.param(spec, name, sides, id=f"{name.split('/')[1]}-{'x'.join(map(str, sides))}")
        for spec in ALL_PIPELINES.values()
        for name in spec.schedules[0]
        for sides in spec.schedules[1]
    ],
)
def test_sigmas_and_timesteps_are_the_pipelines(spec, name, sides):
    """Of the published models, bit by bit."""
    from digen_jax.models.published import published_folder

    family, size = load_family(published_folder(name)), Size(*sides)
    for steps in range(spec.first_steps, 51):
        sigmas, timesteps = sigmas_and_timesteps(spec, name, steps, size)
        found = family.sigmas(steps, size)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, sigmas)
        times = spec.times(family.scheduled(steps, size), found[:-1])
        np.testing.assert_array_equal(times, timesteps)


# ------------------------------------------------------------------------------ the whole pipeline


@pytest.mark.parametrize(("spec", "name"), VARIANTS)
def test_latents_are_the_pipelines_after_each_step_and_so_are_pixels(base, spec, name):
    variant = spec.variants[name]
    folder = spec.folder(base, variant.kind)
    family, params, encode = spec.ours(folder)
    size = spec.size._replace(frames=variant.frames or spec.size.frames)
    family = dataclasses.replace(family, **variant.options).scheduled(STEPS, size)
    records = records_of(variant)
    policy = policy_of(family, variant)
    trained = trained_of(family, params)
    tuned, fixed = policy.split(jax.random.key(0), trained, reference=False)
    prompts = encode(params, family.tokenize(records))
    null = encode(params, family.tokenize_null(records)) if policy.reads_null else None
    x = np.random.default_rng(0).normal(size=(3, *family.latent_shape(size)))
    x = x.astype(np.float32)
    pipe = diffusers_pipeline(folder)
    given = variant.call | ({"negative_prompt": NEGATIVES} if variant.negative else {})
    expected, pixels = spec.call(pipe, PROMPTS, x, **given)
    sigmas = family.sigmas(STEPS, size)
    np.testing.assert_array_equal(sigmas, pipe.scheduler.sigmas.numpy())

    found = list(our_latents(policy, tuned, fixed, prompts, null, x, size))
    for latents, wanted in zip(found, expected, strict=True):
        close(spec.seen(latents), wanted, 1e-4)
    clips = np.asarray(jax.jit(family.decode)(params, found[-1]))
    assert clips.shape == (3, size.frames, size.height, size.width, 3)
    np.testing.assert_allclose(clips, pixels, rtol=0, atol=1e-3)
    # Neither clipped nearly everywhere, nor equal for other negative prompts: such images would prove nothing.
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3
    if variant.negative and null is not None:
        _, others = spec.call(pipe, PROMPTS, x, **given | {"negative_prompt": NEGATIVES[::-1]})
        assert (np.abs(others - pixels).max((1, 2, 3, 4))[[0, 2]] > 2 / 255).all()


@pytest.mark.parametrize(
    "spec", quick([(FAMILIES[name],) for name in ("sd3", "wan", "qwen_image", "hunyuan")], 0, 1)
)
def test_the_samplers_images_are_the_pipelines_and_those_of_a_prompt_alone(spec, folder):
    """Of negative prompts that records do not name the family's own is taken.

    In families whose prompts are padded, or masked, and whose solver remembers a step.
    """
    name, variant = next(iter(spec.variants.items()))
    family, params, _ = spec.ours(folder)
    policy = policy_of(family, variant)
    settings = SamplerSettings(spec.size, STEPS, family.solver)
    sampler = Sampler(policy, all_devices(jax.devices()[:1]), settings)
    trained = trained_of(family, params)
    weights = Weights(*policy.split(jax.random.key(0), trained, reference=False), params)
    places = np.arange(2, dtype=np.int32)
    keys = image_keys(jax.random.key(3), places, np.zeros_like(places))

    def images(*prompts):
        encoded = sampler.encode(weights, said(*prompts))
        trajectory = sampler.generate(weights, encoded, places, keys)
        return np.asarray(decode_floats(sampler, weights, trajectory))

    noise, prompts = np.asarray(start_noise(keys, sampler.shape)), (PROMPTS[0], LONG)
    given = dict(variant.call)
    if variant.negative:
        given["negative_prompt"] = [family.negative_prompt] * 2
    pipe = diffusers_pipeline(folder)
    found, (_, expected) = images(*prompts), spec.call(pipe, prompts, noise, **given)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    alone = images(prompts[0], prompts[0])
    np.testing.assert_allclose(alone[0], found[0], rtol=0, atol=1e-4)
    assert np.abs(alone[1] - found[1]).max() > 10 / 255
    if name != "plain":
        _, plain = spec.call(pipe, prompts, noise, **spec.variants["plain"].call)
        assert np.abs(plain - expected).max() > 10 / 255


# ---------------------------------------------------------------------------------------- folders


@each_pipeline
def test_every_tensor_is_read_once_or_is_known_to_be_unread(spec, folder):
    family, params, _ = spec.ours(folder)
    for part, tree in params.items():
        component = family.parts[part]
        paths = [[key.key for key in path] for path, _ in jax.tree.leaves_with_path(tree)]
        used = [n for path in paths for n in tensor_names(tuple(path), component.lists)]
        stored = {
            (component.renamed or str)(name): t for name, t in open_tensors(folder / part).items()
        }
        assert len({*used}) == len(used) and {*used} <= stored.keys()
        ignored = component.ignored(family.networks[part])
        for name in stored.keys() - {*used}:
            assert any(fnmatch.fnmatch(name, pattern) for pattern in ignored), name
        read = sum(np.prod(stored[name].shape) for name in used)
        assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == read


@each_pipeline
def test_diffusers_reads_the_same_weights_from_the_export(spec, folder, tmp_path):
    """The transformers written anew, in several files; the other components are copied."""
    family, params, _ = spec.ours(folder)
    target = tmp_path / "copy"

    def write(part, to):
        config = read_json(folder / part / "config.json")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params[part])) // 2
        write_params(to, params[part], family.lists[part], config, max_shard_bytes=size)

    writers = {part: functools.partial(write, part) for part in family.trained}
    copy_pipeline(folder, target, writers, {"steps": STEPS})
    for part in family.trained:
        assert len(list((target / part).glob("*.safetensors"))) > 1
    others = {*family.networks, *family.encoders.values(), "scheduler"}
    for part in others - {*family.trained, ""}:
        for file in (folder / part).iterdir():
            assert (target / part / file.name).read_bytes() == file.read_bytes()
    index = "model_index.json"
    assert read_json(target / index) == read_json(folder / index)
    again = load_family(target, max_sequence_length=spec.tokens)
    for part in family.trained:
        read = again.read(target, part)
        jax.tree.map(np.testing.assert_array_equal, read, params[part])
        module = getattr(diffusers_pipeline(folder), part)
        exported = type(module).from_pretrained(target / part).state_dict()
        assert exported.keys() == module.state_dict().keys()
        for name, tensor in module.state_dict().items():
            assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(s, id=n, marks=[pytest.mark.slow] * (n != "zimage"))
        for n, s in ALL_PIPELINES.items()
        if n != "wan_5b"
    ],
)
def test_loras_load_both_ways(spec, folder, tmp_path):
    """Ours in diffusers; and one of PEFT, whose layers our regular expression names, in ours.

    Experts have a file each, which diffusers loads by a call each; without a LoRA they have none.
    """
    import peft
    from peft.utils import get_peft_model_state_dict

    family, params, encode = spec.ours(folder)
    trained, variant = trained_of(family, params), spec.variants["plain"]
    config = LoraConfig(rank=2, alpha=6, targets=family.lora_targets)
    lora = lora_init(jax.random.key(0), trained, config, family.lists)
    rng = np.random.default_rng(0)
    lora = jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype("f4"), lora)
    places = {part: "" if part == "transformer" else part for part in family.trained}
    for name, parts in (("last", family.trained[-1:]), ("ours", family.trained)):
        write_lora(tmp_path / name, {part: lora[part] for part in parts}, 6, family.lists)
        assert {p for p in trained if (tmp_path / name / places[p] / FILE).exists()} == {*parts}
        found = read_lora(tmp_path / name, trained, family.lists)
        assert {part: settings for part, (_, *settings) in found.items()} == {
            p: [2, 6] for p in parts
        }
        for part in parts:
            jax.tree.map(np.testing.assert_array_equal, found[part][0], lora[part])

    x = rng.normal(size=(3, *family.latent_shape(spec.size))).astype(np.float32)
    prompts = encode(params, family.tokenize(said(*PROMPTS)))
    policy = Policy(family.scheduled(STEPS, spec.size), variant.guidance, config)

    def by_ours(lora):
        *_, latents = our_latents(policy, lora, trained, prompts, None, x, spec.size)
        return spec.seen(latents)

    def by_diffusers(pipe):
        return spec.call(pipe, PROMPTS, x, **variant.call)[0][-1]

    kind = type(diffusers_pipeline(folder))
    plain = by_diffusers(diffusers_pipeline(folder))
    pipe, other = kind.from_pretrained(folder), kind.from_pretrained(folder)
    names = adapted_layers(trained, family.lora_targets, family.lists)
    for part, place in places.items():
        second = ", load_into_transformer_2=True" if place else ""
        call = family.lora_loader.format(repr(str(tmp_path / "ours" / place)) + second)
        eval(f"pipe.{call}")  # as export.py prints it
        given = dict(r=2, lora_alpha=6, init_lora_weights=False)
        network = getattr(other, part)
        network.add_adapter(peft.LoraConfig(**given, target_modules=sorted(names[part])))
        modules = network.named_modules()
        adapted = {n for n, m in modules if isinstance(m, peft.tuners.lora.LoraLayer)}
        assert adapted == names[part]
        # A pipeline without this method has no other names in its files.
        getattr(kind, "save_lora_weights", diffusers.HunyuanVideoPipeline.save_lora_weights)(
            tmp_path / "theirs" / place,
            transformer_lora_layers=get_peft_model_state_dict(network),
            transformer_lora_adapter_metadata=network.peft_config["default"].to_dict(),
        )
    close(by_ours(lora), by_diffusers(pipe), 1e-4)
    assert np.abs(by_diffusers(pipe) - plain).max() > 0.01 * np.abs(plain).max()
    read = read_lora(tmp_path / "theirs", trained, family.lists)
    assert {part: settings for part, (_, *settings) in read.items()} == {p: [2, 6] for p in trained}
    read = {part: factors for part, (factors, *_) in read.items()}
    close(by_ours(read), by_diffusers(other), 1e-4)
    write_lora(tmp_path / "again", read, 6, family.lists)
    for place in places.values():
        kept, again = (load_file(tmp_path / one / place / FILE) for one in ("theirs", "again"))
        assert kept.keys() == again.keys()
        for name, array in kept.items():
            np.testing.assert_array_equal(again[name], array, err_msg=name)


# ---------------------------------------------------------------------------- what it says of itself


@each_family
def test_defaults_are_the_pipelines(spec, folder):
    family, pipe = load_family(folder), diffusers_pipeline(folder)
    call = inspect.signature(type(pipe).__call__).parameters
    for name, ours in spec.defaults.items():
        assert ours(family) == call[name].default, name
    assert family.default_size() == spec.default_size(pipe)
    assert family.default_steps == call["num_inference_steps"].default
    assert family.max_sequence_length == spec.tokens_by_default(pipe)
    assert family.heads.number * family.heads.width == family.transformer.config.dim
    latent, transformer = family.latent_shape(spec.size), family.parts["transformer"]
    for one in (family, spec.ours(folder)[0]):
        found = transformer.flops(one.transformer.config, latent, one.context_tokens)
        assert one.flops(spec.size) == {"transformer": found}
    assert family.context_tokens - one.context_tokens == family.max_sequence_length - spec.tokens


@each_pipeline
def test_a_size_that_does_not_fit_is_refused(spec, folder):
    family = spec.ours(folder)[0]
    for size in (*spec.unfit, Size(spec.size.height, 0), spec.size._replace(frames=6)):
        with pytest.raises(ValueError, match="does not fit this model"):
            family.latent_shape(size)


@pytest.mark.parametrize(
    ("spec", "broken"),
    [
        pytest.param(spec, each, id=f"{name}-{each[0]}-{next(iter(each[1]))}")
        for name, spec in ALL_PIPELINES.items()
        for each in spec.broken
    ],
)
def test_components_that_do_not_fit_are_refused_by_their_file(spec, copy, broken):
    file, change, *named = broken
    path = copy / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as caught:
        load_family(copy, max_sequence_length=spec.tokens)
    assert str(caught.value).startswith(str(copy / named[0] if named else path))


@each_family
def test_what_it_cannot_do_without_is_refused(spec, copy):
    with pytest.raises(ConfigError, match=f"its '{spec.needed}', which config"):
        open_pipeline(str(copy), (spec.needed,))
    if spec.most is not None:
        assert load_family(copy, max_sequence_length=spec.most).max_sequence_length == spec.most
        with pytest.raises(ConfigError, match=r"config\.model\.max_sequence_length"):
            load_family(copy, max_sequence_length=spec.most + 1)
    for file in (copy / tokenizer_of(spec.needed)).iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=tokenizer_of(spec.needed)):
        load_family(copy)


@pytest.mark.parametrize("spec", [FAMILIES[n] for n in ("flux2", "zimage", "qwen_image")])
@pytest.mark.parametrize("more", [0, -1])
def test_chats_must_fit_the_text_encoders_sliding_window(spec, copy, more):
    path, family = copy / "text_encoder" / "config.json", load_family(copy)
    window = family.dropped + spec.tokens + more
    fields = dict(use_sliding_window=True, sliding_window=window, max_window_layers=0)
    config = json.loads(path.read_text())
    config.get("text_config", config).update(fields | {"layer_types": None})
    path.write_text(json.dumps(config))
    if not more:
        assert load_family(copy, max_sequence_length=spec.tokens).max_sequence_length
        return
    with pytest.raises(ConfigError, match="sliding_window") as caught:
        load_family(copy, max_sequence_length=spec.tokens)
    assert str(caught.value).startswith(f"{path}: ")
    assert f"max_sequence_length to {spec.tokens - 1} " in str(caught.value)
    load_family(copy, max_sequence_length=spec.tokens - 1)


@pytest.mark.parametrize("spec", quick([(spec,) for spec in ALL_PIPELINES.values()], 1))
def test_every_quantized_kernel_is_that_of_a_linear_layer(base, spec):
    """A layer without `nn.Dense` would take the quantized numbers for its weights."""
    folder = spec.folder(base, spec.kinds[0])
    family = load_family(folder, max_sequence_length=spec.tokens)
    parts = {*family.trained, *family.encoders}
    shapes, called = frozen_shapes(family, parts, "int8"), set()

    def note(call, args, kwargs, context):
        called.update([context.module.path] * isinstance(context.module, nn.Dense))
        return call(*args, **kwargs)

    with nn.intercept_methods(note), quantized_layers():
        prompts = jax.eval_shape(family.encode, shapes, family.tokenize(said(*PROMPTS)))
        x = jax.ShapeDtypeStruct((3, *family.latent_shape(spec.size)), jnp.float32)
        embedded = 1.0 if family.guidance in ("embedded", "both") else None
        variables = {part: {"params": shapes[part]} for part in family.trained}
        sigma = jnp.ones(3)
        velocity = jax.eval_shape(family.velocity, variables, x, sigma, prompts, embedded)
    assert velocity.shape == x.shape
    for part in parts:
        kernels = {path[:-1] for path in flatten_dict(shapes[part]) if path[-1] == SCALE}
        assert kernels and kernels <= called
