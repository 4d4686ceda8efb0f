"""Clips of a pipeline folder of moving shapes, by this project and by diffusers."""

import pathlib

import jax
import numpy as np
import torch
from diffusers import WanPipeline

from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.inference.model import open_model
from tests.cases import said
from tests.pipelines import decode_floats

PROMPTS = "a red circle moving left", "a blue star standing still and a green ring moving down"


def both(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Clips in [0, 1] by this project and by diffusers, of the same prompts and noise, in two steps."""
    model = open_model(str(folder), jax.devices()[:1])
    sampler, places = model.sampler(dict(steps=2)), np.arange(2, dtype=np.int32)
    keys = image_keys(jax.random.key(3), places, np.zeros_like(places))
    with jax.default_matmul_precision("highest"):
        encoded = sampler.encode(model.weights, said(*PROMPTS))
        trajectory = sampler.generate(model.weights, encoded, places, keys)
        found = np.asarray(decode_floats(sampler, model.weights, trajectory))
    noise = np.asarray(start_noise(keys, sampler.shape)).transpose(0, 4, 1, 2, 3)
    pipe = WanPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    height, width, frames = sampler.settings.size
    expected = pipe(
        list(PROMPTS),
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=2,
        guidance_scale=model.defaults.guidance,
        latents=torch.from_numpy(noise.copy()),
        max_sequence_length=model.family.max_sequence_length,
        output_type="np",
    ).frames
    return found, expected
