"""Memory and seconds of a config's programs: compiled for absent accelerators, or run on available devices.

The estimated seconds of a compiled program are the larger of two numbers:
- its FLOPs over an `Efficiency` of the chip's bfloat16 peak, where a float32 product counts several times (`PASSES`);
- the bytes of its arguments and results over `MEMORY_SHARE` of the memory's bandwidth.
Elementwise operations and collectives are not counted separately; they are included in the efficiency.
"""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax import files
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_files
from digen_jax.errors import ConfigError
from digen_jax.models.published import published_folder, published_models
from digen_jax.planning.costs import Calibration, on_one_device
from digen_jax.planning.flops import Flops, program_flops
from digen_jax.planning.hardware import CHIPS, Chip, chip_of, compiler_version, topology_devices
from digen_jax.planning.memory import model_footprint
from digen_jax.planning.programs import Program, step_programs
from digen_jax.policies import on_devices
from digen_jax.process.job import CACHE, prepare
from digen_jax.rewards import answers
from digen_jax.rewards.built_in import on_mesh, resolve
from digen_jax.rewards.dry_run import synthetic_image
from digen_jax.scheduling.settings import Costs


class Efficiency(NamedTuple):
    """Share of peak FLOP/s that programs reach: the denoising network; encoders, autoencoder and rewards."""

    network: float
    others: float


# GPUs: measured with Stable Diffusion 3.5 Medium in TF32 on an H100. TPUs: the compiler's cycles for its programs
# (docs/performance.md).
EFFICIENCY = {"gpu": Efficiency(0.2, 0.5), "tpu": Efficiency(0.5, 0.35)}
MEMORY_SHARE, LINK_SHARE = 0.8, 0.8
# Share of a TPU's memory that a run may take, and of a GPU's: JAX's default, which these variables override.
TPU_SHARE, GPU_SHARE = 0.97, 0.75
GPU_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
LOCAL = "local"
MEMORY_RULE = (
    "2"  # part of the cache's key: changes if another memory is read from the compiler's report
)
REPEATS = 3  # timed calls after a first one; the median is used


class CompiledProgram(NamedTuple):
    """A compiled program, or the memory needed by a program that does not fit.

    Attributes:
      text: HLO text. "" means that the program does not fit.
      peak: Peak bytes per device, arguments included.
      temporaries: Bytes per device of temporaries and results, without results in an argument's memory.
      moved: Bytes per device of arguments and results.
    """

    text: str
    peak: int
    temporaries: int
    moved: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "CompiledProgram":
        """Returns the compiler's report on a program."""
        found: Any = compiled.memory_analysis()
        arguments, results = found.argument_size_in_bytes, found.output_size_in_bytes
        peak = getattr(found, "peak_memory_in_bytes", 0)
        temporaries = found.temp_size_in_bytes + results - found.alias_size_in_bytes
        device = next(iter(jax.tree.leaves(compiled.output_shardings)[0].device_set))
        if device.platform == "tpu":
            # The report adds up temporaries that share memory, because they are needed at different times.
            temporaries = min(temporaries, peak - arguments)
        else:
            # GPUs allocate all temporaries at once, more than the compiler's peak.
            peak = max(peak, arguments + temporaries)
        return cls(str(compiled.as_text()), peak, temporaries, arguments + results)

    @classmethod
    def compile(cls, lowered: jax.stages.Lowered) -> "CompiledProgram":
        """Compiles a program."""
        try:
            return cls.of(lowered.compile())
        except jax.errors.JaxRuntimeError as error:
            if (needed := _exceeded(str(error))) is None:
                raise
            return cls("", needed, needed, 0)


class CachedCompiler:
    """Compiles programs for one topology, each once.

    Args:
      target: Everything else that the result depends on besides the program: topology, versions.
      folder: Folder of the cache.
      note: Called with each compiled program and its compile time.
      memory: Bytes per device above which a program does not fit. None means that the compiler decides.
    """

    def __init__(
        self,
        target: str,
        folder: pathlib.Path,
        note: Callable[[str], None],
        memory: float | None = None,
    ):
        self.target, self.folder, self.note, self.memory = target, folder, note, memory

    def __call__(self, name: str, lowered: jax.stages.Lowered) -> CompiledProgram:
        """Returns the compiled program, from the cache if possible."""
        key = "\0".join([self.target, MEMORY_RULE, *CompiledProgram._fields, lowered.as_text()])
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json.gz"
        if path.exists():
            self.note(f"{name}: compiled before")
            found = CompiledProgram(**json.loads(gzip.decompress(path.read_bytes())))
        else:
            found = self._compile(name, lowered)
            self.folder.mkdir(parents=True, exist_ok=True)
            files.replace(path, gzip.compress(json.dumps(found._asdict()).encode(), mtime=0))
        if found.text and (self.memory is None or found.peak <= self.memory):
            return found
        self.note(f"{name}: does not fit, because it needs {found.peak / 1e9:.1f} GB of a device")
        return found._replace(text="")

    def _compile(self, name: str, lowered: jax.stages.Lowered) -> CompiledProgram:
        self.note(f"{name}: compiling for {self.target.partition(' ')[0]}")
        begin = time.monotonic()
        found = CompiledProgram.compile(lowered)
        self.note(f"{name}: compiled in {time.monotonic() - begin:.1f} s")
        return found


def _exceeded(error: str) -> int | None:
    """Returns the bytes that a program needs, if the compiler's error is that a device has less."""
    found = re.search(
        r"RESOURCE_EXHAUSTED.*?([\d.]+)([KMGT])\)? (?:exceeds|of [\d.]+[KMGT])", error, re.S
    )
    return found and round(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2])))


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Cost of a program on its mesh.

    Attributes:
      program: The program.
      compiled: Compiler's report on it.
      seconds: Seconds per run, estimated or measured; nan if it does not fit.
      flops: FLOPs per device of its products, convolutions and kernels; nan if it does not fit.
    """

    program: Program
    compiled: CompiledProgram
    seconds: float
    flops: float

    @property
    def fits(self) -> bool:
        """Whether a device has enough memory; if not, only the needed memory is known."""
        return bool(self.compiled.text)

    @property
    def needed(self) -> float | None:
        """FLOPs per device that its work needs, without remat. None means unknown."""
        work = self.program.work
        return None if work is None else sum(work.values()) / self.program.devices


def estimated_seconds(
    program: Program, flops: Flops, compiled: CompiledProgram, device: jax.Device, chip: Chip
) -> float:
    """Estimates the seconds of a program from its FLOPs and its bytes on a device."""
    reached = EFFICIENCY[device.platform]
    efficiency = reached.others if program.work is None else reached.network
    in_memory = compiled.moved / (MEMORY_SHARE * chip.bandwidth)
    return max(flops.weighted / (efficiency * chip.flops), in_memory)


def estimate(
    config: TrainConfig, devices: Sequence[jax.Device], chip: Chip, compiler: CachedCompiler
) -> list[ProgramCost]:
    """Compiles a config's programs, and estimates their seconds.

    The gradient, which needs the most memory, is compiled first. Stops at the first program that does not fit.

    Raises:
      ConfigError: The config's meshes do not fit the devices, or the model's folder cannot be used.
    """
    order = list(step_programs(on_devices(config, len(devices)), devices))
    found: dict[str, ProgramCost] = {}
    for program in sorted(order, key=lambda program: program.name != "train"):
        traced = program.trace()
        compiled = compiler(program.name, traced.lower())
        if not compiled.text:
            found[program.name] = ProgramCost(program, compiled, math.nan, math.nan)
            break
        flops = program_flops(traced.jaxpr, devices[0].platform)
        flops = flops.times(program.share / program.devices)
        seconds = estimated_seconds(program, flops, compiled, devices[0], chip)
        found[program.name] = ProgramCost(program, compiled, seconds, flops.count)
    return [found[program.name] for program in order if program.name in found]


def compile_programs(
    config: TrainConfig, devices: Sequence[jax.Device], note: Callable[[str], None]
) -> list[ProgramCost]:
    """Compiles a config's programs for available devices, for their memory only.

    Raises:
      ConfigError: See `estimate`.
    """
    found = []
    for program in step_programs(on_devices(config, len(devices)), devices):
        note(f"memory of {program.name} on {program.devices} devices: compiling")
        compiled = CompiledProgram.compile(program.trace().lower())
        found.append(ProgramCost(program, compiled, math.nan, math.nan))
    return found


def measure(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    note: Callable[[str], None],
    evaluation: bool = True,
) -> list[ProgramCost]:
    """Runs and times a config's programs on available devices, with small numbers instead of weights.

    Without `evaluation`, omits the programs of an evaluation.

    Raises:
      ConfigError: See `estimate`.
    """
    found = []
    for program in step_programs(on_devices(config, len(devices)), devices):
        if program.command == "evaluate" and not evaluation:
            continue
        note(f"{program.name}: compiling and timing")
        traced = program.trace()
        lowered = traced.lower()
        compiled = lowered.compile()
        # Every call has new arguments, because a program may consume them.
        seconds = _median(compiled, functools.partial(_arguments, lowered, compiled))
        note(f"{program.name}: {seconds:.4g} s")
        flops = program_flops(traced.jaxpr, devices[0].platform).count
        flops *= program.share / program.devices
        found.append(ProgramCost(program, CompiledProgram.of(compiled), seconds, flops))
    return found


def _median(call: Callable[..., Any], arguments: Callable[[], Any] = tuple) -> float:
    """Returns the median seconds of calls, each with new arguments."""
    seconds = []
    for _ in range(1 + REPEATS):
        given = jax.block_until_ready(arguments())
        begin = time.perf_counter()
        jax.block_until_ready(call(*given))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def measured_costs(
    config: TrainConfig, note: Callable[[str], None], serial: tuple[float, float] = (0, 0)
) -> Calibration:
    """Measures the costs of a chunk on the available devices: of its programs, and of the rewards on the host.

    Args:
      config: Config placed on these devices.
      note: Called with each part of the work, which takes minutes.
      serial: See `on_one_device`.

    Raises:
      ConfigError: See `estimate`, and `rewards.NamedReward.answer`.
    """
    devices = jax.devices()
    found = measure(config, devices, note, evaluation=False)
    rewards, learned = resolve(config.rewards), on_mesh(config.rewards)
    others = {number: one for number, one in enumerate(rewards.members) if number not in learned}
    size, images = config.model.size, config.sampler.chunk
    image = synthetic_image(size.height, size.width)
    if size.frames > 1:
        image = np.stack([image] * size.frames)
    prompts = itertools.cycle(itertools.chain(*read_prompt_files(config.prompts.paths)))
    records = list(itertools.islice(prompts, images))
    batch = np.stack([image] * images), [record["prompt"] for record in records], records
    note("score: timing")
    score = _median(lambda: answers(others, batch))
    note(f"score: {score:.4g} s")
    kind, used = devices[0].device_kind, {one.program.name: one.program.devices for one in found}
    meshes = f"{used['generate']} for rollout and {used['train']} for training"
    source = f"a chunk timed on devices of the kind {kind}, {meshes}"
    return calibrate(config, found, CHIPS.get(kind), source, score / images, serial)


def _arguments(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> Any:
    """Returns arrays of a program's shapes with its shardings: keys, zeros, or the number 0.01."""
    shapes, shardings = lowered.args_info[0], compiled.input_shardings[0]

    def filled(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        value = 0.01 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
        return jnp.full(leaf.shape, value, leaf.dtype)

    arrays, tree = cast(Any, jax.tree.flatten(shapes))
    wanted = tree.flatten_up_to(shardings)
    # The compiler gives no sharding for an argument that the program does not read.
    meshes = [sharding.mesh for sharding in wanted if isinstance(sharding, NamedSharding)]
    wanted = [sharding or NamedSharding(meshes[0], PartitionSpec()) for sharding in wanted]
    created = jax.jit(lambda: [filled(leaf) for leaf in arrays], out_shardings=wanted)()
    return jax.tree.unflatten(tree, created)


class Topology(NamedTuple):
    """Devices to plan for.

    Attributes:
      name: Name of the topology.
      devices: All of its devices.
      chip: Kind of each device. None means unknown.
      memory: Bytes per device that a run may take. None means no limit.
      assess: Returns the costs of a config's programs on these devices.
      compiler: Compiler for them. None means that programs run here.
    """

    name: str
    devices: Sequence[jax.Device]
    chip: Chip | None
    memory: float | None
    assess: Callable[[TrainConfig], list[ProgramCost]]
    compiler: CachedCompiler | None = None

    @property
    def how(self) -> str:
        """Source of its numbers, as a word that is printed next to each of them."""
        return "estimated" if self.compiler else "measured"


def open_target(name: str, cpu_devices: int, note: Callable[[str], None]) -> Topology:
    """Returns the devices of a topology such as "v5p:2x2x1" or "h100:8", or the local devices for `LOCAL`.

    Must be called before JAX starts.

    Args:
      name: Name of the topology.
      cpu_devices: Number of virtual devices for `LOCAL` without an accelerator.
      note: Called with each compiled program and its compile time.

    Raises:
      ConfigError: The topology is unknown, its compiler is missing, or a memory variable is invalid.
    """
    prepare(cpu_devices)
    if name == LOCAL:
        devices: Sequence[Any] = jax.devices()
        chip = CHIPS.get(devices[0].device_kind)
        memory = (devices[0].memory_stats() or {}).get("bytes_limit")
        return Topology(name, devices, chip, memory, lambda config: measure(config, devices, note))
    devices = topology_devices(name)
    chip = chip_of(devices[0].device_kind)
    gpu = devices[0].platform == "gpu"
    memory = (_gpu_share() if gpu else TPU_SHARE) * chip.memory
    if gpu and len({device.process_index for device in devices}) > 1:
        chip = dataclasses.replace(chip, link=chip.network)
    versions = f"{name} jax {jax.__version__} {compiler_version(name)}"
    # The CUDA compiler does not check memory limits.
    compiler = CachedCompiler(versions, CACHE.with_name("slices"), note, memory if gpu else None)
    return Topology(
        name, devices, chip, memory, lambda config: estimate(config, devices, chip, compiler), compiler
    )  # fmt: skip


def _gpu_share() -> float:
    """Returns the share of a GPU's memory that JAX takes."""
    name, text = next(((n, os.environ[n]) for n in GPU_SHARES if n in os.environ), ("", GPU_SHARE))
    with contextlib.suppress(ValueError):
        if 0 < (share := float(text)) <= 1:
            return share
    raise ConfigError(f"{name}={text} must be a share of a GPU's memory above 0 and at most 1")


def with_published_folder(config: TrainConfig) -> TrainConfig:
    """Returns the config with the shipped configuration of its model if `model.folder` is a hub id.

    Raises:
      ConfigError: The folder is neither local nor a hub id whose configuration is shipped.
    """
    name = config.model.folder
    if pathlib.Path(name).is_dir():
        return config
    folder = published_folder(name)
    if folder is None:
        raise ConfigError(
            f"config.model.folder = {name!r} is neither a local folder nor a model whose configuration is shipped "
            f"({', '.join(published_models())}): download it and give its folder"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, folder=str(folder)))


def calibrate(
    config: TrainConfig,
    found: list[ProgramCost],
    chip: Chip | None,
    source: str,
    score: float | None = None,
    serial: tuple[float, float] = (0, 0),
) -> Calibration:
    """Returns the costs of a step's commands on one device, from its programs on the config's meshes.

    Weights and trajectories that move between meshes use one link per worker. `score` are the seconds per image of the
    rewards on the host, if known; see `on_one_device` for `serial`.
    """
    seconds = defaultdict[str, float](float)
    for one in found:
        seconds[one.program.command] += one.seconds
    sizes = {one.program.name: one.program.devices for one in found}
    images, footprint = config.sampler.chunk, model_footprint(config)
    missing: tuple[str, ...] = ("score_latency", "evaluate", "switch")
    if score is None:
        missing = ("score", *missing)
    link = chip and LINK_SHARE * chip.link
    if not link:
        missing += ("deliver",)
    costs = Costs(
        generate=seconds["generate"] / images,
        train=seconds["train"] / images,
        decode=seconds["decode"] / images,
        encode=seconds["encode"],
        score=score or 0.0,
        update=seconds["update"],
        sync=seconds["sync"] + (footprint.synced(1, 1) / link if link else 0.0),
        deliver=footprint.trajectory / link if link else 0.0,
    )
    return on_one_device(costs, (sizes["generate"], sizes["train"]), source, missing, serial)
