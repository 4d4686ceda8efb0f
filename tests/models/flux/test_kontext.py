"""FLUX.1 Kontext as a family, against diffusers' own pipeline on a folder of random weights."""

import dataclasses
import functools
import inspect

import jax
import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.utils import load_image
from PIL import Image

from digen_jax.errors import ConfigError
from digen_jax.families import editing, load_family, read_parts
from digen_jax.inference.model import all_devices
from digen_jax.models.family import Size
from digen_jax.models.flux.network import forward_flops
from digen_jax.models.published import published_folder
from digen_jax.parallel.policy import Policy
from tests.cases import quick, said
from tests.models.families import diffusers_pipeline
from tests.models.flux.kontext_folders import SOURCE, kontext_folder, picture
from tests.models.flux.spec import PIPELINE
from tests.models.folders import flux_folder
from tests.models.test_families import close, our_latents

pytestmark = pytest.mark.usefixtures("exact")
PROMPTS = ["a photo of a red circle", "two blue squares and schräge ☃"]
NEGATIVES = ["four shapes", "a green star above a yellow triangle"]
GUIDANCE, TOKENS = 2.5, 21
SIZE, SOURCE = Size(20, 12), Size(*SOURCE)
SPEC = dataclasses.replace(PIPELINE, size=SIZE, tokens=TOKENS)


@pytest.fixture(scope="module")
def folder(base):
    yield kontext_folder(base)
    ours.cache_clear()  # other tests look at all arrays that are left


@functools.cache
def ours(folder):
    """The family that edits, with all its parameters, and its jitted `encode`."""
    family = load_family(folder, max_sequence_length=TOKENS, source=SOURCE)
    group = all_devices(jax.devices()[:1])
    return family, read_parts(family, folder, family.shapes(), group), jax.jit(family.encode)


def records(*sizes):
    """The prompts with pictures of some sizes, random ones."""
    return [
        {"prompt": prompt, "image": picture(seed, *size)}
        for seed, (prompt, size) in enumerate(zip(PROMPTS, sizes, strict=True))
    ]


# --------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_pictures_are_encoded_as_by_the_pipeline(folder, tmp_path, mode):
    """From a file, of another size and of any kind, as diffusers' `load_image` reads it."""
    family, params, encode = ours(folder)
    pipe = diffusers_pipeline(folder)
    paths = []
    for seed in (0, 1):
        made = picture(seed, 33, 21)
        if mode == "RGBA":
            made.putalpha(100 + seed)
        paths.append(tmp_path / f"{seed}.png")
        made.convert(mode).save(paths[-1])
    given = [{"prompt": p, "image": str(path)} for p, path in zip(PROMPTS, paths, strict=True)]
    found = encode(params, family.tokenize(given))
    images = [load_image(str(path)) for path in paths]
    height, width, _ = SOURCE
    resized = pipe.image_processor.resize(images[0], height, width), images[1]
    prepared = pipe.image_processor.preprocess(list(resized), height, width)
    close(found.source, pipe._encode_vae_image(prepared, None).permute(0, 2, 3, 1))
    context, pooled, _ = pipe.encode_prompt(PROMPTS, PROMPTS, max_sequence_length=TOKENS)
    close(found.context, context)
    close(found.pooled, pooled)
    assert np.abs(np.diff(found.source, axis=0)).max() > 0.1


def test_a_photograph_is_turned_as_its_camera_says(folder, tmp_path):
    family, _, _ = ours(folder)
    upright = picture(0, *SOURCE[:2])
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees
    upright.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
    found, expected = (
        family.tokenize([{"prompt": "", "image": image}]).image
        for image in (tmp_path / "turned.png", upright)
    )
    np.testing.assert_array_equal(found, expected)


def test_prompts_have_pictures_exactly_where_the_model_edits(folder):
    family = ours(folder)[0]
    with pytest.raises(ValueError, match="the prompt 'x' has no image to edit"):
        family.tokenize(said("x"))
    with pytest.raises(ValueError, match="the prompt 'x' has an image, but the model was opened"):
        load_family(folder).tokenize([{"prompt": "x", "image": picture(0, 8, 8)}])


# ------------------------------------------------------------------------------------------ sizes


@pytest.fixture(scope="module")
def asked(folder):
    """What the pipeline with the published autoencoder's factor makes of sizes: of the image, of the picture."""

    class Found(Exception):
        pass

    pipe = FluxKontextPipeline.from_pretrained(folder)
    pipe.vae_scale_factor = 8
    pipe.image_processor = pipeline_flux_kontext.VaeImageProcessor(vae_scale_factor=16)
    seen = {}

    def prepared(image, *given):
        seen["source"] = Size(*image.shape[2:]) if image is not None else None
        seen["size"] = Size(*given[2:4])
        raise Found

    pipe.prepare_latents = prepared
    # Only the shape is looked at.
    pipe.image_processor.resize = lambda image, height, width: torch.zeros(1, 3, height, width)
    pipe.image_processor.preprocess = lambda image, height, width: image
    embeds = torch.zeros(1, 2, 16), torch.zeros(1, 12)

    def ask(size=None, picture_size=None, **given):
        given |= dict(height=size.height, width=size.width) if size else {}
        if picture_size:
            given["image"] = torch.zeros(1, 3, 1, 1).expand(1, 3, *picture_size)
        with pytest.raises(Found):
            pipe(prompt_embeds=embeds[0], pooled_prompt_embeds=embeds[1], **given)
        return seen["size"], seen["source"]

    return ask


def published():
    return load_family(published_folder("black-forest-labs/FLUX.1-Kontext-dev"))


def test_pictures_get_the_size_that_the_pipeline_chooses(asked):
    family, rng = published(), np.random.default_rng(0)
    # Of all shapes between the narrowest and the widest that there are, and beyond.
    shapes = np.exp(rng.uniform(-1.1, 1.1, 100))
    heights = rng.uniform(60, 3000, 100)
    sizes = np.stack([heights, heights * shapes], axis=1).astype(int).tolist()
    sizes += [
        [1024, 1024],
        [16, 4000],
        [4000, 16],
        [880, 1184],
        [887, 1200],
        [512, 768],
        [720, 1280],
        [432, 976],  # between the means, arithmetic and geometric, of the two widest shapes
    ]
    chosen = {tuple(size): family.source_size(*size, SIZE) for size in sizes}
    assert chosen == {tuple(size): asked(picture_size=size)[1] for size in sizes}
    assert len(set(chosen.values())) == 17


def test_images_have_the_size_that_the_pipeline_makes_of_it(asked):
    """Where its `max_area` is that size's area; by default it is that of the default size."""
    family, rng = published(), np.random.default_rng(0)
    assert asked()[0] == family.default_size() == Size(1024, 1024)
    for _ in range(100):
        size = Size(*(16 * rng.integers(1, 130, 2)).tolist())
        assert asked(size, max_area=size.height * size.width)[0] == size
        h, w, c = family.latent_shape(size)
        assert (8 * h, 8 * w, c) == (size.height, size.width, 16)


# ------------------------------------------------------------------------------ the whole pipeline


@pytest.mark.parametrize("true", quick([(2.5,), (0.4,)], 0))
def test_latents_are_the_pipelines_after_each_step_and_so_are_pixels(folder, true):
    """With pictures, of another shape than the image, in one pass and in two."""
    family, params, encode = ours(folder)
    given = records(SOURCE[:2], (30, 50))
    images = [record["image"] for record in given]
    # The pipeline gives all of them the first one's size.
    images[1] = images[1].resize((SOURCE.width, SOURCE.height), Image.Resampling.LANCZOS)
    policy = Policy(family, GUIDANCE, true_cfg_scale=true)
    more = dict(guidance_scale=GUIDANCE, true_cfg_scale=true, negative_prompt=NEGATIVES)
    more |= dict(max_area=SIZE.height * SIZE.width, _auto_resize=False)
    null = None
    if true > 1:
        negatives = [r | {"negative_prompt": n} for r, n in zip(given, NEGATIVES, strict=True)]
        null = encode(params, family.tokenize_null(negatives))
    trained = {"transformer": params["transformer"]}
    tuned, base = policy.split(jax.random.key(0), trained, reference=False)
    prompts = encode(params, family.tokenize(given))
    x = np.random.default_rng(0).normal(size=(2, *family.latent_shape(SIZE))).astype(np.float32)
    pipe = diffusers_pipeline(folder)
    expected, pixels = SPEC.call(pipe, PROMPTS, x, image=images, **more)
    found = list(our_latents(policy, tuned, base, prompts, null, x, SIZE))
    for latents, wanted in zip(found, expected, strict=True):
        close(SPEC.seen(latents), wanted, 1e-4)
    decoded = np.asarray(jax.jit(family.decode)(params, found[-1]))
    assert decoded.shape == (2, 1, SIZE.height, SIZE.width, 3)
    np.testing.assert_allclose(decoded, pixels, rtol=0, atol=1e-3)
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3
    _, others = SPEC.call(pipe, PROMPTS, x, image=images[::-1], **more)
    assert np.abs(others - pixels).max() > 4 / 255
    more["negative_prompt"] = NEGATIVES[::-1]
    _, others = SPEC.call(pipe, PROMPTS, x, image=images, **more)
    assert (np.abs(others - pixels).max((1, 2, 3, 4)) > 4 / 255).all() == (true > 1)


def test_without_a_picture_it_is_flux(base, folder):
    """Bit by bit, with the shapes and the programs of FLUX.1-dev."""
    ids = load_family(folder, max_sequence_length=TOKENS).tokenize(said(*PROMPTS))
    texts = []
    for one in (folder, flux_folder(base, "dev")):
        family = load_family(one, max_sequence_length=TOKENS)
        assert family.encoders.keys() == {"text_encoder", "text_encoder_2"}
        shapes = family.shapes()
        made = jax.eval_shape(family.encode, shapes, ids)
        variables = {"transformer": {"params": shapes["transformer"]}}
        x = jax.ShapeDtypeStruct((2, *family.latent_shape(SIZE)), np.float32)
        sigma = jax.ShapeDtypeStruct((2,), np.float32)
        lowered = jax.jit(lambda *a, f=family: f.velocity(*a, 3.5)).lower(variables, x, sigma, made)
        texts.append(lowered.as_text())
    assert texts[0] == texts[1]


# ---------------------------------------------------------------------------- what it says of itself


def test_defaults_are_the_pipelines(folder):
    family = ours(folder)[0]
    call = inspect.signature(FluxKontextPipeline.__call__).parameters
    assert family.guidance == "both" and call["true_cfg_scale"].default == 1
    assert family.default_guidance == call["guidance_scale"].default
    assert family.default_steps == call["num_inference_steps"].default == 28
    side = (
        diffusers_pipeline(folder).default_sample_size * diffusers_pipeline(folder).vae_scale_factor
    )
    assert family.default_size() == Size(side, side)
    assert call["max_area"].default == 1024**2


def test_few_pictures_of_a_megapixel_are_encoded_together():
    family = published()
    assert family.encoded_prompts == 32
    assert editing(family, Size(1024, 1024)).encoded_prompts == 2
    assert editing(family, Size(4096, 4096)).encoded_prompts == 1
    assert editing(family, Size(16, 16)).encoded_prompts == 32


def test_flops_count_the_pictures_tokens(folder):
    family = ours(folder)[0]
    config, latent = family.transformer.config, family.latent_shape(SIZE)
    assert family.flops(SIZE) == {"transformer": forward_flops(config, latent, TOKENS, 3 * 4)}
    plain = load_family(folder, max_sequence_length=TOKENS)
    assert plain.flops(SIZE) == {"transformer": forward_flops(config, latent, TOKENS)}
    # The schedule is that of the image alone.
    np.testing.assert_array_equal(family.sigmas(4, SIZE), plain.sigmas(4, SIZE))


def test_a_size_of_pictures_must_fit(base, folder):
    with pytest.raises(ConfigError, match=r"source_height and config.model.source_width: .*18x12"):
        load_family(folder, source=Size(18, 12))
    with pytest.raises(ConfigError, match="cannot edit images: set"):
        load_family(flux_folder(base, "dev"), source=SOURCE)
