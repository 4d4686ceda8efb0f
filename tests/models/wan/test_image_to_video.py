"""Wan's image to video beside diffusers' pipeline, which takes one image a call."""

import dataclasses
import functools
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusers import WanImageToVideoPipeline
from diffusers.pipelines.wan import pipeline_wan_i2v
from diffusers.utils import load_image

from digen_jax.config.load import load_config
from digen_jax.data.prompt_files import read_prompt_file
from digen_jax.diffusion.sampling import flatten, image_keys, replay, start_noise
from digen_jax.diffusion.steps import make_step
from digen_jax.errors import ConfigError
from digen_jax.families import check_parts, load_family, read_parts
from digen_jax.inference.export import export, how_to_load
from digen_jax.inference.model import all_devices, edited, open_model
from digen_jax.inference.sampling import sample_clips
from digen_jax.logging.metrics import read_metrics
from digen_jax.models.family import Size
from digen_jax.parallel.encoding import null_prompt_key, prompt_key
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import SEED, Sampler, SamplerSettings, Weights, steps_of_experts
from digen_jax.policies import trained_of
from digen_jax.train import train
from tests.cases import said
from tests.models.families import NEGATIVES, PROMPTS, STEPS
from tests.models.flux.kontext_folders import edit_prompts, picture
from tests.models.test_families import close
from tests.models.wan.folders import wan_folder
from tests.models.wan.spec import PIPELINE, PIPELINE_5B, PIPELINE_EXPERTS
from tests.tiny_runs import tiny_config

SPECS = {"5B": PIPELINE_5B, "image experts": PIPELINE_EXPERTS}
# diffusers' network takes the last 512 tokens for the text.
SPECS["image"] = dataclasses.replace(PIPELINE, tokens=512)
GUIDED, PLAIN = dict(guidance_scale=5.0), dict(guidance_scale=1.0)
CASES = [("5B", GUIDED), ("image", GUIDED)]
CASES += [("image experts", dict(guidance_scale=4.0, guidance_scale_2=3.0))]
CASES += [pytest.param(kind, PLAIN, marks=pytest.mark.slow) for kind in SPECS]


@pytest.fixture(autouse=True)
def with_ftfy(exact, monkeypatch):
    """The pipeline needs ftfy, which is not installed for the tests; it changes none of their prompts."""
    given = SimpleNamespace(fix_text=lambda text: text)
    monkeypatch.setattr(pipeline_wan_i2v, "ftfy", given, raising=False)


@functools.cache
def ours(base, kind):
    """The family with all its parameters, and its jitted `encode`."""
    spec, folder = SPECS[kind], wan_folder(base, kind)
    family = load_family(folder, max_sequence_length=spec.tokens, source=spec.size)
    params = read_parts(family, folder, family.shapes(), all_devices(jax.devices()[:1]))
    return family, params, jax.jit(family.encode)


@functools.cache
def theirs(base, kind):
    pipe = WanImageToVideoPipeline.from_pretrained(wan_folder(base, kind))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module", autouse=True)
def forget():
    yield
    ours.cache_clear()  # other tests look at all arrays that are left


def records(negative=False):
    """Two prompts, with images of other sizes than the clips'."""
    found = said(*PROMPTS[:2])
    for seed, record in enumerate(found):
        record["image"] = picture(seed, 33, 21 + seed)
        if negative:
            record["negative_prompt"] = NEGATIVES[seed]
    return found


def by_diffusers(spec, pipe, given, x, **call):
    """Latents after each step and clips of `Pipeline.call`, for each prompt with its image."""
    found = []
    for i, record in enumerate(given):
        own = dict(image=record["image"], **call)
        if "negative_prompt" in record:
            own["negative_prompt"] = [record["negative_prompt"]]
        found.append(spec.call(pipe, [record["prompt"]], x[i : i + 1], **own))
    latents, clips = zip(*found, strict=True)
    return [np.concatenate(each) for each in zip(*latents, strict=True)], np.concatenate(clips)


@pytest.mark.parametrize(("kind", "call"), CASES)
def test_latents_are_the_pipelines_after_each_step_and_so_are_pixels(base, kind, call):
    """The pipeline computes a first frame that it does not use until the end, where it is replaced."""
    spec, (family, params, encode) = SPECS[kind], ours(base, kind)
    guided = call["guidance_scale"] > 1
    family, given = family.scheduled(STEPS, spec.size), records(guided)
    policy = Policy(family, call["guidance_scale"], guidance_2=call.get("guidance_scale_2", 0.0))
    prompts = encode(params, family.tokenize(given))
    null = encode(params, family.tokenize_null(given)) if guided else None
    tuned, fixed = policy.split(jax.random.key(0), trained_of(family, params), reference=False)
    x = np.random.default_rng(0).normal(size=(2, *family.latent_shape(spec.size)))
    x = start = x.astype(np.float32)
    expected, pixels = by_diffusers(spec, theirs(base, kind), given, x, **call)
    sigmas = family.sigmas(STEPS, spec.size)
    counts = steps_of_experts(family, sigmas)
    experts = [one.expert for one, n in zip(policy.experts, counts, strict=True) for _ in range(n)]

    @functools.partial(jax.jit, static_argnums=3)
    def step(x, i, last, expert):
        sigma = jnp.full(2, jnp.asarray(sigmas)[i])
        v = policy.experts[expert].velocity(tuned, fixed, prompts, null)(x, sigma)
        return family.solver.advance(x, v, jnp.asarray(sigmas), i, last)

    x, replaced = jnp.asarray(x), int(family.expand_timesteps)
    last = family.solver.init_last(x)
    for i, latents in enumerate(expected):
        x, last = step(x, i, last, experts[i])
        close(spec.seen(np.asarray(x))[:, :, replaced:], latents[:, :, replaced:], 1e-4)
    clips = np.asarray(jax.jit(family.decode)(params, x))
    np.testing.assert_allclose(clips, pixels, rtol=0, atol=1e-3)
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3
    swapped = [
        one | {"image": other["image"]} for one, other in zip(given, given[::-1], strict=True)
    ]
    _, others = by_diffusers(spec, theirs(base, kind), swapped, start, **call)
    # The image matters in the first frame and in later ones, by more than the tolerance.
    assert (np.abs(others - pixels)[:, [0, -1]].max((2, 3, 4)) > 4e-3).all()


def test_images_are_part_of_a_prompts_key(base):
    """And of that of its negative prompt; equal ones are encoded once."""
    family, (first, other) = ours(base, "5B")[0], records()
    same = first | {"image": other["image"]}
    for key in (prompt_key, null_prompt_key):
        assert len({key(family, one) for one in (first, same, dict(first))}) == 2
    tokens = family.tokenize([first, same])
    assert (tokens.ids[0] == tokens.ids[1]).all() and (tokens.image[0] != tokens.image[1]).any()
    assert family.tokenize_null([first, same]).image.shape[0] == 2


def test_the_first_frame_counts_in_no_ratio_and_in_no_gradient(base):
    """With noise in all steps, the last one included, which would change the image."""
    family, params, _ = ours(base, "5B")
    size, step = PIPELINE_5B.size, make_step("flow", 0.7)
    sampler = Sampler(
        Policy(family), all_devices(jax.devices()[:1]), SamplerSettings(size, 2, step, 2)
    )
    trained = trained_of(family, params)
    tuned, fixed = sampler.policy.split(jax.random.key(0), trained, reference=False)
    weights, rows = Weights(tuned, fixed, params), np.arange(2, dtype=np.int32)
    prompts = sampler.encode(weights, records())
    keys = image_keys(jax.random.key(3), rows, np.zeros(2, int))
    trajectory = sampler.generate(weights, prompts, rows, keys)
    conditioning = prompts.conditioning
    np.testing.assert_array_equal(trajectory.latents[:, :1], conditioning.source)
    done = flatten(trajectory.transitions)
    repeated = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), conditioning)

    @jax.jit
    def again(tuned):
        velocity = sampler.policy.velocity(tuned, fixed, repeated, None)
        return replay(velocity, done, step, trajectory.sigmas[1])

    before, after = again(tuned), again(jax.tree.map(lambda leaf: leaf * 1.05, tuned))
    np.testing.assert_allclose(before.log_prob, done.log_prob, rtol=0, atol=1e-5)
    for field in ("mean", "velocity"):
        old, new = getattr(before, field), getattr(after, field)
        np.testing.assert_array_equal(old[:, 0], new[:, 0])
        assert np.abs(old[:, 1:] - new[:, 1:]).max() > 1e-3
    errors = [np.square(done.x_next - one.mean)[:, 1:] / 2 for one in (before, after)]
    ratio = (errors[0] - errors[1]).sum((1, 2, 3, 4)) / before.std**2 / done.x[0].size
    np.testing.assert_allclose(after.log_prob - before.log_prob, ratio, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "match"),
    [
        (Size(32, 64, 5), "make both sizes equal"),
        (Size(64, 32, 9), "make both sizes equal"),
        (Size(32, 64, 1), "make both sizes equal"),
    ],
)
def test_clips_have_the_size_of_their_images(base, size, match):
    with pytest.raises(ValueError, match=match):
        ours(base, "5B")[0].latent_shape(size)


def test_images_and_sizes_that_do_not_fit_are_refused(base):
    family = load_family(wan_folder(base, "5B"))
    with pytest.raises(ValueError, match="use 5 or more"):
        load_family(wan_folder(base, "5B"), source=Size(32, 64))
    with pytest.raises(ValueError, match="has an image, but the model was opened without"):
        family.tokenize(records())
    with pytest.raises(ValueError, match="has no image"):
        ours(base, "5B")[0].tokenize(said("x"))
    with pytest.raises(ValueError, match=r"set config\.model\.source_height"):
        load_family(wan_folder(base, "image")).tokenize(records())
    with pytest.raises(ValueError, match="cannot edit images"):
        load_family(wan_folder(base), source=Size(32, 64, 9))
    for size in (Size(32, 64, 9), Size(64, 32, 5)):
        found = edited(family, records(), size=size)
        assert found.source == size and found.pipeline == "WanImageToVideoPipeline"


@pytest.mark.parametrize("kind", ["image", "image experts"])
def test_every_tensor_is_read_or_is_known_to_be_unread(base, kind):
    folder, family = wan_folder(base, kind), ours(base, kind)[0]
    check_parts(family, folder, family.shapes())
    assert family.encoders.keys() == {*family.shapes()} - {*family.trained}


@pytest.mark.parametrize(
    ("kind", "file", "change"),
    [
        ("image experts", "transformer/config.json", {"in_channels": 4}),
        ("image experts", "model_index.json", {"expand_timesteps": True}),
        ("image", "model_index.json", {"image_encoder": [None, None]}),
        ("image", "image_encoder/config.json", {"hidden_size": 14}),
        ("", "transformer/config.json", {"image_dim": 12, "added_kv_proj_dim": 32}),
    ],
)
def test_folders_that_do_not_fit_are_refused(base, tmp_path, kind, file, change):
    ignore = shutil.ignore_patterns("*.safetensors")
    copy = shutil.copytree(wan_folder(base, kind), tmp_path / "pipeline", ignore=ignore)
    both = [copy / file, copy / "transformer_2" / "config.json"]
    for path in both if "in_channels" in change and kind else both[:1]:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match="must be") as caught:
        load_family(copy)
    assert "max_sequence_length" not in str(caught.value)


def test_models_with_an_image_encoder_have_512_tokens(base):
    with pytest.raises(ConfigError, match=r"config\.model\.max_sequence_length must be 512"):
        load_family(wan_folder(base, "image"), max_sequence_length=21)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tuned"), [("5B", "lora"), ("image experts", "full")])
def test_the_export_of_a_run_samples_in_diffusers_as_here(base, tmp_path, kind, tuned):
    spec, c = SPECS[kind], tiny_config(base, tuned)
    size = spec.size._replace(frames=5)
    source = dict(source_height=size.height, source_width=size.width)
    folder = str(wan_folder(base, kind))
    c.model = dict(folder=folder, max_sequence_length=spec.tokens, **source, **size._asdict())
    c.prompts.file = c.evaluation.prompts = str(edit_prompts(base))
    c.sampler.guidance = c.evaluation.guidance = 3.0
    c.sampler.kind, c.sampler.window = "flow", dict(first=0, length=2)
    c.evaluation.steps, c.rewards, c.trainer.ema = STEPS, ("tests.tiny_runs:redness",), 0.0
    if tuned == "lora":
        c.lora = dict(rank=4, alpha=8.0)
    train(load_config(c), tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    first = next(line for line in lines if "ratio" in line)
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["gradient_norm"] > 0

    run, scope = export(tmp_path / "run", tmp_path / "out"), {}
    exec(how_to_load(run, tmp_path / "out"), scope)
    pipe = scope["pipe"]
    assert type(pipe) is WanImageToVideoPipeline
    pipe.set_progress_bar_config(disable=True)
    model = open_model(str(tmp_path / "run"), jax.devices()[:1])
    sampler = model.sampler()
    given = read_prompt_file(edit_prompts(base))[:2]
    found = sample_clips(sampler, model.weights, given, 0, 2)
    keys = image_keys(jax.random.key(SEED), np.arange(2), np.zeros(2, int))
    noise = np.asarray(start_noise(keys, sampler.shape))
    given = [one | {"image": load_image(one["image"])} for one in given]
    _, expected = by_diffusers(spec, pipe, given, noise, guidance_scale=3.0)
    assert np.abs(found / 255 - expected).max() < 2 / 255
    _, before = by_diffusers(spec, theirs(base, kind), given, noise, guidance_scale=3.0)
    assert np.abs(expected - before).max() > 3 / 255
