"""The benchmark of faults: its comparisons of runs and weights, and the processes that it finds."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kills_train
from benchmarks.fault_injection import steps
from benchmarks.kills import metrics_difference, update_difference
from digen_jax.scheduling.commands import WeightsVersion

LINE = {"seconds/clock": 1.0, "images_per_second": 2.0, "assisted": 0.0}


def write(folder, rewards, **more):
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps(LINE | {"step": i, "reward": r} | more) for i, r in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9')
    return folder


def test_runs_are_compared_by_their_lines(tmp_path):
    one, two = write(tmp_path / "one", [1.0, 4.0]), tmp_path / "two"
    assert steps(one) == [1, 2]  # without the torn line
    assert metrics_difference(one, write(two, [1.0, 4.0], assisted=0.5, utilisation=1.0)) == 0
    assert metrics_difference(one, write(two, [1.02, 4.0])) == pytest.approx(0.02 / 4, rel=0.05)
    assert metrics_difference(one, write(two, [1.0])) == math.inf
    assert metrics_difference(one, write(two, [1.0, 4.0], loss=1.0)) == math.inf


def test_updates_are_compared_by_what_they_change():
    start, end = {"a": np.zeros(3), "b": np.ones(2)}, {"a": np.float64([0, 3, 0]), "b": np.ones(2)}
    assert update_difference(end, end, start) == 0
    other = {"a": end["a"], "b": np.float64([1, 1.3])}
    assert update_difference(other, end, start) == pytest.approx(0.1)


def test_received_weights_that_were_never_sent_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv(kills_train.FOLDER, str(tmp_path))
    sent, received = kills_train.SENT, kills_train.RECEIVED
    first, second = ({"a": jnp.arange(4.0) + i, "b": jnp.ones(2) * i} for i in range(2))
    for version, tree in enumerate((first, second)):
        kills_train.record(sent, WeightsVersion(version), tree)
        copy = {name: np.asarray(leaf) for name, leaf in tree.items()}
        kills_train.record(received, WeightsVersion(version), copy)
    (tmp_path / "killed").write_text(f"{received} 1 0123")
    assert kills_train.compare_hashes(tmp_path) == (2, [])
    kills_train.record(received, WeightsVersion(1), first | {"b": second["b"]})
    kills_train.record(received, WeightsVersion(1, True), second)
    assert kills_train.compare_hashes(tmp_path) == (4, ["1", "1e"])
