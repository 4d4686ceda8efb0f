"""The LoRA that a run continues from, `config.lora.start`: another run's, or a published one."""

from typing import Any

from digen_jax.errors import ConfigError
from digen_jax.weights.folder import resolve_folder
from digen_jax.weights.lora import LoraConfig, adapted_layers
from digen_jax.weights.lora_files import LoraFile, open_lora, read_opened
from digen_jax.weights.tensors import Tree


def read_start(name: str, config: LoraConfig, template: Tree, lists: tuple[str, ...]) -> Any:
    """The factors of a LoRA in PEFT's or diffusers' format, float32, on the first device.

    It begins where the other one ended, with new moments of the optimizer. The reference of a KL stays
    the model without any LoRA, as in the code of Flow-GRPO (scripts/train_sd3.py, ac4c86e), DiffusionNFT
    and AWM, which turn the adapter off for it.

    Args:
      name: a folder or a hub id.
      config: what is tuned, which must be what the LoRA has.
      template: the transformer's parameters or their shapes.
      lists: the network's.

    Raises:
      ConfigError: the LoRA differs from `config`, and in what.
      ValueError: there is no LoRA, or none for this network.
    """
    opened = open_lora(resolve_folder(name))
    _check_same(opened, config, adapted_layers(template, config.targets, lists))
    return read_opened(opened, template, lists)


def _check_same(opened: LoraFile, config: LoraConfig, targets: set[str]) -> None:
    """ConfigError for another rank, alpha, or set of layers than the config's."""
    file, rank, alpha = opened.file, opened.rank, opened.alpha
    if rank != config.rank:
        raise ConfigError(
            f"{file} has rank {rank}, but config.lora.rank is {config.rank}: set that to {rank}"
        )
    said = (
        f"has alpha {alpha:g}" if alpha else f"says nothing of alpha, so that it is its rank {rank}"
    )
    if (alpha or rank) != config.alpha:
        raise ConfigError(
            f"{file} {said}, but config.lora.alpha is {config.alpha:g}: set that to {alpha or rank:g}"
        )
    for layers, differs in (
        (targets - opened.layers, "matches {}, for which {} has no factors"),
        (opened.layers - targets, "does not match {}, for which {} has factors"),
    ):
        if layers:
            more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
            raise ConfigError(
                f"config.lora.targets = {config.targets!r} {differs.format(min(layers) + more, file)}: "
                f"make it match the {len(opened.layers)} layers of the LoRA"
            )
