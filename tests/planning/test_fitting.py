"""What fits on a topology, and what is proposed where a config does not."""

import dataclasses
import functools
import math

import jax
import pytest

from digen_jax.config.load import complete, load_config
from digen_jax.errors import ConfigError
from digen_jax.planning import fitting
from digen_jax.planning.estimate import (
    EFFICIENCY,
    CachedCompiler,
    CompiledProgram,
    ProgramCost,
    Target,
    calibrate,
    estimate,
)
from digen_jax.planning.fitting import at_least_as_full, fit_plan
from digen_jax.planning.hardware import Chip
from digen_jax.planning.programs import Program
from digen_jax.scheduling.layouts import DeviceBytes, PoolLayout
from tests.tiny_runs import tiny_config

CHIP = Chip("toy", 1e12, 10**9, 1e10, 1e9)


def tiny(base):
    config = complete(tiny_config(base, "full"))
    config.model.height = config.model.width = 64
    config.batch.update(groups=4, images=4)
    config.sampler.chunk = config.trainer.micro_batch = config.evaluation.batch = 4
    config.placement.mode = "given"
    config.placement.rollout.data = 0
    config.placement.trainer.data = 2
    return load_config(config)


@pytest.fixture(scope="module")
def small_target(tmp_path_factory):
    """Returns a number of virtual devices; each config is compiled once, and nothing runs."""

    @functools.cache
    def of(count):
        devices, known = jax.devices()[:count], {}
        compiler = CachedCompiler(f"{count}", tmp_path_factory.mktemp("compiled"), lambda _: None)

        def assess(config):
            key = str(config.as_json())
            if key not in known:
                known[key] = estimate(config, devices, CHIP, compiler)
            return known[key]

        return Target("small", devices, CHIP, None, assess, compiler)

    EFFICIENCY["cpu"] = EFFICIENCY["tpu"]
    yield of
    del EFFICIENCY["cpu"]


def plan(config, target, memory, monkeypatch):
    """Returns (lines written, the recipe that fits into `memory` bytes of a device, bytes needed)."""

    def hardly_scaling(*given):  # then the best layout trains on one device
        return dataclasses.replace(calibrate(*given), trainer_serial=0.5)

    monkeypatch.setattr(fitting, "calibrate", hardly_scaling)
    written = []
    fit = fit_plan(config, target._replace(memory=memory), written.append)
    return written, fit.config, fit.plan.choice.memory.largest


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_another_layout_is_proposed(
    base, small_target, monkeypatch
):
    config, target = tiny(base), small_target(2)
    written, changed, needed = plan(config, target, 1e12, monkeypatch)
    tables, fits = written
    assert changed == config and fits.startswith("it fits")
    assert all(f"\n{one.program.name} " in tables for one in target.assess(config))

    memory = 0.9 * needed
    written, changed, needed = plan(config, target, memory, monkeypatch)
    assert changed == config and needed <= memory  # by another layout
    assert "a device that trains needs" in written[1] and "temporaries of" in written[1]


@pytest.mark.slow
def test_the_layout_is_compiled_on_its_own_meshes(base, small_target):
    """A recipe whose meshes are not the best ones: those of the choice are compiled, too."""
    config = tiny(base)
    alone = dataclasses.replace(config.placement.trainer, data=1)
    config = dataclasses.replace(
        config, placement=dataclasses.replace(config.placement, trainer=alone)
    )
    target, asked = small_target(2), []
    noted = target._replace(assess=lambda changed: asked.append(changed) or target.assess(changed))
    fit = fit_plan(config, noted, lambda text: None)
    assert {one.program.devices for one in target.assess(config)} == {1}
    assert fit.plan.choice.layout.devices == 2
    assert [one.placement.trainer.data for one in asked] == [1, 2]


def test_a_config_whose_program_the_compiler_refuses_is_made_smaller(base, monkeypatch):
    """The compiler takes the training only with the most remat, or never."""
    config, written, accepted = tiny(base), [], {"blocks"}

    def assess(changed):
        refused = changed.model.remat not in accepted
        compiled = CompiledProgram("" if refused else "HloModule", 2 * 10**9, 2 * 10**9, 0)
        program = Program("train", "train", 1, 8, "", lambda: None)
        return [ProgramCost(program, compiled, math.nan, math.nan)]

    target = Target("small", jax.devices()[:2], CHIP, None, assess)
    monkeypatch.setattr(fitting, "calibrate", lambda *given: None)
    monkeypatch.setattr(fitting, "best_layout", lambda *given: ("a plan", ""))
    plan, changed, _ = fit_plan(config, target, written.append)
    assert plan == "a plan" and changed.model.remat == "blocks"
    assert "train needs 2.0 GB" in written[0]
    assert "tries config.model.remat=blocks" in written
    accepted.clear()
    with pytest.raises(ConfigError):
        fit_plan(config, target, written.append)
    assert "config.trainer.micro_batch=2" in written[-2]


def rollout(rollout_devices, devices, **fields):
    return PoolLayout(1, devices, rollout=1, rollout_devices=rollout_devices, **fields)


def test_text_encoders_that_do_not_fit_rule_out_layouts_that_sample_on_as_few_devices():
    held = DeviceBytes({"parameters": 5.0}, {}, 1, 1, {"text encoders": 11.0})
    ruled_out = functools.partial(at_least_as_full, PoolLayout(1, 2), held, 10)
    assert ruled_out(PoolLayout(1, 2)) and ruled_out(rollout(2, 6)) and ruled_out(rollout(1, 6))
    assert not ruled_out(PoolLayout(1, 4)) and not ruled_out(rollout(4, 2))


def test_a_full_device_rules_out_layouts_whose_devices_have_as_much_to_do():
    full, free = {"parameters": 11.0}, {"parameters": 5.0}
    layout = rollout(4, 4, lag=1)
    trains = functools.partial(at_least_as_full, layout, DeviceBytes(full, free, 1, 1), 10)
    assert trains(layout) and trains(rollout(6, 2, lag=1)) and trains(PoolLayout(1, 4, lag=1))
    assert not trains(PoolLayout(1, 8, lag=1)) and not trains(rollout(4, 4))
    assert not trains(rollout(4, 4, samples=False, lag=1))
    samples = functools.partial(at_least_as_full, layout, DeviceBytes(free, full, 1, 1), 10)
    assert samples(layout) and samples(rollout(2, 6, samples=False, lag=1))
    assert not samples(PoolLayout(1, 4, lag=1)) and not samples(rollout(6, 2, lag=1))
