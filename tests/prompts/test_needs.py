"""What rewards need of prompts is missed before a run, with file and lines."""

import json

import pytest

from digen_jax.data.needs import check_needs
from digen_jax.errors import ConfigError
from digen_jax.rewards import ocr
from tests.pipelines import ROOT


def box(record):
    return None if "box" in record else "has no box" if record.get("tag") else "has no box or tag"


@pytest.fixture
def files(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.jsonl"
    first.write_text("".join(f"a wall\na 'wall' {i}\n" for i in range(3)) + 'a "wall"\n')
    lines = [
        {"prompt": "a “wall”", "tag": "t"},
        {"prompt": "a wall", "box": 1},
        {"prompt": '"x"', "tag": "u"},
    ]
    second.write_text("\n\n".join(map(json.dumps, lines)))
    return [first, second]


def test_each_file_reward_and_lack_is_a_sentence_with_its_first_lines(files):
    first, second = files
    with pytest.raises(ConfigError) as error:
        check_needs([*files, first], {"ocr": ocr.needs, "mine:box": box})
    quotes = 'because each quotes no text, such as a sign that says "OPEN"; change or remove them'
    assert error.value.args == (
        f"{first}, lines 1, 2, 3 and 3 more: 6 of 7 prompts cannot be scored by the reward 'ocr', {quotes}",
        f"{first}, lines 1, 2, 3 and 4 more: 7 of 7 prompts cannot be scored by the reward 'mine:box', because "
        "each has no box or tag; change or remove them",
        f"{second}, lines 1, 5: 2 of 3 prompts cannot be scored by the reward 'mine:box', because each has no box; "
        "change or remove them",
        f"{second}, line 3: 1 of 3 prompts cannot be scored by the reward 'ocr', {quotes}",
    )


def test_of_prompts_with_all_that_is_needed_nothing_is_said(files):
    check_needs([ROOT / "tests" / "data" / "ocr_test.txt"], {"ocr": ocr.needs})
    check_needs(files, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no prompt file at"):
        check_needs([tmp_path / "none.txt"], {"ocr": ocr.needs})
