"""A tiny random FLUX.1 Kontext folder, which is that of FLUX.1-dev but for its pipeline, and runs that edit by it."""

import functools
import json
import pathlib
import shutil
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from tests.tiny_runs import once, tiny_config

# Two prompts have the same text, and pictures are of several shapes.
EDITS = [
    ("a red circle", "photos/a.png", (20, 30)),
    ("a red circle", "photos/b.png", (20, 30)),
    ("a blue star above", "photos/b.png", (20, 30)),
    ("two green squares", "c.jpg", (64, 48)),
]
SOURCE = (12, 16)
TOKENS = 21


def kontext_folder(base: pathlib.Path) -> pathlib.Path:
    """The folder, which test processes share."""
    from tests.models.folders import flux_folder

    return once(base / "tiny-flux-kontext", functools.partial(_write, flux_folder(base, "dev")))


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Random colours that change smoothly, as in photographs."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def edit_prompts(base: pathlib.Path) -> pathlib.Path:
    """A prompt file with pictures beside it."""
    return once(base / "tiny-edits", _write_prompts) / "prompts.jsonl"


def edit_config(base: pathlib.Path, **prompts: Any) -> ConfigDict:
    """Two steps that tune a LoRA to edit; `prompts` are fields of that section."""
    c = tiny_config(base, "lora")
    file = str(edit_prompts(base))
    c.model.update(
        folder=str(kontext_folder(base)),
        height=16,
        width=12,
        source_height=SOURCE[0],
        source_width=SOURCE[1],
        max_sequence_length=TOKENS,
    )
    c.prompts.update(file=file, **prompts)
    c.evaluation.update(prompts=file, guidance=2.5)
    c.sampler.guidance = 2.5
    c.lora = ConfigDict(dict(rank=4, alpha=8.0))
    c.rewards = ("tests.models.flux.kontext_folders:likeness",)
    c.reward_pool = ConfigDict(dict(processes=0))
    return c


def likeness(images: np.ndarray, prompts: list[str], metadata: list[dict]) -> np.ndarray:
    """A reward that compares each image with the picture that was edited."""
    height, width = images.shape[1:3]
    sources = [
        np.asarray(Image.open(record["image"]).convert("RGB").resize((width, height))) / 255
        for record in metadata
    ]
    return 1 - np.abs(images / 255 - np.stack(sources)).mean((1, 2, 3))


def _write_prompts(folder: pathlib.Path) -> None:
    (folder / "photos").mkdir(parents=True)
    lines = []
    for seed, (prompt, image, size) in enumerate(EDITS):
        if not (folder / image).exists():
            picture(seed, *size).save(folder / image)
        lines.append(json.dumps({"prompt": prompt, "image": image, "tag": "edit"}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def _write(source: pathlib.Path, folder: pathlib.Path) -> None:
    shutil.copytree(source, folder)
    index = folder / "model_index.json"
    changed = json.loads(index.read_text()) | {"_class_name": "FluxKontextPipeline"}
    index.write_text(json.dumps(changed))
