"""Two steps of real training of a tiny random pipeline, full and LoRA, run once for all tests that read them."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from filelock import FileLock
from ml_collections import ConfigDict

from tests.pipelines import write_tiny_pipeline

PROMPTS = [
    '{"prompt": "a photo of a red circle", "tag": "colors"}',
    '{"prompt": "a photo of a blue star", "tag": "colors"}',
    '{"prompt": "a photo of two green squares", "tag": "counting"}',
    '{"prompt": "a yellow circle above a red square"}',
    '{"prompt": "a photo of three circles", "tag": "counting"}',
]
TARGETS = r"transformer_blocks\..*\.attn\.(to_[qkv]|to_out\.0)"


def redness(images: np.ndarray, prompts: list[str], metadata: list[dict]) -> np.ndarray:
    """A reward that differs from image to image, or from clip to clip."""
    pixels = tuple(range(1, images.ndim - 1))
    return (images[..., 0].mean(pixels) - images[..., 1:].mean((*pixels, -1))) / 255


def darkness(images: np.ndarray, prompts: list[str], metadata: list[dict]) -> np.ndarray:
    """Another one."""
    return 1 - images.mean((1, 2, 3)) / 255


def once(path: pathlib.Path, make: Callable[[pathlib.Path], Any]) -> pathlib.Path:
    """The result of `make` at `path`, made by the first test process that needs it."""
    with FileLock(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            make(path)
    return path


def pipeline(base: pathlib.Path) -> pathlib.Path:
    return once(base / "tiny-pipeline", write_tiny_pipeline)


@functools.cache
def oracle(folder: pathlib.Path) -> Any:
    """diffusers' own pipeline of a folder."""
    # Here, because scripts that take their reward from this file need no torch.
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompt_file(base: pathlib.Path) -> pathlib.Path:
    return once(base / "tiny-prompts.jsonl", lambda f: f.write_text("\n".join(PROMPTS) + "\n"))


def tiny_config(base: pathlib.Path, kind: str) -> ConfigDict:
    """Few images, and steps with a visible effect; "full" keeps an average of the weights, and has two rewards."""
    prompts = str(prompt_file(base))
    c = ConfigDict()
    c.steps = 2
    c.model = ConfigDict(dict(folder=str(pipeline(base)), height=32, width=32))
    c.prompts = ConfigDict(dict(file=prompts))
    c.rewards = ("tests.tiny_runs:redness",)
    c.batch = ConfigDict(dict(groups=2, images=4))
    c.sampler = ConfigDict(dict(steps=4, window=dict(first=0, length=2), chunk=8))
    c.algorithm = ConfigDict(dict(clip_range=0.2))
    c.trainer = ConfigDict(dict(micro_batch=8, learning_rate=0.01))
    one = dict(data=1, fsdp=1)
    c.placement = ConfigDict(dict(rollout=one, trainer=one))
    c.evaluation = ConfigDict(dict(prompts=prompts, every=2, steps=5, guidance=2.0, batch=4))
    c.images = ConfigDict(dict(every=2, count=2, fps=8))
    if kind == "full":
        c.trainer.ema = 0.5
        c.rewards += (dict(name="tests.tiny_runs:darkness", weight=0.25),)
    else:
        c.lora = ConfigDict(dict(rank=4, alpha=8.0, targets=TARGETS))
        c.trainer.learning_rate = 0.2
    return c


def trained(base: pathlib.Path, kind: str) -> pathlib.Path:
    """The workdir of a finished run of a kind, "full" or "lora"."""
    from digen_jax.config.load import load_config
    from digen_jax.train import train

    config = load_config(tiny_config(base, kind))
    return once(base / f"tiny-run-{kind}", functools.partial(train, config))
