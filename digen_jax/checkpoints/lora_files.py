"""LoRA files: writes diffusers' `pytorch_lora_weights.safetensors`; reads plain LoRAs in common formats.

A PEFT folder, as released by Flow-GRPO, DiffusionNFT and AWM, contains `adapter_config.json` and
`adapter_model.safetensors`. diffusers writes one file, with PEFT's settings, such as alpha, in optional metadata.
kohya's scripts, ai-toolkit and ComfyUI use other prefixes, other factor names, and a tensor `.alpha` per layer.
"""

import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from digen_jax.checkpoints import tensors as safetensors
from digen_jax.checkpoints.folder import Folder, resolve_folder
from digen_jax.checkpoints.lora import Lists, LoraConfig, Templates, adapted_layers, dense_layers
from digen_jax.checkpoints.tensors import StoredTensor, Tree, file_tensors
from digen_jax.errors import ConfigError
from digen_jax.files import parse_json, read_json

FILE = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model"
# Flax leaf names to torch module names; both factors are stored in the layout of a Dense kernel.
FACTORS = {"a": "lora_A", "b": "lora_B"}
# Suffixes of tensor names, and the role of the tensor.
ROLES = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    ".lora_down.weight": "lora_A",
    ".lora_up.weight": "lora_B",
    ".lora.down.weight": "lora_A",
    ".lora.up.weight": "lora_B",
    ".alpha": "alpha",
}
# Name parts added by DDP, torch.compile, FSDP, activation checkpointing and PEFT adapter names.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "default"}
# Prefixes of PEFT, of ai-toolkit and ComfyUI, and of kohya's scripts, which use underscores in layer names.
PREFIXES = (PEFT_PREFIX, "diffusion_model")
FLAT = "lora_unet_"
# Conversion instructions for other files. `pipe` is the model's diffusers pipeline; {file}, {part}: the file and the
# trained component; {parts}: that component and the text encoders that the file adapts.
CONVERT = (
    "convert it with diffusers by safetensors.torch.save_file({{k: v.clone() for k, v in "
    "pipe.lora_state_dict({file!r}).items()}}, 'converted.safetensors'), and use that file"
)
MERGE = (
    "merge it into the model with diffusers by pipe.load_lora_weights({file!r}), pipe.fuse_lora({parts}), "
    "pipe.unload_lora_weights() and pipe.save_pretrained(FOLDER), and use that folder as the model"
)
MERGE_PEFT = (
    "merge it into the model by pipe.{part} = peft.PeftModel.from_pretrained(pipe.{part}, {folder!r})"
    ".merge_and_unload() and pipe.save_pretrained(FOLDER), and use that folder as the model"
)
ELSEWHERE = "merge it into the model with the program that wrote it, and use the merged model"
# Tensors of other formats, by name: description and advice.
ENCODER = r"(?:.*\.)?(?:text_encoder(_\d)?\.|lora_te(\d?)_)"
FORMATS = (
    (ENCODER, "a factor of a text encoder, which is not trained here", MERGE),
    (r".*\.lora_magnitude_vector", "a part of DoRA", MERGE),
    (r".*[._](lokr_|hada_|oft_|dora_scale$|diff(_b)?$|lora_mid)", "no part of a LoRA", ELSEWHERE),
    (
        r".*joint_blocks",
        "a layer by its original name, which diffusers cannot convert either",
        ELSEWHERE,
    ),
    (
        r".*(double_blocks|single_blocks|qkv|[._]processor[._])",
        "a layer by its original name, which diffusers has renamed or divided",
        CONVERT,
    ),
)
# Supported values of PEFT settings that change the meaning of the tensors. Some initializations
# (init_lora_weights) also change the base model.
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
    "modules_to_save": ([],),
    "bias": ("none",),
    "lora_bias": (False,),
}


class LoraFile(NamedTuple):
    """LoRA of a component: lazily read tensors, and settings."""

    file: pathlib.Path
    tensors: dict[str, StoredTensor]  # by COMPONENT.LAYER.lora_A.weight and so on
    component: str
    rank: int
    alpha: float | None  # None means unspecified; diffusers uses the rank
    layers: set[str]  # torch names of the layers with tensors


def write_lora(folder: Folder, lora: Mapping[str, Tree], alpha: float | int, lists: Lists) -> None:
    """Writes `pytorch_lora_weights.safetensors`, which `pipe.load_lora_weights(folder)` reads.

    `lora` and `lists` are by component. Components after the first of `lists` have a file each, in a folder of their
    name: for `pipe.load_lora_weights(folder, load_into_transformer_2=True)`, which expects the first one's name as the
    prefix of the tensor names. Alpha is stored in the metadata, because diffusers otherwise assumes alpha = rank.
    """
    first = next(iter(lists))
    for part, factors in lora.items():
        own = lora_folder(pathlib.Path(folder), part, first)
        own.mkdir(parents=True, exist_ok=True)
        tensors = dict(file_tensors(_as_modules(factors, first), lists[part]))
        layers = sorted({name.removeprefix(f"{first}.").rsplit(".", 2)[0] for name in tensors})
        rank = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
        settings = {"r": rank, "lora_alpha": alpha, "target_modules": layers}
        adapter = {f"{first}.{key}": value for key, value in settings.items()}
        metadata = {METADATA: json.dumps(adapter, indent=2, sort_keys=True)}
        safetensors.write_file(own / FILE, tensors, metadata)


def lora_folder(folder: pathlib.Path, part: str, first: str) -> pathlib.Path:
    """Returns the folder of a component's file in the folder of a LoRA, whose `first` component has no other."""
    return folder if part == first else folder / part


def read_lora(
    folder: Folder, templates: Templates, lists: Lists, shardings: Any = None
) -> dict[str, tuple[dict[str, Any], int, float]]:
    """Reads (factors, rank, alpha) of each component. See `open_lora` for arguments and errors."""
    found = {}
    for part, opened in open_lora(folder, templates, lists).items():
        alpha = opened.rank if opened.alpha is None else opened.alpha
        lora = read_opened(opened, templates[part], lists[part], shardings)
        found[part] = lora, opened.rank, float(alpha)
    return found


def open_lora(folder: Folder, templates: Templates, lists: Lists) -> dict[str, LoraFile]:
    """Opens a LoRA from a PEFT or diffusers folder, or from a single file, by component.

    `templates` are the parameters or shapes of the trainable components, and `lists` the `LISTS` of each. Names without
    a component belong to the first one; components without tensors are omitted. Components after the first may have a
    folder of their name in the folder (see `write_lora`). If a folder has both files, PEFT's is read. The settings come
    from `adapter_config.json` if present, else from the metadata of the file. Tensors `.alpha` override the settings'
    alpha; if they differ between layers, the factors are scaled and alpha is the rank.

    Raises:
      ValueError: The file is missing, or is not a plain LoRA of uniform rank for these components; the message names
        the format or the layer, and how to convert the file.
    """
    folder = pathlib.Path(folder).expanduser()
    first = next(iter(lists))
    separate = [part for part in templates if part != first and (folder / part).is_dir()]
    opened = {}
    if not separate or any((folder / name).exists() for name in (PEFT_FILE, FILE)):
        opened = _open_file(_lora_file(folder) if folder.is_dir() else folder, templates, lists)
    for part in separate:
        alone = {first: templates[part]}, {first: lists[part]}
        opened[part] = _open_file(_lora_file(folder / part), *alone)[first]
    return opened


def _open_file(file: pathlib.Path, templates: Templates, lists: Lists) -> dict[str, LoraFile]:
    """Opens a file; see `open_lora`."""
    stored, opened = safetensors.open_file(file), {}
    found = _by_component(file, stored, templates, lists)
    given = _settings(file, stored)
    for part, roles in found.items():
        settings = {key.removeprefix(f"{part}."): value for key, value in given.items()}
        rank, alpha = _rank_and_alpha(file, roles.get("lora_A", {}), part, settings)
        if alphas := {layer: _number(tensor) for layer, tensor in roles.pop("alpha", {}).items()}:
            # As in kohya's scripts, a layer without the tensor has a scale of 1.
            alphas |= {layer: rank for layer in roles["lora_A"] if layer not in alphas}
            alpha = alphas[min(alphas)] if len({*alphas.values()}) == 1 else rank
            for layer, tensor in roles.get("lora_B", {}).items():
                if alphas[layer] != alpha:
                    roles["lora_B"][layer] = _scaled(tensor, alphas[layer] / alpha)
        tensors = {
            f"{part}.{layer}.{role}.weight": tensor
            for role, layers in roles.items()
            for layer, tensor in layers.items()
        }
        opened[part] = LoraFile(file, tensors, part, rank, alpha, set[str]().union(*roles.values()))
    return opened


def read_opened(opened: LoraFile, template: Tree, lists: tuple, shardings: Any = None) -> dict:
    """Reads the factors of an opened LoRA as float32."""
    adapted, rank = opened.layers, opened.rank
    factors = {}
    for path, kernel, layers in dense_layers(template, lists):
        if adapted.intersection(layers):
            *stack, inputs, outputs = kernel.shape
            factors[*path, "a"] = jax.ShapeDtypeStruct((*stack, inputs, rank), jnp.float32)
            factors[*path, "b"] = jax.ShapeDtypeStruct((*stack, rank, outputs), jnp.float32)
    modules = _as_modules(unflatten_dict(factors), opened.component)
    read = flatten_dict(safetensors.read_tree(opened.tensors, modules, lists, shardings))
    short = {module: leaf for leaf, module in FACTORS.items()}
    lora = {(*path[1:-2], short[path[-2]]): leaf for path, leaf in read.items()}
    return unflatten_dict(lora)


def _as_modules(lora: Tree, component: str) -> dict[str, Any]:
    """Converts the tree to the file's tensor names, with factors as kernels of modules lora_A and lora_B."""
    modules = {}
    for (*path, leaf), factor in flatten_dict(lora).items():
        modules[component, *path, FACTORS[leaf], "kernel"] = factor
    return unflatten_dict(modules)


def _lora_file(folder: pathlib.Path) -> pathlib.Path:
    for name in (PEFT_FILE, FILE):
        if (folder / name).exists():
            return folder / name
    others = sorted(folder.glob("*.safetensors"))
    advice = f"; if {others[0].name} is the LoRA, give the path of that file" if others else ""
    raise ValueError(f"{folder} holds no LoRA: neither {PEFT_FILE} nor {FILE}{advice}")


def _by_component(
    file: pathlib.Path, stored: Mapping[str, StoredTensor], templates: Templates, lists: Lists
) -> dict[str, dict[str, dict[str, StoredTensor]]]:
    """Returns the tensors by component, role and layer. Raises ValueError for tensors that plain LoRAs do not have."""
    layers = {
        part: {name for _, _, names in dense_layers(template, lists[part]) for name in names}
        for part, template in templates.items()
    }
    flat = {part: {name.replace(".", "_"): name for name in own} for part, own in layers.items()}
    first = next(iter(templates))
    prefixes = "|".join(map(re.escape, (*templates, *PREFIXES)))
    found: dict[str, dict[str, dict[str, StoredTensor]]] = {}
    unknown = []
    for name, tensor in stored.items():
        plain = ".".join(word for word in name.split(".") if word not in WRAPPERS)
        end = next((end for end in ROLES if plain.endswith(end)), "")
        start = re.findall(rf"^(?:(?:{prefixes})\.)*", plain)[0]
        part = next((one for one in templates if f".{one}." in f".{start}"), first)
        layer = plain.removeprefix(start).removesuffix(end)
        if layer.startswith(FLAT):
            layer = flat[part].get(layer.removeprefix(FLAT), layer)
        if end and layer in layers[part]:
            found.setdefault(part, {}).setdefault(ROLES[end], {})[layer] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(f"{file} {_why_unknown(file, unknown, first)}")
    if not found:
        raise ValueError(f"{file} holds no tensors")
    return found


def _why_unknown(file: pathlib.Path, names: list[str], part: str) -> str:
    """Describes tensors that do not belong to a plain LoRA of the network, with advice."""
    for pattern, kind, advice in FORMATS:
        if found := next((name for name in names if re.match(pattern, name)), None):
            return f"has {found}, {kind}: {_advice(advice, file, part, names)}"
    what = f"has {names[0]}" + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
    if any(name.endswith(end) for name in names for end in ROLES):
        return f"{what}, of layers that are no linear layers of this {part}: choose a LoRA of the same model"
    advice = MERGE_PEFT if names[0].startswith(PEFT_PREFIX) else ELSEWHERE
    return f"{what}, which are no factors of a LoRA: {_advice(advice, file, part)}"


def _advice(text: str, file: pathlib.Path, part: str, names: Iterable[str] = ()) -> str:
    """Returns conversion instructions for a file; `names` are tensors outside of `part`."""
    encoders = set()
    for match in filter(None, (re.match(ENCODER, name) for name in names)):
        number = (match[1] or match[2] or "1")[-1]
        encoders.add("text_encoder" if number == "1" else f"text_encoder_{number}")
    parts = [part, *sorted(encoders)]
    return text.format(file=str(file), folder=str(file.parent), part=part, parts=parts)


def _scaled(tensor: StoredTensor, factor: float) -> StoredTensor:
    """Returns a tensor times a scalar, read as float32."""
    return tensor._replace(
        read=lambda index: tensor.read(index).astype(np.float32) * np.float32(factor)
    )


def _number(tensor: StoredTensor) -> float:
    """Reads a scalar tensor. Raises ValueError if it is not a positive number."""
    values = np.ravel(tensor.read(...))
    if values.size != 1 or not 0 < float(values[0]) < math.inf:
        raise ValueError(f"{tensor.file} has an alpha {values[:3].tolist()}, not a positive number")
    return float(values[0])


def _settings(file: pathlib.Path, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Reads PEFT's settings from the folder, or from the file's metadata as saved by diffusers; may be empty."""
    config = file.parent / PEFT_CONFIG
    needed = any(name.startswith(f"{PEFT_PREFIX}.") for name in stored)
    needed = needed and not any(name.endswith(".alpha") for name in stored)
    if needed or (file.name in (FILE, PEFT_FILE) and config.exists()):
        return read_json(config)
    text = safetensors.file_metadata(file).get(METADATA, "{}")
    try:
        return dict(parse_json(text).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} has metadata {METADATA} that is not a JSON object") from error


def _rank_and_alpha(
    file: pathlib.Path, factors: Mapping[str, StoredTensor], part: str, settings: Mapping[str, Any]
) -> tuple[int, float | None]:
    """Returns the rank of a component's factors, and alpha from PEFT's settings (None: missing).

    Raises:
      ValueError: A setting is not that of a plain LoRA, or the ranks differ.
    """
    advice = _advice(MERGE_PEFT if file.name == PEFT_FILE else MERGE, file, part)
    for key, plain in PLAIN.items():
        if settings.get(key) is not None and settings[key] not in plain:
            supported = " or ".join(f"{key}={value}" for value in plain)
            wrong = f"{file} has {key}={settings[key]}, but only {supported} is supported"
            raise ValueError(f"{wrong}: {advice}")
    ranks = sorted({tensor.shape[0] for tensor in factors.values()})
    if not ranks:
        raise ValueError(f"{file} holds no factors lora_A of {part}")
    if len(ranks) > 1:
        raise ValueError(f"{file} mixes the ranks {ranks}, not supported: {advice}")
    if (given := settings.get("r", ranks[0])) != ranks[0]:
        has = f"{file} has the setting r = {given}, but its tensors have rank {ranks[0]}"
        raise ValueError(f"{has}: correct r")
    alpha = settings.get("lora_alpha")
    if alpha is not None and not (type(alpha) in (int, float) and 0 < alpha < math.inf):
        raise ValueError(f"{file} has lora_alpha={alpha}, which must be a positive number")
    return ranks[0], alpha


def read_initial_lora(
    name: str, config: LoraConfig, templates: Templates, lists: Lists
) -> dict[str, Any]:
    """Reads the initial factors of a run (`config.lora.path`) by component, as float32 on the first device.

    The optimizer state is not restored. The KL reference remains the model without LoRA, as in the code of Flow-GRPO
    (scripts/train_sd3.py, ac4c86e), DiffusionNFT and AWM, which disable the adapter for it.

    `name` is a folder, file or Hub id; see `open_lora` for `templates` and `lists`.

    Raises:
      ConfigError: The LoRA differs from `config`.
      ValueError: There is no LoRA, or none for this network.
    """
    path = pathlib.Path(name)
    opened = open_lora(path if path.is_file() else resolve_folder(name), templates, lists)
    targets = adapted_layers(templates, config.targets, lists)
    for one in opened.values():
        _check_settings(one, config)
    file = next(iter(opened.values())).file
    for part in templates:
        own, matched = opened[part].layers if part in opened else set(), targets.get(part, set())
        for layers, differs in (
            (matched - own, "matches {}, for which {} has no factors"),
            (own - matched, "does not match {}, for which {} has factors"),
        ):
            if layers:
                more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
                raise ConfigError(
                    f"config.lora.targets = {config.targets!r} {differs.format(min(layers) + more, file)}: "
                    f"make it match the {len(own)} layers of the LoRA"
                )
    return {part: read_opened(file, templates[part], lists[part]) for part, file in opened.items()}


def _check_settings(opened: LoraFile, config: LoraConfig) -> None:
    """Raises ConfigError if rank or alpha differs from the config's."""
    file, rank, alpha = opened.file, opened.rank, opened.alpha
    if rank != config.rank:
        wrong = f"{file} has rank {rank}, but config.lora.rank is {config.rank}"
        raise ConfigError(f"{wrong}: set that to {rank}")
    has = f"has alpha {alpha:g}" if alpha else f"does not give alpha, which is then its rank {rank}"
    if (alpha or rank) != config.alpha:
        wrong = f"{file} {has}, but config.lora.alpha is {config.alpha:g}"
        raise ConfigError(f"{wrong}: set that to {alpha or rank:g}")
