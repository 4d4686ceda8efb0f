"""PickScore: the logit of a picture and its prompt by a CLIP that was tuned on people's choices, divided by 26.

Kirstain et al., Pick-a-Pic, arXiv 2305.01569: yuvalkirstain/PickScore_v1, with the processor and the tokenizer of
laion/CLIP-ViT-H-14-laion2B-s32B-b79K. The divisor is Flow-GRPO's (flow_grpo/pickscore_scorer.py, ac4c86e).
"""

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike

from digen_jax.checkpoints.folder import Folder, resolve_folder
from digen_jax.learned_rewards.files import opened_clip, read_processor, read_tokenizer
from digen_jax.learned_rewards.host import on_host
from digen_jax.learned_rewards.scorer import Opened, Params, Similarity
from digen_jax.models.vision.preprocess import pil_crop
from digen_jax.parallel.reward_model import RewardModel

DIVISOR = 26.0


def opened(
    folder: Folder, processor: Folder | None = None, dtype: DTypeLike = jnp.float32
) -> Opened:
    """The scorer, without its parameters.

    Args:
      folder: of a CLIPModel, or its hub id.
      processor: folder of tokenizer and processor; None: they are in the model's.
      dtype: of parameters and arithmetic.

    Raises:
      ValueError: names the file that is missing or does not fit.
    """
    folder = resolve_folder(folder)
    beside = folder if processor is None else resolve_folder(processor)
    network, shapes, read = opened_clip(folder, dtype)
    found = read_processor(beside, network.config.vision.image_size)
    prepare = functools.partial(pil_crop, processor=found)
    tokenizer = read_tokenizer(beside, network.config.text)
    return Opened(Similarity(network, prepare, tokenizer, DIVISOR), shapes, read)


def load(
    folder: Folder,
    processor: Folder | None = None,
    dtype: DTypeLike = jnp.float32,
    shardings: object = None,
) -> tuple[Similarity, Params]:
    """The scorer and its parameters: see `opened` and `Opened.load`."""
    return opened(folder, processor, dtype).load(shardings)


def make(
    *, folder: str, processor: str | None = None, batch: int = 16, dtype: str = "float32"
) -> RewardModel:
    """The reward on the host; for the settings see `opened` and `on_host`."""
    return on_host(*load(folder, processor, dtype), batch)
