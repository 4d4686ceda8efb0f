"""CLIP score: the logit of a picture and its prompt by OpenAI's CLIP, divided by 30.

Hessel et al., CLIPScore, arXiv 2104.08718, as Flow-GRPO has it (flow_grpo/clip_scorer.py; a copy is zhtmike/flow_grpo,
19d5169): openai/clip-vit-large-patch14, whose logits are 100 cosines. Pictures are resized by torchvision's bilinear
filter with antialiasing, not by the processor's bicubic one.
"""

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike

from digen_jax.learned_rewards.files import read_clip, read_processor, read_tokenizer
from digen_jax.learned_rewards.host import HostReward
from digen_jax.learned_rewards.scorer import Params, Similarity
from digen_jax.models.vision.preprocess import tensor_crop
from digen_jax.weights.folder import Folder, resolve_folder

DIVISOR = 30.0


def load(
    folder: Folder, dtype: DTypeLike = jnp.float32, shardings: object = None
) -> tuple[Similarity, Params]:
    """The scorer and its parameters.

    Args:
      folder: of a CLIPModel with its tokenizer and processor, or its hub id.
      dtype: of parameters and arithmetic.
      shardings: of the parameters, as in `read_params`.

    Raises:
      ValueError: names the file that is missing or does not fit.
    """
    folder = resolve_folder(folder)
    network, params = read_clip(folder, dtype, shardings)
    processor = read_processor(folder, network.config.vision.image_size)
    prepare = functools.partial(tensor_crop, processor=processor, kind="bilinear")
    tokenizer = read_tokenizer(folder, network.config.text)
    return Similarity(network, prepare, tokenizer, DIVISOR), params


def make(*, folder: str, batch: int = 16, dtype: str = "float32") -> HostReward:
    """The reward on the host; for the settings see `load` and `HostReward`."""
    return HostReward(*load(folder, dtype), batch)
