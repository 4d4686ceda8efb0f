"""Component and pipeline folders in diffusers and transformers format.

A component is `config.json` and safetensors, in one file or in several with an index. A pipeline is
`model_index.json` and a folder per component. Neither torch nor diffusers is required.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.typing import DTypeLike

from digen_jax.checkpoints import tensors as safetensors
from digen_jax.checkpoints.tensors import StoredTensor, Tree, file_tensors, open_file
from digen_jax.files import read_json

Folder = str | pathlib.Path

INDEX = "model_index.json"
# Weights file name of each library.
STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
# File next to model_index.json with the recommended sampling settings (steps, guidance, size, tokens of a prompt), if
# they differ from the pipeline's defaults. diffusers does not read it.
SAMPLING = "sampling.json"
# Excludes single-file checkpoints at the root and half-precision copies, which Hub repositories often contain.
HUB_FILES = ["*.json", "*/*.txt", "*/*.model", "*/*.jinja", "LICENSE*", "*/*.safetensors"]
HUB_FILES += [f"{stem}*.safetensors" for stem in STEMS.values()]
HUB_FILES += ["*lora_weights.safetensors", "adapter_model.safetensors"]
HUB_IGNORED = ["*.fp16.*", "*.fp16-*", "*.bf16.*", "*.non_ema.*", "*onnx*"]

# Maximum bytes per file that `fingerprint` reads; larger files are sampled in pieces.
MAX_READ = 2**25
PIECE = 2**16


def resolve_folder(
    name_or_path: Folder, without: tuple[str, ...] = (), index_only: bool = False
) -> pathlib.Path:
    """Returns a local folder unchanged, or downloads a Hub repository "owner/name".

    Skips the components `without`, such as a large text encoder, or all files but `model_index.json` if `index_only`.

    Raises:
      ValueError: The folder or repository does not exist.
    """
    path = pathlib.Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    seen_from = "" if path.is_absolute() else f"; relative folders are seen from {os.getcwd()}"
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or path.exists():
        what = "neither an existing folder nor a hub id 'owner/name'"
        raise ValueError(f"{name!r} is {what}{seen_from}")
    skip = HUB_IGNORED + [f"{component}/*" for component in without]
    files = [INDEX] if index_only else HUB_FILES
    try:
        options = dict(allow_patterns=files, ignore_patterns=skip)
        return pathlib.Path(huggingface_hub.snapshot_download(name, **options))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, ConnectionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name!r} is not an existing folder, and the hub repository of that name cannot be downloaded "
            f"(check the name, the network, and your access to gated models{seen_from}): {reason}"
        ) from error


def read_model_index(folder: Folder) -> dict[str, Any]:
    """Reads a pipeline's `model_index.json`: `_class_name`, and [library, class] for each component."""
    path = pathlib.Path(folder) / INDEX
    index = read_json(path)
    if not isinstance(index.get("_class_name"), str):
        raise ValueError(f"{path} has no _class_name, so it does not describe a pipeline")
    return index


def read_sampling(folder: Folder) -> dict[str, Any]:
    """Reads a pipeline's `SAMPLING` file; empty if there is none."""
    path = pathlib.Path(folder) / SAMPLING
    found = read_json(path) if path.exists() else {}
    tokens = found.get("max_sequence_length", 1)
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"{path}: max_sequence_length must be a positive integer, not {tokens!r}")
    return found


def absent_components(folder: Folder) -> list[str]:
    """Returns the components that are listed in `model_index.json` but missing in the pipeline folder."""
    entries = {k: v for k, v in read_model_index(folder).items() if isinstance(v, list)}
    return [name for name in entries if not pathlib.Path(folder, name).is_dir()]


def read_configs(
    folder: Folder,
    components: Mapping[str, tuple[str | None, ...]],
    readers: Mapping[str, Callable[[dict[str, Any]], Any]],
) -> dict[str, Any]:
    """Parses the JSON files of a pipeline's components with `readers`, by component.

    `components` has the (library, class, ...) of each component; `model_index.json` must list one of the classes.
    (None, None) is not checked.

    Raises:
      ValueError: A file is missing, has another class, or is rejected by its reader; names the first one.
    """
    path = pathlib.Path(folder) / INDEX
    index = read_json(path)
    for part, (library, *kinds) in components.items():
        found = index.get(part)
        # transformers may save the class of the fast tokenizer, which reads the same files.
        same = isinstance(found, list) and [str(name).removesuffix("Fast") for name in found]
        supported = [[library, kind] for kind in kinds]
        if library is not None and same not in supported:
            names = " or ".join(map(json.dumps, supported))
            raise ValueError(
                f"{path}: {part} is {json.dumps(found)}, but only {names} is supported: choose another folder"
            )
    parsed = {}
    for part, read in readers.items():
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        path, kinds = pathlib.Path(folder) / part / name, [*components[part][1:]]
        config = read_json(path)
        found = config.get("_class_name") or (config.get("architectures") or kinds)[0]
        if found not in kinds:
            names = " or ".join(map(str, kinds))
            raise ValueError(f"{path} describes a {found}, not a {names}: choose another folder")
        try:
            parsed[part] = read(config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return parsed


def read_params(
    folder: Folder,
    template: Tree,
    lists: tuple[str, ...],
    shardings: Any = None,
    dtype: DTypeLike | None = None,
    ignore: Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
) -> dict[str, Any]:
    """Reads the parameters of a component folder. Each device reads only its own shards.

    Args:
      folder: Component folder.
      template: Tree of `jax.ShapeDtypeStruct` of the network.
      lists: `LISTS` of the network.
      shardings: A Sharding, or a tree or tree prefix of Shardings. None means the first device.
      dtype: Dtype of floating leaves; int8 and float8 quantize them (`stored_shapes`). None means the template's.
      ignore: Patterns of additional tensor names in the file (`*.position_ids`) to ignore.
      rename: Maps tensor names to the network's, since they differ between transformers versions. Applied before
        `ignore`.

    Raises:
      ValueError: A tensor is missing or unexpected, or has the wrong shape.
    """
    tensors = _renamed(open_tensors(folder), rename)
    config = pathlib.Path(folder) / "config.json"
    return safetensors.read_tree(tensors, template, lists, shardings, dtype, ignore, config)


def check_params(
    folder: Folder,
    template: Tree,
    lists: tuple[str, ...],
    ignore: Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
) -> None:
    """Raises the errors of `read_params` that are detectable from file headers; reads no tensors."""
    tensors = _renamed(open_tensors(folder), rename)
    config = pathlib.Path(folder) / "config.json"
    safetensors.check_tensors(tensors, template, lists, ignore, config)


def _renamed(tensors: dict[str, StoredTensor], rename: Any) -> dict[str, StoredTensor]:
    """Renames tensors by the function `rename`, if any. Raises ValueError if names collide."""
    if rename is None:
        return tensors
    stored: dict[str, str] = {}
    for name in tensors:
        first = stored.setdefault(rename(name), name)
        if first != name:
            both = f"{tensors[name].file} holds both {first} and {name}, the same parameter"
            raise ValueError(f"{both}: get a complete copy of the folder")
    return {name: tensors[in_file] for name, in_file in stored.items()}


def has_weights(folder: Folder) -> bool:
    """Returns whether a component folder has any weights, even incomplete ones."""
    return any(pathlib.Path(folder).glob("*.safetensors*"))


def open_tensors(folder: Folder) -> dict[str, StoredTensor]:
    """Opens the tensors of a component folder by name. Only headers are read.

    If there are both a single file and an index, diffusers reads the index and transformers the single file.
    """
    folder = pathlib.Path(folder)
    for stem in STEMS.values():
        index, single = (folder / f"{stem}.safetensors{end}" for end in (".index.json", ""))
        if single.exists() and (stem == STEMS["transformers"] or not index.exists()):
            return open_file(single)
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} has no weight_map of tensor names to files")
            for file in weight_map.values():
                # A lexical check, because files in the Hub cache are symlinks to outside the folder.
                plain = isinstance(file, str) and pathlib.PurePath(file).name == file
                if not (plain and file.endswith(".safetensors")):
                    must = "name a .safetensors file next to it"
                    raise ValueError(f"{index} takes weights from {file!r}: {must}")
            files = sorted({folder / file for file in weight_map.values()})
            for file in files:
                if not file.exists():
                    missing = f"{file} is missing, which {index.name} next to it names"
                    raise ValueError(f"{missing}: copy or download the folder again")
            return {name: tensor for file in files for name, tensor in open_file(file).items()}
    expected = " or ".join(f"{stem}.safetensors[.index.json]" for stem in STEMS.values())
    others = sorted({*folder.glob("*.safetensors"), *folder.glob("*.bin")})
    found = f", not {others[0].name}" if others else ""
    raise ValueError(f"{folder} holds no weights: expected {expected}{found}")


def write_params(
    folder: Folder,
    params: Tree,
    lists: tuple[str, ...],
    config: Mapping[str, Any],
    kind: str = "diffusers",
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes `config.json` and the weights so that `from_pretrained(folder)` loads them.

    `kind` is the library, "diffusers" or "transformers". Above `max_shard_bytes` the weights are split into several
    files with an index. Files are written atomically, earlier weights are removed, and `config.json` is written last:
    if it exists, all files do.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stem = STEMS[kind]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
        tensors = file_tensors(params, lists)
        written = _write_weights(pathlib.Path(scratch), stem, tensors, max_shard_bytes)
        written.append(pathlib.Path(scratch, "config.json"))
        written[-1].write_text(_dump(config), encoding="utf-8")
        (folder / "config.json").unlink(missing_ok=True)
        for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json"):
            (folder / name).unlink(missing_ok=True)
        for stale in folder.glob(f"{stem}-?????-of-?????.safetensors"):
            stale.unlink()
        for file in written:
            os.replace(file, folder / file.name)


def _write_weights(
    folder: pathlib.Path, stem: str, tensors: Iterable[tuple[str, np.ndarray]], limit: int
) -> list[pathlib.Path]:
    """Writes one file, or numbered shards and their index. Returns the paths."""
    shards: list[list[str]] = []
    total, size, held = 0, 0, dict[str, np.ndarray]()

    def flush() -> None:
        safetensors.write_file(folder / f"{len(shards)}", held)
        shards.append(list(held))

    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            flush()
            size, held = 0, {}
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        return [(folder / "0").rename(folder / f"{stem}.safetensors")]
    files = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(_dump({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return [(folder / f"{i}").rename(folder / file) for i, file in enumerate(files)] + [index]


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def copy_pipeline(
    source: Folder,
    target: Folder,
    replace: Mapping[str, Callable[[pathlib.Path], None]],
    sampling: Mapping[str, Any],
) -> None:
    """Copies a pipeline folder, except for the components in `replace`.

    `replace[component](folder)` must write the given folder. `sampling` is the content of `SAMPLING`. The entries of
    missing components become null, as in diffusers for components that were not loaded. The target must not exist,
    and is created atomically.
    """
    source, target = pathlib.Path(source), pathlib.Path(target)
    index = read_model_index(source)
    parts = [name for name, value in index.items() if isinstance(value, list) and value[0]]
    if unknown := sorted(set(replace) - set(parts)):
        raise ValueError(f"{source} has no component {unknown[0]}, only {', '.join(sorted(parts))}")
    if target.exists():
        raise ValueError(f"{target} exists already; choose another folder or delete it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as scratch:
        pipeline = pathlib.Path(scratch, target.name)
        pipeline.mkdir()
        for part in parts:
            if part in replace:
                (pipeline / part).mkdir()
                replace[part](pipeline / part)
            elif (source / part).is_dir():
                shutil.copytree(source / part, pipeline / part)
            else:
                index[part] = [None, None]
        for licence in source.glob("LICENSE*"):
            shutil.copy(licence, pipeline)
        (pipeline / SAMPLING).write_text(_dump(sampling), encoding="utf-8")
        (pipeline / INDEX).write_text(_dump(index), encoding="utf-8")
        os.replace(pipeline, target)


def fingerprint(folder: str | os.PathLike[str], parts: Sequence[str]) -> str:
    """Returns a hash of the files of pipeline components; takes seconds for any size.

    It covers file names and sizes, but not dates or the folder's path. Of large files it reads 512 evenly spaced
    pieces: training changes weights everywhere, but a change of less than 1/500 of a file may be missed.

    Raises:
      ValueError: A component is missing or empty.
    """
    digest = hashlib.sha256()
    for part in parts:
        files = sorted(path for path in pathlib.Path(folder, part).glob("*") if path.is_file())
        if not files:
            raise ValueError(f"{pathlib.Path(folder, part)} holds no file of the {part}")
        for path in files:
            size, pieces = path.stat().st_size, MAX_READ // PIECE
            digest.update(f"{part}/{path.name} {size}\n".encode())
            with path.open("rb") as file:
                if size <= MAX_READ:
                    digest.update(file.read())
                    continue
                for piece in range(pieces):
                    file.seek(piece * (size - PIECE) // (pieces - 1))
                    digest.update(file.read(PIECE))
    return digest.hexdigest()[:32]
