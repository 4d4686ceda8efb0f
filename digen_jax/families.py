"""Model families: opens a pipeline folder as one of them, and reads its components onto a mesh."""

import dataclasses
import pathlib
import pkgutil
from collections.abc import Iterable
from typing import Any, cast

import jax.numpy as jnp
from jax.typing import DTypeLike

from digen_jax.checkpoints.folder import read_model_index, read_sampling, resolve_folder
from digen_jax.errors import ConfigError, prefix_errors, user_input
from digen_jax.models.family import Family, Params, Size, frozen_dtype, frozen_shapes
from digen_jax.models.layers import Remat
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.process.shutdown import during

# Model families by pipeline class, as named in a folder's model_index.json. A run imports only its own.
FAMILIES = {
    "StableDiffusion3Pipeline": "digen_jax.models.sd3.family:StableDiffusion3",
    "FluxPipeline": "digen_jax.models.flux.family:Flux",
    "FluxKontextPipeline": "digen_jax.models.flux.kontext:FluxKontext",
    "Flux2KleinPipeline": "digen_jax.models.flux2.family:Flux2Klein",
    "ZImagePipeline": "digen_jax.models.zimage.family:ZImage",
    "QwenImagePipeline": "digen_jax.models.qwen_image.family:QwenImage",
    "QwenImageEditPlusPipeline": "digen_jax.models.qwen_image.edit:QwenImageEdit",
    "WanPipeline": "digen_jax.models.wan.family:Wan",
    "WanImageToVideoPipeline": "digen_jax.models.wan.image_to_video:WanImageToVideo",
    "HunyuanVideoPipeline": "digen_jax.models.hunyuan_video.family:HunyuanVideo",
    "HunyuanVideo15Pipeline": "digen_jax.models.hunyuan_video.family15:HunyuanVideo15",
}


def open_pipeline(name: str, without: tuple[str, ...] = ()) -> pathlib.Path:
    """Returns the folder of a local path or hub id; downloads only what its family uses, except components `without`.

    Raises:
      ConfigError: No family has its class, or it needs one of `without`; nothing large is downloaded in that case.
    """
    family = family_of(resolve_folder(name, index_only=True))
    if needed := [part for part in without if part not in family.optional]:
        few = f"only {' and '.join(family.optional)}" if family.optional else "nothing"
        given = f"its {needed[0]!r}, which config.model.without names"
        raise ConfigError(f"{given}, cannot be left out: name {few} there")
    return resolve_folder(name, without=family.unused + without)


def family_of(folder: pathlib.Path) -> Any:
    """Returns the family class of a pipeline folder; raises ConfigError if there is none."""
    with user_input():
        kind = read_model_index(folder)["_class_name"]
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{folder} is a {kind}; supported are {known}: choose another folder")
    return pkgutil.resolve_name(FAMILIES[kind])


def load_family(
    folder: pathlib.Path,
    dtype: str = "float32",
    remat: Remat = "none",
    without: tuple[str, ...] = (),
    max_sequence_length: int = 0,
    source: Size | None = None,
    sources: int = 1,
) -> Family:
    """Returns the family of a pipeline folder; the last four arguments are those of the config's section `model`.

    Without a `max_sequence_length` that of the folder's sampling.json applies, and then that of diffusers' pipeline.

    Raises:
      ConfigError: No family has its class, the folder cannot be used, or it cannot edit images of
        the size `source`, or several.
    """
    kind = family_of(folder)
    with user_input():
        tokens = max_sequence_length or read_sampling(folder).get("max_sequence_length", 0)
        family = kind.from_folder(folder, jnp.dtype(dtype), remat, without, tokens)
    return family if source is None else editing(family, source, sources)


def editing(family: Family, source: Size, sources: int = 1) -> Family:
    """Returns the family with `sources` source images, resized to `source`, for every prompt.

    Raises:
      ConfigError: The family cannot edit images, or not several, or not of this size.
    """
    if not family.edits:
        raise ConfigError(
            "this model generates images from prompts and cannot edit images: set config.model.source_height "
            "and config.model.source_width to 0, or choose a model that edits"
        )
    several = {"sources": sources} if sources != family.sources else {}
    if several.keys() - {field.name for field in dataclasses.fields(cast(Any, family))}:
        raise ConfigError(
            f"this model reads one source image per prompt, not {sources}: set config.model.source_images to 1, and "
            'give one path as "image"'
        )
    with prefix_errors("config.model.source_height and config.model.source_width: "):
        return dataclasses.replace(cast(Any, family), source=source, **several)


def check_parts(family: Family, folder: pathlib.Path, parts: Iterable[str]) -> None:
    """Raises ValueError if weights of some components are incomplete or do not fit; reads none."""
    for part in sorted(parts):
        family.check(folder, part)


def read_parts(
    family: Family,
    folder: pathlib.Path,
    parts: Iterable[str],
    group: DeviceGroup,
    dtype: DTypeLike = "float32",
) -> Params:
    """Reads the parameters of some components directly onto a mesh with the mesh's sharding rules, as `dtype`.

    int8 and float8 quantize them; see `quantization` and `frozen_dtype`.
    """
    kinds = {part: jnp.dtype(frozen_dtype(family, part, dtype)) for part in parts}
    shardings = group.params(frozen_shapes(family, kinds, dtype))
    with during("the reading of the model's weights"):
        return {
            part: family.read(folder, part, shardings[part], kind) for part, kind in kinds.items()
        }


def read_frozen(family: Family, folder: pathlib.Path, group: DeviceGroup) -> Params:
    """Reads the parameters of all components that are never trained."""
    frozen = [part for part in family.shapes() if part not in family.trained]
    return read_parts(family, folder, frozen, group)
