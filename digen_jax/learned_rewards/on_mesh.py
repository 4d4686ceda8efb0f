"""The learned rewards that a run computes on its meshes: their weights are read there, or planned with."""

import functools
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from digen_jax.errors import blame
from digen_jax.learned_rewards import aesthetic
from digen_jax.learned_rewards.built_in import Learned
from digen_jax.learned_rewards.files import in_dtype
from digen_jax.learned_rewards.scorer import Opened, Similarity
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
from digen_jax.rewards import NamedReward, RewardSettings
from digen_jax.rewards.built_in import resolve

# The settings that name files.
FILES = ("folder", "file", "head", "processor", "tokenizer")


def read(asked: Mapping[int, RewardSettings], group: DeviceGroup) -> tuple[RewardModel, ...]:
    """Rewards of a config's list, by their places in it, with their weights on a mesh.

    Raises:
      ConfigError: names the reward, and the file that is missing or does not fit.
    """
    return tuple(_read(number, one, group) for number, one in asked.items())


def outlined(asked: Mapping[int, RewardSettings], group: DeviceGroup) -> tuple[RewardModel, ...]:
    """The same with shapes instead of weights: nothing is downloaded, and nothing but configurations is read.

    If the files of a reward are not on this machine, its published network stands for it.

    Raises:
      ConfigError: names the reward, and the file that does not fit.
    """
    return tuple(_outlined(number, one, group) for number, one in asked.items())


def named(
    asked: Mapping[int, RewardSettings], scorers: tuple[RewardModel, ...]
) -> dict[int, NamedReward]:
    """The rewards of a mesh by their places in a config's list, to be called on the host."""
    pairs = zip(asked.items(), scorers, strict=True)
    return {number: NamedReward(settings, scorer) for (number, settings), scorer in pairs}


def _read(number: int, asked: RewardSettings, group: DeviceGroup) -> RewardModel:
    learned = _learned(asked)
    with blame(f"config.rewards[{number}]: reward {asked.title!r}: "):
        opened = learned.opened()
        shardings = jax.tree.map(_sharding, scorer_shapes(asked.title, opened.shapes, group))
        with during(f"the reading of the weights of reward {asked.title!r}"):
            scorer, params = opened.load(shardings)
        return RewardModel(asked.title, scorer, params, group, learned.batch)


def _outlined(number: int, asked: RewardSettings, group: DeviceGroup) -> RewardModel:
    learned = _learned(asked)
    files = [value for name, value in learned.settings if name in FILES and value]
    here = all(pathlib.Path(file).exists() for file in files)
    with blame(f"config.rewards[{number}]: reward {asked.title!r}: "):
        opened = learned.opened() if here else published(learned)
        shapes = scorer_shapes(asked.title, opened.shapes, group)
        return RewardModel(asked.title, opened.scorer, shapes, group, learned.batch)


def _learned(asked: RewardSettings) -> Learned:
    (found,) = resolve([asked]).members
    return found.function


def _sharding(leaf: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    return leaf.sharding


# -------------------------------------------------------------------------- the published networks


def published(learned: Learned) -> Opened:
    """The network that was published for a reward, without files: it can be compiled, but not called."""
    dtype = jnp.dtype(dict(learned.settings)["dtype"])
    config = LARGE if learned.module in ("clip_score", "aesthetic") else HUGE
    if learned.module == "aesthetic":
        seen = CLIPVisionModelWithProjection(config.vision, dtype)
        return Opened(aesthetic.Aesthetic(seen, _prepare(pil_crop)), aesthetic.shapes(seen), _no)
    network = CLIPModel(config, dtype)
    scorer = Similarity(network, PREPARE[learned.module], tokenizer=None)
    return Opened(scorer, in_dtype(clip.shapes(network), dtype), _no)


def _prepare(function: Callable, **options: str) -> Callable:
    return functools.partial(function, processor=Processor(), **options)


def _no(shardings: object = None) -> dict:
    raise ValueError("its files are not on this machine")


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
PREPARE = {
    "clip_score": _prepare(tensor_crop, kind="bilinear"),
    "pickscore": _prepare(pil_crop),
    "hpsv2": _prepare(tensor_pad),
}
