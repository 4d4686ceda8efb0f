"""Chooses the placement of a config for a number of devices, from measured or estimated costs.

python launch/plan.py --config configs/shapes_flow_grpo.py --costs costs.json --devices 8
python launch/plan.py --config configs/shapes_demo.py --costs runs/shapes
python launch/plan.py --config configs/shapes_flow_grpo.py --measure
python launch/plan.py --config configs/sd35_medium.py:geneval,4 --topology v5p:2x2x1
python launch/plan.py --config configs/sd35_medium.py:geneval,8 --topology h100:8
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import dataclasses
import functools
import json
import pathlib
from typing import Any

from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import ConfigError, check_output, check_range
from digen_jax.files import write_output

# A search over more would take hours.
MOST_DEVICES = 1024

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_DEVICES = flags.DEFINE_integer(
    "devices", None, "Number of devices; default: all devices of this machine.", 1, MOST_DEVICES
)
_COSTS = define_path(
    "costs", None, 'Seconds on one device, {"generate": 0.5, ...} in JSON; or a run\'s workdir.'
)
_MEASURE = flags.DEFINE_bool(
    "measure", False, "Measure costs by timing a chunk on the config's meshes on this machine."
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "TPU slice, such as v5p:2x2x1, or GPUs, such as h100:8 or h100:2x8 on two hosts (rtx4090, a6000, "
    "a100, h100, h200, b200): compiles the config's programs for it, without the hardware, reports their "
    "memory and time, and plans the layout; local: times the programs on this machine.",
)
_TRAINER_SERIAL = flags.DEFINE_float(
    "trainer_serial",
    None,
    "Fraction of training time that more devices do not reduce; 0 means linear speed-up.",
)
_WORKER_SERIAL = flags.DEFINE_float("worker_serial", None, "The same fraction for generation.")
_MEMORY = flags.DEFINE_float(
    "memory",
    None,
    "Memory per device in GiB; excludes layouts that need more. Compiles programs for their temporaries.",
)
_OUTPUT = define_path("output", None, "JSON file for the chosen placement.")
_IMAGE_FOLDER = define_path(
    "image_folder",
    None,
    "Folder for plots: images per second by layout, timelines of the best layouts.",
)
flags.mark_flags_as_required(["config"])
_note = functools.partial(print, flush=True)


def main() -> None:
    """Finds the costs of commands, plans, and prints the table, the choice and its reason."""
    from digen_jax.config.load import load_config

    _check_flags()
    config = load_config(_CONFIG.value)
    if _TOPOLOGY.value is not None:
        _plan_topology(config)
    else:
        _plan(config)


def _check_flags() -> None:
    sources = (_MEASURE.value, _COSTS.value is not None, _TOPOLOGY.value is not None)
    if sum(sources) != 1:
        raise ConfigError(
            "give the costs of commands: by --costs=FILE.json, --costs=WORKDIR, --measure or --topology=NAME"
        )
    if _TOPOLOGY.value is not None:
        given = (_DEVICES, _MEMORY, _TRAINER_SERIAL, _WORKER_SERIAL)
        if set_too := [flag.name for flag in given if flag.value is not None]:
            raise ConfigError(f"--topology implies --{set_too[0]}: remove that option")
    if _MEMORY.value is not None:
        check_range("--memory", _MEMORY.value, 0, 10**6, "least")
    for flag in (_TRAINER_SERIAL, _WORKER_SERIAL):
        if flag.value is not None:
            check_range(f"--{flag.name}", flag.value, 0, 1, "most")
    if _OUTPUT.value is not None:
        check_output("--output", _OUTPUT.value)


def _plan(config: Any) -> None:
    """Plans for the devices of this machine, or for --devices devices."""
    from digen_jax.process.job import prepare

    wanted, virtual = _DEVICES.value, config.placement.cpu_devices
    memory = None if _MEMORY.value is None else _MEMORY.value * 2**30
    prepare(virtual if memory is None else max(virtual, wanted or 1))

    import jax

    from digen_jax.planning.estimate import compile_programs
    from digen_jax.planning.memory import model_footprint
    from digen_jax.planning.plan import best_plan, can_run, make_problem
    from digen_jax.scheduling.planner import make_plan

    here = jax.devices()
    devices = wanted or len(here)
    if memory is not None and devices > len(here):
        raise ConfigError(
            f"--memory compiles programs for {devices} devices, but there are {len(here)}: use --topology, such as "
            "h100:8, which needs no hardware"
        )
    calibration, footprint = _calibration(config), model_footprint(config)
    problem = make_problem(config, devices, calibration, footprint, memory)
    runs = functools.partial(can_run, config, problem)
    if memory is None:
        plan = make_plan(problem, runs)
    else:
        assess = functools.partial(compile_programs, devices=here[:devices], note=_note)
        plan = best_plan(config, problem, runs, assess, _note)
    _show(config, plan, calibration, config)


def _plan_topology(config: Any) -> None:
    """Plans for accelerators that this machine need not have, or for this machine with its programs timed."""
    from digen_jax.planning.estimate import open_target, with_published_folder
    from digen_jax.planning.fitting import fit_plan
    from digen_jax.planning.report import heading

    target = open_target(str(_TOPOLOGY.value), config.placement.cpu_devices, _note)
    opened = with_published_folder(config)
    _note(heading(opened, target) + "\n")
    plan, fitting, calibration = fit_plan(opened, target, _note)
    _note(f"the plan follows from these {target.how} costs by simulation:\n")
    model = dataclasses.replace(fitting.model, folder=config.model.folder)
    _show(config, plan, calibration, dataclasses.replace(fitting, model=model))


def _show(config: Any, plan: Any, calibration: Any, planned: Any) -> None:
    """Prints the plan and the fields to set for its choice, and writes --output; `planned` is the config that fits."""
    from digen_jax.planning.plan import changed_fields, meshes, suited
    from digen_jax.planning.report import draw_plan, plan_report

    print(plan_report(plan, calibration))
    layout = plan.choice.layout
    if _OUTPUT.value:
        section = meshes(plan.problem, layout).as_dict()
        write_output(_OUTPUT.value, (json.dumps(section, indent=2) + "\n").encode())
    changes = changed_fields(config, suited(planned, plan.problem, layout))
    options = " \\\n".join(f"  --config.{name}={value}" for name, value in changes.items())
    print("\nit runs with the config as it is here" + (f" and\n{options}" if options else ""))
    if _IMAGE_FOLDER.value:
        files = draw_plan(plan, pathlib.Path(_IMAGE_FOLDER.value))
        print("\n".join(["images:", *map(str, files)]))


def _calibration(config: Any) -> Any:
    """Returns the costs; the scaling of the flags replaces that of the source."""
    from digen_jax.config.sections import AUTO
    from digen_jax.planning.costs import read_calibration, read_run_costs
    from digen_jax.planning.estimate import measured_costs
    from digen_jax.policies import place_here, place_on_one_device

    shares = _TRAINER_SERIAL, _WORKER_SERIAL
    serial = _TRAINER_SERIAL.value or 0.0, _WORKER_SERIAL.value or 0.0
    if _MEASURE.value:
        place = place_on_one_device if config.placement.mode == AUTO else place_here
        return measured_costs(place(config), _note, serial)
    path = pathlib.Path(_COSTS.value)
    if path.is_dir():
        return read_run_costs(path, serial)
    given: dict[str, Any] = {flag.name: flag.value for flag in shares if flag.value is not None}
    return dataclasses.replace(read_calibration(path), **given)


if __name__ == "__main__":
    run_main(main)
