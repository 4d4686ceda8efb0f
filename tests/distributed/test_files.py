"""Files that must be the same on all nodes."""

import pytest

from digen_jax.config.door import reopen_recipe
from digen_jax.distributed.files import PACKAGE, check_same, fingerprints
from digen_jax.distributed.launch import TrainerPart, check_part
from digen_jax.errors import ConfigError
from tests.tiny_runs import tiny_config


def test_a_prompt_file_or_code_that_differs_is_named(tmp_path):
    config = tiny_config(tmp_path, "lora")
    prompts = tmp_path / "prompts.txt"
    config.prompts.file = str(prompts)
    prompts.write_text("a red square\n")
    recipe = reopen_recipe(config)
    expected = fingerprints(recipe)
    check_same(expected, recipe, "the trainer's")
    with pytest.raises(ConfigError, match=PACKAGE):
        check_same(expected | {PACKAGE: "other"}, recipe, "the trainer's")
    prompts.write_text("a blue square\n")
    with pytest.raises(ConfigError, match=prompts.name):
        check_same(expected, recipe, "the trainer's")
    prompts.unlink()
    with pytest.raises(ConfigError, match=prompts.name):
        check_same(expected, recipe, "the trainer's")


def test_a_workdir_that_the_trainers_node_does_not_see_is_named(tmp_path):
    recipe = reopen_recipe(tiny_config(tmp_path, "lora"))
    part = TrainerPart("", "", fingerprints(recipe), "")
    check_part(part, recipe, str(tmp_path))
    with pytest.raises(ConfigError, match="--workdir"):
        check_part(part, recipe, str(tmp_path / "elsewhere"))
