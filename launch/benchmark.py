"""Benchmarks of the scheduler, the runtime, algorithms, reward servers, workers on Ray and faults.

python launch/benchmark.py bound [--output=bound.json]  # a simulation of up to 1,024 devices, 10 minutes of one core
python launch/benchmark.py runtime [--devices=8 --ratios=1:8,1:4,1:1,4:1,8:1 --output=speed.json]
python launch/benchmark.py peers --config configs/shapes_flow_grpo.py [--rounds=5 --output=peers.json]
python launch/benchmark.py peers --config configs/shapes_flow_grpo.py --wide=4 --config.lora.rank=32 \
    --config.model.height=128 --config.model.width=128 --config.batch.groups=1 --config.batch.images=4 \
    --config.sampler.chunk=4 --config.trainer.micro_batch=4
python launch/benchmark.py asynchrony --config configs/shapes_flow_grpo.py --workdir runs/asynchrony --config.steps=60 \
    --config.sampler.chunk=36 --config.trainer.micro_batch=36 --config.runtime.max_policy_lag=1 [--seeds=3]
python launch/benchmark.py algorithms --config configs/shapes_algorithms.py --workdir runs/algorithms \
    [--only=cispo,topr --seeds=3 --output=algorithms.json]
python launch/benchmark.py rewards [--output=rewards.json]
python launch/benchmark.py cluster [--step_seconds=8 --layouts=1,2 --output=cluster.json]
python launch/benchmark.py ray  # commands, weights, starts, idle processes
python launch/benchmark.py kills --config configs/shapes_demo.py --workdir runs/kills [--kills=100 --seed=0]
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import dataclasses
import functools
import json
import pathlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import ConfigError, check_output
from digen_jax.files import make_examples_importable, write_output

make_examples_importable()

_OUTPUT = define_path("output", None, "JSON file for all results.")
# runtime and cluster
_DEVICES = flags.DEFINE_integer("devices", 8, "runtime: number of devices to split.")
_RATIOS = flags.DEFINE_list(
    "ratios",
    ["1:8", "1:4", "1:2", "1:1", "2:1", "4:1", "8:1"],
    "runtime: ratios of device-seconds of generation to training.",
)
_SECONDS = flags.DEFINE_float(
    "seconds", 4.0, "runtime: duration of a step if all devices were always busy."
)
_WARM_UP = flags.DEFINE_integer(
    "warm_up", 3, "runtime, cluster: number of first steps that are not measured."
)
_STEPS = flags.DEFINE_integer("steps", 5, "runtime, cluster: measured steps after the first ones.")
_STEP_SECONDS = flags.DEFINE_float(
    "step_seconds", 8.0, "cluster: seconds of generation per step of the rollout workers."
)
_LAYOUTS = flags.DEFINE_list(
    "layouts", [], "cluster: indices of the layouts to measure; default: all."
)
_SEED = flags.DEFINE_integer("seed", 0, "runtime, cluster, rewards, kills: seed of random choices.")
# peers, which ignores the placement, asynchrony, kills, and algorithms, which applies the same overrides to all of the
# file's ALGORITHMS
_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "peers: number of steps on each side.")
_WIDE = flags.DEFINE_integer(
    "wide",
    0,
    "peers: layers of a random transformer of Stable Diffusion 3.5 Medium's width; 0 means the config's model.",
)
_WORKDIR = define_path(
    "workdir",
    None,
    "asynchrony, algorithms, kills: folder for all runs; the same folder resumes them.",
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "asynchrony, algorithms: number of runs of each kind.")
_ONLY = flags.DEFINE_list("only", [], "algorithms: names of the algorithms to train; default: all.")
_KILLS = flags.DEFINE_integer("kills", 100, "kills: number of faults.")

# Numbers of a benchmark, which are also written to --output, and the exit code.
Result = tuple[dict[str, Any], int | None]


def bound() -> Result:
    """Simulates the scheduler at many sizes and compares it with the bound; the exit code is 1 if a share is missed."""
    from benchmarks.bound import measure

    rows = measure(functools.partial(print, flush=True))
    missed = sum(len(row.missed) for row in rows)
    print(f"\n{missed} shares are out of range." if missed else "\nEvery share is in its range.")
    return {"rows": list(map(dataclasses.asdict, rows))}, 1 if missed else None


def runtime() -> Result:
    """Measures each kind of layout with waits instead of device work, and prints the tables."""
    ratios = list(map(_ratio, _RATIOS.value))
    from benchmarks.runtime import KINDS, TimedRun, Work, accuracy, compare, introduction, table

    run = TimedRun(_WARM_UP.value, _STEPS.value, seed=_SEED.value)
    works = [Work(_DEVICES.value, g, t, _SECONDS.value) for g, t in ratios]
    print(introduction(works[0], run), flush=True)
    found = []
    with _bar(len(works) * len(KINDS) * (run.warm_up + run.steps), "step") as bar:
        for work in works:
            found.append(compare(work, run, KINDS, bar.update))
            bar.write(f"\n{table(work, found[-1])}", file=sys.stdout)
    print(f"\n{accuracy(row for rows in found for row in rows.values())}")
    numbers = [
        {
            "work": dataclasses.asdict(work),
            "kinds": {kind: row.as_json() for kind, row in rows.items()},
        }
        for work, rows in zip(works, found, strict=True)
    ]
    return {"run": dataclasses.asdict(run), "ratios": numbers}, None


def peers() -> Result:
    """Times a step's sampling and training, and the same work in an eager loop of torch and diffusers, alternately."""
    config = _config()
    from benchmarks.eager import with_wide_model
    from benchmarks.peers import check, compare

    config = check(config, _ROUNDS.value)
    with with_wide_model(config, _WIDE.value) as config, _bar(_ROUNDS.value, "round") as bar:

        def on_round(found: Any) -> None:
            bar.write(found.describe(), file=sys.stdout)
            sys.stdout.flush()
            bar.update()

        print(
            f"A step of {config.batch.groups * config.batch.images} images, {config.sampler.steps} steps, "
            f"{config.trained_steps} of them trained; ours, then an eager loop of torch and diffusers. Both compare\n"
            "their velocities and do a step first. The 256 empty tokens of diffusers' pipeline are one token in both: "
            "ours has\ntheir weight, so that it is exact, and the eager loop's has not.",
            flush=True,
        )
        found = compare(config, _ROUNDS.value, on_round)
    print(found.describe())
    return found.as_json(), None


def asynchrony() -> Result:
    """Trains with and without asynchrony from a few seeds; the exit code is a signal's if one stopped it."""
    config, workdir = _config(), _workdir("asynchrony")
    from benchmarks.training import compare_asynchrony
    from digen_jax.process.job import prepare

    prepare(config.placement.cpu_devices)
    found = compare_asynchrony(config, _SEEDS.value, workdir)
    if isinstance(found, int):
        return {}, found
    print(f"\n{found.describe()}\n{workdir / 'asynchrony.png'} has the curves.")
    rows = {row.name: row.as_json() for row in found.table.rows}
    return rows | {"difference": found.difference, "policy_lag": found.policy_lag}, None


def algorithms() -> Result:
    """Trains with every algorithm from a few seeds; the exit code is a signal's if one stopped it."""
    workdir, config, configs = _workdir("algorithms"), _config(), _all_configs()
    from benchmarks.training import compare_algorithms, load_configs
    from digen_jax.process.job import prepare

    loaded = load_configs(configs)
    prepare(config.placement.cpu_devices)
    table, code = compare_algorithms(loaded, _SEEDS.value, workdir, _ONLY.value)
    print(
        f"\n{table.describe()}\n\n{workdir} has this as algorithms.md, its runs as algorithms.csv, and all plotted as "
        "algorithms.png."
    )
    return {row.name: row.as_json() for row in table.rows}, code


def rewards() -> Result:
    """Requests scores from servers with many clients, network faults and a server that is killed."""
    from benchmarks.rewards import Requests, compare

    requests = Requests(seed=_SEED.value)
    print(
        f"{requests.clients} clients request scores of {requests.total} images of {requests.side} x {requests.side} "
        f"from {requests.servers} servers, {requests.images} in a request; the reward takes "
        f"{1000 * requests.seconds:g} ms per image.",
        flush=True,
    )
    found = compare(requests, functools.partial(print, flush=True))
    print(f"\n{found.describe()}")
    return dataclasses.asdict(found) | {"overhead": found.overhead}, None


def cluster() -> Result:
    """Runs Ray rollout workers that wait instead of using devices, and the simulator with the same costs."""
    from benchmarks.cluster import chosen, measure
    from benchmarks.runtime import TimedRun, describe

    run = TimedRun(_WARM_UP.value, _STEPS.value, jitter=0.0, seed=_SEED.value)
    layouts, found = chosen(_LAYOUTS.value, _STEP_SECONDS.value), {}
    print(f"{len(layouts)} layouts, {run.warm_up} + {run.steps} steps each", flush=True)
    with _bar(len(layouts) * (run.warm_up + run.steps), "step") as bar:
        for layout in layouts:
            found[layout.name] = measure(layout, _STEP_SECONDS.value, run, bar.update)
    print(describe(found))
    numbers = {name: row.as_json() for name, row in found.items()}
    return {"run": dataclasses.asdict(run), "layouts": numbers}, None


def ray() -> Result:
    """Measures Ray on this machine: commands, weights, starts, and the use of its processes."""
    from benchmarks.ray_transport import measure
    from digen_jax.process.job import prepare

    prepare()
    found = measure(commands=500, megabytes=(100, 1000))
    print(found.describe())
    return dataclasses.asdict(found), None


def kills() -> Result:
    """Injects faults into a run with rollout workers on Ray, and compares it with the same run without faults."""
    workdir = _workdir("kills")
    _config(load=False)  # it is loaded with further overrides
    from benchmarks.kills import compare
    from digen_jax.process.job import prepare

    prepare()
    flag = flags.FLAGS["config"]
    path, overrides = config_flags.get_config_filename(flag), config_flags.get_override_values(flag)
    found = compare(path, overrides, workdir, _KILLS.value, _SEED.value)
    print(f"\n{found.describe()}")
    return dataclasses.asdict(found), None


def _workdir(name: str) -> pathlib.Path:
    if _WORKDIR.value is None:
        raise ConfigError(f"give a folder for its runs, by --workdir=runs/{name} for example")
    return pathlib.Path(_WORKDIR.value)


def _config(load: bool = True) -> Any:
    """Returns the config, loaded unless `load` is False. Raises ConfigError if there is none."""
    if _CONFIG.value is None:
        raise ConfigError("give a config, by --config=configs/shapes_flow_grpo.py for example")
    from digen_jax.config.load import load_config

    return load_config(_CONFIG.value) if load else _CONFIG.value


def _all_configs() -> dict[str, Any]:
    """Returns the configs of the file's algorithms by name, with the overrides of the command line."""
    flag = flags.FLAGS["config"]
    path = config_flags.get_config_filename(flag).split(":")[0]
    file = runpy.run_path(path)
    if "ALGORITHMS" not in file:
        raise ConfigError(
            f"{path} has no ALGORITHMS by name: use configs/shapes_algorithms.py or a similar config"
        )
    configs = {}
    for name in file["ALGORITHMS"]:
        configs[name] = file["get_config"](name)
        configs[name].update_from_flattened_dict(config_flags.get_override_values(flag))
    return configs


def _bar(total: int, unit: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, disable=not sys.stderr.isatty())


def _ratio(text: str) -> tuple[float, float]:
    try:
        generate, train = map(float, text.split(":"))
    except ValueError:
        raise ConfigError(f"--ratios: {text!r} must be two numbers such as 4:1") from None
    return generate, train


def _with_output(benchmark: Callable[[], Result]) -> Callable[[], int | None]:
    """Returns a command that checks --output first, and writes the numbers of a benchmark to it."""

    def command() -> int | None:
        if _OUTPUT.value is not None:
            check_output("--output", _OUTPUT.value)
        numbers, code = benchmark()
        if numbers and _OUTPUT.value is not None:
            write_output(_OUTPUT.value, (json.dumps(numbers, indent=2) + "\n").encode())
        return code

    return command


if __name__ == "__main__":
    commands = bound, runtime, peers, asynchrony, algorithms, rewards, cluster, ray, kills
    run_main({one.__name__: _with_output(one) for one in commands})
