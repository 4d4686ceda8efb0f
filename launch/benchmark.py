"""Benchmarks: the scheduler against the bound, the runtime's speed with waits instead of device work, real compute on
two cores and against torch, the cost of asynchrony, which algorithms learn, reward servers under load and faults,
rollout workers on Ray, and the effect of faults on a run of several processes.

python launch/benchmark.py bound [--output=bound.json]  # a simulation of up to 1,024 devices, 10 minutes of one core
python launch/benchmark.py runtime [--devices=8 --ratios=1:8,1:4,1:1,4:1,8:1 --output=speed.json]
python launch/benchmark.py compute --config configs/shapes_flow_grpo.py --config.sampler.chunk=12 \
    --config.trainer.micro_batch=12 [--rounds=5 --output=cores.json]
python launch/benchmark.py peers --config configs/shapes_flow_grpo.py [--rounds=5 --output=peers.json]
python launch/benchmark.py peers --config configs/shapes_flow_grpo.py --wide=4 --config.lora.rank=32 \
    --config.model.height=128 --config.model.width=128 --config.batch.groups=1 --config.batch.images=4 \
    --config.sampler.chunk=4 --config.trainer.micro_batch=4
python launch/benchmark.py asynchrony --config configs/shapes_flow_grpo.py --workdir runs/asynchrony --config.steps=60 \
    --config.sampler.chunk=36 --config.trainer.micro_batch=36 --config.runtime.max_policy_lag=1 [--seeds=3]
python launch/benchmark.py algorithms --config configs/shapes_algorithms.py --workdir runs/algorithms \
    [--only=cispo,topr --seeds=3 --output=algorithms.json]
python launch/benchmark.py algorithms --cells=runs/algorithms/algorithms.csv --workdir runs/algorithms  # draws it again
python launch/benchmark.py rewards [--clients=64 --servers=3 --requests=20 --output=rewards.json]
python launch/benchmark.py cluster [--step_seconds=8 --output=cluster.json]
python launch/benchmark.py ray [--commands=2000 --megabytes=100,1000 --output=ray.json]
python launch/benchmark.py kills --config configs/shapes_demo.py --workdir runs/kills [--kills=100 --seed=0]
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import dataclasses
import json
import pathlib
import runpy
import sys
from typing import Any

from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import ConfigError, check_choice, check_output, check_positive, user_input
from digen_jax.files import make_examples_importable, write_output

make_examples_importable()

_OUTPUT = define_path("output", None, "A JSON file for all numbers.")

# Options of "runtime"; the last four also of "cluster".
_DEVICES = flags.DEFINE_integer("devices", 8, "Number of devices to split.")
_RATIOS = flags.DEFINE_list(
    "ratios",
    ["1:8", "1:4", "1:2", "1:1", "2:1", "4:1", "8:1"],
    "Ratios of the device-seconds of generation to those of training.",
)
_WORKERS = flags.DEFINE_list(
    "workers", [], "Kinds of layouts to measure, such as pool, with each lag; none: all."
)
_SECONDS = flags.DEFINE_float("seconds", 4.0, "Duration of a step if all devices were always busy.")
_SYNC = flags.DEFINE_float("sync", 0.02, "Duration of a weight sync, as a share of --seconds.")
_SCORE = flags.DEFINE_float("score", 0.1, "Duration of scoring a step, as a share of --seconds.")
_JITTER = flags.DEFINE_float(
    "jitter",
    0.2,
    "Random variation of the work of each device, as a share of it; cluster: 0.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the jitter, or of what is drawn.")
_WARM_UP = flags.DEFINE_integer("warm_up", 3, "First steps, which are not measured.")
_STEPS = flags.DEFINE_integer("steps", 5, "Measured steps after the first ones.")

# Options of "compute" and "peers", which do not use the placement, of "asynchrony", and of "algorithms", which applies
# the same overrides to all of the file's ALGORITHMS.
_CONFIG = config_flags.DEFINE_config_file("config", None, "A configs/*.py file.", lock_config=True)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 5, "Number of steps in turn, and of steps on a core each or by torch."
)
_WIDE = flags.DEFINE_integer(
    "wide",
    0,
    "Layers of a random transformer of Stable Diffusion 3.5 Medium's width for peers to use; 0: the config's model.",
)

# Options of "asynchrony" and "algorithms".
_WORKDIR = define_path("workdir", None, "Folder for all runs; give it again to continue.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of runs of each kind.")
_ONLY = flags.DEFINE_list("only", [], "Algorithms to train now; none: all.")
_CELLS = define_path("cells", None, "An algorithms.csv to draw again; nothing is trained.")

# Options of "rewards", with --seed.
_CLIENTS = flags.DEFINE_integer("clients", 64, "Threads that ask for scores at the same time.")
_SERVERS = flags.DEFINE_integer("servers", 3, "Reward servers, each with a process that scores.")
_REQUESTS = flags.DEFINE_integer("requests", 20, "Requests of each client.")
_IMAGES = flags.DEFINE_integer("images", 4, "Images of a request.")
_SIDE = flags.DEFINE_integer("side", 64, "Height and width of an image.")
_REWARD_SECONDS = flags.DEFINE_float("reward_seconds", 0.001, "Seconds of the reward for an image.")

# Options of "cluster".
_STEP_SECONDS = flags.DEFINE_float(
    "step_seconds", 8.0, "Seconds for which the rollout workers generate in a step."
)
_LAYOUTS = flags.DEFINE_list("layouts", [], "Numbers of the cluster's layouts; none: all.")

# Options of "ray".
_COMMANDS = flags.DEFINE_integer("commands", 2000, "Commands to rollout workers.")
_MEGABYTES = flags.DEFINE_list("megabytes", ["100", "1000"], "Sizes of weights in MB.")
_IDLE_SECONDS = flags.DEFINE_float(
    "idle_seconds", 20.0, "Seconds for which Ray's idle processes are measured."
)

# An option of "kills", with --config, --workdir and --seed.
_KILLS = flags.DEFINE_integer("kills", 100, "Faults, one after the other.")


def bound() -> int | None:
    """Simulate the scheduler at many sizes, and compare it with the bound; returns 1 if a required share is missed."""
    output = _output()
    from benchmarks.bound import measure

    rows = measure(lambda text: print(text, flush=True))
    _write(output, {"rows": list(map(dataclasses.asdict, rows))})
    missed = sum(len(row.missed) for row in rows)
    print(f"\n{missed} shares are out of range." if missed else "\nEvery share is in its range.")
    return 1 if missed else None


def runtime() -> None:
    """Measure each kind of layout with waits instead of device work, and print the tables."""
    check_positive("--devices", _DEVICES.value)
    output, ratios = _output(), list(map(_ratio, _RATIOS.value))
    from benchmarks.report import accuracy, introduction, record, table
    from benchmarks.runtime import TimedRun, compare
    from benchmarks.variants import KINDS, Work

    names = {kind: kind.split(",")[0] for kind in KINDS}
    for name in _WORKERS.value:
        check_choice("--workers", name, tuple(dict.fromkeys(names.values())))
    kinds = [kind for kind, name in names.items() if name in (_WORKERS.value or names.values())]
    work = Work(
        devices=_DEVICES.value,
        seconds=_SECONDS.value,
        sync=_SYNC.value,
        score=_SCORE.value,
    )
    run = TimedRun(_WARM_UP.value, _STEPS.value, _JITTER.value, _SEED.value)
    works = [dataclasses.replace(work, generate=g, train=t) for g, t in ratios]
    for each in works:
        each.check()
    run.check()
    print(introduction(work, run), flush=True)
    total = len(works) * len(kinds) * (run.warm_up + run.steps)
    found = []
    with _bar(total, "step") as bar:
        for each in works:
            found.append(compare(each, run, kinds, bar.update))
            bar.write(f"\n{table(each, found[-1])}", file=sys.stdout)
    print(f"\n{accuracy(row for part in found for row in part.values())}")
    numbers = [record(*pair) for pair in zip(works, found, strict=True)]
    _write(output, {"run": dataclasses.asdict(run), "ratios": numbers})


def compute() -> None:
    """Time a step on one core, sampling and training in turn, and on a core each at the same time."""
    output, recipe = _output(), _recipe()
    from benchmarks.compute import compare

    batch, chunk = recipe.batch, recipe.sampler.chunk
    images = batch.groups * batch.images
    print(
        f"A step of {images} images in {images // chunk} chunks, without a reward and without sending "
        "weights; both processes compile first.",
        flush=True,
    )
    with _bar(_ROUNDS.value, "round") as bar:
        speed = compare(recipe, _ROUNDS.value, bar.update)
    print(speed.describe())
    _write(output, dataclasses.asdict(speed) | {"speed_up": speed.speed_up, "ideal": speed.ideal})


def peers() -> None:
    """Time a step's sampling and training, and the same work by an eager loop of torch and diffusers, in turn."""
    output, recipe = _output(), _recipe()
    from benchmarks.peers import check, compare
    from benchmarks.wide import with_wide_model

    recipe = check(recipe, _ROUNDS.value)
    with with_wide_model(recipe, _WIDE.value) as recipe, _bar(_ROUNDS.value, "round") as bar:

        def went_round(found: Any) -> None:
            bar.write(found.describe(), file=sys.stdout)
            sys.stdout.flush()
            bar.update()

        print(
            f"A step of {recipe.batch.groups * recipe.batch.images} images, {recipe.sampler.steps} steps, "
            f"{recipe.trained_steps} of them trained; ours, then an eager loop of torch and diffusers. Both compare\n"
            "their velocities and do a step first. The 256 empty tokens of diffusers' pipeline are one token in both: "
            "ours has\ntheir weight, so that it is exact, and the eager loop's has not.",
            flush=True,
        )
        found = compare(recipe, _ROUNDS.value, went_round)
    print(found.describe())
    _write(output, found.record())


def asynchrony() -> int | None:
    """Train with and without asynchrony, from a few seeds; returns the exit code where a signal stopped it."""
    output, recipe, workdir = _output(), _recipe(), _workdir("asynchrony")
    from benchmarks.asynchrony import Comparison, check, compare
    from digen_jax.process.job import prepare

    check(recipe, _SEEDS.value)
    prepare(recipe.placement.cpu_devices)
    found = compare(recipe, _SEEDS.value, workdir)
    if not isinstance(found, Comparison):
        return found
    print(f"\n{found.describe()}\n{workdir / 'asynchrony.png'} shows how the runs went.")
    _write(output, dataclasses.asdict(found))
    return None


def algorithms() -> int | None:
    """Train with every algorithm, from a few seeds; returns the exit code where a signal stopped it."""
    if _CELLS.value is not None:
        return _redraw(pathlib.Path(_CELLS.value), _workdir("algorithms"))
    output, recipe, workdir = _output(), _recipe(), _workdir("algorithms")
    configs = _all_configs()
    from benchmarks.algorithms import check, compare, open_all
    from digen_jax.process.job import prepare

    recipes = open_all(configs)
    check(recipes, _SEEDS.value, _ONLY.value)
    prepare(recipe.placement.cpu_devices)
    table, code = compare(recipes, _SEEDS.value, workdir, _ONLY.value)
    print(
        f"\n{table.describe()}\n\n{workdir} has this as algorithms.md, its cells as algorithms.csv, and it all drawn "
        "as algorithms.png."
    )
    _write(output, {row.name: row.record() for row in table.rows})
    return code


def rewards() -> None:
    """Ask reward servers from many clients, with faults on the way and a server that is killed."""
    output = _output()
    from benchmarks.rewards import Load, compare

    load = Load(
        clients=_CLIENTS.value,
        servers=_SERVERS.value,
        requests=_REQUESTS.value,
        images=_IMAGES.value,
        side=_SIDE.value,
        seconds=_REWARD_SECONDS.value,
        seed=_SEED.value,
    )
    print(
        f"{load.clients} clients ask {load.servers} servers for the scores of {load.total} images of {load.side} x "
        f"{load.side}, {load.images} in a request; the reward takes {1000 * load.seconds:g} ms an image.",
        flush=True,
    )
    found = compare(load, lambda line: print(line, flush=True))
    print(f"\n{found.describe()}")
    _write(output, dataclasses.asdict(found) | {"overhead": found.overhead})


def cluster() -> None:
    """Run rollout workers on Ray that wait instead of using devices, and the simulator at equal costs."""
    output = _output()
    from benchmarks.cluster import chosen, describe, measure
    from benchmarks.runtime import TimedRun

    jitter = _JITTER.value if flags.FLAGS["jitter"].present else 0.0
    run = TimedRun(_WARM_UP.value, _STEPS.value, jitter, _SEED.value)
    run.check()
    check_positive("--step_seconds", _STEP_SECONDS.value)
    cases, found = chosen(_LAYOUTS.value), []
    print(f"{len(cases)} layouts, {run.warm_up} + {run.steps} steps each", flush=True)
    with _bar(len(cases) * (run.warm_up + run.steps), "step") as bar:
        for case in cases:
            found.append(measure(case, _STEP_SECONDS.value, run, bar.update))
    print(describe(found))
    _write(
        output, {"run": dataclasses.asdict(run), "layouts": list(map(dataclasses.asdict, found))}
    )


def ray() -> None:
    """Measure Ray on this machine: commands, weights, starts, and what its own processes use."""
    output, megabytes = _output(), _numbers("--megabytes", _MEGABYTES.value, int)
    from benchmarks.ray_transport import measure
    from digen_jax.process.job import prepare

    prepare()
    found = measure(_COMMANDS.value, megabytes, _IDLE_SECONDS.value)
    print(found.describe())
    _write(output, dataclasses.asdict(found))


def kills() -> None:
    """Inject faults into a run with rollout workers on Ray, and compare it with the same run without."""
    output, workdir = _output(), _workdir("kills")
    if _CONFIG.value is None:
        raise ConfigError("say what to run, by --config=configs/shapes_demo.py for example")
    from benchmarks.kills import compare
    from digen_jax.process.job import prepare

    prepare()
    flag = flags.FLAGS["config"]
    path, overrides = config_flags.get_config_filename(flag), config_flags.get_override_values(flag)
    found = compare(path, overrides, workdir, _KILLS.value, _SEED.value)
    print(f"\n{found.describe()}")
    _write(output, dataclasses.asdict(found))


def _redraw(cells: pathlib.Path, workdir: pathlib.Path) -> None:
    from benchmarks.algorithms import read_cells

    table = read_cells(cells)
    with user_input():
        workdir.mkdir(parents=True, exist_ok=True)
        table.write(workdir)
    print(
        f"{table.describe()}\n\n{workdir} has this as algorithms.md, and drawn as algorithms.png."
    )


def _workdir(name: str) -> pathlib.Path:
    if _WORKDIR.value is None:
        raise ConfigError(f"say where its runs may lie, by --workdir=runs/{name} for example")
    return pathlib.Path(_WORKDIR.value)


def _all_configs() -> dict[str, Any]:
    """The config of each of the file's algorithms, by name, with the overrides of the command line."""
    flag = flags.FLAGS["config"]
    path = config_flags.get_config_filename(flag).split(":")[0]
    file = runpy.run_path(path)
    if "ALGORITHMS" not in file:
        raise ConfigError(
            f"{path} has no ALGORITHMS by name: give configs/shapes_algorithms.py or one like it"
        )
    configs = {}
    for name in file["ALGORITHMS"]:
        config = file["get_config"](name)
        config.update_from_flattened_dict(config_flags.get_override_values(flag))
        configs[name] = config
    return configs


def _recipe() -> Any:
    if _CONFIG.value is None:
        raise ConfigError(
            "say what to compute, by --config=configs/shapes_flow_grpo.py for example"
        )
    from digen_jax.config.load import load_config

    return load_config(_CONFIG.value)


def _bar(total: int, unit: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, disable=not sys.stderr.isatty())


def _ratio(text: str) -> tuple[float, float]:
    try:
        generate, train = map(float, text.split(":"))
    except ValueError:
        raise ConfigError(f"--ratios: {text!r} must be two numbers such as 4:1") from None
    return generate, train


def _numbers(flag: str, given: list[str], kind: type = float) -> list:
    try:
        return [kind(text) for text in given]
    except ValueError:
        raise ConfigError(f"{flag}={','.join(given)}: give numbers such as 1,2,4") from None


def _output() -> str | None:
    """The file for the numbers, checked before anything is measured."""
    if _OUTPUT.value is not None:
        check_output("--output", _OUTPUT.value)
    return _OUTPUT.value


def _write(path: str | None, numbers: dict[str, Any]) -> None:
    if path is not None:
        write_output(path, (json.dumps(numbers, indent=2) + "\n").encode())


if __name__ == "__main__":
    run_main(
        {
            "bound": bound,
            "runtime": runtime,
            "compute": compute,
            "peers": peers,
            "asynchrony": asynchrony,
            "algorithms": algorithms,
            "rewards": rewards,
            "cluster": cluster,
            "ray": ray,
            "kills": kills,
        }
    )
