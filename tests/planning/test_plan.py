"""Plans for configs: the script as a user runs it, costs from their sources, `placement = "auto"`."""

import ast
import dataclasses
import json
import re
import subprocess
import sys

import jax
import pytest

from digen_jax.config.checks import check_devices
from digen_jax.config.load import complete, fit_config, load_config, read_config, replaced
from digen_jax.errors import ConfigError
from digen_jax.planning import costs, placing
from digen_jax.planning.costs import Calibration
from digen_jax.planning.plan import auto_plan, can_run, make_problem, meshes, suited
from digen_jax.planning.report import table, why
from digen_jax.runtime import opening
from digen_jax.scheduling.layouts import PoolLayout, device_bytes
from digen_jax.scheduling.planner import Simulations, layouts, make_plan, settings_of
from digen_jax.scheduling.settings import Costs
from digen_jax.train import train
from tests.parallel import toy
from tests.pipelines import ROOT, environment, shipped_config
from tests.scripts import run_forked, run_script
from tests.tiny_runs import pipeline, prompt_file, tiny_config

SHAPES = "configs/shapes_flow_grpo.py"
FINE = ("--config.sampler.chunk=12", "--config.trainer.micro_batch=12")


def shapes(chunk=12):
    config = complete(shipped_config("shapes_flow_grpo"))
    config.sampler.chunk = config.trainer.micro_batch = chunk
    return config


def opened(chunk=12):
    return read_config(shapes(chunk))


def auto_placement(config, devices, costs):
    plan = auto_plan(config, devices, costs)
    return meshes(plan.problem, plan.choice.layout)


def calibration(**fields):
    return Calibration(Costs(**(dict(generate=0.4, train=0.3) | fields)), "a test")


def test_the_script_plans_from_a_file_of_costs(tmp_path):
    costs, output = tmp_path / "costs.json", tmp_path / "placement.json"
    given = {"generate": 0.4, "train": 0.3, "sync": 0.2, "trainer_serial": 0.02}
    costs.write_text(json.dumps(given))
    done = run_script(
        "plan.py",
        f"--config={SHAPES}",
        f"--costs={costs}",
        "--devices=4",
        f"--output={output}",
        f"--pictures={tmp_path / 'pictures'}",
        *FINE,
    )
    assert done.returncode == 0, done.stderr
    text, _, _ = done.stdout.partition("\nimages:")
    # A path may be cut where it has a hyphen.
    assert f"costsfromthefile{costs}" in "".join(text.split())
    lines = [line for line in text.splitlines() if str(costs) not in line]
    assert max(map(len, lines)) <= 100
    text = text.replace("\n  ", " ")
    assert "not known and left out: decode, encode, score, score_latency, update" in text
    assert "144 images in 12 chunks on 4 devices" in text
    kinds = {re.split("  +", line[3:])[0]: line[:3] for line in lines if line[:3] in ("   ", "*  ")}
    names = ("colocated", "pool", "disaggregated", "rollout + pool")
    assert kinds.keys() >= {f"{name}{lag}" for name in names for lag in ("", ", lag 1")}
    (chosen,) = (kind for kind, mark in kinds.items() if mark == "*  ")
    sentence, kind = " ".join(text.split()), re.escape(chosen)
    assert re.search(rf" {kind} \([^)]*\) reaches [\d.]+% of the bound", sentence)
    assert re.search(r"a device of the home worker, MiB: .*optimizer [\d.]+.*trajectories", text)
    assert "without temporaries of programs: --memory=GIB compiles" in text
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {"images_per_second.png", *(f"timeline_{n}.png" for n in (1, 2, 3))}
    section = json.loads(output.read_text())
    # The last line has the flags of a run with the choice.
    flags = re.findall(r"--config\.(\S+)=(\w+)", text.split("\nit runs with")[1])
    config = shapes()
    config.update_from_flattened_dict({name: ast.literal_eval(value) for name, value in flags})
    fit_config(load_config(config), 4)
    for mesh, axes in section.items():
        assert {axis: config.placement[mesh][axis] for axis in axes} == axes
    assert config.runtime.max_policy_lag == chosen.endswith("lag 1")
    rollout, trainer = section["rollout"], section["trainer"]
    assert rollout["workers"] * rollout["data"] * rollout["fsdp"] == 4 - (
        trainer["workers"] * trainer["data"] * trainer["fsdp"] * trainer["time"]
    )


# launch/plan.py around the toy family.
TOY_PLAN = """
import runpy, sys
from digen_jax.planning import costs
from tests.parallel import toy

costs.build = lambda recipe, devices: toy.system(recipe, 2)
sys.argv[0] = "launch/plan.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_the_script_times_a_chunk_on_the_available_devices(base):
    arguments = (
        f"--config={SHAPES}",
        "--measure",
        f"--config.model.folder={pipeline(base)}",
        f"--config.prompts.file={prompt_file(base)}",
        f"--config.evaluation.prompts={prompt_file(base)}",
        "--config.rewards=tests.tiny_runs:redness",
        "--config.batch.groups=2",
        "--config.batch.images=4",
        "--config.sampler.chunk=4",
        "--config.trainer.micro_batch=4",
        "--config.evaluation.batch=4",
        "--config.placement.rollout.data=1",
        "--config.placement.trainer.data=1",
        "--config.placement.trainer.fsdp=1",
    )
    done = subprocess.run(
        [sys.executable, "-c", TOY_PLAN, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(2),
    )
    assert done.returncode == 0, done.stderr
    source = "costs from a chunk timed on devices of the kind cpu, 1 for rollout and 1 for training"
    assert source in done.stdout.replace("\n  ", " ")
    for name in ("generate", "decode", "train", "score", "encode", "update", "sync"):
        (seconds,) = re.findall(rf"[ :]{name} (\S+) s", done.stdout)
        assert 0 < float(seconds) < 20
    assert "not known and left out: score_latency, switch" in done.stdout.replace("\n  ", " ")
    assert "on 2 devices" in done.stdout and "% of the bound" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "by --costs=FILE.json"),
        (["--costs=nowhere.json"], "--costs=nowhere.json cannot be read as JSON"),
        (
            ["--measure", "--devices=0"],
            "flag --devices=0: 0 is not an integer in the range .1, 1024.",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, sentence):
    done = run_forked("plan.py", f"--config={SHAPES}", *arguments)
    assert done.returncode == 2
    assert re.fullmatch(f"plan.py: .*{sentence}.*\n", done.stderr)


# --------------------------------------------------------------------------------------- the choice


def test_a_step_of_one_chunk_is_best_colocated_and_the_sentence_says_so():
    plan = make_plan(make_problem(opened(144), 4, calibration(sync=0.1)))
    assert plan.choice.layout == PoolLayout(1, 4, chunk=144)
    assert why(plan).startswith("colocated (") and "config.sampler.chunk" in why(plan)
    assert re.search(r"^\*  colocated", table(plan), re.MULTILINE)


def test_auto_is_the_choice_as_a_section_of_the_config():
    config = shapes()
    config.runtime.max_policy_lag, config.evaluation.batch = 1, 12
    train_config = read_config(config)
    costs = dataclasses.replace(calibration(sync=0.2), trainer_serial=0.02)
    sizes = auto_placement(train_config, 4, costs)
    problem = make_problem(train_config, 4, costs)
    plan = make_plan(problem, lambda layout: can_run(train_config, problem, layout))
    assert plan.choice.layout.lag == 1 and sizes == meshes(problem, plan.choice.layout)
    rollout, trainer = sizes.as_dict().values()
    axes = {"data", "fsdp", "tensor", "sequence", "hosts", "workers"}
    assert set(rollout) == axes | {"max_workers"}
    assert set(trainer) == axes | {"time", "samples"}
    check_devices(train_config.with_meshes(sizes), 4)


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_policy_lag": 1}, {"deterministic_order": "no"}, {"max_incomplete_groups": 2}],
)
def test_what_is_simulated_of_a_layout_is_what_its_run_does(fields):
    config = shapes(4)
    config.runtime.update(fields)
    if "max_incomplete_groups" in fields:
        config.algorithm.old_log_probs = "current"
    train_config = read_config(config)
    problem = make_problem(train_config, 4, calibration())
    found = layouts(problem, lambda layout: can_run(train_config, problem, layout))
    assert {layout.workers for layout in found} == (
        {1} if "max_incomplete_groups" in fields else {1, 2, 3, 4}
    )
    assert {layout.lag for layout in found} == (
        {0} if "max_incomplete_groups" in fields else {0, 1}
    )
    for layout in found:
        run = dataclasses.replace(suited(train_config, problem, layout).scheduler, steps=1)
        assert settings_of(problem, layout) == run


def test_slow_rewards_leave_colocated_the_best_as_it_trains_what_is_scored_already():
    config, costs = shapes(), calibration(score_latency=4.0)
    config.runtime.max_policy_lag = 1
    train_config = read_config(config)
    assert auto_placement(train_config, 4, costs).rollout.data == 0

    def seconds(*sizes, **fields):
        return simulations.predict(PoolLayout(*sizes, chunk=12, lag=1, **fields)).step_seconds

    simulations = Simulations(make_problem(train_config, 4, costs))
    split = [seconds(1, n, samples=False, rollout=4 - n, rollout_devices=1) for n in (1, 2, 3)]
    assert seconds(1, 4) == pytest.approx(144 * 0.7 / 4)
    assert min(split) > 1.11 * seconds(1, 4)


def test_a_placement_that_no_batch_fits_is_not_chosen():
    config = shapes()
    config.evaluation.batch = 7
    sizes = auto_placement(read_config(config), 4, calibration())
    used = sizes.rollout if sizes.rollout.data else sizes.trainer
    assert used.devices == 1  # 7 images are for no others


def test_a_run_with_an_automatic_placement_keeps_it_when_it_goes_on(
    base, tmp_path, capsys, monkeypatch
):
    for module in (costs, opening):
        monkeypatch.setattr(module, "build", lambda config, found: toy.system(config, len(found)))
    config = tiny_config(base, "full")
    config = replaced(config, placement="auto", runtime=dict(max_off_policy_fraction=1.0))
    config.steps = 1
    assert train(load_config(config), tmp_path) is None
    said = capsys.readouterr().out
    assert "placement chosen by a chunk timed on" in said
    assert said.startswith(
        "config.placement = 'auto': times each part of a step on one of the 8 devices"
    )
    for part in ("sync", "encode", "generate", "decode", "score", "train", "update"):
        assert re.search(rf"  {part}: compiling and timing\n  {part}: \S+ s\n", said)
    placement = json.loads((tmp_path / "config.json").read_text())["placement"]
    rollout, trainer = placement["rollout"], placement["trainer"]
    assert re.search(r"\n  \d x .*: \S+ images/s, \d+% of the bound", said)
    assert re.search(
        r"  with --config.runtime.max_policy_lag=1: .* images/s, \d+% of the bound", said
    )
    used = trainer["workers"] * trainer["data"] * trainer["fsdp"] * trainer["time"]
    used += rollout["workers"] * rollout["data"] * rollout["fsdp"]
    assert used == jax.device_count() == 8
    config.steps = 2
    assert train(load_config(config), tmp_path) is None
    said = capsys.readouterr().out
    assert "continuing after step 1" in said and "chosen" not in said
    assert json.loads((tmp_path / "config.json").read_text())["placement"] == placement


@pytest.mark.parametrize(("holds_all", "devices"), [(True, 1), (False, 8)])
def test_costs_are_measured_on_as_few_devices_as_hold_the_training(
    base, monkeypatch, holds_all, devices
):
    """A device that holds the sharded training, but not all of it alone; then on all devices, which share it."""
    config = complete(tiny_config(base, "full"))
    config.placement.update(mode="auto", rules=((".*", "fsdp"),))
    config.sampler.chunk = config.trainer.micro_batch = config.evaluation.batch = 8
    config.batch.update(groups=4, images=4)
    train_config, measured = load_config(config), []
    alone = placing.place_on_one_device(train_config)
    problem = make_problem(alone, 1, calibration(), placing.model_footprint(alone))
    needed = device_bytes(problem, PoolLayout(1, 1)).largest

    def fake_costs(placed, note):
        measured.append(placed.placement.trainer)
        return calibration()

    monkeypatch.setattr(placing, "measured_costs", fake_costs)
    monkeypatch.setattr(placing, "compiled_temporaries", lambda placed, note: None)
    monkeypatch.setattr(placing, "_device_memory", lambda: int(needed * (2 if holds_all else 0.9)))
    placing.planned_meshes(train_config)
    assert [axes.devices for axes in measured] == [measured[0].fsdp] == [devices]


def test_work_that_scales_is_colocated():
    for devices in (1, 4):
        sizes = auto_placement(opened(), devices, calibration())
        trainer = sizes.trainer
        assert sizes.rollout.data == 0 and not trainer.samples
        assert trainer.data * trainer.fsdp * trainer.time == devices


def test_axes_whose_devices_share_images_are_kept():
    config = shapes()
    config.placement.rollout.tensor = config.placement.trainer.sequence = 2
    train_config = read_config(config)
    problem = make_problem(train_config, 8, calibration())
    layout = PoolLayout(1, 4, shared=2, rollout=2, rollout_devices=2, rollout_shared=2)
    rollout, trainer = meshes(problem, layout)
    assert (rollout.data, rollout.tensor, rollout.hosts, rollout.max_workers) == (1, 2, 1, 0)
    assert (trainer.data, trainer.sequence, trainer.tensor, trainer.samples) == (2, 2, 1, True)


def test_devices_that_no_batch_divides_are_an_error():
    config = shapes(144)
    config.trainer.micro_batch = 1
    problem = make_problem(read_config(config), 7, calibration())
    with pytest.raises(ConfigError, match=r"config\.sampler\.chunk"):
        make_plan(problem, lambda layout: False)
