"""The prompts that a run will draw."""

import itertools
import pathlib
from typing import Any

from digen_jax.assemble import drawn_prompts
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import blame
from digen_jax.prompts.files import read_prompt_file, read_prompt_files


def reached(recipe: TrainConfig, cache: pathlib.Path, first: int = 0) -> list[dict[str, Any]]:
    """The records of a run's evaluations and of its steps from `first` on, one of each prompt, negative and picture.

    Args:
      recipe: of the run.
      cache: where the prompt file's data set is built, as in `prompt_batches`.
      first: steps that are done.

    Raises:
      ConfigError: a prompt file cannot be used.
    """
    with blame("config.evaluation.prompts: "):
        held_out = read_prompt_file(recipe.evaluation.prompts)[: recipe.evaluation.images or None]
    with blame("config.prompts.file: "):
        left = set(map(_content, itertools.chain(*read_prompt_files(recipe.prompts.paths))))
        steps = drawn_prompts(recipe, cache)
    found = {_content(record): record for record in held_out}
    for records in itertools.islice(steps, first, recipe.steps):
        drawn = {_content(record): record for record in records}
        found |= {content: drawn[content] for content in drawn if content not in found}
        left.difference_update(drawn)
        if not left:
            break
    return list(found.values())


def _content(record: dict[str, Any]) -> tuple[str, str | None, str]:
    return record["prompt"], record.get("negative_prompt"), str(record.get("image", ""))
