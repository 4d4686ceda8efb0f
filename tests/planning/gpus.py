"""Compiles the published recipes' programs for H100s, and writes the table in docs/performance.md.

python -m tests.planning.gpus                          # all recipes, and the table
python -m tests.planning.gpus sd35_medium:geneval,8    # one recipe, as JSON

It needs requirements-gpu-check.txt. Compiled programs are cached, as by launch/plan.py.
"""

import json
import re
import runpy
import sys
from typing import Any

from tests.pipelines import ROOT

PUBLISHED = (
    "sd35_medium",
    "flux_dev",
    "flux_kontext",
    "flux2_klein",
    "zimage_turbo",
    "qwen_image",
    "wan21",
    "wan22",
    "hunyuan_video",
    "hunyuan_video15",
)
PROGRAMS = ("encode", "generate", "decode", "train", "update", "evaluate")
DOC = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- table of GPUs: make gpu-table -->\n", "<!-- end of the table of GPUs -->\n"
GIB = 2**30


def published() -> list[str]:
    """Every recipe with the number of GPUs that its config's docstring names first, as "config:argument"."""
    found = []
    for name in PUBLISHED:
        config = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))
        gpus = re.search(rf"{name}\.py:(?:\w+,)?(\d+)", config["__doc__"])[1]
        found += [f"{name}:{recipe},{gpus}" for recipe in config.get("RECIPES", ())] or [
            f"{name}:{gpus}"
        ]
    return found


def open_gpus() -> Any:
    """Eight H100s."""
    from digen_jax.planning.estimate import open_target

    return open_target("h100:8", 1, lambda text: print(text, file=sys.stderr, flush=True))


def compiled(name: str, where: Any) -> dict[str, Any]:
    """What a recipe takes on its GPUs, or the error that ended its compilation.

    Memory is in GiB of a device: of each program its arguments, and its temporaries and results; `held` is that of a
    run as the planner counts it, with the largest temporaries. `auto` is the layout that the planner chooses by these
    costs, and `share` its share of the bound.
    """
    from digen_jax.config.load import load_config
    from digen_jax.planning.estimate import calibrate, estimate, with_published_folder
    from digen_jax.planning.memory import model_footprint
    from digen_jax.planning.plan import auto_plan, make_problem, with_temporaries
    from digen_jax.scheduling.layouts import PoolLayout, device_bytes
    from tests.test_configs import load
    from tools.tpu_cycles import COLLECTIVES, Cycles

    config, argument = name.split(":")
    gpus = int(argument.split(",")[-1])
    train_config = with_published_folder(load_config(load(config, argument)))
    try:
        found = estimate(train_config, where.devices[:gpus], where.chip, where.compiler)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    programs = {}
    for one in found:
        peak, temporaries = one.compiled.peak, one.compiled.temporaries
        cycles = Cycles(one.compiled.text, where.chip) if one.fits else None
        moved = cycles.by_what(COLLECTIVES) if cycles else {}
        programs[one.program.name] = {
            "arguments": (peak - temporaries) / GIB,
            "temporaries": temporaries / GIB,
            "seconds": one.seconds,
            "collectives": {what: [runs, size / 1e9] for what, (runs, size, _) in moved.items()},
        }
    if not all(one.fits for one in found):
        return {"fits": False, "programs": programs}
    trainer = train_config.placement.trainer
    costs, sizes = calibrate(train_config, found, where.chip, name), model_footprint(train_config)
    problem = make_problem(train_config, gpus, costs, sizes)
    shared = trainer.tensor * trainer.sequence
    own = PoolLayout(1, trainer.devices, trainer.time, shared=shared)
    held = device_bytes(with_temporaries(problem, train_config, own, found), own)
    assert held.trainer_fsdp == trainer.fsdp
    fits = held.largest <= where.memory
    chosen = auto_plan(train_config, gpus, costs, sizes, where.memory).choice
    return {
        "fits": fits,
        "held": held.largest / GIB,
        "programs": programs,
        "auto": f"{chosen.layout.describe()}, chunks of {train_config.sampler.chunk}",
        "share": chosen.utilisation,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown; recipes of a config with the same numbers share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, one in found.items():
        config, argument = name.split(":")
        *recipe, gpus = argument.split(",")
        rows.setdefault((config, gpus, *_cells(one)), []).extend(recipe)
    head = ["recipe", "GPUs", *PROGRAMS, "a device", "seconds", "collectives", "auto"]
    lines = [head, ["---"] * len(head)]
    for (config, *cells), recipes in rows.items():
        lines.append([f"`{config}`" + (": " if recipes else "") + ", ".join(recipes), *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(one: dict[str, Any]) -> list[str]:
    if "error" in one:
        return [*[""] * len(PROGRAMS), f"does not compile: {one['error']}", "", "", ""]
    made = one["programs"]
    sizes = [
        f"{made[p]['arguments']:.1f} + {made[p]['temporaries']:.1f}" if p in made else "-"
        for p in PROGRAMS
    ]
    if not one["fits"]:
        return [
            *sizes,
            f"{one['held']:.1f}: does not fit" if "held" in one else "does not fit",
            "",
            "",
            "",
        ]
    rounded = [float(f"{made[p]['seconds']:.2g}") for p in ("generate", "train")]
    seconds = ", ".join(f"{one:g}" for one in rounded)
    moved = []
    for name in ("generate", "train"):
        each = made[name]["collectives"].items()
        if parts := ", ".join(
            f"{what} {runs} ({float(f'{size:.3g}'):g} GB)" for what, (runs, size) in each
        ):
            moved.append(f"{name}: {parts}")
    auto = f"{one['auto']} ({one['share']:.0%} of the bound)"
    return [*sizes, f"{one['held']:.1f}", seconds, "; ".join(moved) or "none", auto]


def main() -> None:
    """Compiles the recipes that are named, or all."""
    where = open_gpus()
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print(json.dumps({name: compiled(name, where)}), flush=True)
        return
    found = {name: compiled(name, where) for name in published()}
    before, _, rest = DOC.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOC.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")


if __name__ == "__main__":
    main()
