"""The rewards that prompts name are those of the config."""

import json

import pytest

from digen_jax.config.load import check_named
from digen_jax.rewards import RewardSettings

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
    ("named", "hint"),
    [
        (["mine:orc"], "'shown'; did you mean 'mine:ocr'?"),
        (["beauty"], "'beauty'"),
        ([], "[]"),
        ("mine:ocr", '"mine:ocr"'),
        ([3], "[3]"),
        (["shown"], "weight of 0"),
    ],
)
def test_other_names_are_refused_with_file_and_line(tmp_path, named, hint):
    path = file(tmp_path, ["mine:ocr"], named)
    with pytest.raises(ValueError) as caught:
        check_named(str(path), REWARDS, training=True)
    assert str(caught.value).startswith(f"{path}, line 5: ") and hint in str(caught.value)
