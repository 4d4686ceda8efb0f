"""A tiny random pipeline of a family: what its `spec.py` says for `test_families.py`."""

import dataclasses
import functools
import inspect
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import jax
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from digen_jax.families import load_family, read_parts
from digen_jax.inference.model import all_devices
from digen_jax.models.family import Size
from digen_jax.models.published import published_folder

STEPS = 4
PROMPTS = ["a photo of a red circle", 'two blue squares and "schräge ☃"', ""]
NEGATIVES = ["four shapes", "", "a green star above a yellow triangle"]
LONG = "a green star above a yellow triangle and " * 4 + "a red circle"
# Two of these have other tokens in a pipeline that splits at braces, or cuts where ours does not.
ALL = [*PROMPTS, LONG, "Ein ROTER {Kreis},  schräg ☃\n日本"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to sample.

    Attributes:
      kind: of folder.
      guidance: ours.
      true: ours, of families with two guidances.
      call: arguments of diffusers' pipeline.
      negative: whether prompts have negative ones.
      options: fields of our family.
      frames: of clips. None means those of the pipeline's size.
      second: ours, of the second expert. 0 means `guidance`.
    """

    kind: str
    guidance: float
    true: float = 1.0
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    negative: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    frames: int | None = None
    second: float = 0.0


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A family's tiny pipeline folders.

    Attributes:
      folder: of a folder for all tests and a kind, the pipeline's folder.
      kinds: the first is used where one is enough.
      size: of images or clips, whose sides differ.
      tokens: `max_sequence_length`, fewer than by default to save time, and than LONG has.
      encoded: of diffusers' pipeline and some prompts, their conditioning by field, a list by prompt, without padding
        where that is masked.
      start: our latents as the pipeline is given them.
      seen: our latents as its callback sees them.
      variants: by name; the first is used where one is enough. "plain" has one pass and no negative prompts.
      schedules: published folders, sizes, and arguments of the scheduler for a number of steps and a size.
      first_steps: fewest steps of the schedule.
      defaults: our attributes by the name of the pipeline's argument, whose default they are.
      default_size: of diffusers' pipeline.
      unfit: sizes that are refused.
      broken: (file, changed fields) of folders that are refused, and the file that is named if it is another.
      most: of `max_sequence_length`.
      needed: a component that cannot be left out.
      tolerance: of the conditioning.
      scheduler: diffusers' class.
      times: of a family for a schedule and of its sigmas, diffusers' timesteps.
      clip: further arguments of diffusers' pipeline for our latents.
      tokens_by_default: of diffusers' pipeline, its `max_sequence_length`.
    """

    folder: Callable[[pathlib.Path, str], pathlib.Path]
    kinds: tuple[str, ...]
    size: Size
    tokens: int
    encoded: Callable[[Any, Sequence[str], int], dict[str, list[np.ndarray]]]
    start: Callable[[np.ndarray], torch.Tensor]
    seen: Callable[[np.ndarray], np.ndarray]
    variants: dict[str, Variant]
    schedules: tuple[tuple[str, ...], list[tuple[int, int]], Callable[[Any, int, Size], dict]]
    defaults: dict[str, Any]
    default_size: Callable[[Any], Size]
    unfit: list[Size]
    broken: list[tuple[Any, ...]]
    most: int | None
    needed: str
    first_steps: int = 1
    tolerance: float = 1e-5
    scheduler: Any = FlowMatchEulerDiscreteScheduler
    times: Callable[[Any, np.ndarray], np.ndarray] = lambda family, s: s * np.float32(1000)
    clip: Callable[[np.ndarray], dict[str, Any]] = lambda x: {}
    tokens_by_default: Callable[[Any], int] = lambda pipe: (
        inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default
    )

    @functools.cached_property
    def ours(self) -> Callable[[pathlib.Path], tuple[Any, Any, Any]]:
        """Of a folder the family with all its parameters, and its jitted `encode`."""

        @functools.cache
        def load(folder: pathlib.Path):
            family = load_family(folder, max_sequence_length=self.tokens)
            group = all_devices(jax.devices()[:1])
            return (
                family,
                read_parts(family, folder, family.shapes(), group),
                jax.jit(family.encode),
            )

        return load

    def call(self, pipe: Any, prompts: Sequence[str], x: np.ndarray, **given: Any):
        """Latents after each step as the callback sees them, and clips; an image is a clip of one frame."""
        latents = []

        def keep(pipe, step, timestep, given):
            latents.append(given["latents"].numpy())
            return {}

        given = {k: list(v) if isinstance(v, list) else v for k, v in given.items()}
        found = pipe(
            prompt=list(prompts),
            height=self.size.height,
            width=self.size.width,
            **{"num_inference_steps": STEPS, "max_sequence_length": self.tokens, **given},
            **self.clip(x),
            latents=self.start(np.asarray(x)),
            callback_on_step_end=keep,
            output_type="np",
        )
        return latents, found.frames if "frames" in found else found.images[:, None]


@functools.cache
def diffusers_pipeline(folder: pathlib.Path) -> Any:
    """diffusers' pipeline of a folder."""
    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    pipe = getattr(diffusers, index["_class_name"]).from_pretrained(folder, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sigmas_and_timesteps(spec: Pipeline, name: str, steps: int, size: Size):
    """Of diffusers' scheduler in a published folder."""
    folder = published_folder(name)
    scheduler = spec.scheduler.from_pretrained(folder / "scheduler")
    given = spec.schedules[2](scheduler.config, steps, size)
    scheduler.set_timesteps(**given)
    return scheduler.sigmas.numpy(), scheduler.timesteps.numpy()


def shifted(shift: Callable[..., float]) -> Callable[[Any, int, Size], dict]:
    """The arguments of pipelines that space sigmas evenly and shift them by the tokens of 16 x 16 pixels."""

    def given(config: Any, steps: int, size: Size) -> dict:
        mu = shift(
            (size.height // 16) * (size.width // 16),
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        )
        return dict(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)

    return given


def square(side: int) -> Size:
    """The size of an image of equal sides."""
    return Size(side, side)


def first(x: np.ndarray) -> torch.Tensor:
    """Latents with channels first."""
    return torch.tensor(np.moveaxis(np.asarray(x), -1, 1)).contiguous()


def packed(x: np.ndarray) -> torch.Tensor:
    """Latents as FLUX.1's and Qwen-Image's pipelines take them."""
    batch, height, width, channels = x.shape
    return diffusers.FluxPipeline._pack_latents(first(x), batch, channels, height, width)
