"""FLUX.2 klein with source images, against diffusers' own pipeline on a folder of random weights."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

from digen_jax.errors import ConfigError
from digen_jax.families import editing, load_family, read_parts
from digen_jax.inference.model import all_devices, edited
from digen_jax.models.family import Size
from digen_jax.models.flux2.network import forward_flops
from digen_jax.models.published import published_folder
from digen_jax.parallel.encoding import null_prompt_key, prompt_key
from digen_jax.parallel.policy import Policy
from tests.cases import quick, said
from tests.models.families import diffusers_pipeline
from tests.models.flux.kontext_folders import kontext_folder, picture
from tests.models.flux2.spec import PIPELINE
from tests.models.folders import klein_folder
from tests.models.test_families import close, our_latents

pytestmark = pytest.mark.usefixtures("exact")
SIZE, TOKENS = PIPELINE.size, PIPELINE.tokens
SOURCE = Size(68, 64)  # 17 x 16 tokens; the pipeline rejects sides below 64


@functools.cache
def ours(folder, images):
    """The family for a number of images, all its parameters, and its jitted `encode`."""
    family = load_family(folder, max_sequence_length=TOKENS, source=SOURCE, sources=images)
    group = all_devices(jax.devices()[:1])
    return family, read_parts(family, folder, family.shapes(), group), jax.jit(family.encode)


@pytest.fixture(scope="module", autouse=True)
def free_arrays():
    yield
    ours.cache_clear()  # other tests look at all arrays that are left


def published():
    return load_family(published_folder("black-forest-labs/FLUX.2-klein-4B"))


# ------------------------------------------------------------------------------------------ images


@pytest.fixture(scope="module")
def prepared(base):
    """The pixels that the pipeline with the published factor encodes."""

    class Found(Exception):
        pass

    pipe = Flux2KleinPipeline.from_pretrained(klein_folder(base))
    pipe.vae_scale_factor, pipe.image_processor = 8, Flux2ImageProcessor(vae_scale_factor=16)
    seen = {}

    def prepare(images, *_, **__):
        seen["pixels"] = [
            ((one[0].permute(1, 2, 0).numpy() + 1) * 127.5).round().astype(np.uint8)
            for one in images
        ]
        raise Found

    pipe.prepare_image_latents = prepare

    def ask(*images):
        with pytest.raises(Found):
            pipe(prompt="x", image=list(images), num_inference_steps=1, max_sequence_length=TOKENS)
        return seen["pixels"]

    return ask


def test_images_are_prepared_as_by_the_pipeline(prepared):
    """Cut to whole latents, and smaller first if they have more than a megapixel."""
    family = published()
    for number, (height, width) in enumerate(
        [(64, 64), (97, 130), (512, 341), (1024, 1024), (1031, 1030), (700, 2500)]
    ):
        image = picture(number, height, width)
        (expected,) = prepared(image)
        size = family.source_size(height, width, SIZE)
        assert size == Size(*expected.shape[:2])
        np.testing.assert_array_equal(editing(family, size).fit_source(image), expected)


@pytest.mark.parametrize("shape", [(300, 500), (500, 300), (70, 64), (60, 90)])
def test_images_of_another_size_are_scaled_to_cover_it(shape):
    """An image of one colour gradient along its width or height: the middle of the longer side is left."""
    family = editing(published(), Size(64, 64))
    height, width = shape
    ramp = np.indices(shape)[int(width > height)] * 255.0 / (max(shape) - 1)
    image = picture(0, *shape)
    image.frombytes(np.repeat(np.uint8(ramp)[..., None], 3, axis=2).tobytes())
    found = np.float32(family.fit_source(image))
    assert found.shape == (64, 64, 3)
    left = min(shape) / max(shape)  # the part of the ramp that is left
    expected = 255 * (0.5 + left * (np.arange(64) + 0.5 - 32) / 64)
    profile = found[:, :, 0].mean(axis=int(width <= height))
    np.testing.assert_allclose(profile[3:-3], expected[3:-3], atol=2.5)


# ------------------------------------------------------------------------------ the whole pipeline


@pytest.mark.parametrize(
    ("kind", "images", "guidance"),
    quick([("base", 2, 3.5), ("distilled", 1, 1.0), ("base", 1, 1.0)], 0),
)
def test_latents_and_pixels_are_the_pipelines(base, kind, images, guidance):
    """With one and two images, in one pass and in two."""
    folder = klein_folder(base, kind)
    family, params, encode = ours(folder, images)
    given = [picture(seed, 70, 67) for seed in range(images)]
    records = [{"prompt": "a photo of a red circle", "image": given}]
    policy = Policy(family, guidance)
    trained = {"transformer": params["transformer"]}
    tuned, fixed = policy.split(jax.random.key(0), trained, reference=False)
    prompts = encode(params, family.tokenize(records))
    null = encode(params, family.tokenize_null(records)) if guidance > 1 else None
    x = np.random.default_rng(0).normal(size=(1, *family.latent_shape(SIZE))).astype(np.float32)
    pipe = diffusers_pipeline(folder)
    more = dict(guidance_scale=guidance)
    expected, pixels = PIPELINE.call(pipe, [records[0]["prompt"]], x, image=given, **more)
    found = list(our_latents(policy, tuned, fixed, prompts, null, x, SIZE))
    for latents, wanted in zip(found, expected, strict=True):
        close(PIPELINE.seen(latents), wanted, 1e-4)
    decoded = np.asarray(jax.jit(family.decode)(params, found[-1]))
    np.testing.assert_allclose(decoded, pixels, rtol=0, atol=1e-3)
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3
    # Other images, or their order, are seen in the result.
    others = given[::-1] if images > 1 else [picture(9, 70, 67)]
    changed, _ = PIPELINE.call(pipe, [records[0]["prompt"]], x, image=others, **more)
    assert np.abs(changed[-1] - expected[-1]).max() > 1e-3 * np.abs(expected[-1]).max()


def test_records_are_encoded_apart(base):
    """Each with its own images, whose order counts, in the second pass, too."""
    family, params, encode = ours(klein_folder(base), 2)
    one, two, three = (picture(seed, 70, 67) for seed in range(3))
    records = [
        {"prompt": "x", "image": images} for images in ([one, two], [two, one], [one, three])
    ]
    for tokens in (family.tokenize(records), family.tokenize_null(records)):
        found = encode(params, tokens).source
        assert found.shape == (3, 2, 17, 16, 12)
        np.testing.assert_array_equal(found[0], found[1, ::-1])
        np.testing.assert_array_equal(found[0, 0], found[2, 0])
        assert np.abs(np.diff(found, axis=1)).max() > 0.1
    for key in (prompt_key, null_prompt_key):
        assert len({key(family, record) for record in records}) == 3


# ---------------------------------------------------------------------------- numbers of images


def test_numbers_of_images(base):
    family = load_family(klein_folder(base), max_sequence_length=TOKENS)
    image = picture(0, 70, 67)

    def record(count):
        return {"prompt": f"{count} images", "image": [image] * count}

    assert edited(family, [record(2)] * 3).sources == 2
    assert edited(family, [{"prompt": "x", "image": image}]).sources == 1
    assert edited(family, [record(1)]).source == SOURCE
    assert edited(family, said("x")) is family
    with pytest.raises(ConfigError, match="'2 images' has 2 images and '1 images' has 1"):
        edited(family, [record(2), record(1)])
    with pytest.raises(ConfigError, match="one source image per prompt, not 2"):
        edited(load_family(kontext_folder(base)), [record(2)])
    pair = editing(family, SOURCE, 2)
    assert edited(pair, [record(1)]).sources == 1
    assert pair.tokenize([record(2)]).images.shape == (1, 2, *SOURCE[:2], 3)
    for count, words in ((1, "has 1 images, but"), (3, "has 3 images, but"), (0, "has no image")):
        with pytest.raises(ValueError, match=words):
            pair.tokenize([record(count)])
    with pytest.raises(ValueError, match="opened without source images"):
        family.tokenize([record(1)])
    with pytest.raises(ConfigError, match=r"source_width: .*66x64"):
        editing(family, Size(66, 64))


def test_flops_and_batches_count_all_images(base):
    family = dataclasses.replace(ours(klein_folder(base), 2)[0])
    config, latent = family.transformer.config, family.latent_shape(SIZE)
    expected = forward_flops(config, latent, TOKENS, 2 * 17 * 16)
    assert family.flops(SIZE) == {"transformer": expected}
    model = published()
    assert model.encoded_prompts == 16
    assert editing(model, Size(1024, 1024)).encoded_prompts == 2
    assert editing(model, Size(1024, 1024), 2).encoded_prompts == 1
    assert editing(model, Size(64, 64), 4).encoded_prompts == 16
