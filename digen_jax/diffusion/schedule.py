"""Sigma schedules of diffusers' flow-matching and UniPC schedulers, and windows of their steps.

A window is the steps that are noisy and trained in a training step; it may move. All images of a training step share
one window. It is a pure function of the settings and the training step's number, so that every host and a resumed run
compute the same window.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, Int64

from digen_jax.diffusion.sampling import check_window
from digen_jax.diffusion.steps import ReverseStep
from digen_jax.errors import Count, PositiveInt, Range
from digen_jax.files import check_values, number

# Unsupported fields of diffusers' config that would change the schedule or the step.
UNSUPPORTED = (
    "invert_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "stochastic_sampling",
)


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Fields of `scheduler_config.json` that affect the sigmas, with diffusers' names and defaults.

    `shift` applies to a static schedule, the `base_*`, `max_*` and `time_shift_type` fields to a dynamic
    one, where the shift depends on the number of image tokens. The networks embed 1000 sigma, as diffusers'
    pipelines do for a scheduler with `num_train_timesteps` 1000; no published model has another number.
    """

    name: ClassVar = "FlowMatchEulerDiscreteScheduler"

    num_train_timesteps: Literal[1000] = 1000
    shift: float = number(1.0, 1e-3, 1e3)
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = number(None, 0, 0.999)
    time_shift_type: Literal["exponential", "linear"] = "exponential"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "SchedulerConfig":
        """Parses a `scheduler_config.json`; raises ValueError for a field that is not supported."""
        _check_class(cls.name, config)
        for name in UNSUPPORTED:
            if config.get(name):
                raise ValueError(
                    f"scheduler field {name} is {config[name]!r}, which is unsupported; set false"
                )
        fields = {k: v for k, v in config.items() if not k.startswith("_") and k not in UNSUPPORTED}
        known = {field.name for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise ValueError(f"scheduler field {name} is unknown; remove it from the config")
        check_values(cls, fields)
        return cls(**fields)


# Fields of diffusers' UniPCMultistepScheduler that a flow-matching schedule does not read.
UNIPC_UNREAD = (
    *("beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"),
    *("timestep_spacing", "steps_offset", "dynamic_thresholding_ratio", "sample_max_value"),
    *("time_shift_type", "sigma_min", "sigma_max"),
)
# Its fields that support one value: these are Wan's, and other values change the schedule or the solver (`UniPc`).
UNIPC_FIXED = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "num_train_timesteps": 1000,
    "thresholding": False,
    "disable_corrector": [],
    "solver_p": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
}


@dataclasses.dataclass(frozen=True)
class UniPcConfig:
    """Fields of `scheduler_config.json` that affect the sigmas of diffusers' UniPCMultistepScheduler."""

    name: ClassVar = "UniPCMultistepScheduler"

    flow_shift: float = number(1.0, 1e-3, 1e3)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "UniPcConfig":
        """Parses a `scheduler_config.json`; raises ValueError for a field that is not supported."""
        _check_class(cls.name, config)
        # Without these diffusers' defaults apply, which are those of models that predict noise.
        config = {"prediction_type": "epsilon", "use_flow_sigmas": False, **config}
        for name, value in config.items():
            if name in UNIPC_FIXED and value != UNIPC_FIXED[name]:
                raise ValueError(
                    f"scheduler field {name} is {value!r}, which is unsupported; it must be {UNIPC_FIXED[name]!r}"
                )
            if not name.startswith("_") and name not in (*UNIPC_FIXED, *UNIPC_UNREAD, "flow_shift"):
                raise ValueError(f"scheduler field {name} is unknown; remove it from the config")
        check_values(cls, config)
        return cls(**{"flow_shift": config["flow_shift"]} if "flow_shift" in config else {})


def _check_class(name: str, config: Mapping[str, Any]) -> None:
    kind = config.get("_class_name", name)
    if kind != name:
        raise ValueError(f"scheduler _class_name is {kind!r}; only {name!r} is supported")


class UniPcSchedule(NamedTuple):
    """Schedule of diffusers' UniPCMultistepScheduler.

    Attributes:
      sigmas: Noise levels, from nearly 1 down to 0.
      times: Inputs of the network at all sigmas but the last: 1000 sigma in float64, without its fraction. It cannot be
        computed from float32 sigmas: where 1000 sigma is an integer, the rounding of float64 decides.
    """

    sigmas: Float32[np.ndarray, "sigmas"]
    times: Int64[np.ndarray, "steps"]


def make_unipc_schedule(config: UniPcConfig, num_steps: int) -> UniPcSchedule:
    """Returns the schedule of a sampling run of `num_steps` steps; equals diffusers' bit for bit.

    Raises:
      ValueError: there are too few steps.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; a schedule needs at least 1 step")
    sigmas = _static_shift(np.linspace(1, 1 / 1000, num_steps + 1)[:-1], config.flow_shift)
    if abs(sigmas[0] - 1) < 1e-6:
        sigmas[0] -= 1e-6  # so that the solver's log((1 - sigma) / sigma) is finite
    return UniPcSchedule(
        np.append(sigmas, 0.0).astype(np.float32), (sigmas * 1000).astype(np.int64)
    )


def make_sigmas(
    config: SchedulerConfig,
    num_steps: int,
    image_seq_len: int | None = None,
    spacing: Literal["timesteps", "uniform", "uniform float32"] = "timesteps",
    mu: float | None = None,
) -> Float32[np.ndarray, "sigmas"]:
    """Returns the sigmas of a sampling run of `num_steps` steps, from 1 down to 0.

    They are computed in the precision that diffusers uses at each place, so they equal its
    `scheduler.sigmas` bit for bit.

    Args:
      config: Settings of the scheduler.
      num_steps: Network evaluations n.
      image_seq_len: Number of image tokens; required only with `config.use_dynamic_shifting`.
      spacing: How the family's pipeline spaces the sigmas before the shift. "timesteps":
        evenly from the scheduler's first to its last training timestep (pipelines that pass
        `num_inference_steps`: SD3, Wan). "uniform": from 1 to 1/n (pipelines that pass `sigmas`:
        FLUX, Qwen-Image, HunyuanVideo). "uniform float32": the same from `torch.linspace` (Z-Image).
      mu: Dynamic shift of a pipeline with a different rule. None means the rule of the config.

    Raises:
      ValueError: there are too few steps, or `image_seq_len` is missing although the shift is dynamic.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; a schedule needs at least 1 step")
    if num_steps == 1 and config.shift_terminal:
        raise ValueError(
            "one step is too few for a scheduler with shift_terminal: set 2 steps or more"
        )
    if spacing == "uniform":
        sigmas = np.linspace(1.0, 1.0 / num_steps, num_steps).astype(np.float32)
    elif spacing == "uniform float32":
        sigmas = _torch_linspace(1.0, 1.0 / num_steps, num_steps)
    else:
        sigmas = _spaced_by_timesteps(config, num_steps)
    if config.use_dynamic_shifting:
        sigmas = _dynamic_shift(config, sigmas, _mu(config, image_seq_len) if mu is None else mu)
    else:
        sigmas = _static_shift(sigmas, config.shift)
    if config.shift_terminal:
        remaining = 1 - sigmas
        sigmas = 1 - remaining / (remaining[-1] / (1 - config.shift_terminal))
    return np.append(sigmas, 0.0).astype(np.float32)


def _torch_linspace(first: float, last: float, number: int) -> Float32[np.ndarray, "number"]:
    """Returns `torch.linspace` on a CPU: a rounded step, from the first number up to the middle, then from the last.

    A multiple of the step is added with one rounding (FMA), like a sum in float64.
    """
    start, end, index = np.float32(first), np.float32(last), np.arange(number)
    step = np.float64((end - start) / np.float32(max(1, number - 1)))
    forward, backward = start + step * index, end - step * index[::-1]
    return np.where(index < number // 2, forward, backward).astype(np.float32)


def _static_shift(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Applies the resolution-dependent shift of Stable Diffusion 3 (arXiv 2403.03206)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _spaced_by_timesteps(config: SchedulerConfig, num_steps: int) -> np.ndarray:
    """Spaces sigmas from the first to the last *shifted* training sigma; the shift then applies a second time."""
    steps = config.num_train_timesteps
    ends = np.array([steps, 1], np.float32) / np.float32(steps)
    if not config.use_dynamic_shifting:
        ends = _static_shift(ends, config.shift)
    first, last = (float(end) * steps for end in ends)
    return np.linspace(first, last, num_steps) / steps


def _dynamic_shift(config: SchedulerConfig, sigmas: np.ndarray, mu: float) -> np.ndarray:
    """Applies FLUX's shift."""
    scale = math.exp(mu) if config.time_shift_type == "exponential" else mu
    return scale / (scale + (1 / sigmas - 1))


def _mu(config: SchedulerConfig, image_seq_len: int | None) -> float:
    """Returns FLUX.1's mu, which is linear in the number of image tokens."""
    if image_seq_len is None:
        raise ValueError(
            "image_seq_len is missing; with use_dynamic_shifting, pass the number of image tokens"
        )
    tokens = config.max_image_seq_len - config.base_image_seq_len
    slope = (config.max_shift - config.base_shift) / tokens
    return image_seq_len * slope + (config.base_shift - slope * config.base_image_seq_len)


Mode = Literal["fixed", "random", "progressive"]


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of `length` steps that is fixed, or that moves within the steps [first, end) of the schedule.

    "fixed": it starts at `first`. MixGRPO's paper calls it frozen.

    "random": each position is equally likely, sampled every `interval` training steps. With interval 1 it is
    Flow-GRPO-Fast (arXiv 2505.05470; `sde_window_size` is `length` and `sde_window_range` is (first, end))
    and MixGRPO's "random" strategy. Implementations differ in which images share a position. Flow-GRPO-Fast's
    paper samples one per prompt. Its public code samples one per call of the sampler, shared by all images of
    the call: for SD3 and FLUX anew each time, from a generator that is seeded once per process
    (flow_grpo/diffusers_patch/sd3_pipeline_with_logprob_fast.py, 3d02fd9); for Qwen-Image and BAGEL it seeds
    with the process's number each time, so that a device keeps its position
    (qwenimage_pipeline_with_logprob.py, 4b13ec7). MixGRPO's code samples once per training step and process,
    without a seed. verl-omni's Flow-GRPO samples one per image (verl_omni/pipelines/request_batch.py,
    a1139ba), its MixGRPO one per training step, by a seed, as here.

    "progressive": from `first`, `stride` steps towards the data every `interval` training steps
    (MixGRPO, arXiv 2507.21802: `group_size` is `length`, `iters_per_group` is `interval`). With a
    stride below the length, positions overlap (its `prog_overlap_step`); without `prog_overlap` its
    stride is the length. The last position ends at `end`, even if the stride would lead further, as in
    the paper. MixGRPO's public code lets the window pass the end, where it has fewer steps, down to
    none for one interval. After the last position the window starts again (`roll_back`, which the
    public script sets) or stays (as in the paper). Intervals that shrink along the way (the strategies
    "decay" and "exp_decay") are not implemented.
    """

    mode: Mode = "fixed"  # how the window moves between training steps
    # steps in the window; 0 means sampling without noise, for algorithms that train on final images
    length: Count = 4
    first: Count = 0  # first step of the window, or of the range in which it moves
    # end of the range in which a window moves, exclusive (MixGRPO: 2 steps before the end of the schedule); 0 for a
    # fixed window
    end: Count = 0
    interval: PositiveInt = 1  # training steps between moves
    stride: PositiveInt = 1  # steps by which a "progressive" window moves
    # whether a "progressive" window restarts after its last position instead of staying there
    roll_back: bool = True
    # fraction of the window's steps that each image trains, sampled at random (DanceGRPO)
    timestep_fraction: Annotated[float, Range(0, 1, "least")] = 1.0

    def check(self, steps: int) -> None:
        """Raises ValueError if the window does not fit into a schedule of `steps` steps.

        `check_noise` checks whether its steps have noise, which depends on their kind and the sigmas.
        """
        if self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1")
        if (self.mode == "fixed") != (self.end == 0):
            raise ValueError(
                f"end is {self.end} in mode {self.mode!r}; a window that moves needs the step before which it "
                "stops, a fixed one has none, which is 0"
            )
        end = self.end or self.first + self.length
        if not 0 <= self.first <= end - self.length or end > steps:
            raise ValueError(
                f"length is {self.length}, first is {self.first} and end is {self.end}: the window "
                f"must fit between them, within the schedule's {steps} steps"
            )

    def check_noise(self, step: ReverseStep, sigmas: Float[np.ndarray, "sigmas"]) -> None:
        """Raises ValueError if the window can reach a step that cannot be trained by its density."""
        for start in self.places:
            check_window(step, sigmas, start, self.length)

    @property
    def places(self) -> tuple[int, ...]:
        """Steps at which the window can start, in the order of the schedule."""
        if self.mode == "fixed":
            return (self.first,)
        last = self.end - self.length
        stride = self.stride if self.mode == "progressive" else 1
        return (*range(self.first, last, stride), last)

    def start(self, k: int, seed: int = 0) -> int:
        """Returns the first noisy step in training step k, counted from 0; mode "random" uses `seed`."""
        places, turn = self.places, k // self.interval
        if self.mode == "random":
            return places[np.random.default_rng((seed, turn)).integers(len(places))]
        if self.mode == "progressive" and not self.roll_back:
            return places[min(turn, len(places) - 1)]
        return places[turn % len(places)]


def random_timesteps(
    seed: int | Sequence[int], steps: int, fraction: float
) -> Int[np.ndarray, "k"]:
    """Samples a random share of the denoising steps, in ascending order (DanceGRPO, arXiv 2505.07818).

    DanceGRPO's code samples a separate share for every image, trains it in the sampled order, and never trains
    the last step of the schedule. The order does not matter if gradients are summed, so it is ascending here.
    The share depends only on the seed: (seed, training step) gives all images of a step the same share, and
    (seed, group serial, image) gives each image a separate one, in any batch. The `timestep_fraction` of
    Flow-GRPO's code is different: it takes the first steps, not random ones.

    Args:
      seed: One integer or several, none of them negative.
      steps: Number of denoising steps to choose from, without those that are never trained.
      fraction: Share of the steps, in (0, 1]; rounded down, as in DanceGRPO's code.

    Returns:
      floor(fraction * steps) different indices in [0, steps).

    Raises:
      ValueError: the fraction gives less than one step.
    """
    count = share_of_timesteps(steps, fraction)
    # numpy guarantees that a bit generator's raw stream stays the same, but not the samples from it
    drawn = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(steps)
    return np.sort(np.argsort(drawn, kind="stable")[:count])


def share_of_timesteps(steps: int, fraction: float) -> int:
    """Returns the number of the `steps` denoising steps that `random_timesteps` selects; raises the same error."""
    count = math.floor(fraction * steps + 1e-9)  # 0.29 * 100 is 28.999999999999996
    if count < 1:
        raise ValueError(
            f"timestep_fraction is {fraction}, which selects none of {steps} denoising steps; raise it"
        )
    return count
