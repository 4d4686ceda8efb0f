import json
import pathlib
import subprocess

import jax
import numpy as np
import pytest

from digen_jax.logging.environment import commit, note_start, started_in


def test_every_start_is_a_line_with_versions_and_devices(tmp_path):
    note_start(tmp_path, 0, [])
    note_start(tmp_path, 20, ["config.trainer.learning_rate: 0.1 -> 0.01"])
    first, second = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert (first["done"], second["done"], first["changes"]) == (0, 20, [])
    assert second["changes"] == ["config.trainer.learning_rate: 0.1 -> 0.01"]
    assert first["packages"]["jax"] == jax.__version__
    assert first["packages"]["numpy"] == np.__version__
    assert started_in(tmp_path) == pathlib.Path.cwd()
    assert first["devices"]["count"] == jax.device_count() and first["processes"] == 1


@pytest.mark.parametrize("last", ["", "3", "{", '{"done": 3}', '{"folder": 3}', "[" * 10**5])
def test_where_a_run_was_started_may_be_unknown(tmp_path, last):
    assert started_in(tmp_path) is None
    (tmp_path / "starts.jsonl").write_text(f'{{"folder": "/a"}}\n{last}\n')
    assert started_in(tmp_path) is None


def test_a_commit_says_whether_files_were_changed_since(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    assert commit(tmp_path) is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD").stdout.strip()
    assert commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == f"{head}+"
