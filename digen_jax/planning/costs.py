"""Costs of commands on one device, from a file or from the metrics of a run; `estimate` measures them."""

import dataclasses
import pathlib
import statistics

from digen_jax.errors import ConfigError, check_choice, check_range, user_input
from digen_jax.files import parse_json
from digen_jax.inference.model import read_run_config
from digen_jax.logging.metrics import read_metrics
from digen_jax.parallel.placement import devices_per_mesh
from digen_jax.scheduling.layouts import Scaling
from digen_jax.scheduling.settings import Costs

WARM = 2  # first steps of a run, which may include compilation


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Costs, their scaling, and their source.

    Attributes:
      costs: Seconds on a worker, and on a trainer, of one device.
      source: Origin of the costs, as a phrase.
      missing: Costs that were not measured and are set to 0.
      trainer_serial: Share of training that does not scale with devices.
      worker_serial: Share of generation that does not scale with devices.
      scorers: Number of chunks scored concurrently. 0 means unlimited.
    """

    costs: Costs
    source: str
    missing: tuple[str, ...] = ()
    trainer_serial: float = 0.0
    worker_serial: float = 0.0
    scorers: int = 0


def on_one_device(
    measured: Costs,
    devices: tuple[int, int],
    source: str,
    missing: tuple[str, ...],
    serial: tuple[float, float] = (0, 0),
) -> Calibration:
    """Converts costs of (rollout, trainer) meshes to one device.

    `serial` are the shares of (training, generation) that do not scale with devices.
    """
    training = Scaling(serial[0]).seconds(devices[1])
    generation = Scaling(serial[1]).seconds(devices[0])
    costs = dataclasses.replace(
        measured,
        generate=measured.generate / generation,
        decode=measured.decode / generation,
        train=measured.train / training,
    )
    return Calibration(costs, source, missing, *serial, scorers=1)


def read_calibration(path: pathlib.Path) -> Calibration:
    """Reads a JSON file with `generate` and `train` and, optionally, other fields of `Costs`.

    It may also contain trainer_serial, worker_serial and scorers.

    Raises:
      ConfigError: Names the file and its error.
    """
    try:
        given = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--costs={path} cannot be read as JSON: {error}") from error
    costs = [field.name for field in dataclasses.fields(Costs)]
    others = ["trainer_serial", "worker_serial", "scorers"]
    if not isinstance(given, dict):
        raise ConfigError(f'{path} must hold an object such as {{"generate": 0.5, "train": 0.2}}')
    for name, value in given.items():
        check_choice(f"a cost in {path}", name, [*costs, *others])
        types = (int,) if name == "scorers" else (int, float)
        if type(value) not in types or not 0 <= value < float("inf"):
            what = "an integer" if name == "scorers" else "a number of seconds or a share"
            raise ConfigError(f"{path}: {name} must be {what} of 0 or more, not {value!r}")
        if name.endswith("_serial"):
            check_range(f"{path}: {name}", value, 0, 1, "most")
    for name in ("generate", "train"):
        if name not in given:
            raise ConfigError(f"{path} lacks {name}: give its seconds per image on one device")
    if not given["generate"] + given["train"]:
        raise ConfigError(f"{path}: generate and train cost nothing: give their seconds per image")
    return Calibration(
        Costs(**{name: float(given[name]) for name in costs if name in given}),
        f"the file {path}",
        tuple(name for name in costs if name not in given),
        **{name: given[name] for name in others if name in given},
    )


def read_run_costs(workdir: pathlib.Path, serial: tuple[float, float] = (0, 0)) -> Calibration:
    """Reads costs from the timings of a run, on the meshes of its config; see `on_one_device` for `serial`.

    Generation seconds include encoding and decoding; training seconds include updates.

    Raises:
      ConfigError: The run has no timings, or its config has no mesh sizes.
    """
    config = read_run_config(workdir)
    with user_input():
        lines = read_metrics(workdir / "metrics.jsonl")
    steps = [line for line in lines if "seconds/train" in line]
    if len(steps) <= WARM:
        raise ConfigError(
            f"{workdir} has timings of {len(steps)} steps, the first {WARM} of which may include compilation: "
            "run it for more steps"
        )
    rollout, trainer = devices_per_mesh(config.placement.meshes, 10**9)
    images, count = config.batch.groups * config.batch.images, len(steps) - WARM

    def median(phase: str) -> float:
        return statistics.median(line[f"seconds/{phase}"] for line in steps[WARM:])

    measured = Costs(
        generate=median("rollout") / images,
        train=median("train") / images,
        score=median("reward") / images,
        sync=median("sync") / config.placement.rollout.workers,
        deliver=median("deliver") / images,
    )
    return on_one_device(
        measured,
        (rollout or trainer, trainer),
        f"the metrics of {count} step{'s' * (count > 1)} of the run in {workdir}",
        ("encode", "score_latency", "switch"),
        serial,
    )
