"""Costs of the commands of a recipe's step: from a finished run's timings, or timed on the available devices."""

import itertools
import pathlib
import statistics
from collections.abc import Callable

import jax

from digen_jax.assemble import build, read_scorers
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_files
from digen_jax.errors import ConfigError, user_input
from digen_jax.inference.model import read_run_config
from digen_jax.logging.metrics import read_metrics
from digen_jax.parallel.placement import devices_per_mesh
from digen_jax.planning.calibration import Calibration, per_device
from digen_jax.planning.measure import UNMEASURED, measure
from digen_jax.precompute import precompute
from digen_jax.rewards.built_in import resolve
from digen_jax.scheduling.layouts import Scaling
from digen_jax.scheduling.settings import Costs

WARM = 2  # first steps of a run, which may include compilation


def read_run_costs(
    workdir: pathlib.Path, trainer_serial: float = 0.0, worker_serial: float = 0.0
) -> Calibration:
    """Costs from the timings of a run, on the meshes of its config.

    The generation's seconds include encoding and decoding, the training's include updates. The shares are
    those that more devices do not shorten.

    Raises:
      ConfigError: it has no timings, or its config has no sizes of meshes.
    """
    recipe = read_run_config(workdir)
    with user_input():
        lines = read_metrics(workdir / "metrics.jsonl")
    timed = [line for line in lines if "seconds/train" in line]
    if len(timed) <= WARM:
        raise ConfigError(
            f"{workdir} has timings of {len(timed)} steps, the first {WARM} of which may include compilation: "
            "run it for more steps"
        )
    rollout, trainer = devices_per_mesh(recipe.placement.meshes, 10**9)
    images = recipe.batch.groups * recipe.batch.images
    count = len(timed) - WARM

    def median(phase: str) -> float:
        return statistics.median(line[f"seconds/{phase}"] for line in timed[WARM:])

    measured = Costs(
        generate=median("rollout") / images,
        train=median("train") / images,
        score=median("reward") / images,
        sync=median("sync") / recipe.placement.rollout.workers,
        deliver=median("deliver") / images,
    )
    return on_one_device(
        measured,
        (rollout or trainer, trainer),
        f"the metrics of {count} step{'s' * (count > 1)} of the run in {workdir}",
        ("encode", "score_latency", "switch"),
        (trainer_serial, worker_serial),
    )


def measured_costs(
    recipe: TrainConfig,
    trainer_serial: float = 0.0,
    worker_serial: float = 0.0,
    note: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Costs of one chunk in the recipe's own system, on the available devices.

    Args:
      recipe: on these devices.
      trainer_serial: share of training that more devices do not shorten.
      worker_serial: the same for generation.
      note: called with each part of the work, as it takes minutes.

    Raises:
      ConfigError: the system cannot be built.
    """
    note(f"loading {recipe.model.folder}")
    records = [*itertools.chain(*read_prompt_files(recipe.prompts.paths))]
    records = [records[i % len(records)] for i in range(recipe.batch.groups)]
    precompute(recipe, jax.devices(), records)
    scorers = read_scorers(recipe, jax.devices())
    system = build(recipe, jax.devices()).with_scorers(scorers)
    measured = measure(system, recipe, records, resolve(recipe.rewards), note)
    rollout, trainer = system.placement.rollout.mesh.size, system.placement.trainer.mesh.size
    kind = jax.devices()[0].device_kind
    source = f"a chunk timed on devices of the kind {kind}, {rollout} for rollout and {trainer} for training"
    serial = (trainer_serial, worker_serial)
    return on_one_device(measured, (rollout, trainer), source, UNMEASURED, serial)


def on_one_device(
    measured: Costs,
    devices: tuple[int, int],
    source: str,
    missing: tuple[str, ...],
    serial: tuple[float, float],
) -> Calibration:
    """Converts costs of (rollout, trainer) meshes to one device by the (trainer's, worker's) serial share."""
    for name, share in zip(("trainer_serial", "worker_serial"), serial, strict=True):
        Scaling(share).check(name)
    trainer, worker = map(Scaling, serial)
    costs = per_device(measured, *devices, worker, trainer)
    return Calibration(costs, source, missing, *serial, scorers=1)
