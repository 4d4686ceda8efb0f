"""The planning problem: devices, the shape of a step, costs on one device and their scaling."""

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

    Attributes:
      gradient: by the parts (data, time) into which a trainer mesh splits images and steps. The gathered
        copies of parameters that fsdp splits are not counted.
      update: by the bytes of trained parameters on the device.
      sampling: of each program by name, by the parts into which a mesh splits images, and its axes fsdp,
        tensor and sequence. "encoding" is that of the text encoders, whenever they run; "scoring" that of rewards.
    """

    gradient: Callable[[int, int], float]
    update: Callable[[float], float]
    sampling: Callable[[int, int, int, int], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Sizes in bytes; those of parameters are on one device.

    Attributes:
      tuned: trained parameters; a gradient, a moment or an average has the same size.
      base: other parameters of the trainer, such as the weights under a LoRA.
      published: the part of the tuned parameters that is sent to a sampler.
      sampler_base: other parameters of a sampler.
      frozen: text encoders and autoencoder, on the devices that generate images.
      ahead: text encoders that are on the first of these devices before anything else is, and are not in `frozen`;
        None: there are no such ones.
      rewards: networks that score images, on the devices that generate these, and before anything else is there; None:
        there are none.
      copies: the number of further copies of the tuned parameters: an average, an algorithm's slow copy.
      trajectory: the stored data of one image until it is trained.
      conditioning: the encoded prompts of a step.
      programs: temporary memory of programs; None: it is not counted.
      trainer_fsdp: the least size of the trainer mesh's axis fsdp, if it divides the mesh; it is made
        larger if the memory requires it.
      worker_fsdp: the same for a rollout mesh.
    """

    tuned: OnDevice
    published: OnDevice
    base: OnDevice
    sampler_base: OnDevice
    frozen: OnDevice
    copies: int
    trajectory: int
    conditioning: int
    programs: Programs | None = None
    trainer_fsdp: int = 1
    worker_fsdp: int = 1
    ahead: OnDevice | None = None
    rewards: OnDevice | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a plan depends on.

    Attributes:
      devices: number of devices, all alike.
      settings: of the scheduler with every tactic allowed. `readiness` is the least that the algorithm
        needs; with `staleness` 0 no proposal is asynchronous, with `tag_fragments` 0 none has TAG.
      costs: on a worker and a trainer of one device each.
      worker: scaling of the generation and decoding of a fragment.
      trainer: scaling of its training, over the axes of the trainer mesh that split images.
      transitions: trained steps or noise levels of an image, which the trainer mesh's axis `time` splits.
      scorers: fragments scored at the same time; 0: any number.
      footprint: sizes of what the devices hold; None: memory is not predicted.
      device_memory: bytes; None: any amount.
      worker_tensor: the size of a rollout mesh's axis tensor, whose devices work on the same images;
        the planner does not change it.
      trainer_tensor: the same for the trainer mesh.
      worker_sequence: as worker_tensor, the size of the axis sequence, which splits no parameters.
      trainer_sequence: the same for the trainer mesh.
    """

    devices: int
    settings: Settings
    costs: Costs
    worker: Scaling = Scaling()
    trainer: Scaling = Scaling()
    transitions: int = 1
    scorers: int = 0
    footprint: Footprint | None = None
    device_memory: float | None = None
    worker_tensor: int = 1
    trainer_tensor: int = 1
    worker_sequence: int = 1
    trainer_sequence: int = 1

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
    """The divisors of a whole number above 0, the smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]
