"""The rewards that prompts name are those of the config."""

import json

import pytest
from ml_collections import ConfigDict

from digen_jax.config.checks.rewards import check_named
from digen_jax.config.door import open_recipe, place
from digen_jax.errors import ConfigError
from digen_jax.rewards.settings import RewardSettings

REWARDS = [
    RewardSettings("shapes_geneval"),
    RewardSettings("mine:ocr"),
    RewardSettings("mine:ocr", 0.0, label="shown"),
]


def file(folder, *named):
    records = [{"prompt": "a cat"}, *({"prompt": "a dog", "rewards": one} for one in named)]
    path = folder / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, records)))
    return path


def test_names_of_the_configs_rewards_are_accepted(tmp_path):
    path = file(tmp_path, ["mine:ocr"], ["shown", "shapes_geneval"])
    check_named(str(path), REWARDS, training=True)
    check_named(str(file(tmp_path, ["shown"])), REWARDS, training=False)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        (
            ["mine:orc"],
            "\"rewards\" names 'mine:orc', but config.rewards has 'shapes_geneval', 'mine:ocr', ",
        ),
        (["mine:orc"], "'shown'; did you mean 'mine:ocr'?"),
        (["beauty"], "'shown'; add it there, or take it out here"),
        (
            [],
            '"rewards" must be a list of the names of rewards, not []; leave it out where all apply',
        ),
        ("mine:ocr", '"rewards" must be a list of the names of rewards, not "mine:ocr"'),
        ([3], '"rewards" must be a list of the names of rewards, not [3]'),
        (["shown"], "\"rewards\" names only 'shown' with a weight of 0: the prompt trains nothing"),
    ],
)
def test_other_names_are_refused_with_file_and_line(tmp_path, named, sentence):
    path = file(tmp_path, ["mine:ocr"], named)
    with pytest.raises(ValueError) as caught:
        check_named(str(path), REWARDS, training=True)
    said = str(caught.value).replace("all rewards apply", "all apply")
    assert said.startswith(f"{path}, line 5: ") and sentence in said


@pytest.mark.parametrize("field", ["prompts", "evaluation"])
def test_a_run_is_refused_before_anything_slow(tmp_path, field):
    good, bad = tmp_path / "good.txt", file(tmp_path, ["ocr"])
    good.write_text("a cat\n")
    files = {"prompts": dict(file=str(good)), "evaluation": dict(prompts=str(good))}
    files[field][{"prompts": "file", "evaluation": "prompts"}[field]] = str(bad)
    recipe = open_recipe(ConfigDict(files))
    name = {"prompts": "config.prompts.file", "evaluation": "config.evaluation.prompts"}[field]
    with pytest.raises(ConfigError) as caught:
        place(recipe, 8)
    assert str(caught.value).startswith(
        f"{name}: {bad}, line 3: \"rewards\" names 'ocr', but config.rew"
    )
