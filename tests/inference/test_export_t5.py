"""A run that tunes Stable Diffusion 3 with its T5: its export in diffusers' own pipeline, and the run itself."""

import functools

import jax
import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from digen_jax.config.door import open_recipe
from digen_jax.flow.sampling import image_keys, start_noise
from digen_jax.inference.export import export, how_to_load
from digen_jax.inference.model import open_model
from digen_jax.run.train import train
from tests.cases import said
from tests.models.sd3.t5_folders import add_t5
from tests.tiny_runs import PROMPTS, pipeline, tiny_config

STEPS, GUIDANCE, TOKENS = 3, 3.5, 21
SAID = ["a photo of a red circle", "two green squares"]


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    return add_t5(pipeline(base), tmp_path_factory.mktemp("t5") / "pipeline", [*PROMPTS, *SAID])


def trained(base, folder, workdir):
    """The workdir of one step."""
    config = tiny_config(base, "lora")
    config.model.update(folder=str(folder), max_sequence_length=TOKENS)
    config.steps = config.evaluation.every = config.pictures.every = 1
    config.evaluation.batch = len(SAID)  # the same programs encode and decode as below
    train(open_recipe(config), workdir)
    return workdir


@pytest.mark.slow
def test_an_exported_run_gives_its_images_in_diffusers(base, folder, tmp_path):
    workdir, output = trained(base, folder, tmp_path / "run"), tmp_path / "tuned"
    run = export(workdir, output, lora=False)
    assert "None" not in how_to_load(run, output)
    for name in ("text_encoder_3/model.safetensors", "tokenizer_3/tokenizer.json"):
        assert (output / name).read_bytes() == (folder / name).read_bytes()

    model = open_model(str(workdir), jax.devices()[:1])
    assert model.family.text_encoder_3 is not None
    sampler = model.sampler(GUIDANCE, STEPS, None, None)
    rows = np.arange(len(SAID), dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))
    with jax.default_matmul_precision("highest"):
        prompts = sampler.encode(model.weights, said(*SAID))
        trajectory = sampler.generate(model.weights, prompts, rows, keys)
        images = np.asarray(sampler.decode(model.weights, trajectory))[:, 0]

    noise = np.asarray(start_noise(keys, sampler.shape)).transpose(0, 3, 1, 2)
    call = functools.partial(
        dict,
        prompt=SAID,
        height=32,
        width=32,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        max_sequence_length=TOKENS,
        latents=torch.tensor(noise),
        output_type="np",
    )
    found, before = (
        StableDiffusion3Pipeline.from_pretrained(path)(**call()).images for path in (output, folder)
    )
    np.testing.assert_allclose(images, found, rtol=0, atol=1e-3)
    assert (np.abs(found - before).max((1, 2, 3)) > 4 / 255).all()
