"""Choose the workers of a config's run, from a number of devices and measured costs.

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

_CONFIG = config_flags.DEFINE_config_file("config", None, "A configs/*.py file.", lock_config=True)
_DEVICES = flags.DEFINE_integer(
    "devices", None, "Number of devices to place; default: all of this machine.", 1, MOST_DEVICES
)
_COSTS = define_path(
    "costs", None, 'Seconds on one device, {"generate": 0.5, ...} in JSON; or a run\'s workdir.'
)
_MEASURE = flags.DEFINE_bool(
    "measure", False, "Time a chunk on the config's own meshes on this machine."
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "A TPU slice, such as v5p:2x2x1, or GPUs, such as h100:8 or on two hosts h100:2x8 (a100, h100, h200, b200), which "
    "this machine need not have: what the config's programs take there, and the layout that fits; local: the same "
    "programs, timed on this machine.",
)
_TRAINER_SERIAL = flags.DEFINE_float(
    "trainer_serial",
    None,
    "Share of training time that more devices do not shorten; 0: linear speed-up.",
)
_WORKER_SERIAL = flags.DEFINE_float("worker_serial", None, "The same share of generation.")
_MEMORY = flags.DEFINE_float(
    "memory",
    None,
    "GiB of a device; layouts that need more are excluded. Compiles the programs for their temporaries.",
)
_OUTPUT = define_path("output", None, "A JSON file for the chosen placement.")
_PICTURES = define_path(
    "pictures",
    None,
    "A folder for pictures: images per second by layout, timelines of the best ones.",
)
flags.mark_flags_as_required(["config"])


def main() -> None:
    """Find the costs of commands, plan, and print the table, the choice and its reason."""
    from digen_jax.config.load import load_config

    _check_flags()
    recipe = load_config(_CONFIG.value)
    if _TOPOLOGY.value is not None:
        _plan_slice(recipe)
    else:
        _plan(recipe)


def _check_flags() -> None:
    sources = (_MEASURE.value, _COSTS.value is not None, _TOPOLOGY.value is not None)
    if sum(sources) != 1:
        raise ConfigError(
            "say what commands cost: by --costs=FILE.json, --costs=WORKDIR, --measure or --topology=SLICE"
        )
    if _TOPOLOGY.value is not None:
        given = (_DEVICES, _MEMORY, _TRAINER_SERIAL, _WORKER_SERIAL)
        if set_too := [flag.name for flag in given if flag.value is not None]:
            raise ConfigError(f"--topology says what --{set_too[0]} would: leave that out")
    if _MEMORY.value is not None:
        check_range("--memory", _MEMORY.value, 0, 10**6, "least")
    for flag in (_TRAINER_SERIAL, _WORKER_SERIAL):
        if flag.value is not None:
            check_range(f"--{flag.name}", flag.value, 0, 1)
    if _OUTPUT.value is not None:
        check_output("--output", _OUTPUT.value)


def _plan(recipe: Any) -> None:
    """For the devices of this machine, or as many as --devices says."""
    from digen_jax.process.job import prepare

    prepare(recipe.placement.cpu_devices)

    import jax

    from digen_jax.planning.footprint import model_footprint
    from digen_jax.planning.plan import can_run, make_problem
    from digen_jax.planning.programs import measured_programs
    from digen_jax.scheduling.planner import make_plan

    calibration, footprint = _calibration(recipe), model_footprint(recipe)
    if _MEMORY.value is not None:
        programs = measured_programs(recipe, _note)
        footprint = dataclasses.replace(footprint, programs=programs)
    problem = make_problem(
        recipe,
        _DEVICES.value or len(jax.devices()),
        calibration,
        footprint,
        _MEMORY.value and _MEMORY.value * 2**30,
    )
    plan = make_plan(problem, functools.partial(can_run, recipe, problem))
    _show(problem, plan, calibration)
    _propose(recipe, problem, plan)


def _plan_slice(recipe: Any) -> None:
    """Plans for accelerators that this machine need not have, or for this machine with its programs timed."""
    from digen_jax.planning.fitting import compiled, proposed
    from digen_jax.planning.slices import configured, open_slice
    from digen_jax.planning.tables import heading, report

    where = open_slice(_TOPOLOGY.value, recipe.placement.cpu_devices, _note)
    opened = configured(recipe)
    print(heading(opened, where) + "\n")
    opened, found = compiled(opened, where, print)
    calibration = report(opened, found, where, print)
    verdict, fitting = proposed(opened, calibration, where, found, print)
    print(f"the plan follows from these {where.how} costs by simulation:\n")
    _show(verdict.problem, verdict.plan, calibration)
    model = dataclasses.replace(fitting.model, folder=recipe.model.folder)
    _propose(recipe, verdict.problem, verdict.plan, dataclasses.replace(fitting, model=model))


def _note(text: str) -> None:
    print(text, flush=True)


def _propose(recipe: Any, problem: Any, plan: Any, changed: Any = None) -> None:
    """Prints what to set for the choice, and writes --output; `changed` is the recipe that was planned."""
    from digen_jax.planning.plan import meshes, overrides

    choice = plan.choice.layout
    if _OUTPUT.value:
        section = meshes(problem, choice).as_dict()
        write_output(_OUTPUT.value, (json.dumps(section, indent=2) + "\n").encode())
    changes = overrides(recipe, problem, choice, changed)
    given = " \\\n".join(f"  --config.{name}={value}" for name, value in changes.items())
    how = (
        f"with the config as it is here and\n{given}" if given else "with the config as it is here"
    )
    print(f"\nit runs {how}")
    if _PICTURES.value:
        from digen_jax.planning.pictures import draw_plan

        files = draw_plan(plan, pathlib.Path(_PICTURES.value))
        print("\n".join(["pictures:", *map(str, files)]))


def _show(problem: Any, plan: Any, calibration: Any) -> None:
    """Prints the costs, the table with its legend, the choice's memory and its reason."""
    from digen_jax.planning.plan_text import (
        LEGEND,
        describe_costs,
        memory_table,
        table,
        why,
        wrapped,
    )

    settings = problem.settings
    told = (
        f"costs from {calibration.source}",
        describe_costs(problem, calibration.missing),
        f"a step: {settings.groups * settings.images} images in {settings.chunks} chunks on "
        f"{problem.devices} devices; bound (G + T)/N {problem.bound:.4g} s",
    )
    print(wrapped("\n".join(told), "  "))
    print(f"\n{table(plan)}\n")
    print(wrapped("\n".join(LEGEND), "  "))
    print(f"\n{wrapped(memory_table(plan), '  ')}\n\n{wrapped(why(plan))}")
    print(f"{plan.simulated} of {plan.layouts} layouts were simulated")


def _calibration(recipe: Any) -> Any:
    """The costs; the flags' scaling replaces that of the source."""
    from digen_jax.config.sections import AUTO
    from digen_jax.planning.calibration import read_calibration
    from digen_jax.planning.placing import place_alone, place_here
    from digen_jax.planning.step_costs import measured_costs, read_run_costs

    serial = {"trainer_serial": _TRAINER_SERIAL.value, "worker_serial": _WORKER_SERIAL.value}
    serial = {name: value for name, value in serial.items() if value is not None}
    if _MEASURE.value:
        placed = place_alone if recipe.placement.mode == AUTO else place_here
        return measured_costs(placed(recipe), **serial, note=_note)
    path = pathlib.Path(_COSTS.value)
    if path.is_dir():
        return read_run_costs(path, **serial)
    return dataclasses.replace(read_calibration(path), **serial)


if __name__ == "__main__":
    run_main(main)
