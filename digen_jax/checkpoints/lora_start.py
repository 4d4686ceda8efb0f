"""The initial LoRA of a run, `config.lora.path`: another run's, or a published one."""

import pathlib
from collections.abc import Mapping
from typing import Any

from digen_jax.checkpoints.folder import resolve_folder
from digen_jax.checkpoints.lora import LoraConfig, adapted_layers
from digen_jax.checkpoints.lora_files import LoraFile, open_lora, read_opened
from digen_jax.checkpoints.tensors import Tree
from digen_jax.errors import ConfigError


def read_start(
    name: str,
    config: LoraConfig,
    templates: Mapping[str, Tree],
    lists: Mapping[str, tuple[str, ...]],
) -> dict[str, Any]:
    """The factors of a LoRA in PEFT's or diffusers' format, float32, on the first device, by component.

    The run begins with these factors and with new moments of the optimizer. The reference of a KL stays
    the model without LoRA, as in the code of Flow-GRPO (scripts/train_sd3.py, ac4c86e), DiffusionNFT
    and AWM, which turn the adapter off for it.

    Args:
      name: a folder, a file or a hub id.
      config: rank, alpha and targets of the run, which the LoRA must have.
      templates: the parameters of the components that may be tuned, or their shapes.
      lists: the `LISTS` of each component.

    Raises:
      ConfigError: the LoRA differs from `config`; the message says in what.
      ValueError: there is no LoRA, or none for this network.
    """
    path = pathlib.Path(name)
    opened = open_lora(path if path.is_file() else resolve_folder(name), templates, lists)
    targets = adapted_layers(templates, config.targets, lists)
    for file in opened.values():
        _check_settings(file, config)
    for part in templates:
        _check_layers(opened, targets, config.targets, part)
    return {part: read_opened(file, templates[part], lists[part]) for part, file in opened.items()}


def _check_settings(opened: LoraFile, config: LoraConfig) -> None:
    """Raises ConfigError if rank or alpha differs from the config's."""
    file, rank, alpha = opened.file, opened.rank, opened.alpha
    if rank != config.rank:
        raise ConfigError(
            f"{file} has rank {rank}, but config.lora.rank is {config.rank}: set that to {rank}"
        )
    said = (
        f"has alpha {alpha:g}" if alpha else f"does not give alpha, which is then its rank {rank}"
    )
    if (alpha or rank) != config.alpha:
        raise ConfigError(
            f"{file} {said}, but config.lora.alpha is {config.alpha:g}: set that to {alpha or rank:g}"
        )


def _check_layers(
    opened: Mapping[str, LoraFile], wanted: Mapping[str, set[str]], targets: str, part: str
) -> None:
    """Raises ConfigError if the layers of a component differ from the config's; `wanted` are those of `targets`."""
    file = next(iter(opened.values())).file
    own = opened[part].layers if part in opened else set()
    matched = wanted.get(part, set())
    for layers, differs in (
        (matched - own, "matches {}, for which {} has no factors"),
        (own - matched, "does not match {}, for which {} has factors"),
    ):
        if layers:
            more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
            raise ConfigError(
                f"config.lora.targets = {targets!r} {differs.format(min(layers) + more, file)}: "
                f"make it match the {len(own)} layers of the LoRA"
            )
