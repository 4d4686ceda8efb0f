"""Sigma schedules that equal those of diffusers' FlowMatchEulerDiscreteScheduler."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from digen_jax.json_fields import check_values, number

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
        kind = config.get("_class_name", "FlowMatchEulerDiscreteScheduler")
        if kind != "FlowMatchEulerDiscreteScheduler":
            raise ValueError(
                f"scheduler _class_name is {kind!r}; "
                "only 'FlowMatchEulerDiscreteScheduler' is supported"
            )
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
    first, last, index = np.float32(first), np.float32(last), np.arange(number)
    step = np.float64((last - first) / np.float32(max(1, number - 1)))
    forward, backward = first + step * index, last - step * index[::-1]
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
