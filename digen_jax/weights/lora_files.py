"""Files of a LoRA: diffusers' `pytorch_lora_weights.safetensors`, and PEFT's folders (`save_pretrained`).

A PEFT folder contains `adapter_config.json` and `adapter_model.safetensors`; Flow-GRPO, DiffusionNFT and
AWM publish these. Diffusers writes one file, whose metadata may contain PEFT's settings, such as alpha.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from digen_jax.weights.folder import read_json
from digen_jax.weights.lora import dense_layers
from digen_jax.weights.tensors import (
    StoredTensor,
    Tree,
    file_metadata,
    file_tensors,
    open_file,
    read_tree,
    write_file,
)

FILE = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
PEFT_FILE, PEFT_CONFIG, PEFT_PREFIX = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "base_model.model",
)
# Our leaf names and torch's module names; both factors are stored in the layout of a Dense kernel.
FACTORS = {"a": "lora_A", "b": "lora_B"}
# PEFT settings that change the meaning of the same tensors; only these values are supported. Some
# initialisations (init_lora_weights) also change the base model.
PLAIN = {
    "peft_type": ("LORA",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "init_lora_weights": (True, False, "gaussian"),
}


class LoraFile(NamedTuple):
    """A LoRA's tensors, of which only the headers are read, and its settings."""

    file: pathlib.Path
    tensors: dict[str, StoredTensor]
    prefix: str  # of the tensors' names
    rank: int
    alpha: float | None  # None: not given, and diffusers takes the rank

    @property
    def layers(self) -> set[str]:
        """The torch names of the layers that have a tensor."""
        start = f"{self.prefix}."
        return {name.rsplit(".lora_", 1)[0].removeprefix(start) for name in self.tensors}


def write_lora(
    folder: str | pathlib.Path,
    lora: Mapping[str, Tree],
    alpha: float | int,
    lists: Mapping[str, tuple[str, ...]],
) -> None:
    """Write `pytorch_lora_weights.safetensors`, which `pipe.load_lora_weights(folder)` reads.

    `lora` and `lists` are by component, whose name is the prefix of its tensors' names. The metadata gives
    diffusers alpha, which would otherwise be the rank.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, adapter = {}, {}
    for part, factors in lora.items():
        own = dict(file_tensors(_as_modules(factors, part), lists[part]))
        layers = sorted({name.removeprefix(f"{part}.").rsplit(".", 2)[0] for name in own})
        rank = next(tensor.shape[0] for name, tensor in own.items() if ".lora_A." in name)
        settings = {"r": rank, "lora_alpha": alpha, "target_modules": layers}
        adapter |= {f"{part}.{key}": value for key, value in settings.items()}
        tensors |= own
    write_file(folder / FILE, tensors, {METADATA: json.dumps(adapter, indent=2, sort_keys=True)})


def read_lora(
    folder: str | pathlib.Path,
    templates: Mapping[str, Tree],
    lists: Mapping[str, tuple[str, ...]],
    shardings: Any = None,
) -> dict[str, tuple[dict[str, Any], int, float]]:
    """(lora, rank, alpha) of each component in a folder or file that `open_lora` can open.

    `templates` contains the components' parameters or their shapes, `lists` is by component. Raises a ValueError
    that names a layer that the network lacks, a missing or misshapen factor, or a setting that plain LoRA does
    not have.
    """
    found = {}
    for part, opened in open_lora(folder, list(templates)).items():
        alpha = opened.rank if opened.alpha is None else opened.alpha
        lora = read_opened(opened, templates[part], lists[part], shardings)
        found[part] = lora, opened.rank, float(alpha)
    return found


def open_lora(folder: str | pathlib.Path, components: Sequence[str]) -> dict[str, LoraFile]:
    """A LoRA in a folder of PEFT or diffusers, or in a file of diffusers, by component.

    The names of diffusers' tensors begin with their component's name, and `components` without tensors are left
    out; PEFT's name no component, and belong to the first one. If a folder has both files, PEFT's is read. The
    settings come from `adapter_config.json` if the folder has one, else from the metadata of diffusers' file.

    Raises:
      ValueError: there is no file, the file contains no LoRA, or the LoRA has several ranks or settings that
        plain LoRA does not have; the message names each.
    """
    folder = pathlib.Path(folder).expanduser()
    config, peft = folder / PEFT_CONFIG, (folder / PEFT_FILE).exists()
    if peft:
        file = folder / PEFT_FILE
    elif (folder / FILE).exists() or not folder.is_dir():
        file = folder / FILE if folder.is_dir() else folder
    else:
        raise ValueError(f"{folder} holds no LoRA: neither {PEFT_FILE} nor {FILE}")
    tensors = open_file(file)
    named = [part for part in components if any(name.startswith(f"{part}.") for name in tensors)]
    opened = {}
    for part in named or components[:1]:
        prefix = PEFT_PREFIX if peft else part
        settings = read_json(config) if peft or config.exists() else _metadata(file, prefix)
        others = tuple(f"{other}." for other in named if other != part)
        own = {name: t for name, t in tensors.items() if not name.startswith(others)}
        opened[part] = LoraFile(file, own, prefix, *_rank_and_alpha(file, own, prefix, settings))
    return opened


def read_opened(
    opened: LoraFile, template: Tree, lists: tuple[str, ...], shardings: Any = None
) -> dict[str, Any]:
    """The float32 factors of an opened LoRA; see `read_lora`."""
    adapted, rank = opened.layers, opened.rank
    factors = {}
    for path, kernel, layers in dense_layers(template, lists):
        if adapted.intersection(layers):
            *stack, inputs, outputs = kernel.shape
            factors[*path, "a"] = jax.ShapeDtypeStruct((*stack, inputs, rank), jnp.float32)
            factors[*path, "b"] = jax.ShapeDtypeStruct((*stack, rank, outputs), jnp.float32)
    modules = _as_modules(unflatten_dict(factors), opened.prefix)
    read = flatten_dict(read_tree(opened.tensors, modules, lists, shardings))
    short, skip = {module: leaf for leaf, module in FACTORS.items()}, opened.prefix.count(".") + 1
    lora = {(*path[skip:-2], short[path[-2]]): leaf for path, leaf in read.items()}
    return unflatten_dict(lora)


def _as_modules(lora: Tree, prefix: str) -> dict[str, Any]:
    """The tree whose tensor names are those of the file: factors are kernels of modules lora_A, lora_B."""
    return unflatten_dict(
        {
            (*prefix.split("."), *path, FACTORS[leaf], "kernel"): factor
            for (*path, leaf), factor in flatten_dict(lora).items()
        }
    )


def _metadata(file: pathlib.Path, prefix: str) -> dict[str, Any]:
    """PEFT's settings as diffusers saves them in the file's header; empty if it did not."""
    text = file_metadata(file).get(METADATA, "{}")
    try:
        return {key.removeprefix(f"{prefix}."): value for key, value in json.loads(text).items()}
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{file} has metadata {METADATA} that is not a JSON object") from error


def _rank_and_alpha(
    file: pathlib.Path, tensors: Mapping[str, Any], prefix: str, settings: Mapping[str, Any]
) -> tuple[int, float | None]:
    """Rank from the tensors; alpha from PEFT's settings, None if they do not give it."""
    ranks = {
        tensor.shape[0]
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}.") and name.endswith(".lora_A.weight")
    }
    if not ranks:
        raise ValueError(f"{file} holds no tensor {prefix}.*.lora_A.weight, so no LoRA of {prefix}")
    if len(ranks) > 1:
        raise ValueError(f"{file} mixes the ranks {sorted(ranks)}; only a single rank is supported")
    rank = ranks.pop()
    for key, plain in PLAIN.items():
        if settings.get(key) is not None and settings[key] not in plain:
            supported = " or ".join(f"{key}={value}" for value in plain)
            raise ValueError(f"{file} has {key}={settings[key]}, but only {supported} is supported")
    if settings.get("r", rank) != rank:
        raise ValueError(f"{file} says rank {settings['r']}, but its tensors have rank {rank}")
    alpha = settings.get("lora_alpha")
    if alpha is not None and not (type(alpha) in (int, float) and 0 < alpha < math.inf):
        raise ValueError(f"{file} has lora_alpha={alpha}, which must be a positive number")
    return rank, alpha
