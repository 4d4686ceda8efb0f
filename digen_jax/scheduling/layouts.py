"""The planning problem, the layouts of a pool of workers, and the bytes that a layout needs on each device."""

import dataclasses
import math
from collections.abc import Callable

from digen_jax.scheduling.settings import Costs, Settings


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Scaling of a command's seconds with the number of devices.

    The share `serial`, from [0, 1), does not scale (Amdahl's law); 0 is linear scaling. The devices split `images`
    images evenly, so their number must divide it. 0 means that any number of devices can split the work.
    """

    serial: float = 0.0
    images: int = 0

    def fits(self, devices: int) -> bool:
        """Returns whether `devices` devices can split the images evenly."""
        return not self.images or self.images % devices == 0

    def used(self, devices: int) -> int:
        """Returns the largest number of devices, up to `devices`, that can split the work."""
        return next(n for n in range(devices, 0, -1) if self.fits(n))

    def seconds(self, devices: int | float) -> float:
        """Returns the seconds on `devices` devices relative to one device."""
        return self.serial + (1 - self.serial) / devices


# Bytes of a parameter tree on each device of a mesh, by the sizes of its axes fsdp and tensor.
OnDevice = Callable[[int, int], float]


@dataclasses.dataclass(frozen=True)
class Programs:
    """Bytes of temporary memory of a layout's programs on a device: temporaries, and results that are not kept.

    `sampling` has those of the workers preferred for sampling, by program: "encoding" is the text encoders, whenever
    they run, and "scoring" the rewards. A training worker that also samples needs them in proportion to its images.
    """

    gradient: float
    update: float
    sampling: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Sizes in bytes; parameter sizes are per device."""

    tuned: OnDevice  # trained parameters; a gradient, a moment or an average has the same size
    synced: OnDevice  # the subset of trained parameters that weight sync sends to a sampler
    base: OnDevice  # other parameters of a worker that trains, such as the weights under a LoRA
    sampler_base: OnDevice  # other parameters of a worker that only samples
    frozen: OnDevice  # text encoders and autoencoder, on the devices that generate images
    copies: int  # additional copies of the trained parameters: an average, an algorithm's slow copy
    trajectory: int  # stored data of one image until it is trained
    conditioning: int  # encoded prompts of a step
    programs: Programs | None = None  # temporary memory, if it is counted
    # Smallest axis fsdp of a training worker, if it divides the worker; larger if the memory requires it.
    trainer_fsdp: int = 1
    worker_fsdp: int = 1  # the same for a worker that only samples
    # Text encoders that are on the sampling devices only before the run; not part of `frozen`.
    encode: OnDevice | None = None
    rewards: OnDevice | None = None  # networks that score images, on the same devices


@dataclasses.dataclass(frozen=True)
class Problem:
    """The input of a plan.

    `settings` are the scheduler's: `readiness` is the minimum that the algorithm needs, `max_policy_lag` the allowed
    maximum, and `ordered` applies to layouts without lag whose workers have the
    same roles. The axes tensor and sequence, whose devices process the same images, are given; a sequence axis shards
    no parameters.
    """

    devices: int  # all of one kind; a layout uses all of them
    settings: Settings
    costs: Costs  # on workers of one device
    worker: Scaling = Scaling()  # of generation and decoding; `images` of a chunk, or 0
    trainer: Scaling = Scaling()  # of training; `images` of a micro-batch, or 0
    transitions: int = 1  # trained steps or noise levels of an image, which the axis `time` splits
    scorers: int = 0  # maximum number of chunks scored concurrently; 0 means unlimited
    footprint: Footprint | None = None  # if memory is predicted
    device_memory: float | None = None  # bytes; None means unlimited
    worker_tensor: int = 1  # of a worker that only samples
    trainer_tensor: int = 1  # of a worker that trains
    worker_sequence: int = 1
    trainer_sequence: int = 1

    @property
    def bound(self) -> float:
        """Seconds of a step if all devices were always busy and everything scaled linearly: (G + T)/N."""
        work = self.costs.generate + self.costs.decode + self.costs.train
        return self.settings.groups * self.settings.images * work / self.devices


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive integer, in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """Workers of a pool. All training workers are alike, and so are all workers that only sample."""

    workers: int  # training workers; the first is the home worker, which runs the updates
    devices: int  # per training worker
    time: int = 1  # parts into which a training worker splits the steps of a trajectory
    samples: bool = True  # whether training workers also sample
    rollout: int = 0  # workers that only sample
    rollout_devices: int = 0  # per worker that only samples
    lag: int = 0  # maximum policy lag, in versions
    shared: int = 1  # devices that process the same images: axes tensor x sequence
    rollout_shared: int = 1  # the same for a worker that only samples

    @property
    def data(self) -> int:
        """Parts into which a training worker splits a micro-batch: the product of its axes data and fsdp."""
        return self.devices // (self.time * self.shared)

    @property
    def rollout_images(self) -> int:
        """Parts into which a worker that only samples splits a chunk, or 0."""
        return self.rollout_devices // self.rollout_shared

    @property
    def sampling_parts(self) -> int:
        """Parts into which the workers preferred for sampling split a chunk."""
        return self.rollout_images or self.data * self.time

    @property
    def kind(self) -> str:
        """Roles of the workers, and the lag."""
        name = "pool" if self.workers > 1 else "colocated"
        if self.rollout:
            name = "rollout + pool" if self.samples else "disaggregated"
        return f"{name}, lag {self.lag}" if self.lag else name

    def describe(self) -> str:
        """Returns a one-line description of the layout."""
        axes = {"time": self.time, "tensor x sequence": self.shared}
        mesh = " x ".join([f"{self.data}", *(f"{n} ({axis})" for axis, n in axes.items() if n > 1)])
        text = f"{self.workers} x {mesh} that {'sample and train' if self.samples else 'train'}"
        rollout = f"{self.rollout} x {self.rollout_devices} that sample, " if self.rollout else ""
        return f"{rollout}{text}"


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes by purpose on a device of the home worker and of a worker that only samples (if there is any).

    Other training workers hold no optimizer state, so the home worker needs the most of them. `encode` is a device
    that encodes prompts before anything else is loaded. A worker runs one program at a time, so only the largest
    temporary memory counts, if the footprint has programs.
    """

    trainer: dict[str, float]
    worker: dict[str, float]
    trainer_fsdp: int
    worker_fsdp: int
    encode: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def largest(self) -> float:
        """Bytes of the fullest device."""
        return _most(self.trainer, self.worker, self.encode)


def device_bytes(problem: Problem, layout: PoolLayout) -> DeviceBytes:
    """Returns the bytes of a layout, with the smallest fsdp axes that fit into device memory.

    If none fits, the axes have the configured sizes, and `largest` shows the excess.
    """
    wanted, limit = problem.footprint, problem.device_memory

    def on_trainer(fsdp: int) -> float:
        encode = {} if layout.rollout else _encode_bytes(problem, layout, fsdp)
        return _most(_trainer_bytes(problem, layout, fsdp), encode)

    def on_rollout(fsdp: int) -> float:
        encode = _encode_bytes(problem, layout, fsdp)
        return _most(_rollout_bytes(problem, layout, fsdp), encode)

    trainer = encode = _smallest(layout.data, wanted.trainer_fsdp, limit, on_trainer)
    rollout = 1
    if layout.rollout:
        rollout = encode = _smallest(layout.rollout_images, wanted.worker_fsdp, limit, on_rollout)
    held = _trainer_bytes(problem, layout, trainer), _rollout_bytes(problem, layout, rollout)
    return DeviceBytes(*held, trainer, rollout, _encode_bytes(problem, layout, encode))


def fits_memory(problem: Problem, layout: PoolLayout) -> bool:
    """Returns whether a layout fits into the memory of every device."""
    if problem.footprint is None or problem.device_memory is None:
        return True
    return device_bytes(problem, layout).largest <= problem.device_memory


def _smallest(devices: int, wanted: int, limit: float | None, held: Callable[[int], float]) -> int:
    """Returns the smallest fsdp axis of at least `wanted` that fits, or the smallest of all if none fits."""
    sizes = [d for d in divisors(devices) if d >= min(wanted, devices)]
    if limit is None:
        return sizes[0]
    return next((size for size in sizes if held(size) <= limit), sizes[0])


def _trainer_bytes(problem: Problem, layout: PoolLayout, fsdp: int) -> dict[str, float]:
    """Returns the bytes of a training worker; gradient, moments and average are sharded like their parameters.

    All candidates of the step, and the started part of the next one, may be waiting for training. The training workers
    hold equal shares of them, plus one chunk that another worker sampled. A group that trains early has two separate
    gradients.
    """
    foot, settings, axes = problem.footprint, problem.settings, (fsdp, problem.trainer_tensor)
    tuned = foot.tuned(*axes)
    off_policy = settings.max_off_policy_fraction if layout.lag else 0.0
    images = max(settings.groups, settings.max_candidates) * settings.images * (1 + off_policy)
    if layout.workers > 1:
        share = math.ceil(images / settings.chunk_images / layout.workers) + 1
        images = min(images, share * settings.chunk_images)
    running = {}
    if foot.programs:
        running = {"the gradient": foot.programs.gradient, "the update": foot.programs.update}
    if layout.samples:
        running |= _sampling(foot, layout, layout.data * layout.time)
    return {
        "parameters": tuned + foot.base(*axes),
        "gradient": (1 + 2 * settings.max_incomplete_groups) * tuned,
        "optimizer": (2 + foot.copies) * tuned,
        "kept versions": (1 + layout.lag) * tuned,
        "frozen": foot.frozen(*axes) if layout.samples else 0.0,
        **(_rewards(foot, *axes) if layout.samples else {}),
        "trajectories": images * foot.trajectory / (layout.data * layout.time),
        "conditioning": (1 + (off_policy > 0)) * float(foot.conditioning),
        **_largest(running),
    }


def _rollout_bytes(problem: Problem, layout: PoolLayout, fsdp: int) -> dict[str, float]:
    """Returns the bytes of a worker that only samples, with one chunk in generation and one in transfer."""
    if not layout.rollout:
        return {}
    foot, axes = problem.footprint, (fsdp, problem.worker_tensor)
    chunk = problem.settings.chunk_images
    return {
        "parameters": foot.sampler_base(*axes),
        "kept versions": (1 + layout.lag) * foot.synced(*axes),
        "frozen": foot.frozen(*axes),
        **_rewards(foot, *axes),
        "trajectories": 2 * chunk / layout.rollout_images * foot.trajectory,
        "conditioning": (1 + (layout.lag > 0)) * float(foot.conditioning),
        **_largest(_sampling(foot, layout, layout.rollout_images)),
    }


def _encode_bytes(problem: Problem, layout: PoolLayout, fsdp: int) -> dict[str, float]:
    """Returns the bytes of text encoders on the sampling devices, before the run's weights are loaded."""
    foot = problem.footprint
    axes = fsdp, problem.worker_tensor if layout.rollout else problem.trainer_tensor
    if foot.encode is None:
        return {}
    running = foot.programs.sampling if foot.programs else {}
    running = {name: size for name, size in running.items() if name == "encoding"}
    return {"text encoders": foot.encode(*axes), **_rewards(foot, *axes), **_largest(running)}


def _rewards(foot: Footprint, *axes: int) -> dict[str, float]:
    return {"rewards": foot.rewards(*axes)} if foot.rewards else {}


def _sampling(foot: Footprint, layout: PoolLayout, parts: int) -> dict[str, float]:
    """Returns the temporary memory of sampling on a worker that splits a chunk into `parts`."""
    if foot.programs is None:
        return {}
    share = layout.sampling_parts / parts
    found = {name: share * size for name, size in foot.programs.sampling.items()}
    return {name: size for name, size in found.items() if not foot.encode or name != "encoding"}


def _most(*held: dict[str, float]) -> float:
    return max(sum(parts.values()) for parts in held)


def _largest(programs: dict[str, float]) -> dict[str, float]:
    """Returns only the program with the largest memory."""
    return {f"temporaries of {n}": programs[n] for n in sorted(programs, key=programs.get)[-1:]}
