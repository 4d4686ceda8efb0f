"""Loads learned rewards onto the meshes of a run, or only their shapes for planning."""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from digen_jax.errors import prefix_errors
from digen_jax.learned_rewards import Learned
from digen_jax.learned_rewards.scorers import (
    Aesthetic,
    RewardFiles,
    Similarity,
    aesthetic_shapes,
    in_dtype,
)
from digen_jax.models.text.clip_text import CLIPTextConfig
from digen_jax.models.vision import clip
from digen_jax.models.vision.preprocess import Processor, pil_crop, tensor_crop, tensor_pad
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.reward_model import RewardModel, scorer_shapes
from digen_jax.process.shutdown import during
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve


def read(
    sections: Mapping[int, RewardSettings], group: DeviceGroup, weights: bool = True
) -> tuple[RewardModel, ...]:
    """Loads rewards onto a mesh; `sections` is by index in the config's list.

    Without `weights`, their shapes replace them: downloads nothing and reads only configs. Rewards without local files
    then use their published architectures.

    Raises:
      ConfigError: A file is missing or invalid; names it and the reward.
    """
    found = []
    for number, one in sections.items():
        learned = _learned(one)
        local = all(pathlib.Path(file).exists() for file in learned.files.values() if file)
        with prefix_errors(f"config.rewards[{number}]: reward {one.title!r}: "):
            opened = learned.open() if weights or local else published(learned)
            scorer, params = opened.scorer, scorer_shapes(one.title, opened.shapes, group)
            if weights:
                with during(f"loading the weights of reward {one.title!r}"):
                    scorer, params = opened.load(jax.tree.map(lambda leaf: leaf.sharding, params))
            args = scorer, params, group, learned.batch, learned.reduction
            found.append(RewardModel(one.title, *args))
    return tuple(found)


def published(learned: Learned) -> RewardFiles:
    """Returns the published architecture of a reward without weights, for compilation only."""
    dtype = jnp.dtype(learned.dtype)
    config, prepare = PUBLISHED[learned.name]
    prepare = functools.partial(prepare, processor=Processor())

    def read(shardings: object = None) -> dict:
        raise ValueError("its files are not on this machine")

    if learned.name == "aesthetic":
        vision = clip.CLIPVisionModelWithProjection(config.vision, dtype)
        return RewardFiles(Aesthetic(vision, prepare), aesthetic_shapes(vision), read)
    network = clip.CLIPModel(config, dtype)
    scorer = Similarity(network, prepare, tokenizer=None)
    return RewardFiles(scorer, in_dtype(clip.shapes(network), dtype), read)


def _learned(settings: RewardSettings) -> Learned:
    (found,) = resolve([settings]).members
    return cast(Learned, found.function)


# ViT-L/14 of OpenAI, and ViT-H/14 of LAION.
def _tower(kind: type, hidden: int, projection: int, layers: int, heads: int, **more: Any) -> Any:
    """Returns the config of a CLIP tower, whose MLPs have four times the hidden size."""
    sizes = dict(hidden_size=hidden, intermediate_size=4 * hidden, projection_dim=projection)
    return kind(**sizes, num_hidden_layers=layers, num_attention_heads=heads, **more)


GELU = dict(hidden_act="gelu")
LARGE = clip.CLIPConfig(
    _tower(CLIPTextConfig, 768, 768, 12, 12),
    _tower(clip.CLIPVisionConfig, 1024, 768, 24, 16, patch_size=14),
)
HUGE = clip.CLIPConfig(
    _tower(CLIPTextConfig, 1024, 1024, 24, 16, **GELU),
    _tower(clip.CLIPVisionConfig, 1280, 1024, 32, 16, patch_size=14, **GELU),
)
PUBLISHED: dict[str, tuple[clip.CLIPConfig, Callable[..., Any]]] = {
    "clip_score": (LARGE, functools.partial(tensor_crop, kind="bilinear")),
    "pickscore": (HUGE, pil_crop),
    "hpsv2": (HUGE, tensor_pad),
    "aesthetic": (LARGE, pil_crop),
}
