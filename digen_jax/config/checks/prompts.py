"""Checks of the section `prompts` that need no file."""

import math

from ml_collections import ConfigDict

from digen_jax.errors import ConfigError


def check_files(config: ConfigDict) -> None:
    """Refuses weights that do not fit the prompt files."""
    files, weights = tuple(config.prompts.files), tuple(config.prompts.weights)
    for file in files:
        if not isinstance(file, str) or not file:
            raise ConfigError(f"config.prompts.files must hold paths of prompt files, not {file!r}")
        if files.count(file) > 1:
            raise ConfigError(
                f"config.prompts.files has {file!r} twice: name it once, with a larger weight"
            )
    if not weights:
        return
    given = f"config.prompts.weights = {weights}"
    if not all(type(one) in (int, float) and 0 < one < math.inf for one in weights):
        raise ConfigError(f"{given} must hold positive numbers: leave out files of weight 0")
    if len(weights) != len(files):
        raise ConfigError(
            f"{given} must have a weight for each of the {len(files)} files of config.prompts.files, or be () where "
            "all weigh the same"
        )
