"""A model's rewards by launch/evaluate.py against those that the run logged when it evaluated itself."""

import json
import re

import numpy as np
import pytest

from digen_jax.logging.evaluation import Evaluation, by_tag, score_table
from digen_jax.logging.metrics import read_metrics
from tests.scripts import run_forked
from tests.tiny_runs import prompt_file, trained


@pytest.mark.slow
def test_a_runs_evaluation_is_repeated_from_its_checkpoint(base, tmp_path):
    # Its average of the weights, its prompts, reward and settings, in other batches on other devices.
    workdir = trained(base, "full")
    done = run_forked(
        "evaluate.py",
        f"--model={workdir}",
        "--batch=5",
        "--guidance=2,7.5",
        f"--output={tmp_path / 'deep' / 'e.json'}",
        f"--image_folder={tmp_path / 'images'}",
    )
    assert done.returncode == 0, done.stderr
    logged = read_metrics(workdir / "metrics.jsonl")[-1]
    result = json.loads((tmp_path / "deep" / "e.json").read_text())
    assert result["steps"] == 5 and result["prompts"] == str(prompt_file(base))
    assert list(result["guidance"]) == ["2", "7.5"]
    found = result["guidance"]["2"]
    both = "tests.tiny_runs:redness", "tests.tiny_runs:darkness"
    assert {name: score["images"] for name, score in found.items()} == {
        "all": 5,
        "colors": 2,
        "counting": 2,
        both[0]: 5,
        both[1]: 5,
    }
    assert (result["reward"], result["reward_weights"]) == (", ".join(both), [1.0, 0.25])
    for line, kind in ((logged, "evaluation/reward"), (logged, "reward")):
        each = [line[f"{'evaluation/' * (kind != 'reward')}reward_of/{name}"] for name in both]
        assert line[kind] == pytest.approx(each[0] + 0.25 * each[1], abs=1e-5)
    of_each = [(name, f"reward_of/{name}") for name in both]
    for name, metric in (
        ("all", "reward"),
        ("colors", "colors"),
        ("counting", "counting"),
        *of_each,
    ):
        assert found[name]["mean"] == pytest.approx(logged[f"evaluation/{metric}"], abs=1e-5)
        assert f"{found[name]['mean']:.3f} ± {found[name]['standard_error']:.3f}" in done.stdout
    assert abs(result["guidance"]["7.5"]["all"]["mean"] - found["all"]["mean"]) > 1e-4
    for guidance, tasks in result["guidance"].items():
        folder = tmp_path / "images" / f"guidance_{guidance}"
        *images, grid = sorted(file.name for file in folder.iterdir())
        scores = [float(name.split("_")[1]) for name in images]
        assert len(scores) == 5 and grid == "grid.png"
        assert np.mean(scores) == pytest.approx(tasks["all"]["mean"], abs=1e-3)


def test_scores_are_given_for_each_task_with_their_standard_error():
    records = [{"tag": "b"}, {"tag": "a"}, {"tag": "b"}, {}]
    scores = np.array([1.0, 0.5, 0.0, 0.5], np.float32)
    evaluation = Evaluation(records, np.zeros((4, 2, 2, 3), np.uint8), scores)
    tasks = evaluation.by_task()
    assert tasks["all"] == (0.5, pytest.approx(np.sqrt(1 / 6) / 2), 4)
    assert tasks["b"] == (0.5, pytest.approx(0.5), 2)
    assert tasks["a"] == (0.5, None, 1)
    assert list(tasks) == ["all", "b", "a"]
    assert by_tag(records, scores) == {"b": 0.5, "a": 0.5}
    lines = score_table({"guidance 1": tasks, "guidance 2.5": tasks}).splitlines()
    assert re.fullmatch(" +images +guidance 1 +guidance 2.5", lines[0])
    assert re.fullmatch(r"b +2( +0\.500 ± 0\.500){2}", lines[2])
    assert re.fullmatch(r"a +1( +0\.500){2}", lines[3])
    assert len({len(line) for line in lines}) == 1
