"""Runs with and without asynchrony: real ones of the toy family, and the report of their results."""

import signal

import numpy as np
import pytest
from PIL import Image

from benchmarks.asynchrony import AsynchronyOutcome, Comparison, check, compare
from digen_jax.config.load import load_config
from digen_jax.errors import ConfigError
from digen_jax.logging.metrics import read_metrics
from digen_jax.runtime import opening
from tests.benchmarks.conftest import brightness
from tests.parallel import toy
from tests.tiny_runs import prompt_file


@pytest.fixture
def config(base):
    c = toy.config(
        **toy.meshes((1, 1), (1, 1)),
        prompts__file=str(prompt_file(base)),
        evaluation__prompts=str(prompt_file(base)),
        evaluation__every=2,
        rewards=f"{brightness.__module__}:brightness",
        reward_pool__processes=0,
        sampler__chunk=4,
        trainer__learning_rate=0.1,
        runtime__max_policy_lag=1,
    )
    c.steps, c.seed = 3, 5
    return c


@pytest.fixture
def built(monkeypatch):
    """The built system, instead of the model in the config's folder."""
    seen, systems = [], {}

    def build(config, devices):
        max_policy_lag = config.runtime.max_policy_lag
        seen.append((config.seed, max_policy_lag))
        # Compiled once: the programs do not depend on the seed.
        if max_policy_lag not in systems:
            systems[max_policy_lag] = toy.system(config, 2)
        system = systems[max_policy_lag]
        return system._replace(start=toy.moved(system.start, 0.0), rng=config.rng)

    monkeypatch.setattr(opening, "build", build)
    return seen


@pytest.mark.slow
def test_each_seed_is_trained_with_and_without_it(config, built, tmp_path, stop_in_third, capsys):
    """After a stop in the third of four runs, the same call does the remaining ones."""
    stop_in_third(built)
    recipe = load_config(config)
    assert compare(recipe, 2, tmp_path) == 128 + signal.SIGTERM
    assert not (tmp_path / "asynchrony.png").exists()
    found = compare(recipe, 2, tmp_path)
    assert built == [(5, 0), (5, 1), (6, 0), (6, 0), (6, 1)]
    for kind, outcomes in (("off", found.off), ("on", found.on)):
        for seed, outcome in zip((5, 6), outcomes, strict=True):
            lines = read_metrics(tmp_path / f"{kind}-{seed}" / "metrics.jsonl")
            assert outcome.rewards == {line["step"]: line["evaluation/reward"] for line in lines
                                       if line["step"] != 1}  # fmt: skip
            assert outcome.policy_lag == pytest.approx(
                np.mean([line["policy_lag"] for line in lines[1:]])
            )
            assert (outcome.policy_lag > 0) == (kind == "on")
    assert found.off[0].rewards[0] == found.on[0].rewards[0]
    assert found.off[0].after != found.off[1].after
    assert Image.open(tmp_path / "asynchrony.png").width > 500
    assert capsys.readouterr().out.count("finished before") == 2


def ends(*rewards: float) -> tuple[AsynchronyOutcome, ...]:
    return tuple(AsynchronyOutcome({0: 0.1, 4: reward}, 0.5) for reward in rewards)


def test_means_are_compared_by_their_standard_errors():
    off, on = (0.50, 0.56, 0.53), (0.54, 0.57, 0.49)
    same = Comparison(ends(*off), ends(*on))
    errors = [np.std(values, ddof=1) / np.sqrt(3) for values in (off, on)]
    expected = np.mean(on) - np.mean(off), np.hypot(*errors)
    np.testing.assert_allclose(same.difference, expected, atol=1e-12)
    assert same.equal
    head, first, second, last = same.describe().splitlines()
    assert " ".join(head.split()) == "held-out reward, 4 steps seed 0 seed 1 seed 2 mean"
    assert first == f"asynchrony off{'':14}   0.500   0.560   0.530   0.530 ± 0.017"
    assert second.startswith("asynchrony on ") and second.endswith("0.533 ± 0.023")
    assert last.startswith("on - off: +0.003 ± 0.029, equal within two standard errors.")
    assert "0.50 versions old" in last
    worse = Comparison(ends(*off), ends(0.40, 0.44, 0.42))
    assert not worse.equal and "beyond two standard errors" in worse.describe()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("runtime.max_policy_lag", 0, "config.runtime.max_policy_lag = 0 is no asynchrony"),
        ("placement.rollout.data", 0, "config.placement.rollout.data = 0 is colocated"),
        ("sampler.chunk", 8, "config.runtime.max_policy_lag = 1 changes nothing, as"),
        ("placement.mode", "auto", "config.placement = 'auto' may choose no rollout worker"),
    ],
)
def test_what_would_be_no_comparison_is_refused(config, field, value, sentence):
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(ConfigError, match=sentence):
        check(load_config(config), 3)


def test_one_seed_has_no_error(config):
    with pytest.raises(ConfigError, match="seeds must be at least 2"):
        check(load_config(config), 1)
