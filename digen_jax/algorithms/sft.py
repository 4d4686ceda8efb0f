"""Supervised fine-tuning: the flow-matching loss of the user's own images.

The loss is that of diffusers' training script for Stable Diffusion 3 (examples/dreambooth/train_dreambooth_lora_sd3.py)
with `weighting_scheme` "logit_normal", whose weights are 1, and of Flow-GRPO's (yifan123/flow_grpo,
scripts/train_sd3_sft.py, ac4c86e) without its factor, the advantage of a sampled image. Both take noise levels from the
scheduler's 1000; here they are continuous.
"""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float32

from digen_jax.algorithms.algorithm import Matching, MatchingSamples, Velocities
from digen_jax.algorithms.losses import mask_rows, velocity_mse
from digen_jax.diffusion.noising import LogitNormalTimes
from digen_jax.errors import NonNegativeFloat

TIMES = LogitNormalTimes(1, shift=3.0)  # the training density of Stable Diffusion 3


@dataclasses.dataclass(frozen=True)
class SFT(Matching):
    """Settings. The images are those that the field "chosen" of prompts names."""

    name: ClassVar[str] = "sft"
    config_defaults: ClassVar[dict] = dict(reference_guidance=0.0)

    # guidance scale in training; 0 means the sampler's; 1 or less otherwise means none
    guidance: NonNegativeFloat = 1.0
    # guidance scale of the reference; 0 means `guidance`
    reference_guidance: NonNegativeFloat = 1.0
    times: LogitNormalTimes = TIMES

    @property
    def given_images(self) -> tuple[str, ...]:
        """Field of a prompt record that names its image."""
        return ("chosen",)

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that `loss` returns."""
        return ("loss",)

    @property
    def reads_reference(self) -> bool:
        """False: there is no KL to the initial policy."""
        return False

    def loss(self, samples: MatchingSamples, v: Velocities) -> dict[str, Float32[Array, "n"]]:
        """Returns (v - (eps - x0))^2, averaged over each image's latents."""
        velocity, target = mask_rows(samples.trained, v.trained, samples.target)
        return {"loss": velocity_mse(velocity, target)}
