"""Processes that follow the first one execute its announcements, here those of a run that has ended."""

import json
import shutil

import pytest

from digen_jax.config.load import load_config
from digen_jax.runtime import opening
from digen_jax.runtime.opening import CommandBroadcast
from digen_jax.scheduling.commands import pack, unpack
from tests.run.test_train import config, saved, train  # noqa: F401


@pytest.fixture
def announced(monkeypatch):
    """The announcements of a run, as text."""
    entries = []

    def announce(self, kind, value=None):
        entries.append(json.dumps([kind, pack(value)]))

    monkeypatch.setattr(CommandBroadcast, "send", announce)
    return entries


def follow(monkeypatch, config, workdir, announced):
    """(the arguments of the end, the answers) of a process that follows these announcements."""
    answers = []
    monkeypatch.setattr(opening, "answer", answers.append)
    entries = ((kind, unpack(value)) for kind, value in map(json.loads, announced))
    with pytest.raises(opening.RunEnded) as end:
        opening._follow(config, workdir, opening.FollowedLog(entries), None)
    return end.value.args, answers


@pytest.mark.parametrize(("steps", "seen", "named"), [(2, True, "config"), (1, False, "--workdir")])
def test_another_config_or_workdir_is_answered(
    tmp_path,
    monkeypatch,
    train,  # noqa: F811
    announced,
    steps,
    seen,
    named,
):
    assert train("first", config(tmp_path, steps=1)) is None
    shutil.copytree(tmp_path / "first", tmp_path / "other")
    if not seen:
        (tmp_path / "other" / ".lock").unlink()
    end = json.dumps(["end", pack(("refused", None))])
    other = load_config(config(tmp_path, steps=steps))
    found, (answer,) = follow(monkeypatch, other, tmp_path / "other", [announced[0], end])
    assert found == ("refused", None) and named in answer
