"""Loads learned rewards onto the meshes of a run, or only their shapes for planning."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any, cast

import jax

from digen_jax.errors import prefix_errors
from digen_jax.learned_rewards import Learned
from digen_jax.learned_rewards.scorers import PREPARE, RewardFiles, aesthetic, similarity
from digen_jax.models.text.clip_text import CLIPTextConfig
from digen_jax.models.vision import clip
from digen_jax.models.vision.preprocess import Processor
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
            params = scorer_shapes(one.title, opened.shapes, group)
            if weights:
                with during(f"loading the weights of reward {one.title!r}"):
                    params = opened.read(jax.tree.map(lambda leaf: leaf.sharding, params))
            args = opened.scorer, params, group, learned.batch, learned.reduction
            found.append(RewardModel(one.title, *args))
    return tuple(found)


def published(learned: Learned) -> RewardFiles:
    """Returns the published architecture of a reward without weights, for compilation only."""

    def read(shapes: Any, shardings: Any) -> dict:
        raise ValueError("its files are not on this machine")

    config = PUBLISHED[learned.name]
    prepare = functools.partial(PREPARE[learned.name], processor=Processor())
    if learned.name == "aesthetic":
        return aesthetic(config.vision, learned.dtype, read, prepare)
    return similarity(config, learned.dtype, read, prepare, tokenizer=None)


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
PUBLISHED = {"clip_score": LARGE, "pickscore": HUGE, "hpsv2": HUGE, "aesthetic": LARGE}
