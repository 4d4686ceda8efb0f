"""The lock, config and starts of a workdir."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.logging.workdir import (
    claim_workdir,
    commit,
    finished_step,
    holder,
    mark_finished,
    record_start,
    started_in,
)
from tests.pipelines import ROOT

HOLD = """
import sys
from digen_jax.logging.workdir import claim_workdir
with claim_workdir(sys.argv[1], {"seed": 0}):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_ends_however_it_ends(tmp_path):
    run = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(run, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on .*: wait"):
            claim(tmp_path, {"seed": 0})
        assert holder(tmp_path) == process.pid
        process.kill()
    assert holder(tmp_path) is holder(tmp_path / "none") is None
    claim(tmp_path, {"seed": 0})
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


CONFIG = {"seed": 0, "steps": 10, "log": {"every": 5, "wandb": {}}, "window": (0, 4)}


def claim(workdir, config, may_change=(), metrics='{"step": 0}\n') -> list[str]:
    """A run that claims the workdir, writes these metrics and ends. Returns the changes of its config."""
    with claim_workdir(workdir, config, may_change) as changed:
        (workdir / "metrics.jsonl").write_text(metrics)
    return changed


def test_a_section_of_a_list_is_compared_field_by_field(tmp_path):
    one, two = {"name": "one", "limit": 3}, {"name": "two", "limit": 3}
    claim(tmp_path, {"rewards": [one, two]})
    with pytest.raises(ConfigError, match=r"\(config\.rewards\[1\]\.limit: 3 -> 5\)"):
        claim(tmp_path, {"rewards": (one, two | {"limit": 5})})
    claim(tmp_path, {"rewards": (one, two | {"limit": 5})}, ["rewards[i].limit"])
    with pytest.raises(ConfigError, match=r'config\.rewards\[1\]\.name: "two" -> not there'):
        claim(tmp_path, {"rewards": (one,)}, ["rewards[i].limit"])


def test_a_run_with_fields_of_an_older_version_is_refused_with_their_new_names(tmp_path):
    claim(tmp_path, {"reward": {"name": ["one"], "processes": 1}})
    with pytest.raises(ConfigError, match=r"version: config\.reward\.name is config\.rewards, of"):
        claim(tmp_path, {"rewards": [{"name": "one"}]})


def test_another_config_is_refused_with_the_fields_that_differ(tmp_path):
    claim(tmp_path, CONFIG)
    other = {"seed": 1, "steps": 10, "log": {"every": 5, "wandb": {"project": "x"}}, "window": None}
    with pytest.raises(ConfigError) as caught:
        claim(tmp_path, other, ["steps"])
    assert str(caught.value) == (
        f"the run in {tmp_path} has another config (config.log.wandb: {{}} -> not there; "
        'config.log.wandb.project: not there -> "x"; config.seed: 0 -> 1; '
        "config.window: [0, 4] -> null): choose another workdir, or undo these changes"
    )
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


def test_fields_that_may_change_do_and_are_returned(tmp_path):
    assert claim(tmp_path, CONFIG) == claim(tmp_path, CONFIG | {"window": [0, 4]}) == []
    longer = CONFIG | {"steps": 20, "log": {"every": 1, "wandb": {}}}
    changed = claim(tmp_path, longer, ["steps", "log"])
    assert changed == ["config.log.every: 5 -> 1", "config.steps: 10 -> 20"]
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 20
    with pytest.raises(ConfigError, match=r"config\.steps: 20 -> 10"):
        claim(tmp_path, CONFIG, ["step", "log"])


def test_where_nothing_has_been_computed_another_config_may_follow(tmp_path):
    claim(tmp_path, CONFIG, metrics="")
    claim(tmp_path, CONFIG | {"seed": 1}, metrics="")
    (tmp_path / "metrics.jsonl").unlink()
    claim(tmp_path, CONFIG | {"seed": 2})
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 2
    with pytest.raises(ConfigError, match=r"config\.seed: 2 -> 3"):
        claim(tmp_path, CONFIG | {"seed": 3})


def test_starts_and_the_end_of_a_run_are_recorded(tmp_path):
    assert finished_step(tmp_path) is started_in(tmp_path) is None
    mark_finished(tmp_path, 70)
    assert finished_step(tmp_path) == 70
    record_start(tmp_path, 0, [])
    record_start(tmp_path, 20, ["config.trainer.learning_rate: 0.1 -> 0.01"])
    first, second = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert (first["done"], second["done"], first["changes"]) == (0, 20, [])
    assert second["changes"] == ["config.trainer.learning_rate: 0.1 -> 0.01"]
    assert first["packages"]["jax"] == jax.__version__
    assert first["packages"]["numpy"] == np.__version__
    assert started_in(tmp_path) == pathlib.Path.cwd()
    assert first["devices"]["count"] == jax.device_count() and first["processes"] == 1


@pytest.mark.parametrize("last", ["", "3", "{", '{"done": 3}', '{"folder": 3}', "[" * 10**5])
def test_the_folder_of_a_start_may_be_unknown(tmp_path, last):
    (tmp_path / "starts.jsonl").write_text(f'{{"folder": "/a"}}\n{last}\n')
    assert started_in(tmp_path) is None


def test_a_commit_is_marked_if_files_have_changed(tmp_path):
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
