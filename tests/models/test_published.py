"""The shipped configurations are those of the published models, and cannot be trained."""

import jax
import pytest

from digen_jax.assemble import load_family, read_parts
from digen_jax.engine.axes import make_mesh
from digen_jax.engine.placement import DeviceGroup
from digen_jax.models.published import published_folder, published_models
from digen_jax.weights.folder import resolve_folder

# Parameters of the transformers without their position tables, as the repositories' safetensors files have them.
TRANSFORMERS = {
    "stabilityai/stable-diffusion-3-medium-diffusers": 2_028_328_000,
    "stabilityai/stable-diffusion-3.5-large": 8_056_627_520,
    "stabilityai/stable-diffusion-3.5-large-turbo": 8_056_627_520,
    "stabilityai/stable-diffusion-3.5-medium": 2_243_171_520,
}


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_all_are_known():
    assert published_models() == list(TRANSFORMERS)
    assert published_folder("stabilityai/stable-diffusion-9") is None


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_shipped_configuration_has_the_models_sizes(name):
    folder = published_folder(name)
    family = load_family(folder)
    shapes = family.shapes()
    table = shapes["transformer"]["pos_embed"]["pos_embed"]
    assert size(shapes["transformer"]) - size(table) == TRANSFORMERS[name]
    encoders = size(shapes["text_encoder"]), size(shapes["text_encoder_2"])
    assert encoders == (123_650_304, 694_659_840) and size(shapes["vae"]) == 83_819_683
    assert family.tokenize([{"prompt": ""}]).first.shape == (1, 77)


def test_there_are_no_weights_to_train():
    name = next(iter(TRANSFORMERS))
    folder = resolve_folder(published_folder(name))
    group = DeviceGroup(make_mesh(jax.devices()[:1]))
    with pytest.raises(ValueError, match="transformer holds no weights"):
        read_parts(load_family(folder), folder, ("transformer",), group)


def test_a_local_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    name = next(iter(TRANSFORMERS))
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert published_folder(name) is None
