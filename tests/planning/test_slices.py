"""Plans for slices: what fits, what is proposed where it does not, and products timed on this machine."""

import dataclasses
import functools
import math

import jax
import pytest

from digen_jax.config.load import complete, load_config
from digen_jax.errors import ConfigError
from digen_jax.planning.answers import Answer, Answers
from digen_jax.planning.assessment import Assessed, assess, timed
from digen_jax.planning.chips import Chip
from digen_jax.planning.compiled import Program
from digen_jax.planning.fitting import _no_smaller, compiled, proposed
from digen_jax.planning.plain_products import shares
from digen_jax.planning.slices import Slice, calibrated, configured
from digen_jax.scheduling.layouts import DeviceBytes, PoolLayout
from tests.scripts import run_forked
from tests.tiny_runs import tiny_config

CHIP = Chip("toy", 1e9, 1e12, 10**9, 1e10, 1e9, 128)


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
def small_slice(tmp_path_factory):
    """Returns the slice of so many virtual devices; it compiles each recipe once and runs nothing."""

    @functools.cache
    def of(count):
        devices, known = jax.devices()[:count], {}
        answers = Answers(f"{count} devices", tmp_path_factory.mktemp("answers"), lambda text: None)

        def assessed(recipe):
            key = str(recipe.as_json())
            if key not in known:
                known[key] = assess(recipe, devices, CHIP, answers)
            return known[key]

        return Slice("small", devices, CHIP, None, assessed, answers)

    return of


def plan(recipe, where, memory):
    """Returns (lines written, the recipe that fits into `memory` bytes of a device, bytes needed)."""
    written, where = [], where._replace(memory=memory)
    own = where.assess(recipe)
    # With training that hardly scales, the best layout trains on one device.
    costs = dataclasses.replace(calibrated(recipe, own, CHIP, "a test"), trainer_serial=0.5)
    verdict, changed = proposed(recipe, costs, where, own, written.append)
    return written, changed, verdict.plan.choice.memory.largest


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_a_reason_and_another_layout_is_proposed(
    base, small_slice
):
    recipe, where = tiny(base), small_slice(2)
    written, changed, needed = plan(recipe, where, 1e12)
    assert changed == recipe and written == ["it fits (estimated)"]

    memory = 0.9 * needed
    written, changed, needed = plan(recipe, where, memory)
    assert changed == recipe and needed <= memory  # by another layout
    assert "does not fit, because a device that trains needs" in written[0]
    assert "(estimated): temporaries of" in written[0]


def test_a_config_whose_program_the_compiler_refuses_is_made_smaller(base):
    """The compiler takes the training only with the most remat, or never."""
    recipe, written, accepted = tiny(base), [], {"blocks"}

    def assessed(changed):
        refused = changed.model.remat not in accepted
        answer = Answer("" if refused else "HloModule", 2 * 10**9, 2 * 10**9)
        program = Program("train", "train", 1, 8, "", lambda: None)
        return [Assessed(program, answer, math.nan, math.nan, math.nan, None)]

    where = Slice("small", jax.devices()[:2], CHIP, None, assessed)
    changed, found = compiled(recipe, where, written.append)
    assert changed.model.remat == "blocks" and found[0].fits
    assert written[0] == (
        "the config does not fit, because train needs 2.0 GB of a device (measured)"
    )
    assert written[-1] == "tries config.model.remat=blocks"
    accepted.clear()
    with pytest.raises(ConfigError, match="small is too small for this config"):
        compiled(recipe, where, written.append)
    assert "config.trainer.micro_batch=2" in written[-2]


def rollout(rollout_devices, devices, **fields):
    return PoolLayout(1, devices, rollout=1, rollout_devices=rollout_devices, **fields)


def test_text_encoders_that_do_not_fit_rule_out_layouts_that_sample_on_as_few_devices():
    held = DeviceBytes({"parameters": 5.0}, {}, 1, 1, {"text encoders": 11.0})
    ruled_out = functools.partial(_no_smaller, PoolLayout(1, 2), held, 10)
    assert ruled_out(PoolLayout(1, 2)) and ruled_out(rollout(2, 6)) and ruled_out(rollout(1, 6))
    assert not ruled_out(PoolLayout(1, 4)) and not ruled_out(rollout(4, 2))


def test_a_full_device_rules_out_layouts_whose_devices_have_as_much_to_do():
    full, free = {"parameters": 11.0}, {"parameters": 5.0}
    layout = rollout(4, 4, lag=1)
    trains = functools.partial(_no_smaller, layout, DeviceBytes(full, free, 1, 1), 10)
    assert trains(layout) and trains(rollout(6, 2, lag=1)) and trains(PoolLayout(1, 4, lag=1))
    assert not trains(PoolLayout(1, 8, lag=1)) and not trains(rollout(4, 4))
    assert not trains(rollout(4, 4, samples=False, lag=1))
    samples = functools.partial(_no_smaller, layout, DeviceBytes(free, full, 1, 1), 10)
    assert samples(layout) and samples(rollout(2, 6, samples=False, lag=1))
    assert not samples(PoolLayout(1, 4, lag=1)) and not samples(rollout(6, 2, lag=1))


@pytest.mark.slow
def test_the_layout_is_compiled_on_its_own_meshes(base, small_slice):
    """A recipe whose meshes are not the best ones: those of the choice are compiled, too."""
    recipe = tiny(base)
    alone = dataclasses.replace(recipe.placement.trainer, data=1)
    recipe = dataclasses.replace(
        recipe, placement=dataclasses.replace(recipe.placement, trainer=alone)
    )
    where, asked = small_slice(2), []
    own = where.assess(recipe)
    assert {one.program.devices for one in own} == {1}
    noted = where._replace(assess=lambda changed: asked.append(changed) or where.assess(changed))
    costs = calibrated(recipe, own, CHIP, "a test")
    verdict, _ = proposed(recipe, costs, noted, own, print)
    assert verdict.plan.choice.layout.devices == 2
    assert [one.placement.trainer.data for one in asked] == [2]


def test_a_model_is_a_folder_or_a_shipped_configuration(base):
    recipe = tiny(base)
    assert configured(recipe) == recipe

    def named(name):
        return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, folder=name))

    folder = configured(named("stabilityai/stable-diffusion-3.5-large")).model.folder
    assert folder.endswith("published/stabilityai/stable-diffusion-3.5-large")
    with pytest.raises(ConfigError, match="neither a local folder nor a model whose configuration"):
        configured(named("stabilityai/stable-diffusion-9"))


def test_plain_products_are_timed_on_a_device_at_hand():
    found = shares(
        jax.devices()[0], CHIP, 8, lambda lowered: timed(lowered, lowered.compile()), rows=4
    )
    assert list(found) == [(4, 8, 8), (4, 8, 32), (4, 32, 8)]
    assert all(0 < share < 1 for share in found.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--topology=local", "--devices=2"), "--topology says what --devices would: leave that out"),
        (("--topology=local", "--measure"), "say what commands cost: by --costs=FILE.json"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments, said):
    done = run_forked("plan.py", "--config=configs/shapes_flow_grpo.py", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
