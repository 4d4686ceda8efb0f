"""Plans for configs: the script as a user runs it, costs from their sources, `placement = "auto"`."""

import ast
import dataclasses
import json
import re
import shutil

import jax
import pytest

from digen_jax.config.checks import check_devices
from digen_jax.config.load import complete, fit_config, load_config, read_config, replaced
from digen_jax.errors import ConfigError
from digen_jax.planning import estimate
from digen_jax.planning import plan as plans
from digen_jax.planning.costs import Calibration, read_calibration, read_run_costs
from digen_jax.planning.estimate import CompiledProgram, ProgramCost
from digen_jax.planning.plan import auto_plan, can_run, make_problem, meshes, suited
from digen_jax.planning.programs import step_programs
from digen_jax.planning.report import table, why
from digen_jax.scheduling.layouts import PoolLayout, device_bytes
from digen_jax.scheduling.planner import layouts, make_plan, settings_of
from digen_jax.scheduling.settings import Costs
from digen_jax.train import train
from tests.parallel import toy
from tests.pipelines import shipped_config
from tests.scripts import run_forked
from tests.tiny_runs import tiny_config

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
    costs.write_text('{"generate": 0.4, "train": 0.3, "sync": 0.2, "trainer_serial": 0.02}')
    options = f"--devices=4 --costs={costs} --output={output} --image_folder={tmp_path / 'images'}"
    done = run_forked("plan.py", f"--config={SHAPES}", *options.split(), *FINE)
    assert done.returncode == 0, done.stderr
    text, _, _ = done.stdout.partition("\nimages:")
    lines = text.splitlines()
    text = text.replace("\n  ", " ")
    assert "left out: decode, encode, score, score_latency, update" in text
    kinds = {re.split("  +", line[3:])[0]: line[:3] for line in lines if line[:3] in ("   ", "*  ")}
    names = ("colocated", "pool", "disaggregated", "rollout + pool")
    assert kinds.keys() >= {f"{name}{lag}" for name in names for lag in ("", ", lag 1")}
    (chosen,) = (kind for kind, mark in kinds.items() if mark == "*  ")
    assert re.search(r"optimizer [\d.]+.*trajectories", text)
    drawn = {path.name for path in (tmp_path / "images").iterdir()}
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


# --------------------------------------------------------------------------------------- the choice


def test_a_step_of_one_chunk_is_best_colocated_and_the_sentence_says_so():
    plan = make_plan(make_problem(opened(144), 4, calibration(sync=0.1)))
    assert plan.choice.layout == PoolLayout(1, 4)
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


def test_a_placement_that_no_batch_fits_is_not_chosen():
    config = shapes()
    config.evaluation.batch = 7
    sizes = auto_placement(read_config(config), 4, calibration())
    used = sizes.rollout if sizes.rollout.data else sizes.trainer
    assert used.devices == 1  # 7 images are for no others


@pytest.mark.slow
def test_a_run_with_an_automatic_placement_keeps_it_when_it_goes_on(
    base, tmp_path, capsys, monkeypatch
):
    def timed(config, devices, note, evaluation):
        """Programs that are not compiled: test_estimate measures some."""
        compiled, found = CompiledProgram("", 0, 0, 0), step_programs(config, devices)
        return [ProgramCost(one, compiled, 0.1, 0.0) for one in found if one.command != "evaluate"]

    monkeypatch.setattr(estimate, "measure", timed)
    toy.replace_model(monkeypatch.setattr, lambda config: toy.system(config, jax.device_count()))
    config = tiny_config(base, "full")
    config = replaced(config, placement="auto", runtime=dict(max_off_policy_fraction=1.0))
    config.steps = 1
    assert train(load_config(config), tmp_path) is None
    said = capsys.readouterr().out
    assert "placement chosen by a chunk timed on" in said
    assert said.startswith("config.placement = 'auto': ") and "on one of the 8 devices" in said
    assert re.search(r"  score: timing\n  score: \S+ s\n", said)
    placement = json.loads((tmp_path / "config.json").read_text())["placement"]
    rollout, trainer = placement["rollout"], placement["trainer"]
    assert re.search(r"\n  \d x .*: \S+ images/s, \d+% of the bound", said)
    assert re.search(r"\.max_policy_lag=1: .* images/s, \d+% of the bound", said)
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
    alone = plans.place_on_one_device(train_config)
    problem = make_problem(alone, 1, calibration(), plans.model_footprint(alone))
    needed = device_bytes(problem, PoolLayout(1, 1)).largest

    def fake_costs(placed, note):
        measured.append(placed.placement.trainer)
        return calibration()

    monkeypatch.setattr(plans, "measured_costs", fake_costs)
    monkeypatch.setattr(plans, "compile_programs", lambda placed, **given: [])
    monkeypatch.setattr(plans, "_device_memory", lambda: int(needed * (2 if holds_all else 0.9)))
    plans.planned_meshes(train_config)
    assert [axes.devices for axes in measured] == [measured[0].fsdp] == [devices]


def test_missing_weights_are_found_before_costs_are_measured(base, tmp_path, monkeypatch):
    config = complete(tiny_config(base, "full"))
    folder = shutil.copytree(config.model.folder, tmp_path / "model")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    config.update(placement=dict(mode="auto"), model=dict(folder=str(folder)))
    monkeypatch.setattr(plans, "measured_costs", lambda *given: pytest.fail("it measures"))
    with pytest.raises(ConfigError, match=r"config\.model\.folder: .*vae"):
        plans.planned_meshes(load_config(config))


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


# ----------------------------------------------------------------------------------- costs from files


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
        ({"generate": 1, "train": 1, "synch": 1}, "did you mean 'sync'?"),
        ({"generate": 1}, "lacks train"),
        ({"generate": -1, "train": 1}, "generate must be a number"),
        ({"generate": 1, "train": 1, "scorers": 0.5}, "scorers must be an integer"),
        ({"generate": 1, "train": 1, "worker_serial": 1.0}, "worker_serial must be in [0, 1)"),
        ({"generate": 0, "train": 0}, "cost nothing"),
        ([1, 2], "must hold an object"),
    ],
)
def test_a_wrong_file_of_costs_is_refused(tmp_path, given, sentence):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_calibration(file)
