"""CLIP's vision tower and its preprocessing against transformers', Pillow and torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import CLIPImageProcessorPil

from digen_jax.models.family import logical_axes
from digen_jax.models.vision import clip
from digen_jax.models.vision.clip import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)
from digen_jax.models.vision.preprocess import (
    Processor,
    pil_crop,
    resize_bytes,
    tensor_crop,
    tensor_pad,
)
from tests.models import parity

END = 40
TEXT = dict(vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2)
TEXT |= dict(num_attention_heads=3, max_position_embeddings=9, hidden_act="quick_gelu")
TEXT |= dict(layer_norm_eps=0.1, bos_token_id=0, eos_token_id=2, pad_token_id=1)
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2)
VISION |= dict(image_size=24, patch_size=8, hidden_act="quick_gelu", layer_norm_eps=0.2)
CASES = {
    "quick_gelu": VISION,
    "gelu, one layer": {**VISION, "hidden_act": "gelu", "num_hidden_layers": 1, "patch_size": 6},
}


def pixels() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, 24, 24, 3)).astype(np.float32)


def for_torch(pictures: np.ndarray) -> torch.Tensor:
    return torch.tensor(pictures.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_pictures_embeddings_equal_transformers(config):
    whole = {**config, "projection_dim": 12}
    module = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**whole))
    parity.randomise(module)
    model = CLIPVisionModelWithProjection(CLIPVisionConfig.from_config(whole))
    shapes = jax.eval_shape(model.init, jax.random.key(0), pixels())["params"]
    params = parity.to_flax(module.state_dict(), shapes, clip.LISTS)
    expected = module(for_torch(pixels())).image_embeds.detach().numpy()
    with jax.default_matmul_precision("highest"):
        actual = jax.jit(model.apply)({"params": params}, pixels())
    assert parity.worst([actual], [expected])[0] < 1e-5
    axes = logical_axes(shapes, clip.AXES, clip.LISTS)
    assert axes["vision_model"]["embeddings"]["class_embedding"] == ("embed",)


def test_old_files_have_fields_in_a_second_object():
    config = {"text_config": {}, "vision_config": {"patch_size": 16}, "text_config_dict": None}
    read = CLIPConfig.from_config(config | {"vision_config_dict": {"patch_size": 8}})
    expected = transformers.CLIPConfig(**config, vision_config_dict={"patch_size": 8})
    assert read.vision.patch_size == expected.vision_config.patch_size == 8
    assert read.text.projection_dim == read.vision.projection_dim == expected.projection_dim


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "siglip"}, "model_type must be 'clip'"),
        ({"projection_dim": 0}, "projection_dim must be an integer"),
        ({"vision_config": []}, None),
        ({"vision_config": [1]}, "vision_config must be an object"),
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act"),
        ({"vision_config": {"image_size": 30, "patch_size": 8}}, "image_size 30 must be"),
        ({"vision_config": {"image_size": [24, 24]}}, "image_size must be"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "'clip_vision_model'"),
        ({"text_config": {"num_attention_heads": 5}}, "num_attention_heads"),
    ],
)
def test_an_unsupported_field_is_named(config, words):
    if words is None:
        assert CLIPConfig.from_config(config).vision == CLIPVisionConfig()
        return
    with pytest.raises(ValueError, match=words):
        CLIPConfig.from_config(config)


def test_pictures_of_another_size_and_long_texts_are_refused():
    model = CLIPModel(
        CLIPConfig.from_config({"text_config": TEXT, "vision_config": VISION, "projection_dim": 4})
    )
    init = jax.random.key(0)
    with pytest.raises(ValueError, match="images are 32 x 24 pixels but image_size is 24"):
        jax.eval_shape(model.init, init, jnp.zeros((1, 32, 24, 3)), jnp.zeros((1, 9), jnp.int32))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        jax.eval_shape(model.init, init, jnp.zeros((1, 24, 24, 3)), jnp.zeros((1, 10), jnp.int32))


# ------------------------------------------------------------------------------------- preprocessing


SIZES = [(37, 61), (90, 40), (17, 13), (24, 24)]


def pictures(height: int, width: int) -> np.ndarray:
    """Noise, which overshoots most, and a smooth picture."""
    noise = np.random.default_rng(0).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
    smooth = Image.fromarray(noise[1, :5, :7]).resize((width, height), Image.Resampling.BICUBIC)
    return np.stack([noise[0], np.asarray(smooth)])


def oracle(size: int, **fields) -> CLIPImageProcessorPil:
    return CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, **fields
    )


def pillows(images: np.ndarray, height: int, width: int, method: Image.Resampling) -> list:
    """Pillow's pictures, rows first: since Pillow 13 it resizes the columns of very tall pictures first."""
    wide = [Image.fromarray(image).resize((width, image.shape[0]), method) for image in images]
    return [image.resize((width, height), method) for image in wide]


@pytest.mark.parametrize(
    ("size", "kind"), [*((size, "bicubic") for size in SIZES), ((37, 61), "bilinear")]
)
def test_bytes_equal_pillows(size, kind):
    images = pictures(*size)
    actual = resize_bytes(jnp.asarray(images), 24, 33, kind)
    expected = pillows(images, 24, 33, Image.Resampling[kind.upper()])
    assert actual.dtype == np.uint8
    np.testing.assert_array_equal(actual, np.stack(list(map(np.asarray, expected))))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(512, 512), (1024, 1024), (720, 1280), (1280, 720), (100, 64)])
def test_bytes_equal_pillows_at_the_sizes_of_models(size):
    images = pictures(*size)
    actual = jax.jit(functools.partial(pil_crop, processor=Processor()))(images)
    expected = np.stack(CLIPImageProcessorPil()(list(map(Image.fromarray, images))).pixel_values)
    assert np.abs(actual - expected.transpose(0, 2, 3, 1)).max() < 1e-6


def test_a_reduction_that_would_not_be_exact_is_refused():
    with pytest.raises(ValueError, match="8000 pixels cannot be resized to 4"):
        jax.eval_shape(
            lambda x: resize_bytes(x, 4, 4, "bicubic"), np.zeros((1, 8000, 4, 3), np.uint8)
        )


@pytest.mark.parametrize("size", [(37, 61), (17, 13)])
def test_the_processors_pictures_equal_transformers(size):
    fields = {"resample": 2, "rescale_factor": 1 / 256, "image_mean": [0.1, 0.2, 0.3]}
    fields["image_std"] = [0.5, 0.6, 0.7]
    processor = oracle(24, **fields)
    images = pictures(*size)
    expected = np.stack(processor(list(map(Image.fromarray, images))).pixel_values)
    actual = pil_crop(jnp.asarray(images), Processor.from_config(processor.to_dict()))
    assert np.abs(actual - expected.transpose(0, 2, 3, 1)).max() < 1e-6


def torch_resized(images: np.ndarray, height: int, width: int, kind: str) -> np.ndarray:
    """As torchvision resizes tensors with antialiasing."""
    x = torch.tensor(images.transpose(0, 3, 1, 2)) / 255
    resize = torch.nn.functional.interpolate
    y = resize(x, size=(height, width), mode=kind, antialias=True, align_corners=False)
    return y.numpy().transpose(0, 2, 3, 1)


# The last four: sizes after resizing, and the rows and columns that torchvision's CenterCrop leaves out, by hand.
@pytest.mark.parametrize(
    ("size", "resized", "top", "left"),
    [
        ((48, 48), (24, 24), 0, 0),
        ((37, 61), (24, 39), 0, 8),  # round(7.5)
        ((90, 40), (54, 24), 15, 0),
        ((48, 50), (24, 25), 0, 0),  # round(0.5)
        ((48, 54), (24, 27), 0, 2),  # round(1.5)
    ],
)
def test_pictures_resized_as_tensors_equal_torchs(size, resized, top, left):
    images = pictures(*size)
    processor = Processor(edge=24, size=24)
    actual = tensor_crop(jnp.asarray(images), processor, "bilinear")
    cropped = torch_resized(images, *resized, "bilinear")[:, top : top + 24, left : left + 24]
    expected = (cropped - np.asarray(processor.mean)) / np.asarray(processor.std)
    assert np.abs(actual - expected).max() < 5e-5


@pytest.mark.parametrize(
    ("size", "resized", "top", "left"),
    [
        ((48, 48), (24, 24), 0, 0),
        ((24, 24), (24, 24), 0, 0),
        ((36, 61), (14, 24), 5, 0),  # round(14.16)
        ((90, 40), (24, 11), 0, 6),  # round(10.67), 13 columns of bars
    ],
)
def test_padded_pictures_are_black_beside_the_resized_one(size, resized, top, left):
    images = pictures(*size)
    processor = Processor(edge=24, size=24)
    actual = tensor_pad(jnp.asarray(images), processor)
    whole = np.zeros((2, 24, 24, 3))
    rows, columns = slice(top, top + resized[0]), slice(left, left + resized[1])
    whole[:, rows, columns] = torch_resized(images, *resized, "bicubic")
    expected = (whole - np.asarray(processor.mean)) / np.asarray(processor.std)
    assert np.abs(actual - expected).max() < 1e-4


def test_a_folder_of_old_has_plain_numbers_and_defaults():
    old = {"size": 30, "crop_size": 28, "resample": 3, "do_resize": True}
    assert Processor.from_config(old) == Processor(edge=30, size=28)
    assert Processor.from_config({}) == Processor.from_config(CLIPImageProcessorPil().to_dict())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"do_center_crop": False}, "do_center_crop must be true"),
        ({"resample": 1}, "resample must be 2"),
        ({"size": {"height": 224, "width": 224}}, "size must give shortest_edge"),
        ({"crop_size": {"height": 20, "width": 24}}, "crop_size must be a square"),
        ({"crop_size": 300}, "crop_size 300 must be at most the shortest edge"),
        ({"size": "224"}, "size must give"),
        ({"image_mean": [0.5, 0.5]}, "image_mean must be three numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std must be three numbers"),
        ({"rescale_factor": None}, "rescale_factor must be"),
    ],
)
def test_an_unsupported_field_of_a_processor_is_named(config, words):
    with pytest.raises(ValueError, match=words):
        Processor.from_config(config)
