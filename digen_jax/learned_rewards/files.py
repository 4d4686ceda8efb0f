"""Reading a CLIP, its tokenizer and its processor of pictures from folders in transformers' format."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from digen_jax.checkpoints.folder import Folder, read_json, read_params
from digen_jax.learned_rewards.scorer import Params
from digen_jax.models.text import tokenizers
from digen_jax.models.text.clip_text import CLIPTextConfig
from digen_jax.models.vision import clip
from digen_jax.models.vision.clip import CLIPConfig, CLIPModel
from digen_jax.models.vision.preprocess import Processor

PROCESSOR = "preprocessor_config.json"


def read_config(folder: Folder) -> CLIPConfig:
    """The configuration in a CLIPModel's folder; raises ValueError that names the file and the field."""
    return _read(pathlib.Path(folder) / "config.json", CLIPConfig.from_config)


def opened_clip(
    folder: Folder, dtype: DTypeLike = jnp.float32
) -> tuple[CLIPModel, Params, Callable[[Any], Params]]:
    """A CLIPModel, the shapes of its parameters in `dtype`, and what reads these, as in `Opened`.

    Args:
      folder: with config.json and safetensors.
      dtype: of parameters and arithmetic.

    Raises:
      ValueError: names the file that is missing or does not fit.
    """
    network = CLIPModel(read_config(folder), jnp.dtype(dtype))
    template = in_dtype(clip.shapes(network), dtype)
    read = functools.partial(read_params, folder, template, clip.LISTS, ignore=clip.IGNORED)
    return network, template, read


def in_dtype(template: Params, dtype: DTypeLike) -> Params:
    """A template whose parameters have a dtype, except the logits' scale: in bfloat16 it would be wrong by 1%."""
    leaves = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), template)
    return leaves | {name: template[name] for name in ("logit_scale",) if name in template}


def read_processor(folder: Folder, size: int) -> Processor:
    """The processor in a folder, for a network of pictures of `size` pixels; raises ValueError if it does not fit."""
    path = pathlib.Path(folder) / PROCESSOR
    processor = _read(path, Processor.from_config)
    if processor.size != size:
        raise ValueError(
            f"{path}: crop_size is {processor.size}, but the network's image_size is {size}"
        )
    return processor


def read_tokenizer(folder: Folder, text: CLIPTextConfig) -> Any:
    """The CLIPTokenizer in a folder; raises ValueError if it is not whole or does not fit the network."""
    return tokenizers.read_clip(pathlib.Path(folder), text)


def _read(path: pathlib.Path, read: Callable[[dict[str, Any]], Any]) -> Any:
    config = read_json(path)
    try:
        return read(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
