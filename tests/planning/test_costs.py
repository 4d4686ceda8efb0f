import json
import re

import pytest

from digen_jax.config.load import complete
from digen_jax.errors import ConfigError
from digen_jax.planning.costs import read_calibration, read_run_costs
from digen_jax.scheduling.settings import Costs
from tests.tiny_runs import tiny_config


def test_a_runs_timings_become_costs_of_one_device(base, tmp_path):
    config = complete(tiny_config(base, "full"))
    config.placement.rollout.data, config.placement.trainer.data = 2, 4
    (tmp_path / "config.json").write_text(config.to_json())
    phases = {"rollout": 4.0, "train": 8.0, "sync": 0.5, "reward": 0.8, "deliver": 0.4}
    line = {f"seconds/{name}": seconds for name, seconds in phases.items()}
    slow = {name: 100.0 for name in line}
    lines = [{"reward": 1.0}, slow, slow, line, line, slow, line]
    lines = [{"step": step, "seconds/clock": 9.0, **one} for step, one in enumerate(lines)]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    found = read_run_costs(tmp_path)
    # 8 images a step; the first two steps may have compiled, and the median ignores the fifth.
    assert found.costs == Costs(
        generate=4.0 * 2 / 8, train=8.0 * 4 / 8, score=0.1, sync=0.5, deliver=0.05
    )
    assert f"4 steps of the run in {tmp_path}" in found.source
    half = read_run_costs(tmp_path, (0.5, 0.0)).costs
    assert half.train == pytest.approx(8.0 / 8 / (0.5 + 0.5 / 4))
    log.write_text("".join(json.dumps(entry) + "\n" for entry in lines[:3]))
    with pytest.raises(ConfigError, match="timings of 2 steps"):
        read_run_costs(tmp_path)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"generate": 1, "train": 1, "synch": 1},
            "did you mean 'sync'?",
        ),
        ({"generate": 1}, "lacks train"),
        ({"generate": -1, "train": 1}, "generate must be a number"),
        ({"generate": 1, "train": 1, "scorers": 0.5}, "scorers must be a whole number"),
        ([1, 2], "must hold an object"),
    ],
)
def test_a_wrong_file_of_costs_is_refused(tmp_path, given, sentence):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_calibration(file)
