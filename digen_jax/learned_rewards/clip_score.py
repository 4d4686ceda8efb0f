"""CLIP score: the logit of a picture and its prompt by OpenAI's CLIP, divided by 30.

Hessel et al., CLIPScore, arXiv 2104.08718, as Flow-GRPO has it (flow_grpo/clip_scorer.py; a copy is zhtmike/flow_grpo,
19d5169): openai/clip-vit-large-patch14, whose logits are 100 cosines. Pictures are resized by torchvision's bilinear
filter with antialiasing, not by the processor's bicubic one.
"""

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike

from digen_jax.checkpoints.folder import Folder, resolve_folder
from digen_jax.learned_rewards.files import opened_clip, read_processor, read_tokenizer
from digen_jax.learned_rewards.host import on_host
from digen_jax.learned_rewards.scorer import Opened, Params, Similarity
from digen_jax.models.vision.preprocess import tensor_crop
from digen_jax.parallel.reward_model import RewardModel

DIVISOR = 30.0


def opened(folder: Folder, dtype: DTypeLike = jnp.float32) -> Opened:
    """The scorer, without its parameters.

    Args:
      folder: of a CLIPModel with its tokenizer and processor, or its hub id.
      dtype: of parameters and arithmetic.

    Raises:
      ValueError: names the file that is missing or does not fit.
    """
    folder = resolve_folder(folder)
    network, shapes, read = opened_clip(folder, dtype)
    processor = read_processor(folder, network.config.vision.image_size)
    prepare = functools.partial(tensor_crop, processor=processor, kind="bilinear")
    tokenizer = read_tokenizer(folder, network.config.text)
    return Opened(Similarity(network, prepare, tokenizer, DIVISOR), shapes, read)


def load(
    folder: Folder, dtype: DTypeLike = jnp.float32, shardings: object = None
) -> tuple[Similarity, Params]:
    """The scorer and its parameters: see `opened` and `Opened.load`."""
    return opened(folder, dtype).load(shardings)


def make(*, folder: str, batch: int = 16, dtype: str = "float32") -> RewardModel:
    """The reward on the host; for the settings see `opened` and `on_host`."""
    return on_host(*load(folder, dtype), batch)
