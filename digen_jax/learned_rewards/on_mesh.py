"""Loads learned rewards onto the meshes of a run, or only their shapes for planning."""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from digen_jax.errors import blame
from digen_jax.learned_rewards import Learned
from digen_jax.learned_rewards.scorers import (
    Aesthetic,
    Opened,
    Similarity,
    aesthetic_shapes,
    in_dtype,
)
from digen_jax.models.text.clip_text import CLIPTextConfig
from digen_jax.models.vision import clip
from digen_jax.models.vision.clip import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)
from digen_jax.models.vision.preprocess import Processor, pil_crop, tensor_crop, tensor_pad
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.reward_model import RewardModel, scorer_shapes
from digen_jax.process.shutdown import during
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve

FILES = ("folder", "file", "head", "processor", "tokenizer")  # settings with file paths


def read(sections: Mapping[int, RewardSettings], group: DeviceGroup) -> tuple[RewardModel, ...]:
    """Loads rewards onto a mesh; `sections` is by index in the config's list.

    Raises:
      ConfigError: A file is missing or invalid; names it and the reward.
    """
    found = []
    for number, one in sections.items():
        learned = _learned(one)
        with blame(f"config.rewards[{number}]: reward {one.title!r}: "):
            opened = learned.open()
            shapes = scorer_shapes(one.title, opened.shapes, group)
            with during(f"loading the weights of reward {one.title!r}"):
                scorer, params = opened.load(jax.tree.map(lambda leaf: leaf.sharding, shapes))
            found.append(RewardModel(one.title, scorer, params, group, learned.batch))
    return tuple(found)


def read_shapes(
    sections: Mapping[int, RewardSettings], group: DeviceGroup
) -> tuple[RewardModel, ...]:
    """Like `read`, but returns shapes instead of weights. Downloads nothing and reads only configs.

    Rewards without local files use their published architectures.

    Raises:
      ConfigError: A file is invalid; names it and the reward.
    """
    found = []
    for number, one in sections.items():
        learned = _learned(one)
        files = [value for name, value in learned.settings if name in FILES and value]
        local = all(pathlib.Path(file).exists() for file in files)
        with blame(f"config.rewards[{number}]: reward {one.title!r}: "):
            opened = learned.open() if local else published(learned)
            shapes = scorer_shapes(one.title, opened.shapes, group)
            found.append(RewardModel(one.title, opened.scorer, shapes, group, learned.batch))
    return tuple(found)


def published(learned: Learned) -> Opened:
    """Returns the published architecture of a reward without weights, for compilation only."""
    dtype = jnp.dtype(dict(learned.settings)["dtype"])
    config, prepare = PUBLISHED[learned.name]
    prepare = functools.partial(prepare, processor=Processor())

    def read(shardings: object = None) -> dict:
        raise ValueError("its files are not on this machine")

    if learned.name == "aesthetic":
        vision = CLIPVisionModelWithProjection(config.vision, dtype)
        return Opened(Aesthetic(vision, prepare), aesthetic_shapes(vision), read)
    network = CLIPModel(config, dtype)
    scorer = Similarity(network, prepare, tokenizer=None)
    return Opened(scorer, in_dtype(clip.shapes(network), dtype), read)


def _learned(settings: RewardSettings) -> Learned:
    (found,) = resolve([settings]).members
    return cast(Learned, found.function)


# ViT-L/14 of OpenAI, and ViT-H/14 of LAION.
LARGE = CLIPConfig(
    CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, projection_dim=768, num_attention_heads=12
    ),
    CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        projection_dim=768,
        num_hidden_layers=24,
        num_attention_heads=16,
        patch_size=14,
    ),
)
HUGE = CLIPConfig(
    CLIPTextConfig(
        hidden_size=1024,
        intermediate_size=4096,
        projection_dim=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        hidden_act="gelu",
    ),
    CLIPVisionConfig(
        hidden_size=1280,
        intermediate_size=5120,
        projection_dim=1024,
        num_hidden_layers=32,
        num_attention_heads=16,
        patch_size=14,
        hidden_act="gelu",
    ),
)
PUBLISHED: dict[str, tuple[CLIPConfig, Callable[..., Any]]] = {
    "clip_score": (LARGE, functools.partial(tensor_crop, kind="bilinear")),
    "pickscore": (HUGE, pil_crop),
    "hpsv2": (HUGE, tensor_pad),
    "aesthetic": (LARGE, pil_crop),
}
