"""Bytes on each device, from numbers of parameters, sizes of dtypes, meshes, sharding and compiled programs."""

import dataclasses
import math
from collections.abc import Callable

from digen_jax.scheduling.planner.problem import Footprint, Problem, divisors


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """The workers of a pool. Those that train are all alike, and so are those that only sample."""

    workers: int  # that train; the first one is the home worker, which updates
    devices: int  # of each of them
    time: int = 1  # parts into which each of them splits the steps of a trajectory
    samples: bool = True  # whether they also sample
    rollout: int = 0  # workers that only sample
    rollout_devices: int = 0  # of each of them
    chunk: int = 1  # images
    lag: int = 0  # maximum policy lag, in versions
    shared: int = 1  # devices that work on the same images: the axes tensor and sequence
    rollout_shared: int = 1  # the same of a worker that only samples

    @property
    def data(self) -> int:
        """Parts into which a worker that trains splits a micro-batch: the product of its axes data and fsdp."""
        return self.devices // (self.time * self.shared)

    @property
    def rollout_images(self) -> int:
        """Parts into which a worker that only samples splits a chunk; 0: there is none."""
        return self.rollout_devices // self.rollout_shared

    @property
    def sampling_parts(self) -> int:
        """Parts into which the workers that are preferred for sampling split a chunk."""
        return self.rollout_images or self.data * self.time

    @property
    def kind(self) -> str:
        """Which roles the workers have, and the lag."""
        name = "pool" if self.workers > 1 else "colocated"
        if self.rollout:
            name = "rollout + pool" if self.samples else "disaggregated"
        return f"{name}, lag {self.lag}" if self.lag else name

    def describe(self) -> str:
        """The layout in words."""
        axes = {"time": self.time, "tensor x sequence": self.shared}
        mesh = " x ".join([f"{self.data}", *(f"{n} ({axis})" for axis, n in axes.items() if n > 1)])
        text = f"{self.workers} x {mesh} that {'sample and train' if self.samples else 'train'}"
        rollout = f"{self.rollout} x {self.rollout_devices} that sample, " if self.rollout else ""
        return f"{rollout}{text}, chunks of {self.chunk}"


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes by purpose on a device of the home worker and on one of a worker that only samples (if there is any).

    The other workers that train hold no optimizer state, so the home worker has the most of these. `ahead` are those
    on a device that encodes prompts before there is anything else. One program runs at a time on a worker, so only
    the one with the largest temporary memory counts, if the footprint has programs.
    """

    trainer: dict[str, float]
    worker: dict[str, float]
    trainer_fsdp: int
    worker_fsdp: int
    ahead: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def largest(self) -> float:
        """Bytes of the fullest device."""
        return _most(self.trainer, self.worker, self.ahead)


def device_bytes(problem: Problem, layout: PoolLayout) -> DeviceBytes:
    """The bytes of a layout, with the smallest axes fsdp that fit into the devices' memory.

    If none fits, the axes have the wanted sizes, and `largest` shows the excess.
    """
    wanted, limit = problem.footprint, problem.device_memory

    def on_trainer(fsdp: int) -> float:
        ahead = {} if layout.rollout else _ahead_bytes(problem, layout, fsdp)
        return _most(_trainer_bytes(problem, layout, fsdp), ahead)

    def on_rollout(fsdp: int) -> float:
        ahead = _ahead_bytes(problem, layout, fsdp)
        return _most(_rollout_bytes(problem, layout, fsdp), ahead)

    trainer = ahead = _smallest(layout.data, wanted.trainer_fsdp, limit, on_trainer)
    rollout = 1
    if layout.rollout:
        rollout = ahead = _smallest(layout.rollout_images, wanted.worker_fsdp, limit, on_rollout)
    held = _trainer_bytes(problem, layout, trainer), _rollout_bytes(problem, layout, rollout)
    return DeviceBytes(*held, trainer, rollout, _ahead_bytes(problem, layout, ahead))


def fits_memory(problem: Problem, layout: PoolLayout) -> bool:
    """Whether a layout fits into the memory of every device."""
    if problem.footprint is None or problem.device_memory is None:
        return True
    return device_bytes(problem, layout).largest <= problem.device_memory


def _smallest(devices: int, wanted: int, limit: float | None, held: Callable[[int], float]) -> int:
    """The smallest axis fsdp, at least `wanted`, with which the bytes fit; if none fits, the smallest of these."""
    sizes = [d for d in divisors(devices) if d >= min(wanted, devices)]
    if limit is None:
        return sizes[0]
    return next((size for size in sizes if held(size) <= limit), sizes[0])


def _trainer_bytes(problem: Problem, layout: PoolLayout, fsdp: int) -> dict[str, float]:
    """Gradient, moments and average are laid out like their parameters.

    All candidates of the step, and the started part of the next one, may wait to be trained. The workers that train
    hold equal shares of them, and one more chunk that another worker sampled. A group that trains early has two
    gradients of its own.
    """
    foot, settings, axes = problem.footprint, problem.settings, (fsdp, problem.trainer_tensor)
    tuned = foot.tuned(*axes)
    ahead = settings.max_off_policy_fraction if layout.lag else 0.0
    images = max(settings.groups, settings.max_candidates) * settings.images * (1 + ahead)
    if layout.workers > 1:
        share = math.ceil(images / layout.chunk / layout.workers) + 1
        images = min(images, share * layout.chunk)
    running = {}
    if foot.programs:
        running["the gradient"] = foot.programs.gradient(layout.data, layout.time)
        running["the update"] = foot.programs.update(tuned)
    if foot.programs and layout.samples:
        parts = layout.data * layout.time
        running |= _sampling(problem, layout, parts, *axes, problem.trainer_sequence)
    return {
        "parameters": tuned + foot.base(*axes),
        "gradient": (1 + 2 * settings.max_incomplete_groups) * tuned,
        "optimizer": (2 + foot.copies) * tuned,
        "kept versions": (1 + layout.lag) * tuned,
        "frozen": foot.frozen(*axes) if layout.samples else 0.0,
        **(_rewards(foot, *axes) if layout.samples else {}),
        "trajectories": images * foot.trajectory / (layout.data * layout.time),
        "conditioning": (1 + (ahead > 0)) * float(foot.conditioning),
        **_largest(running),
    }


def _rollout_bytes(problem: Problem, layout: PoolLayout, fsdp: int) -> dict[str, float]:
    """Includes the trajectories of two chunks: one in generation, one in transfer to a worker that trains."""
    if not layout.rollout:
        return {}
    foot, axes = problem.footprint, (fsdp, problem.worker_tensor)
    running = {}
    if foot.programs:
        running = _sampling(problem, layout, layout.rollout_images, *axes, problem.worker_sequence)
    return {
        "parameters": foot.sampler_base(*axes),
        "kept versions": (1 + layout.lag) * foot.published(*axes),
        "frozen": foot.frozen(*axes),
        **_rewards(foot, *axes),
        "trajectories": 2 * layout.chunk / layout.rollout_images * foot.trajectory,
        "conditioning": (1 + (layout.lag > 0)) * float(foot.conditioning),
        **_largest(running),
    }


def _ahead_bytes(problem: Problem, layout: PoolLayout, fsdp: int) -> dict[str, float]:
    """Of the text encoders, on the sampling devices before the weights of the run are there."""
    foot, axes = problem.footprint, (fsdp, problem.trainer_tensor, problem.trainer_sequence)
    if foot.ahead is None:
        return {}
    if layout.rollout:
        axes = fsdp, problem.worker_tensor, problem.worker_sequence
    running = foot.programs.sampling(layout.sampling_parts, *axes) if foot.programs else {}
    running = {name: size for name, size in running.items() if name == "encoding"}
    held = {"text encoders": foot.ahead(*axes[:2]), **_rewards(foot, *axes[:2])}
    return held | _largest(running)


def _rewards(foot: Footprint, *axes: int) -> dict[str, float]:
    return {"rewards": foot.rewards(*axes)} if foot.rewards else {}


def _sampling(
    problem: Problem, layout: PoolLayout, parts: int, fsdp: int, tensor: int, sequence: int
) -> dict[str, float]:
    """The temporary memory of what a worker that samples does in a step."""
    foot = problem.footprint
    # The programs are known for one size of a chunk; a larger part counts in proportion to the largest known one.
    wanted = parts * problem.settings.chunk_images / layout.chunk
    found = foot.programs.sampling(max(1, int(wanted)), fsdp, tensor, sequence)
    known = {name: max(1.0, 1 / wanted) * size for name, size in found.items()}
    return {name: size for name, size in known.items() if not foot.ahead or name != "encoding"}


def _most(*held: dict[str, float]) -> float:
    return max(sum(parts.values()) for parts in held)


def _largest(programs: dict[str, float]) -> dict[str, float]:
    """The program that needs most, alone."""
    return {f"temporaries of {n}": programs[n] for n in sorted(programs, key=programs.get)[-1:]}
