"""The planning problem: devices, the shape of a step, costs on one device, and their scaling."""

import dataclasses
from collections.abc import Callable

from digen_jax.errors import ConfigError, check_positive
from digen_jax.scheduling.settings import Costs, Settings


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How the seconds of a command fall with the devices that share it.

    The share `serial` does not fall (Amdahl's law); 0 is linear scaling. The devices split `images`
    images evenly, so their number must divide it; 0: any number of devices splits the work.
    """

    serial: float = 0.0
    images: int = 0

    def fits(self, devices: int) -> bool:
        """Whether `devices` devices can split the images evenly."""
        return not self.images or self.images % devices == 0

    def used(self, devices: int) -> int:
        """How many of the devices can work together."""
        return next(n for n in range(devices, 0, -1) if self.fits(n))

    def seconds(self, devices: int | float) -> float:
        """Seconds on `devices` devices, divided by those on one."""
        return self.serial + (1 - self.serial) / devices

    def check(self, name: str) -> None:
        """Refuses a serial share outside [0, 1).

        Raises:
          ConfigError: names the field.
        """
        if not 0 <= self.serial < 1:
            raise ConfigError(f"{name} must lie in [0, 1), not be {self.serial}")


# Bytes of a parameter tree on each device of a mesh, by the sizes of its axes fsdp and tensor.
OnDevice = Callable[[int, int], float]


@dataclasses.dataclass(frozen=True)
class Programs:
    """Bytes of temporary memory of programs on a device: temporaries, and results that are not kept.

    `gradient` is by the parts (data, time) into which a worker that trains splits images and steps; gathered copies
    of parameters that fsdp splits are not counted. `update` is by the bytes of trained parameters on the device.
    `sampling`, of each program by name, is by the parts into which a worker splits images, and its axes fsdp, tensor
    and sequence: "encoding" is that of the text encoders, whenever they run, and "scoring" that of rewards.
    """

    gradient: Callable[[int, int], float]
    update: Callable[[float], float]
    sampling: Callable[[int, int, int, int], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Sizes in bytes; those of parameters are on one device."""

    tuned: OnDevice  # trained parameters; a gradient, a moment or an average has the same size
    published: OnDevice  # the part of the tuned parameters that is sent to a sampler
    base: OnDevice  # other parameters of a worker that trains, such as the weights under a LoRA
    sampler_base: OnDevice  # other parameters of a worker that only samples
    frozen: OnDevice  # text encoders and autoencoder, on the devices that generate images
    copies: int  # further copies of the tuned parameters: an average, an algorithm's slow copy
    trajectory: int  # the stored data of one image until it is trained
    conditioning: int  # the encoded prompts of a step
    programs: Programs | None = None  # temporary memory of programs; None: it is not counted
    # The least axis fsdp of a worker that trains, if it divides the worker; larger if the memory requires it.
    trainer_fsdp: int = 1
    worker_fsdp: int = 1  # the same for a worker that only samples
    # Text encoders on the first of the devices that sample before anything else is, and not in `frozen`; None: none.
    ahead: OnDevice | None = None
    rewards: OnDevice | None = None  # networks that score images, on the same devices; None: none


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a plan depends on.

    `settings` are the scheduler's: `readiness` is the least that the algorithm needs, `max_policy_lag` what it allows,
    `passes` those of `chunk_images` images, and `ordered` holds for layouts without lag whose workers have the same
    roles. The axes tensor and sequence, whose devices work on the same images, are given; a
    sequence axis splits no parameters.
    """

    devices: int  # all alike; a layout uses all of them
    settings: Settings
    costs: Costs  # on workers of one device
    worker: Scaling = Scaling()  # of generation and decoding; `images` are those of a chunk, or 0
    trainer: Scaling = Scaling()  # of training; `images` are those of a micro-batch, or 0
    transitions: int = 1  # trained steps or noise levels of an image, which the axis `time` splits
    scorers: int = 0  # chunks scored at the same time; 0: any number
    footprint: Footprint | None = None  # None: memory is not predicted
    device_memory: float | None = None  # bytes; None: any amount
    worker_tensor: int = 1  # of a worker that only samples
    trainer_tensor: int = 1  # of a worker that trains
    worker_sequence: int = 1
    trainer_sequence: int = 1
    chunks: tuple[int, ...] = ()  # sizes of a chunk to choose from; empty: `settings.chunk_images`

    def check(self) -> None:
        """Refuses a problem that cannot be planned.

        Raises:
          ConfigError: names the field and what to change.
        """
        check_positive("the number of devices", self.devices)
        self.worker.check("worker_serial")
        self.trainer.check("trainer_serial")
        for name, seconds in dataclasses.asdict(self.costs).items():
            if not seconds >= 0:
                raise ConfigError(f"the cost {name} must be 0 seconds or more, not {seconds}")
        if not self.costs.generate + self.costs.train > 0:
            raise ConfigError("generate and train cost nothing: give their seconds an image")
        self.settings.check()

    @property
    def bound(self) -> float:
        """Seconds of a step if all devices were always busy and everything scaled: (G + T)/N."""
        work = self.costs.generate + self.costs.decode + self.costs.train
        return self.settings.groups * self.settings.images * work / self.devices


def divisors(number: int) -> list[int]:
    """The divisors of a positive integer, the smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]
