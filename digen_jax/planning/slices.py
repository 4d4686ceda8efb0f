"""A slice or several GPUs to plan for, and the costs of a recipe's commands on them."""

import dataclasses
import math
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.models.published import published_folder, published_models
from digen_jax.planning.answers import Answers
from digen_jax.planning.assessment import Assessed, assess, assess_here, timed
from digen_jax.planning.calibration import Calibration
from digen_jax.planning.chips import CHIPS, Chip, chip_of
from digen_jax.planning.costs import COMPILER, LINK_SHARE, estimate_answer
from digen_jax.planning.footprint import model_footprint
from digen_jax.planning.plain_products import shares
from digen_jax.planning.step_costs import on_one_device
from digen_jax.planning.topology import compiler_version, slice_devices
from digen_jax.process.job import CACHE, prepare
from digen_jax.scheduling.settings import Costs

# The share of a TPU's memory that a run may take, and of a GPU's, which is JAX's default or what these variables give.
TPU_SHARE, GPU_SHARE = 0.97, 0.75
GPU_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
LOCAL = "local"
UNKNOWN = ("score", "score_latency", "evaluate", "switch")


class Slice(NamedTuple):
    """Devices to plan for.

    Attributes:
      name: of the slice.
      devices: all of them.
      chip: what each is; None: nothing is known of it.
      memory: bytes of each that a run may take; None: any number.
      assess: compiles a recipe's programs for them; see `assessment`.
      answers: of the compiler; None: the programs are run here.
    """

    name: str
    devices: Sequence[jax.Device]
    chip: Chip | None
    memory: float | None
    assess: Callable[[TrainConfig], list[Assessed]]
    answers: Answers | None = None

    @property
    def how(self) -> str:
        """Where the numbers come from, in a word that stands next to each of them."""
        return "estimated" if self.answers else "measured"


def open_slice(name: str, cpu_devices: int, note: Callable[[str], None]) -> Slice:
    """Returns the devices of a slice such as "v5p:2x2x1" or "h100:8", or, by the name `LOCAL`, those of this machine.

    Must be called before JAX starts.

    Args:
      name: of the slice.
      cpu_devices: virtual devices for `LOCAL` where there is no accelerator.
      note: called with what is compiled, and how long it took.

    Raises:
      ConfigError: there is no such slice, its compiler is missing, or a variable for the memory is wrong.
    """
    prepare(cpu_devices)
    if name == LOCAL:
        devices = jax.devices()
        chip = CHIPS.get(devices[0].device_kind)
        told = devices[0].memory_stats() or {}
        memory = told.get("bytes_limit")
        return Slice(name, devices, chip, memory, lambda recipe: assess_here(recipe, devices, note))
    devices = slice_devices(name)
    chip = chip_of(devices[0].device_kind)
    gpu = devices[0].platform == "gpu"
    memory = (_gpu_share() if gpu else TPU_SHARE) * chip.memory
    if gpu and len({device.process_index for device in devices}) > 1:
        chip = dataclasses.replace(chip, link=chip.network)
    versions = f"jax {jax.__version__} {compiler_version(name)}"
    folder = CACHE.with_name("slices")
    answers = Answers(f"{name} {versions}", folder, note, memory if gpu else None)
    return Slice(
        name,
        devices,
        chip,
        memory,
        lambda recipe: assess(recipe, devices, chip, answers),
        answers,
    )


def _gpu_share() -> float:
    """The share of a GPU's memory that JAX takes."""
    name, text = next(((n, os.environ[n]) for n in GPU_SHARES if n in os.environ), ("", GPU_SHARE))
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(f"{name}={text} must be a share of a GPU's memory above 0 and at most 1")
    return share


def configured(recipe: TrainConfig) -> TrainConfig:
    """The recipe with the shipped configuration of its model if `model.folder` is a hub id; a local folder stays.

    Raises:
      ConfigError: it is neither a local folder nor a hub id whose configuration is shipped.
    """
    name = recipe.model.folder
    if pathlib.Path(name).is_dir():
        return recipe
    folder = published_folder(name)
    if folder is None:
        raise ConfigError(
            f"config.model.folder = {name!r} is neither a local folder nor a model whose configuration is shipped "
            f"({', '.join(published_models())}): download it and give its folder"
        )
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, folder=str(folder)))


def plain_shares(where: Slice, width: int) -> dict[tuple[int, int, int], float]:
    """Shares of the chip's peak that plain products of a width reach: see `calibration.shares`."""

    def seconds(lowered: jax.stages.Lowered) -> float:
        if where.answers is None:
            return timed(lowered, lowered.compile())
        answer = where.answers("a plain product", lowered)
        return estimate_answer(answer, where.chip).of(COMPILER)

    return shares(where.devices[0], where.chip, width, seconds)


def calibrated(
    recipe: TrainConfig, found: list[Assessed], chip: Chip | None, source: str
) -> Calibration:
    """Costs of a step's commands on one device, from those of its programs on the recipe's meshes.

    Weights and trajectories that go from one mesh to another take one link to each worker.
    """
    seconds: Counter[str] = Counter()
    for one in found:
        seconds[one.program.command] += one.seconds
    sizes = {one.program.name: one.program.devices for one in found}
    images, footprint, missing = recipe.sampler.chunk, model_footprint(recipe), UNKNOWN
    link = chip and LINK_SHARE * chip.link
    if not link:
        missing += ("deliver",)
    costs = Costs(
        generate=seconds["generate"] / images,
        train=seconds["train"] / images,
        decode=seconds["decode"] / images,
        encode=seconds["encode"],
        update=seconds["update"],
        sync=seconds["sync"] + (footprint.published(1, 1) / link if link else 0.0),
        deliver=footprint.trajectory / link if link else 0.0,
    )
    return on_one_device(costs, (sizes["generate"], sizes["train"]), source, missing, (0.0, 0.0))
