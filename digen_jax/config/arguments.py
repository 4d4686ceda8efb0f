"""The argument of a config file with several recipes, as in `--config configs/flux_dev.py:pickscore,8`."""

from collections.abc import Iterable

from digen_jax.errors import ConfigError


def recipe_and_gpus(argument: str, recipes: Iterable[str], example: str) -> tuple[str, int]:
    """The name and the number of GPUs, which is 1 if it is not given.

    Args:
      argument: "name,number" or "name".
      recipes: their names.
      example: an argument that the error message shows.

    Raises:
      ConfigError: there is no such recipe, or the number is not a whole one above 0.
    """
    name, _, gpus = argument.partition(",")
    if name not in recipes or not (gpus or "1").isdecimal() or int(gpus or 1) < 1:
        raise ConfigError(
            f"the config's argument {argument!r} must be a recipe and a number of GPUs, such as :{example}; "
            f"recipes are {', '.join(recipes)}"
        )
    return name, int(gpus or 1)
