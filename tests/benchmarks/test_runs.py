"""Comparisons of algorithms and of asynchrony: real runs of the toy family, and the tables of their results."""

import json
import os
import pathlib
import runpy
import signal

import numpy as np
import pytest
from PIL import Image

from benchmarks import training
from benchmarks.comparison import Outcome, Point, Row, Table, read_cost
from benchmarks.training import AsynchronyComparison, compare_asynchrony
from digen_jax.config.load import load_config
from digen_jax.errors import ConfigError
from digen_jax.logging.metrics import MetricsLog, read_metrics
from tests.parallel import toy
from tests.tiny_runs import prompt_file

ROOT = pathlib.Path(__file__).parents[2]
ALGORITHMS = runpy.run_path(str(ROOT / "configs" / "shapes_algorithms.py"))


def brightness(images, prompts, metadata):
    """A reward."""
    return images.mean((1, 2, 3), dtype=np.float64)


def toy_config(base, rollout, **fields):
    config = toy.config(
        **toy.meshes((rollout, 1), (1, 1)),
        prompts__file=str(prompt_file(base)),
        evaluation__prompts=str(prompt_file(base)),
        evaluation__every=2,
        rewards=f"{__name__}:brightness",
        reward_pool__processes=0,
        trainer__learning_rate=0.1,
        **fields,
    )
    config.steps, config.seed = 2, 5
    return config


@pytest.fixture
def configs(base):
    """Two algorithms of two steps of 8 images."""
    return {
        # Near a ratio of 1, topr differs by the weight only.
        name: toy_config(base, 0, algorithm__surrogate=name, algorithm__negative_weight=0.25)
        for name in ("clip", "topr")
    }


@pytest.fixture
def lagging(base):
    config = toy_config(base, 1, sampler__chunk=4, runtime__max_policy_lag=1)
    config.steps = 3
    return config


@pytest.fixture
def built(monkeypatch):
    """(seed, surrogate, lag) of each built run; a signal ends the third one after its first step."""
    seen, systems, write = [], {}, MetricsLog.write

    def build(config):
        kind = config.algorithm.surrogate, config.runtime.max_policy_lag
        seen.append((config.seed, *kind))
        # Compiled once: the programs do not depend on the seed, except those with a LoRA.
        if kind not in systems:
            systems[kind] = toy.system(config, 1 + kind[1])
        system = systems[kind]
        return system._replace(start=toy.moved(system.start, 0.0), rng=config.rng)

    def stop(log, step, line):
        write(log, step, line)
        if len(seen) == 3 and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    toy.replace_model(monkeypatch.setattr, build)
    monkeypatch.setattr(MetricsLog, "write", stop)
    return seen


@pytest.mark.slow
def test_algorithms_are_trained_once_seed_by_seed(configs, built, tmp_path):
    """Stopped in the third of four runs; then of one algorithm only, then of all."""
    loaded = training.load_configs(configs)
    table, code = training.compare_algorithms(loaded, 2, tmp_path)
    assert code == 128 + signal.SIGTERM
    assert [row.missing for row in table.rows] == [(6,), (6,)]
    stopped = read_cost(tmp_path / "clip-6")
    assert min(stopped) > 0

    table, code = training.compare_algorithms(loaded, 2, tmp_path, only=["topr"])
    assert code is None
    assert [row.missing for row in table.rows] == [(6,), ()]
    table, code = training.compare_algorithms(loaded, 2, tmp_path)
    names = [(seed, name) for seed, name, _ in built]
    assert names == [(5, "clip"), (5, "topr"), (6, "clip"), (6, "topr"), (6, "clip")]
    assert [row.missing for row in table.rows] == [(), ()]
    csv = (tmp_path / "algorithms.csv").read_bytes()
    assert csv.count(b"\n") == 1 + 4 * 2  # a line per evaluation
    again, _ = training.compare_algorithms(loaded, 2, tmp_path)  # writes the files only
    assert again == table and (tmp_path / "algorithms.csv").read_bytes() == csv

    clip, topr = (row.outcomes for row in table.rows)
    assert clip[6].seconds > stopped.seconds and clip[6].cpu_seconds > stopped.cpu_seconds
    for name, outcomes in (("clip", clip), ("topr", topr)):
        for seed, outcome in outcomes.items():
            lines = read_metrics(tmp_path / f"{name}-{seed}" / "metrics.jsonl")
            assert [line["step"] for line in lines] == [0, 1, 2]
            seconds = sum(8 / line["images_per_second"] for line in lines[1:])
            first, last = lines[0]["evaluation/reward"], lines[2]["evaluation/reward"]
            assert outcome.points[0] == (0, 0, first)
            assert outcome.points[1] == (16, pytest.approx(seconds), last)
    assert clip[5].points[0] == topr[6].points[0]
    assert len({one.points[1].reward for one in (*clip.values(), *topr.values())}) > 2


@pytest.mark.slow
def test_each_seed_is_trained_with_and_without_asynchrony(lagging, built, tmp_path):
    """After a stop in the third of four runs, the same call does the remaining ones."""
    config = load_config(lagging)
    assert compare_asynchrony(config, 2, tmp_path) == 128 + signal.SIGTERM
    assert not (tmp_path / "asynchrony.png").exists()
    found = compare_asynchrony(config, 2, tmp_path)
    assert [(seed, lag) for seed, _, lag in built] == [(5, 0), (5, 1), (6, 0), (6, 0), (6, 1)]
    lags = {}
    for row in found.table.rows:
        for seed, outcome in row.outcomes.items():
            lines = read_metrics(tmp_path / f"{row.name}-{seed}" / "metrics.jsonl")
            rewards = {line["step"]: line.get("evaluation/reward") for line in lines}
            points = {point.images // 8: point.reward for point in outcome.points}
            assert points == {step: rewards[step] for step in (0, 2, 3)}
            lags[row.name, seed] = np.mean([line["policy_lag"] for line in lines[1:]])
    assert lags["off", 5] == lags["off", 6] == 0
    assert found.policy_lag == pytest.approx((lags["on", 5] + lags["on", 6]) / 2)
    assert found.policy_lag > 0
    off, on = (row.outcomes for row in found.table.rows)
    assert off[5].points[0] == on[5].points[0]
    assert off[5].points[-1].reward != off[6].points[-1].reward
    assert Image.open(tmp_path / "asynchrony.png").width > 500


def outcome(*rewards, seconds=90.0, cpu_seconds=150.0):
    points = tuple(Point(100 * i, 40.0 * i, reward) for i, reward in enumerate(rewards))
    return Outcome(points, seconds, cpu_seconds)


def test_the_table_has_means_over_the_seeds():
    """0.32 before; gains 0.10, 0.04 and 0.13 have mean 0.09 and sample std sqrt(0.0021)."""
    outcomes = {
        0: outcome(0.32, 0.40, 0.42, seconds=80.0),
        1: outcome(0.32, 0.34, 0.36),
        2: outcome(0.32, 0.40, 0.45, cpu_seconds=180.0),
    }
    finished = Row("good", "f", outcomes, ())
    started = Row("started", "f", {0: outcome(0.32, 0.3, 0.3)}, (1, 2))
    assert finished.gain == pytest.approx((0.09, np.sqrt(0.0021 / 3)))
    table = Table((finished, started, Row("none", "f", {}, (0, 1, 2)))).describe().splitlines()
    assert table[2] == "| good | +0.090 ± 0.026 | 0.410 | 200 | 87 | 160 | yes |"
    assert table[3] == "| started | -0.020 | 0.300 | 200 | 90 | 150 | seeds missing |"
    assert table[5] == "Held-out reward of the base: 0.32."
    assert table[7] == "Not finished (algorithm, seeds): started 1, 2; none 0, 1, 2."
    values = json.loads(json.dumps(started.as_json()))
    assert values["gain"] == pytest.approx([-0.02, None]) and values["missing"] == [1, 2]
    assert values["learns"] is None and values["seeds"]["0"]["points"][2]["images"] == 200


@pytest.mark.parametrize(
    ("gains", "learns"),
    [
        ((0.0625, 0.0625), True),
        ((0.0625, 0.046875), True),  # mean 0.0547
        ((0.0625, 0.03125), False),  # mean 0.0469, 3 standard errors
        ((0.1875, 0.0625), False),  # mean 0.125 is two standard errors of 0.0625, not more
        ((0.18750001, 0.0625001), True),
        ((-0.25, -0.25), False),
    ],
)
def test_an_algorithm_learns_if_its_gain_is_large_and_significant(gains, learns):
    outcomes = {seed: outcome(0.0, gain) for seed, gain in enumerate(gains)}
    assert Row("it", "f", outcomes, ()).learns is learns
    assert Row("it", "f", outcomes, (2,)).learns is None


def test_asynchrony_is_compared_by_standard_errors():
    def comparison(off, on):
        kinds = {"off": off, "on": on}
        rows = [
            Row(name, name, {seed: outcome(0.1, end) for seed, end in enumerate(ends)}, ())
            for name, ends in kinds.items()
        ]
        return AsynchronyComparison(Table(tuple(rows)), 0.5)

    off, on = (0.50, 0.56, 0.53), (0.54, 0.57, 0.49)
    found = comparison(off, on)
    errors = [np.std(values, ddof=1) / np.sqrt(3) for values in (off, on)]
    expected = np.mean(on) - np.mean(off), np.hypot(*errors)
    np.testing.assert_allclose(found.difference, expected, atol=1e-12)
    *_, first, second, last = found.describe().splitlines()
    assert first == "off, each seed: 0.500, 0.560, 0.530" and second.startswith("on, each seed")
    assert "+0.003 ± 0.029, equal" in last and "0.50 versions" in last
    assert "beyond" in comparison(off, (0.40, 0.44, 0.42)).describe()


def test_shipped_configs_of_algorithms_can_be_compared(monkeypatch):
    monkeypatch.chdir(ROOT)
    configs = {name: ALGORITHMS["get_config"](name) for name in ALGORITHMS["ALGORITHMS"]}
    loaded = training.load_configs(configs)
    training.check_algorithms(loaded, ["topr"])
    with pytest.raises(ConfigError, match="'topr'"):
        training.check_algorithms(loaded, ["torp"])
    with pytest.raises(ConfigError, match="seeds"):
        training.compare_algorithms(loaded, 1, ROOT / "none")
    with pytest.raises(ConfigError, match="'grpo'"):
        ALGORITHMS["get_config"]("grpo")
