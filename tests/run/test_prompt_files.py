"""A run on several prompt files: its notes, what its reward gets, and how it continues."""

import numpy as np
import pytest

from digen_jax.data.prompt_files import prompt_batches
from tests.run.test_train import config, train  # noqa: F401

SEEN: list[dict] = []


def noting(images, prompts, metadata):
    """A reward that keeps what it gets."""
    assert [record["prompt"] for record in metadata] == prompts
    SEEN.extend(metadata)
    return np.arange(len(images), dtype=np.float32)


@pytest.mark.slow
def test_a_run_draws_from_several_files_and_continues(tmp_path, train, capfd):  # noqa: F811
    other = tmp_path / "other.txt"
    other.write_text("a ring\na star\na ring\na photo of a red circle\n")
    c = config(tmp_path, rewards=f"{__name__}:noting")
    files = (c.prompts.file, str(other))
    c.prompts.update(file="", files=files, weights=(3.0, 1.0))
    for c.steps in (1, 5):
        assert train("run", c) is None
    said = capfd.readouterr().err
    assert f"{other}: 1 of 4 prompts" in said and f"{other}: 1 of 3 different prompts" in said
    trained = [record for record in SEEN if "serial" in record]
    serials = {record["serial"]: record for record in trained}
    groups = c.batch.groups
    unbroken = prompt_batches(files, groups, c.seed, weights=(3.0, 1.0))
    expected = [record for _, step in zip(range(5), unbroken, strict=False) for record in step]
    assert [serials[serial] for serial in range(5 * groups)] == expected
    assert 0 < [record["prompt_file"] for record in expected].count(str(other)) < 5 * groups / 2
