"""A run on several prompt files: its notes, what its reward gets, and how it continues."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from digen_jax.config.door import open_recipe
from digen_jax.prompts.dataset import prompt_batches
from digen_jax.run.train import train
from tests.tiny_runs import tiny_config

SEEN: list[dict] = []


def noting(images, prompts, metadata):
    """A reward that keeps what it gets."""
    assert [record["prompt"] for record in metadata] == prompts
    SEEN.extend(metadata)
    return np.arange(len(images), dtype=np.float32)


@pytest.mark.slow
def test_a_run_draws_from_several_files_and_continues(base, tmp_path, capfd):
    other = tmp_path / "other.txt"
    other.write_text("a ring\na star\na ring\na photo of a red circle\n")
    c = tiny_config(base, "lora")
    files = (c.prompts.file, str(other))
    c.prompts.update(files=files, weights=(3.0, 1.0))
    c.batch.groups, c.sampler.fragment, c.trainer.micro_batch = 4, 16, 16
    c.rewards = ("tests.run.test_prompt_files:noting",)
    c.reward_pool = ConfigDict(dict(processes=0))
    for c.steps in (1, 3):
        train(open_recipe(c), tmp_path / "run")
    said = capfd.readouterr().err
    assert f"{other}: 1 of 4 prompts are repeats (line 3 repeats line 1)\n" in said
    both = f"{other}: 1 of 3 different prompts are in {files[0]}, too (line 4 is line 1 there)\n"
    assert both in said
    trained = [record for record in SEEN if "serial" in record]
    serials = {record["serial"]: record for record in trained}
    unbroken = prompt_batches(files, 4, c.get("seed", 0), tmp_path / "cache", weights=(3.0, 1.0))
    expected = [record for _, step in zip(range(3), unbroken, strict=False) for record in step]
    assert [serials[serial] for serial in range(12)] == expected
    assert [record["prompt_file"] for record in expected].count(str(other)) == 3
