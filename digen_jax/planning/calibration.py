"""Costs of commands on one device, and their sources."""

import dataclasses
import difflib
import pathlib

from digen_jax.errors import ConfigError
from digen_jax.files import parse_json
from digen_jax.scheduling.layouts import Scaling
from digen_jax.scheduling.settings import Costs


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Costs, how they scale, and their source.

    Attributes:
      costs: seconds on a worker, and on a trainer, of one device.
      source: the origin of the costs, as a phrase.
      missing: costs that were not measured and are taken as 0.
      trainer_serial: the share of training that more devices do not shorten.
      worker_serial: the same for generation.
      scorers: chunks scored at the same time; 0: any number.
    """

    costs: Costs
    source: str
    missing: tuple[str, ...] = ()
    trainer_serial: float = 0.0
    worker_serial: float = 0.0
    scorers: int = 0


def read_calibration(path: pathlib.Path) -> Calibration:
    """Reads a JSON file with `generate` and `train` and, if known, other fields of `Costs`.

    It may also contain trainer_serial, worker_serial and scorers.

    Raises:
      ConfigError: names the file and its error.
    """
    try:
        given = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--costs={path} cannot be read as JSON: {error}") from error
    costs = [field.name for field in dataclasses.fields(Costs)]
    shares = ["trainer_serial", "worker_serial"]
    known = [*costs, *shares, "scorers"]
    if not isinstance(given, dict):
        raise ConfigError(f'{path} must hold an object such as {{"generate": 0.5, "train": 0.2}}')
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"they are {', '.join(known)}"
            raise ConfigError(f"{path}: {name} is not a cost; {hint}")
        kinds = (int,) if name == "scorers" else (int, float)
        if type(value) not in kinds or not 0 <= value < float("inf"):
            what = "a whole number" if name == "scorers" else "a number of seconds or a share"
            raise ConfigError(f"{path}: {name} must be {what} of 0 or more, not {value!r}")
    for name in ("generate", "train"):
        if name not in given:
            raise ConfigError(f"{path} lacks {name}: give its seconds an image on one device")
    return Calibration(
        Costs(**{name: float(given[name]) for name in costs if name in given}),
        f"the file {path}",
        tuple(name for name in costs if name not in given),
        **{name: float(given[name]) for name in shares if name in given},
        scorers=given.get("scorers", 0),
    )


def per_device(
    measured: Costs, rollout: int, trainer: int, worker: Scaling, train: Scaling
) -> Costs:
    """Converts costs measured on `rollout` and `trainer` devices to one device of each mesh."""
    generation = worker.seconds(rollout)
    return dataclasses.replace(
        measured,
        generate=measured.generate / generation,
        decode=measured.decode / generation,
        train=measured.train / train.seconds(trainer),
    )
