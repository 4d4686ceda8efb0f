"""Qwen-Image-Edit against diffusers' own pipeline, transformers' processor and its vision tower, on random weights."""

import functools
import json
import shutil
from unittest import mock

import diffusers
import jax
import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

from digen_jax.config.load import load_config
from digen_jax.data.prompt_files import read_prompt_file
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.errors import ConfigError
from digen_jax.families import editing, load_family, read_parts
from digen_jax.images import read_image
from digen_jax.inference.export import export, how_to_load
from digen_jax.inference.model import all_devices, edited, open_model
from digen_jax.inference.sampling import SEED, sample_clips
from digen_jax.models.family import Size
from digen_jax.models.published import published_folder
from digen_jax.models.qwen_image import edit
from digen_jax.models.qwen_image.network import forward_flops
from digen_jax.models.text.language_model import ImageLayout
from digen_jax.models.vision import preprocess, qwen_vl
from digen_jax.parallel.encoding import example_record, null_prompt_key, prompt_key
from digen_jax.parallel.policy import Policy
from digen_jax.train import train
from tests.cases import quick, said
from tests.metrics import metrics
from tests.models.families import LONG, STEPS, packed
from tests.models.flux.kontext_folders import picture
from tests.models.folders import QWEN_EDIT_PROCESSOR, qwen_edit_folder
from tests.models.test_families import close, our_latents
from tests.tiny_runs import tiny_config

pytestmark = pytest.mark.usefixtures("exact")
SIZE, TOKENS, AREA = Size(12, 20), 41, 32 * 64
SOURCE = Size(32, 64)
# Of two sizes, which the pipeline resizes to the same.
PICTURES = picture(0, 35, 70), picture(1, 50, 101)
PROMPT, NEGATIVE = 'put a "red" circle on it', "four shapes"


@pytest.fixture(autouse=True)
def small_areas(monkeypatch):
    """Both areas of the pipeline are 32 x 64 pixels."""
    for module, names in (
        (edit, ("VISION_AREA", "SOURCE_AREA")),
        (plus, ("CONDITION_IMAGE_SIZE", "VAE_IMAGE_SIZE")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, AREA)


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


def processor(tokenizer, **options):
    """transformers' processor, which it cannot make without torchvision."""
    images = transformers.Qwen2VLImageProcessorPil(**options)
    kind = transformers.Qwen2VLProcessor
    with mock.patch.object(kind, "check_argument_for_proper_class"):
        return kind(image_processor=images, tokenizer=tokenizer, video_processor=None)


@functools.cache
def pipeline(folder):
    """diffusers' pipeline, with the positions of transformers 4.

    It does not pass on the kinds of tokens, from which transformers 5 computes the positions of images: without them
    they are those of text (github.com/huggingface/diffusers, issue 14194).
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "processor")
    given = processor(tokenizer, **QWEN_EDIT_PROCESSOR)
    pipe = diffusers.QwenImageEditPlusPipeline.from_pretrained(folder, processor=given)
    pipe.set_progress_bar_config(disable=True)
    forward = pipe.text_encoder.forward

    def with_kinds(input_ids, **others):
        kinds = (input_ids == pipe.text_encoder.config.image_token_id).int()
        pipe.seen = input_ids, others["pixel_values"]
        return forward(input_ids=input_ids, mm_token_type_ids=kinds, **others)

    pipe.text_encoder.forward = with_kinds
    return pipe


def call(pipe, images, x, **given):
    """Latents after each step and the image; one prompt at a time, as the pipeline takes them."""
    latents = []

    def keep(pipe, step, timestep, given):
        latents.append(given["latents"].numpy())
        return {}

    found = pipe(
        image=list(images),
        height=SIZE.height,
        width=SIZE.width,
        num_inference_steps=STEPS,
        latents=packed(x),
        callback_on_step_end=keep,
        output_type="np",
        **{"prompt": PROMPT, **given},
    )
    return latents, found.images[:, None]


def record(images, prompt=PROMPT, **others):
    return {"prompt": prompt, "image": list(images), **others}


# ------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("images", quick([(1,), (2,)], 1))
def test_prompts_with_images_are_encoded_as_by_the_pipeline(base, images):
    """Token ids, tokens of the vision tower, and states; of a prompt alone as beside longer ones, and a cut one."""
    folder = qwen_edit_folder(base, "2509")
    family, params, encode = ours(folder, images)
    pipe, given = pipeline(folder), [PICTURES[:images], PICTURES[::-1][:images]]
    prompts = [PROMPT, "", 'zwei "schräge" ☃\n日本']
    records = [record(given[i % 2], prompt) for i, prompt in enumerate(prompts)]
    tokens = family.tokenize(records)
    found = encode(params, tokens)
    assert found.context.shape[1] == family.context_tokens == found.mask.shape[1]
    assert family.context_tokens == TOKENS + len(pipe.tokenizer(family._pictures).input_ids)
    tower = jax.jit(qwen_vl.VisionTower(family.text_encoder.config.vision).apply)
    visual = {"params": params["text_encoder"]["visual"]}
    for row, each in enumerate(records):
        size = tokens.seen.shape[2:4]
        condition = [pipe.image_processor.resize(one, *size) for one in each["image"]]
        states, mask = pipe.encode_prompt(each["prompt"], condition)
        assert mask is None
        ids, pixels = pipe.seen
        np.testing.assert_array_equal(tokens.ids[row][tokens.mask[row]], ids[0])
        with torch.no_grad():
            grid = torch.tensor([[1, size[0] // 4, size[1] // 4]] * images)
            expected = pipe.text_encoder.model.visual(pixels, grid).pooler_output
        scaled = preprocess.scaled(tokens.seen[row], family.processor.pixels)
        of_tower = tower(visual, scaled)
        close(of_tower.reshape(expected.shape), expected.numpy())
        close(found.context[row][found.mask[row]], states[0].numpy())
    null = encode(params, family.tokenize_null([records[0] | {"negative_prompt": prompts[2]}]))
    alone = encode(params, family.tokenize([record(given[0], prompts[2])]))
    jax.tree.map(np.testing.assert_array_equal, null, alone)
    assert family.is_truncated([PROMPT, LONG, ""]).tolist() == [False, True, False]
    cut = family.tokenize([record(given[0], LONG)])
    assert cut.mask.all() and cut.ids.shape[1:] == tokens.ids.shape[1:]


def test_positions_and_pixels_of_published_sizes(monkeypatch):
    """Those of transformers' `get_rope_index` and its processor behind the pipeline's resizing."""
    monkeypatch.undo()
    family = load_family(published_folder("Qwen/Qwen-Image-Edit-2511"))
    layout = ImageLayout((3, 500), 14, 12, (16, 24, 24))
    config = transformers.Qwen2_5_VLConfig()
    model = mock.Mock(config=config)
    kind = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel
    model.get_vision_position_ids = functools.partial(kind.get_vision_position_ids, model)
    ids = torch.zeros(1, 700, dtype=int)
    ids[0, layout.tokens] = 1
    grid = torch.tensor([[1, 28, 24]] * 2)
    expected, _ = kind.get_rope_index(model, ids, ids, image_grid_thw=grid)
    found = layout.positions(700)
    assert found.shape == (700, 64)
    for axis, first in enumerate((0, 16, 40)):
        np.testing.assert_array_equal(found[:, first], expected[axis, 0])
        np.testing.assert_array_equal(found[:, first], found[:, first + 15])

    prepare, shown = processor(family.tokenizer), plus.QwenImageEditPlusPipeline
    resize = diffusers.image_processor.VaeImageProcessor(vae_scale_factor=16)
    assert shown is not None and plus.CONDITION_IMAGE_SIZE == edit.VISION_AREA == 384**2
    for number, (height, width) in enumerate([(384, 384), (1300, 1000), (333, 900)]):
        image = picture(number, height, width)
        size = family.source_size(height, width, SIZE)
        assert size[:2] == plus.calculate_dimensions(plus.VAE_IMAGE_SIZE, width / height)[::-1]
        one = editing(family, size)
        tokens = one.tokenize([record([image])])
        expected = resize.resize(image, size.height, size.width)
        np.testing.assert_array_equal(tokens.images[0, 0], np.asarray(expected))
        wide, high = plus.calculate_dimensions(384**2, width / height)
        small = resize.resize(image, high, wide)
        given = prepare.image_processor(small, return_tensors="pt")
        rows, columns = one._grid(size)
        assert given["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
        found = np.asarray(preprocess.scaled(tokens.seen[0], family.processor.pixels))
        found = found.reshape(rows, 2, 14, columns, 2, 14, 3)
        found = found.transpose(0, 3, 1, 4, 6, 2, 5).reshape(4 * rows * columns, 3, 1, 14 * 14)
        patches = given["pixel_values"].numpy().reshape(len(found), 3, 2, 14 * 14)
        np.testing.assert_allclose(np.broadcast_to(found, patches.shape), patches, atol=1e-6)


# ------------------------------------------------------------------------------ the whole pipeline


@pytest.mark.parametrize(
    ("kind", "images", "guidance"),
    quick([("2509", 2, 3.5), ("2511", 2, 3.5), ("2511", 1, 1.0), ("2509", 1, 1.0)], 0),
)
def test_latents_and_pixels_are_the_pipelines(base, kind, images, guidance):
    """With one and two images, in one pass and in two."""
    folder = qwen_edit_folder(base, kind)
    family, params, encode = ours(folder, images)
    given = PICTURES[:images]
    records = [record(given, negative_prompt=NEGATIVE)]
    policy = Policy(family, guidance)
    trained = {"transformer": params["transformer"]}
    tuned, fixed = policy.split(jax.random.key(0), trained, reference=False)
    prompts = encode(params, family.tokenize(records))
    null = encode(params, family.tokenize_null(records)) if guidance > 1 else None
    x = np.random.default_rng(0).normal(size=(1, *family.latent_shape(SIZE))).astype(np.float32)
    pipe = pipeline(folder)
    options = dict(true_cfg_scale=guidance)
    options |= {"negative_prompt": NEGATIVE} if guidance > 1 else {}
    expected, pixels = call(pipe, given, x, **options)
    np.testing.assert_array_equal(family.sigmas(STEPS, SIZE), pipe.scheduler.sigmas.numpy())
    found = list(our_latents(policy, tuned, fixed, prompts, null, x, SIZE))
    for latents, wanted in zip(found, expected, strict=True):
        close(packed(latents).numpy(), wanted, 1e-4)
    decoded = np.asarray(jax.jit(family.decode)(params, found[-1]))
    np.testing.assert_allclose(decoded, pixels, rtol=0, atol=1e-3)
    assert ((pixels > 0.02) & (pixels < 0.98)).mean() > 0.3
    # Other images, or their order, are seen in the result.
    others = given[::-1] if images > 1 else PICTURES[1:]
    changed, _ = call(pipe, others, x, **options)
    assert np.abs(changed[-1] - expected[-1]).max() > 1e-3 * np.abs(expected[-1]).max()


@pytest.mark.slow
def test_the_export_of_a_run_samples_in_diffusers_as_here(base, tmp_path):
    """A LoRA that edits pairs of images, in two passes."""
    names = [f"{number}.png" for number in range(len(PICTURES))]
    for image, name in zip(PICTURES, names, strict=True):
        image.save(tmp_path / name)
    lines = [record(order, f"{n} circles") for n, order in enumerate((names, names[::-1]))]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    c, size = tiny_config(base, "lora"), dict(height=SIZE.height, width=SIZE.width)
    size |= dict(source_height=SOURCE.height, source_width=SOURCE.width, source_images=2)
    folder = str(qwen_edit_folder(base, "2511"))
    c.model = dict(folder=folder, max_sequence_length=TOKENS, **size)
    c.prompts.file = c.evaluation.prompts = str(tmp_path / "pairs.jsonl")
    c.sampler.guidance = c.evaluation.guidance = 3.0
    c.evaluation.steps, c.lora = STEPS, dict(rank=4, alpha=8.0)
    train(load_config(c), tmp_path / "run")
    first = next(line for line in metrics(tmp_path / "run") if "ratio" in line)
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["gradient_norm"] > 0

    run = export(tmp_path / "run", tmp_path / "out", lora=False)
    assert "QwenImageEditPlusPipeline.from_pretrained" in how_to_load(run, tmp_path / "out")
    model = open_model(str(tmp_path / "run"), jax.devices()[:1])
    sampler = model.sampler()
    given = read_prompt_file(tmp_path / "pairs.jsonl")
    found = sample_clips(sampler, model.weights, given, 0, 2) / 255
    keys = image_keys(jax.random.key(SEED), np.arange(2), np.zeros(2, int))
    noise = np.asarray(start_noise(keys, sampler.shape))
    for folder, low, high in ((tmp_path / "out", 0, 2 / 255), (run.folder, 3 / 255, 1)):
        for one, x, clip in zip(given, noise, found, strict=True):
            images = [read_image(image) for image in one["image"]]
            options = dict(prompt=one["prompt"], negative_prompt=" ", true_cfg_scale=3.0)
            _, expected = call(pipeline(folder), images, x[None], **options)
            assert low <= np.abs(clip - expected[0]).max() < high


# ---------------------------------------------------------------------------------- source images


@pytest.mark.parametrize("shape", [(60, 64), (30, 100), (64, 32)])
def test_images_of_another_shape_are_cut_to_their_middle(base, shape):
    """Of an image whose brightness grows along its longer cut, for both networks."""
    family = ours(qwen_edit_folder(base, "2509"), 1)[0]
    height, width = shape
    wide = width / height > 2
    ramp = np.indices(shape)[int(wide)] * 255.0 / (shape[wide] - 1)
    image = picture(0, *shape)
    image.frombytes(np.repeat(np.uint8(ramp)[..., None], 3, axis=2).tobytes())
    tokens = family.tokenize([record([image])])
    left = min(1, width / height / 2, 2 * height / width)  # the part of the ramp that is left
    for found in (tokens.images[0, 0], tokens.seen[0, 0]):
        assert found.shape == (32, 64, 3)
        side = found.shape[wide]
        expected = 255 * (0.5 + left * ((np.arange(side) + 0.5) / side - 0.5))
        profile = np.float32(found)[:, :, 0].mean(axis=int(not wide))
        np.testing.assert_allclose(profile[3:-3], expected[3:-3], atol=4)


def test_numbers_and_sizes_of_images(base):
    family = load_family(qwen_edit_folder(base, "2511"), max_sequence_length=TOKENS)
    assert edited(family, [record(PICTURES)] * 3).sources == 2
    assert edited(family, [record(PICTURES[:1])]).source == SOURCE
    pair = editing(family, SOURCE, 2)
    for count, words in ((1, "has 1 images, but"), (3, "has 3 images, but"), (0, "has no image")):
        with pytest.raises(ValueError, match=words):
            pair.tokenize([record([PICTURES[0]] * count)])
    with pytest.raises(ValueError, match=r"set config.model.source_height"):
        family.tokenize(said("x"))
    for size in (Size(34, 64), Size(4, 2**14)):
        with pytest.raises(ConfigError, match=r"config.model.source_height .*: an image of"):
            editing(family, size)
    assert pair.encoders == {"text_encoder": "processor", "vae": ""}
    for key in (prompt_key, null_prompt_key):
        records = [record(order) for order in (PICTURES, PICTURES[::-1])]
        assert len({key(pair, one) for one in records}) == 2


def test_flops_and_batches_count_all_images(base, monkeypatch):
    family = ours(qwen_edit_folder(base, "2511"), 2)[0]
    config, latent = family.transformer.config, family.latent_shape(SIZE)
    expected = forward_flops(config, latent, family.context_tokens, 2 * 8 * 16)
    assert family.flops(SIZE) == {"transformer": expected}
    monkeypatch.undo()
    model = load_family(published_folder("Qwen/Qwen-Image-Edit-2509"))
    assert editing(model, Size(1024, 1024), 2).encoded_prompts == 1
    square = editing(model, Size(384, 384), 2)
    assert square.encoded_prompts == 7
    tokens = square.tokenize([example_record(square)])
    assert tokens.seen.shape == (1, 2, 392, 392, 3)
    assert len(square._layout(square.source).tokens) == 2 * 14 * 14


@pytest.mark.parametrize(
    ("file", "changed", "words"),
    [
        ("text_encoder/config.json", {"vision_config": {"depth": 0}}, "depth"),
        ("text_encoder/config.json", {"vision_config": {"out_hidden_size": 16}}, "out_hidden_size"),
        ("text_encoder/config.json", {"vision_config": {"window_size": 4}}, "window_size"),
        ("processor/preprocessor_config.json", {"merge_size": 3}, "patch_size times merge_size"),
        ("processor/preprocessor_config.json", {"image_mean": [1]}, "image_mean"),
        ("processor/preprocessor_config.json", {"size": {"shortest_edge": 0}}, "min_pixels"),
        ("model_index.json", {"processor": ["transformers", "CLIPProcessor"]}, "processor is"),
    ],
)
def test_broken_folders_are_refused(base, tmp_path, file, changed, words):
    ignore = shutil.ignore_patterns("*.safetensors")
    folder = shutil.copytree(qwen_edit_folder(base, "2509"), tmp_path / "pipeline", ignore=ignore)
    path = folder / file
    fields = json.loads(path.read_text())
    for name, value in changed.items():
        fields[name] = fields[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=words):
        load_family(folder)
