"""A run that ends early, because a reward that it watches has fallen on the held-out prompts."""

import json

import numpy as np
import pytest

from digen_jax.config.load import load_config
from digen_jax.errors import ConfigError
from digen_jax.logging.metrics import has_fallen
from digen_jax.logging.report_run import read_run
from digen_jax.logging.workdir import finished_step
from tests.metrics import metrics
from tests.run.test_train import config, saved, train  # noqa: F401

TRAINED = "tests.run.test_train:reward"
WATCHED = f"{__name__}:falling"
evaluations = 0  # that `falling` has seen


def falling(images, prompts, metadata):
    """Falls with every evaluation, of which each is one batch."""
    global evaluations
    evaluations += "serial" not in metadata[0]
    return np.full(len(images), -float(evaluations))


@pytest.mark.parametrize(
    ("values", "margin", "count", "expected"),
    [
        ([], 0, 1, False),
        ([1], 0, 1, False),
        ([1, 0.5], 0, 1, True),
        ([1, 0.5], 0.5, 1, False),
        ([1, 0.5], 0.4, 1, True),
        ([0, 1, 0.5], 0, 2, False),
        ([0, 1, 0.5, 0.9], 0, 2, True),
        ([0, 1, 0.5, 0.9], 0.2, 2, False),
        ([1, 0.5, 1, 0.5], 0, 2, False),
        ([0.4, 0.5, 0.6], 0, 1, False),
    ],
)
def test_it_has_fallen_where_each_of_the_last_is_below_the_best_before(
    values, margin, count, expected
):
    assert has_fallen(values, margin, count) is expected


def both(tmp_path, **fields):
    rewards = (TRAINED, dict(name=WATCHED, weight=0.0))
    return config(tmp_path, rewards=rewards, evaluation__every=1, images__every=9, **fields)


def test_what_cannot_be_watched_is_refused(tmp_path):
    for refused in (
        both(tmp_path, stopping__reward="pick"),
        config(tmp_path, stopping__reward=TRAINED),
    ):
        with pytest.raises(ConfigError, match=r"config\.stopping\.reward"):
            load_config(refused)
    load_config(both(tmp_path, stopping__reward=WATCHED))


@pytest.mark.slow
def test_a_run_ends_early_as_finished_and_goes_on_where_that_is_switched_off(
    tmp_path,
    train,  # noqa: F811
    capsys,
):
    watching = both(tmp_path, steps=6, stopping__reward=WATCHED, stopping__evaluations=2)
    assert train("run", watching) is None
    done = finished_step(tmp_path / "run")
    assert 2 <= done < 6 and saved(tmp_path / "run")[-1] == str(done)
    said = capsys.readouterr().out
    assert f"The run has stopped early: evaluation/reward_of/{WATCHED} was " in said
    assert "reward on 5 training prompts" in said
    history = metrics(tmp_path / "run")
    assert history[1]["images/sharpness"] > 0 and "evaluation/images/diversity" in history[1]
    assert read_run(tmp_path / "run").finished

    assert train("run", watching) is None
    said = capsys.readouterr().out
    assert f"This run is finished: {done} steps are done. It has stopped early" in said
    assert metrics(tmp_path / "run") == history

    assert train("run", both(tmp_path, steps=done + 1)) is None
    assert finished_step(tmp_path / "run") == metrics(tmp_path / "run")[-1]["step"] == done + 1
    changes = json.loads((tmp_path / "run" / "starts.jsonl").read_text().splitlines()[-1])[
        "changes"
    ]
    assert any("config.stopping.reward" in change for change in changes)
