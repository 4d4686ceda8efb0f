"""Programs compiled once for a target, their estimated seconds, programs timed here, and what fits."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from digen_jax.config.load import complete, load_config
from digen_jax.errors import ConfigError
from digen_jax.planning import fitting
from digen_jax.planning.estimate import (
    EFFICIENCY,
    MEMORY_SHARE,
    CachedCompiler,
    CompiledProgram,
    ProgramCost,
    Topology,
    calibrate,
    estimate,
    estimated_seconds,
    measure,
    with_published_folder,
)
from digen_jax.planning.fitting import fit_plan
from digen_jax.planning.flops import Flops
from digen_jax.planning.hardware import CHIPS, Chip
from digen_jax.planning.memory import model_footprint
from digen_jax.planning.plan import at_least_as_full, changed_fields, make_problem
from digen_jax.planning.programs import Program
from digen_jax.scheduling.layouts import DeviceBytes, PoolLayout, device_bytes
from tests.scripts import run_forked
from tests.tiny_runs import tiny_config

CHIP = Chip("toy", 1e12, 10**9, 1e10, 1e9)


def double(factor=2):
    return jax.jit(lambda x: jnp.tanh(factor * x)).lower(jnp.zeros(8))


def test_a_program_is_compiled_once_for_a_target(tmp_path):
    notes = []

    def compiled(target, factor):
        notes.clear()
        found = CachedCompiler(target, tmp_path, notes.append)("double", double(factor))
        return found, any("compiling" in note for note in notes)

    found, compiled_now = compiled("slice jax 1", 2)
    assert "ENTRY" in found.text and found.peak >= 64 and found.moved == 64 and compiled_now
    assert compiled("slice jax 1", 2) == (found, False)
    assert compiled("slice jax 1", 3)[1] and compiled("slice jax 2", 2)[1]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_program_above_the_memory_does_not_fit_and_is_cached(tmp_path):
    """The CUDA compiler refuses none; another limit needs no other compilation."""
    notes = []
    small = CachedCompiler("slice jax 1", tmp_path, notes.append, memory=63.0)
    assert small("double", double())[:3] == ("", 64, 32)
    notes.clear()
    large = CachedCompiler("slice jax 1", tmp_path, notes.append, memory=64.0)
    assert "ENTRY" in large("double", double()).text
    assert not any("compiling" in note for note in notes)


class Refused:
    """A program that the compiler refuses with a message."""

    def __init__(self, message):
        self.message = message

    def as_text(self):
        return self.message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.99G) exceeds "
        "available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 19.99G of "
        "15.75G hbm. Exceeded hbm capacity by 4.24G.",
    ],
)
def test_a_program_that_needs_more_memory_than_there_is_has_no_text(tmp_path, message):
    notes = []
    compiler = CachedCompiler("slice jax 1", tmp_path, notes.append)
    found = compiler("train", Refused(message))
    assert found.text == "" and found.peak == found.temporaries == round(19.99 * 2**30)
    assert any("21.5 GB" in note for note in notes)
    notes.clear()
    assert compiler("train", Refused(message)) == found and "compiled before" in notes[0]


def test_another_error_of_the_compiler_is_not_about_memory(tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError):
        CachedCompiler("here", tmp_path, print)("train", Refused("INTERNAL: 3.1G of 4.2G"))


class Device:
    """Of a platform."""

    def __init__(self, platform):
        self.platform = platform


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_seconds_are_those_of_the_products_or_of_the_memory(platform):
    flops, device = Flops(1e12, 2e12), Device(platform)
    small, large = (CompiledProgram("HLO", 0, 0, moved) for moved in (10**9, 10**12))
    network = Program("train", "train", 1, 8, "", lambda: None, {"image": 1e12})
    other = dataclasses.replace(network, work=None)
    reached = EFFICIENCY[platform]
    seconds = [estimated_seconds(one, flops, small, device, CHIP) for one in (network, other)]
    assert seconds == [2 / reached.network, 2 / reached.others]
    in_memory = estimated_seconds(network, flops, large, device, CHIP)
    assert in_memory == 10**12 / (MEMORY_SHARE * 1e10)


# Measured on an H100 (docs/performance.md): seconds of programs of Stable Diffusion 3.5 Medium in TF32, and their
# FLOPs as counted in the traced programs.
MEASURED = {"generate": (3.16, 361.5e12), "evaluate": (23.5, 2528e12)}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_of_an_h100_is_near_the_measured_seconds(name):
    seconds, flops = MEASURED[name]
    program = Program(name, name, 1, 8, "", lambda: None, {"image": flops})
    chip, compiled = CHIPS["NVIDIA H100 80GB HBM3"], CompiledProgram("HLO", 0, 0, 0)
    found = estimated_seconds(program, Flops(flops, 2 * flops), compiled, Device("gpu"), chip)
    assert found == pytest.approx(seconds, rel=0.2)


def tiny(base):
    config = complete(tiny_config(base, "full"))
    config.batch.update(groups=2, images=4)
    config.sampler.chunk = config.trainer.micro_batch = config.evaluation.batch = 4
    config.placement.mode = "given"
    config.placement.rollout.data = 0
    config.placement.trainer.data = 1
    return load_config(config)


@pytest.mark.slow
def test_programs_are_estimated_and_measured_with_the_same_flops(base, tmp_path, monkeypatch):
    monkeypatch.setitem(EFFICIENCY, "cpu", EFFICIENCY["tpu"])
    config, devices = tiny(base), jax.devices()[:1]
    compiler = CachedCompiler("here", tmp_path, lambda text: None)
    estimated = estimate(config, devices, CHIP, compiler)
    measured = measure(config, devices, (notes := []).append)
    names = [one.program.name for one in estimated]
    assert all(f"{name}: compiling and timing" in notes for name in names)
    assert len(notes) == 2 * len(names) and notes[1].endswith(" s")
    assert names == [one.program.name for one in measured] and "train" in names
    assert [one.flops for one in estimated] == [one.flops for one in measured]
    for found in (estimated, measured):
        costs = calibrate(config, found, CHIP, "a test").costs
        assert min(costs.generate, costs.train, costs.decode, costs.update, costs.deliver) > 0
        assert all(one.fits and 0 < one.seconds < math.inf for one in found)


def test_a_model_is_a_folder_or_a_shipped_configuration(base):
    config = tiny(base)
    assert with_published_folder(config) == config

    def named(name):
        return dataclasses.replace(config, model=dataclasses.replace(config.model, folder=name))

    folder = with_published_folder(named("stabilityai/stable-diffusion-3.5-large")).model.folder
    assert folder.endswith("published/stabilityai/stable-diffusion-3.5-large")
    with pytest.raises(ConfigError):
        with_published_folder(named("stabilityai/stable-diffusion-9"))


@pytest.mark.parametrize("arguments", [("--devices=2",), ("--measure",)])
def test_options_that_exclude_each_other_are_an_error_of_one_line(arguments):
    given = ("--config=configs/shapes_flow_grpo.py", "--topology=local", *arguments)
    done = run_forked("plan.py", *given)
    assert done.returncode == 2 and arguments[0].partition("=")[0] in done.stderr
    assert done.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------- what fits


def larger(base):
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

        return Topology("small", devices, CHIP, None, assess, compiler)

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
    config, target = larger(base), small_target(2)
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
    config = larger(base)
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


@pytest.mark.slow
def test_a_config_whose_program_the_compiler_refuses_is_made_smaller(base, monkeypatch):
    """The compiler takes the training only with the most remat, or never."""
    config, written, accepted = larger(base), [], {"blocks"}

    def assess(changed):
        refused = changed.model.remat not in accepted
        compiled = CompiledProgram("" if refused else "HloModule", 2 * 10**9, 2 * 10**9, 0)
        program = Program("train", "train", 1, 8, "", lambda: None)
        return [ProgramCost(program, compiled, math.nan, math.nan)]

    target = Topology("small", jax.devices()[:2], CHIP, None, assess)
    monkeypatch.setattr(fitting, "calibrate", lambda *given: None)
    monkeypatch.setattr(fitting, "make_problem", lambda *given: None)
    monkeypatch.setattr(fitting, "layouts", lambda *given: None)
    monkeypatch.setattr(fitting, "best_plan", lambda *given: "a plan")
    plan, changed, _ = fit_plan(config, target, written.append)
    assert plan == "a plan" and changed.model.remat == "blocks"
    assert "train needs 2.0 GB" in written[0]
    assert "tries config.model.remat=blocks" in written
    accepted.clear()
    with pytest.raises(ConfigError):
        fit_plan(config, target, written.append)
    assert "config.trainer.micro_batch=2" in written[-2]


@pytest.mark.slow
def test_weights_that_do_not_fit_are_quantized_and_nothing_else_is_compiled(base, monkeypatch):
    config = complete(tiny_config(base, "lora"))
    config.placement.mode, config.prompts.encoding = "given", "precomputed"
    config.placement.rollout.data, config.placement.trainer.data = 0, 1
    config, asked, written = load_config(config), [], []

    def needed(frozen):
        precision = dataclasses.replace(config.precision, frozen=frozen)
        footprint = model_footprint(dataclasses.replace(config, precision=precision))
        problem = make_problem(config, 1, fitting.UNKNOWN, footprint)
        return device_bytes(problem, PoolLayout(1, 1)).largest

    def assess(changed):
        asked.append(changed.precision.frozen)
        program = Program("train", "train", 1, 8, "", lambda: None)
        return [ProgramCost(program, CompiledProgram("HloModule", 1, 1, 0), math.nan, math.nan)]

    assert needed("float8") == needed("int8") < needed("bfloat16") < needed("float32")
    memory = (needed("int8") + needed("bfloat16")) / 2
    target = Topology("small", jax.devices()[:1], CHIP, memory, assess)
    monkeypatch.setattr(fitting, "calibrate", lambda *given: fitting.UNKNOWN)
    monkeypatch.setattr(fitting, "best_plan", lambda *given: "a plan")
    plan, changed, _ = fit_plan(config, target, written.append)
    assert plan == "a plan" and asked == ["int8"] and changed.precision.frozen == "int8"
    assert changed_fields(config, changed).keys() == {"precision.frozen"}
    assert "it fits (measured) with config.precision.frozen=int8" in written


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
