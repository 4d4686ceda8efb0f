"""Costs of commands on one device: from a file, from the metrics of a run, or timed with one chunk."""

import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from digen_jax import rewards
from digen_jax.assemble import build, read_scorers
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_files
from digen_jax.errors import ConfigError, check_choice, user_input
from digen_jax.files import parse_json
from digen_jax.images import reward_input
from digen_jax.inference.model import read_run_config
from digen_jax.logging.metrics import read_metrics
from digen_jax.parallel.accumulate import trained_part
from digen_jax.parallel.mesh import put
from digen_jax.parallel.placement import devices_per_mesh
from digen_jax.parallel.system import (
    SampledImages,
    System,
    make_train_batch,
    move_to_trainer,
    select_images,
)
from digen_jax.precompute import precompute
from digen_jax.rewards.built_in import mesh_rewards, on_mesh, resolve
from digen_jax.scheduling.layouts import Scaling
from digen_jax.scheduling.settings import Costs

WARM = 2  # first steps of a run, which may include compilation
REPEATS = 3  # timed calls after a first one that compiles; the median is used


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
    trainer, worker = Scaling(serial[0]), Scaling(serial[1])
    trainer.check("trainer_serial")
    worker.check("worker_serial")
    training, generation = trainer.seconds(devices[1]), worker.seconds(devices[0])
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
    for name in ("generate", "train"):
        if name not in given:
            raise ConfigError(f"{path} lacks {name}: give its seconds per image on one device")
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


def measured_costs(
    config: TrainConfig, note: Callable[[str], None], serial: tuple[float, float] = (0, 0)
) -> Calibration:
    """Measures costs with one chunk in the config's system, on the available devices.

    Args:
      config: Config placed on these devices.
      note: Called with each part of the work, which takes minutes.
      serial: See `on_one_device`.

    Raises:
      ConfigError: The system cannot be built.
    """
    note(f"loading {config.model.folder}")
    records = [*itertools.chain(*read_prompt_files(config.prompts.paths))]
    records = [records[i % len(records)] for i in range(config.batch.groups)]
    precompute(config, jax.devices(), records)
    scorers = read_scorers(config, jax.devices())
    system = build(config, jax.devices()).with_scorers(scorers)
    measured = _measure(system, config, records, resolve(config.rewards), note)
    rollout, trainer = system.placement.rollout.mesh.size, system.placement.trainer.mesh.size
    kind = jax.devices()[0].device_kind
    source = f"a chunk timed on devices of the kind {kind}, {rollout} for rollout and {trainer} for training"
    missing = ("score_latency", "switch")
    return on_one_device(measured, (rollout, trainer), source, missing, serial)


def _measure(
    system: System,
    config: TrainConfig,
    records: list[dict],
    scored_by: rewards.Rewards,
    note: Callable[[str], None],
) -> Costs:
    """Returns the seconds of commands on the system's meshes; consumes the trainer's state.

    `records` are the prompts of a step, one per group. Seconds of rewards on the mesh are included in decoding.
    """

    def timed(name: str, call: Callable[[], Any]) -> tuple[Any, float]:
        note(f"{name}: compiling and timing")
        seconds = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            result = jax.block_until_ready(call())
            seconds.append(time.perf_counter() - start)
        note(f"{name}: {statistics.median(seconds[1:]):.4g} s")
        return result, statistics.median(seconds[1:])

    sampler, trainer, size = system.sampler, system.placement.trainer, config.sampler.chunk
    rows = np.repeat(np.arange(len(records), dtype=np.int32), config.batch.images)[:size]
    numbers = np.tile(np.arange(config.batch.images), len(records))[:size]
    draws = system.rng.draw(0, rows, numbers)
    state = system.trainer.init(system.start)
    weights, sync = timed("sync", lambda: system.rollout_weights(state.tuned))
    prompts, encoding = timed("encode", lambda: sampler.encode(weights, records))
    latents, generate = timed("generate", lambda: sampler.generate(weights, prompts, rows, *draws))
    decoded, decode = timed("decode", lambda: sampler.decode(weights, latents))
    shown = [records[row] for row in rows]
    batch = reward_input(np.asarray(decoded.clips)), [one["prompt"] for one in shown], shown

    def scores(members: Mapping[int, rewards.NamedReward]) -> list[np.ndarray]:
        return [answer.columns for _, _, answer in rewards.answers(members, batch)]

    settings = [one.settings for one in scored_by.members]
    learned = mesh_rewards(on_mesh(settings), system.rollouts[0].scorers)
    others = {i: one for i, one in enumerate(scored_by.members) if i not in learned}
    score_on_mesh = 0.0
    if learned:
        _, score_on_mesh = timed("score on the mesh", lambda: scores(learned))
    _, score = timed("score", lambda: scores(others))
    samples = trained_part(latents, put(draws.keys, sampler.group.batch))
    images = SampledImages(0, rows, samples, latents.sigmas)
    advantages = np.linspace(-1, 1, size, dtype=np.float32)
    local = jax.device_put(prompts, trainer.replicated)
    count = system.advantages.kept(size, config.batch.images)
    delivered, deliver = timed("deliver", lambda: move_to_trainer(images, trainer)[2:])

    def accumulate() -> Any:
        given = SampledImages(0, rows, *delivered)
        if count < size:
            given = select_images(given, np.arange(count), trainer)
        train_batch = make_train_batch(system, local, given, advantages[:count])
        return system.trainer.accumulate(state, system.base, train_batch, None, state.tuned)

    totals, train = timed("train", accumulate)

    def updated() -> Any:
        nonlocal state  # each update consumes the state of the previous one
        state, metrics = system.trainer.update(state, totals)
        return state, metrics

    _, update = timed("update", updated)
    return Costs(
        generate=generate / size,
        train=train / size,
        decode=(decode + score_on_mesh) / size,
        encode=encoding,
        score=score / size,
        update=update,
        sync=sync,
        deliver=deliver / size,
    )
