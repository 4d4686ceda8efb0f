"""A pipeline folder with a random transformer of Stable Diffusion 3.5 Medium's width, and few layers."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from digen_jax.checkpoints.folder import write_params
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.families import open_pipeline
from digen_jax.models.layers import sincos_2d_table
from digen_jax.models.sd3 import network as sd3
from digen_jax.models.sd3.family import COMPONENTS, StableDiffusion3

HEADS, CHANNELS = 24, 64
POSITIONS = 64  # in each direction


@contextlib.contextmanager
def with_wide_model(recipe: TrainConfig, layers: int) -> Iterator[TrainConfig]:
    """A recipe for such a model, whose folder is removed afterwards; with 0 layers the recipe as it is."""
    if layers < 0:
        raise ConfigError(f"--wide must not be below 0, but is {layers}")
    if not layers:
        yield recipe
        return
    with tempfile.TemporaryDirectory() as folder:
        source = open_pipeline(recipe.model.folder, recipe.model.without)
        write_wide(pathlib.Path(folder), source, layers)
        yield dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, folder=folder))


def write_wide(
    folder: pathlib.Path,
    source: pathlib.Path,
    layers: int,
    heads: int = HEADS,
    channels: int = CHANNELS,
) -> None:
    """Writes the folder of a pipeline whose other components are those of `source`.

    The first half of the layers has a second attention, as in Stable Diffusion 3.5 Medium. Every parameter is
    random, so that none hides a mistake.

    Args:
      folder: an empty one.
      source: a pipeline folder.
      layers: of the transformer.
      heads: of the transformer; the default and that of `channels` are Stable Diffusion 3.5 Medium's.
      channels: of a head.
    """
    source = source.resolve()
    for name in ("model_index.json", *COMPONENTS):
        if name != "transformer" and (source / name).exists():
            (folder / name).symlink_to(source / name)
    config = json.loads((source / "transformer" / "config.json").read_text()) | {
        "num_layers": layers,
        "num_attention_heads": heads,
        "attention_head_dim": channels,
        "caption_projection_dim": heads * channels,
        "dual_attention_layers": list(range(layers // 2)),
        "qk_norm": "rms_norm",
        "pos_embed_max_size": POSITIONS,
    }
    net = sd3.SD3Config.from_config(config)
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    shapes = StableDiffusion3.from_folder(folder).shapes()["transformer"]
    rng = np.random.default_rng(0)
    params = jax.tree.map_with_path(functools.partial(_random, rng), shapes)
    table = sincos_2d_table(net.pos_embed_max_size, net.sample_size // net.patch_size, net.dim)
    params["pos_embed"]["pos_embed"] = np.asarray(table)
    write_params(folder / "transformer", params, sd3.LISTS, config)


def _random(rng: np.random.Generator, path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    values = rng.standard_normal(leaf.shape, np.float32)
    match path[-1].key:
        case "kernel":
            return values * np.float32(0.5 / np.sqrt(leaf.shape[-2]))
        case "scale":
            return 1 + np.float32(0.1) * values
        case _:
            return np.float32(0.1) * values
