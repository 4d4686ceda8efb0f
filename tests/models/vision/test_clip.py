import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from digen_jax.checkpoints.folder import read_params
from digen_jax.models.family import logical_axes
from digen_jax.models.vision import clip
from digen_jax.models.vision.clip import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)
from tests.models import parity

END = 40
TEXT = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 9,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 0.2,
}
CASES = {
    "quick_gelu": VISION,
    "gelu, one layer": {**VISION, "hidden_act": "gelu", "num_hidden_layers": 1, "patch_size": 6},
}
# The towers of openai/clip-vit-large-patch14, and of PickScore and HPSv2.
LARGE = CLIPConfig.from_config(
    {
        "projection_dim": 768,
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 14,
        },
    }
)
HUGE = CLIPConfig.from_config(
    {
        "projection_dim": 1024,
        "text_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "hidden_act": "gelu",
        },
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "patch_size": 14,
            "hidden_act": "gelu",
        },
    }
)


def torch_clip(config: CLIPConfig) -> torch.nn.Module:
    text, vision = (dataclasses.asdict(tower) for tower in (config.text, config.vision))
    both = transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=text["projection_dim"]
    )
    return transformers.CLIPModel(both)


def pixels() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, 24, 24, 3)).astype(np.float32)


def ids() -> np.ndarray:
    found = np.random.default_rng(0).integers(3, END, (3, 7))
    found[0, 3:] = END
    found[1, 5] = END
    found[2, 1], found[2, 4] = END, END
    return found


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 12}
    module = transformers.CLIPModel(transformers.CLIPConfig(**config))
    place = tmp_path_factory.mktemp("clip")
    parity.randomise(module).save_pretrained(place)
    return place


def read(folder) -> tuple[torch.nn.Module, CLIPModel, dict]:
    module = transformers.CLIPModel.from_pretrained(folder)
    config = transformers.CLIPConfig.from_pretrained(folder).to_dict()
    model = CLIPModel(CLIPConfig.from_config(config))
    return module, model, read_params(folder, clip.shapes(model), clip.LISTS, ignore=clip.IGNORED)


def test_a_whole_model_read_from_its_folder_equals_transformers(folder):
    module, model, params = read(folder)
    found = module(torch.tensor(ids()), for_torch(pixels()))
    expected = [
        found.logits_per_image.diagonal(),
        module.get_image_features(for_torch(pixels())).pooler_output,
        module.get_text_features(torch.tensor(ids())).pooler_output,
    ]

    @jax.jit
    def run(params, pixels, ids):
        variables = {"params": params}
        cosine, scale = model.apply(variables, pixels, ids)
        images = model.apply(variables, pixels, method="image_embeddings")
        return scale * cosine, images, model.apply(variables, ids, method="text_embeddings")

    with jax.default_matmul_precision("highest"):
        actual = run(params, pixels(), ids())
    assert parity.worst(list(actual), [e.detach().numpy() for e in expected])[0] < 1e-5
    axes = logical_axes(params, clip.AXES, clip.LISTS)
    assert axes["logit_scale"] == ()
    assert axes["visual_projection"]["kernel"] == ("embed", "text")


@pytest.mark.parametrize(
    ("config", "expected"), [(LARGE, 427_616_513), (HUGE, 986_109_441)], ids=["L", "H"]
)
def test_the_real_models_have_as_many_parameters_as_transformers(config, expected):
    with torch.device("meta"):
        module = torch_clip(config)
    tree = clip.shapes(CLIPModel(config))
    count = sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert count == sum(p.numel() for p in module.parameters()) == expected


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
        ({"projection_dim": 0}, "projection_dim must be a whole number"),
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
