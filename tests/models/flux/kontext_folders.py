"""A tiny random FLUX.1 Kontext folder, which is that of FLUX.1-dev but for its pipeline, and pictures to edit."""

import functools
import json
import pathlib
import shutil

import numpy as np
from diffusers import FluxKontextPipeline
from PIL import Image

from tests.models.flux.folders import flux_folder
from tests.tiny_runs import once


def kontext_folder(base: pathlib.Path) -> pathlib.Path:
    """The folder, which test processes share."""
    return once(base / "tiny-flux-kontext", functools.partial(_write, flux_folder(base, "dev")))


@functools.cache
def kontext_pipeline(folder: pathlib.Path) -> FluxKontextPipeline:
    """diffusers' pipeline of a folder."""
    pipe = FluxKontextPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Random colours that change smoothly, as in photographs."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _write(source: pathlib.Path, folder: pathlib.Path) -> None:
    shutil.copytree(source, folder)
    index = folder / "model_index.json"
    changed = json.loads(index.read_text()) | {"_class_name": "FluxKontextPipeline"}
    index.write_text(json.dumps(changed))
