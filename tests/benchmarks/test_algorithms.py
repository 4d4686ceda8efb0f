"""Comparison of algorithms: real runs of the toy family, and the table of their results."""

import json
import pathlib
import runpy
import signal

import numpy as np
import pytest
from PIL import Image

from benchmarks import family_plot
from benchmarks.algorithms import (
    CELLS,
    COSTS,
    Outcome,
    Point,
    Row,
    Table,
    check,
    compare,
    open_all,
    read_cells,
)
from benchmarks.cells import Cost, cost
from digen_jax.errors import ConfigError
from digen_jax.logging.metrics import read_metrics
from digen_jax.runtime import opening
from tests.benchmarks.conftest import brightness
from tests.parallel import toy
from tests.tiny_runs import prompt_file

ROOT = pathlib.Path(__file__).parents[2]
ALGORITHMS = runpy.run_path(str(ROOT / "configs" / "shapes_algorithms.py"))


@pytest.fixture
def configs(base):
    """Two algorithms of two steps of 8 images."""
    return {surrogate: toy_config(base, surrogate) for surrogate in ("clip", "topr")}


def toy_config(base, surrogate):
    c = toy.config(
        **toy.meshes((0, 1), (1, 1)),
        prompts__file=str(prompt_file(base)),
        evaluation__prompts=str(prompt_file(base)),
        evaluation__every=2,
        rewards=f"{brightness.__module__}:brightness",
        reward_pool__processes=0,
        algorithm__surrogate=surrogate,
        algorithm__negative_weight=0.25,  # of topr, which near a ratio of 1 is otherwise the same
        trainer__learning_rate=0.1,
    )
    c.steps, c.seed = 2, 5
    return c


@pytest.fixture
def built(monkeypatch):
    """The built system, instead of the model in the config's folder."""
    seen, systems = [], {}

    def build(config, devices):
        surrogate = config.algorithm.surrogate
        seen.append((config.seed, surrogate))
        # Compiled once: the programs do not depend on the seed, except those with a LoRA.
        if surrogate not in systems:
            systems[surrogate] = toy.system(config, 1)
        system = systems[surrogate]
        return system._replace(start=toy.moved(system.start, 0.0), rng=config.rng)

    monkeypatch.setattr(opening, "build", build)
    return seen


@pytest.mark.slow
def test_cells_are_trained_once_seed_by_seed(configs, built, tmp_path, stop_in_third):
    """Stopped in the third of four cells; then of one algorithm only, then of all."""
    stop_in_third(built)
    recipes = open_all(configs)
    table, code = compare(recipes, 2, tmp_path)
    assert code == 128 + signal.SIGTERM
    assert [row.missing for row in table.rows] == [(6,), (6,)]
    assert "Not finished (algorithm, seeds): clip 6; topr 6." in table.describe()
    stopped = cost(tmp_path / "clip-6")
    assert min(stopped) > 0

    table, code = compare(recipes, 2, tmp_path, only=["topr"])
    assert code is None
    assert [row.missing for row in table.rows] == [(6,), ()]
    table, code = compare(recipes, 2, tmp_path)
    assert built == [(5, "clip"), (5, "topr"), (6, "clip"), (6, "topr"), (6, "clip")]
    assert [row.missing for row in table.rows] == [(), ()]
    assert (tmp_path / "algorithms.md").read_text() == table.describe() + "\n"
    assert Image.open(tmp_path / "algorithms.png").width > 1000
    assert read_cells(tmp_path / "algorithms.csv").describe() == table.describe()
    assert "Not finished" not in table.describe()

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


def test_a_workdir_of_other_runs_is_refused_before_any_is_trained(configs, built, tmp_path):
    cell = tmp_path / "topr-6"
    cell.mkdir()
    (cell / "metrics.jsonl").write_text("{}\n")
    other = json.loads(configs["topr"].to_json()) | {"seed": 6}
    other["algorithm"] = other["algorithm"] | {"clip_range": 0.5}
    (cell / "config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=r"topr-6 has another config \(config.algorithm.clip_r"):
        compare(open_all(configs), 2, tmp_path)
    (cell / "config.json").write_text(
        json.dumps(json.loads(configs["topr"].to_json()) | {"seed": 6})
    )
    (cell / "finished.json").write_text('{"step": 9}')
    with pytest.raises(ConfigError, match=r"config.steps = 2, but the run in .*topr-6 has done 9"):
        compare(open_all(configs), 2, tmp_path)
    assert not built


def outcome(*rewards, seconds=90.0, cpu_seconds=150.0):
    points = tuple(Point(100 * i, 40.0 * i, reward) for i, reward in enumerate(rewards))
    return Outcome(points, seconds, cpu_seconds)


def test_the_table_has_means_over_the_seeds():
    """0.32 before; gains 0.10, 0.04 and 0.13 have mean 0.09 and sample std sqrt(0.0021)."""
    whole = {
        0: outcome(0.32, 0.40, 0.42, seconds=80.0),
        1: outcome(0.32, 0.34, 0.36),
        2: outcome(0.32, 0.40, 0.45, cpu_seconds=180.0),
    }
    rows = (
        Row("good", "f", whole, ()),
        Row("begun", "f", {0: outcome(0.32, 0.3, 0.3)}, (1, 2)),
    )
    assert rows[0].gain == pytest.approx((0.09, np.sqrt(0.0021 / 3)))
    table = Table((*rows, Row("none", "f", {}, (0, 1, 2)))).describe().splitlines()
    assert table[2] == "| good | +0.090 ± 0.026 | 0.410 | 200 | 87 | 160 | yes |"
    assert table[3] == "| begun | -0.020 | 0.300 | 200 | 90 | 150 | seeds missing |"
    assert table[5] == "Held-out reward of the base: 0.32."
    assert table[7] == "Not finished (algorithm, seeds): begun 1, 2; none 0, 1, 2."
    assert len(table) == 8
    record = json.loads(json.dumps(rows[1].record()))
    assert record["gain"] == pytest.approx([-0.02, None]) and record["missing"] == [1, 2]
    assert record["learns"] is None and record["seeds"]["0"]["points"][2]["images"] == 200


def test_the_picture_has_a_line_with_bars_for_each_family(tmp_path):
    """18 synthetic algorithms of three families; writing cells and reading them gives the same table."""
    rng = np.random.default_rng(0)
    families = {
        "policy gradients": (14, 0.08),
        "forward process": (2, 0.2),
        "preference": (2, 0.12),
    }
    rows = []
    for family, (count, gain) in families.items():
        for i in range(count):
            ends = {seed: 0.32 + gain + 0.02 * rng.standard_normal() for seed in range(3)}
            seconds = {0: 1.46, 1: 1.53, 2: 1.5}  # the mean is 1 before and 2 after rounding to 0.1
            cells = {
                seed: outcome(0.32, (0.32 + end) / 2, end, seconds=seconds[seed])
                for seed, end in ends.items()
            }
            rows.append(Row(f"{family} {i}", family, cells, ()))
    table = Table(tuple(rows))
    table.write(tmp_path)
    assert read_cells(tmp_path / "algorithms.csv") == table
    again = tmp_path / "again"
    again.mkdir()
    read_cells(tmp_path / "algorithms.csv").write(again)
    for name in ("algorithms.csv", "algorithms.md"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()
    drawn = np.asarray(Image.open(tmp_path / "algorithms.png").convert("RGB")).astype(int)
    for colour in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):
        parts = np.array_split((drawn == colour).all(-1), 3, axis=1)
        assert all(part.sum() > 150 for part in parts)
    assert not (drawn == (214, 39, 40)).all(-1).any()  # there is no fourth


def test_deviations_are_those_of_a_familys_runs():
    curves = [[{"images": 5, "reward": reward}] for reward in (0.3, 0.4, 0.8)]
    x, mean, deviation = family_plot._summary(curves, "images")
    assert (x, mean) == ([5], pytest.approx([0.5]))
    assert deviation == pytest.approx([np.std([0.3, 0.4, 0.8], ddof=1)])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is no table of cells: its first line must be algorithm,family,seed,images"),
        ("a,b\n1,2\n", "is no table of cells"),
        (f"{','.join((*CELLS, *COSTS))}\nx,f,0,many,1,0.5,1,1\n", "cells.csv: invalid literal"),
    ],
)
def test_another_table_is_refused(text, sentence, tmp_path):
    (tmp_path / "cells.csv").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_cells(tmp_path / "cells.csv")


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
def test_to_learn_is_to_gain_enough_and_surely(gains, learns):
    outcomes = {seed: outcome(0.0, gain) for seed, gain in enumerate(gains)}
    assert Row("it", "f", outcomes, ()).learns is learns
    assert Row("it", "f", outcomes, (2,)).learns is None


def test_what_would_be_no_comparison_is_refused(configs):
    def refused(sentence, seeds=2, only=()):
        with pytest.raises(ConfigError, match=sentence):
            check(open_all(configs), seeds, only)

    check(open_all(configs), 2, ["topr"])
    refused("seeds must be at least 2", seeds=1)
    refused("a name in --only is 'torp'; did you mean 'topr'?", only=["clip", "torp"])
    configs["topr"].batch.groups = 4
    refused("config.batch.groups \\* config.batch.images of topr is not that of clip")
    configs["topr"].batch.groups = 2
    configs["topr"].evaluation.every = 1
    refused("config.evaluation of topr is not that of clip")
    configs["topr"].evaluation.every = 2
    configs["topr"].algorithm.clip_range = 0.0
    refused("topr: config.algorithm.clip_range is 0.0")


def test_all_recipes_can_be_compared(monkeypatch):
    monkeypatch.chdir(ROOT)
    configs = {name: ALGORITHMS["get_config"](name) for name in ALGORITHMS["ALGORITHMS"]}
    check(open_all(configs), 3)
    with pytest.raises(ConfigError, match="'grpo' is no algorithm here: choose one of flow_grpo, "):
        ALGORITHMS["get_config"]("grpo")


def test_costs_add_up(tmp_path):
    assert cost(tmp_path) == Cost(0, 0)
    (tmp_path / "cost.json").write_text('{"seconds": 2.5, "cpu_seconds": 4}')
    assert cost(tmp_path) == (2.5, 4)
