"""Common parts of the published recipes in configs/: their settings that no source has, and a config's argument.

The argument is for several numbers of GPUs, as in `--config configs/flux_dev.py:pickscore,8`.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from digen_jax.config.load import complete
from digen_jax.errors import ConfigError

COMMON = dict(
    steps=3000,  # the sources run until they are stopped
    model=dict(remat="blocks"),
    precision=dict(arithmetic="bfloat16", frozen="bfloat16"),
    prompts=dict(file=""),
    rewards=(),
    # Sampling and training alternate on the same devices, so no device waits for another.
    placement=dict(rollout=dict(data=0, fsdp=1), trainer=dict(data=1, fsdp=1)),
    evaluation=dict(prompts=""),
    images=dict(every=20, count=12),
    checkpoint=dict(keep=2),
)


def published(*changes: Mapping[str, Any]) -> ConfigDict:
    """Returns the config of a published recipe: `COMMON` with changes by section, applied in order.

    It has every field, so that each can be set on the command line.
    """
    config = ConfigDict(COMMON)
    for one in changes:
        config.update(one)
    return complete(config)


def recipe_and_gpus(argument: str, passes: Mapping[str, int], example: str) -> tuple[str, int]:
    """Returns the recipe's name and the number of GPUs, by default 1, of an argument "name,number" or "name".

    `passes` are by recipe the passes of an update on one GPU, which the GPUs divide among them.

    Raises:
      ConfigError: The recipe is unknown, or its passes cannot be divided among the GPUs.
    """
    name, _, gpus = argument.partition(",")
    if name not in passes or not _is_number(gpus or "1"):
        raise ConfigError(
            f"the config's argument {argument!r} must be a recipe and a number of GPUs, such as :{example}; "
            f"recipes are {', '.join(passes)}"
        )
    return name, _divisor(int(gpus or 1), passes[name], name)


def number_of_gpus(argument: str, passes: int, example: str) -> int:
    """Returns the number of GPUs for a config file with one recipe, whose argument is only this number.

    Raises:
      ConfigError: The argument is not a number, or the passes cannot be divided among the GPUs.
    """
    if not _is_number(argument):
        must = f"must be a number of GPUs, such as :{example}"
        raise ConfigError(f"the config's argument {argument!r} {must}")
    return _divisor(int(argument), passes, "this recipe")


def _is_number(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _divisor(gpus: int, passes: int, name: str) -> int:
    if passes % gpus:
        *some, last = (str(n) for n in range(1, passes + 1) if passes % n == 0)
        takes = f"{name} takes {', '.join(some)} or {last}"
        raise ConfigError(f"the config's argument gives {gpus} GPUs, but {takes}")
    return gpus
