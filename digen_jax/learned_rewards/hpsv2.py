"""HPSv2.1: the cosine of a picture and its prompt by a CLIP that was tuned on people's preferences.

Wu et al., Human Preference Score v2, arXiv 2306.09341: xswu/HPSv2, HPS_v2.1_compressed.pt, and the code tgxs002/HPSv2
(hpsv2/img_score.py and hpsv2/src/open_clip, 866735e). Pictures that are not square get black bars. The source resizes
with antialiasing since torchvision 0.17, as here, and did so without it before.
"""

import functools
import html
import pathlib

import jax.numpy as jnp
from jax.typing import DTypeLike

from digen_jax.checkpoints.folder import Folder, resolve_folder
from digen_jax.checkpoints.tensors import read_tree
from digen_jax.checkpoints.torch_file import as_stored, open_arrays
from digen_jax.learned_rewards.files import in_dtype, read_tokenizer
from digen_jax.learned_rewards.host import on_host
from digen_jax.learned_rewards.scorer import Opened, Params, Similarity
from digen_jax.models.vision import clip, open_clip
from digen_jax.models.vision.clip import CLIPModel
from digen_jax.models.vision.preprocess import Processor, tensor_pad
from digen_jax.parallel.reward_model import RewardModel

HEADS = 16  # of both towers of open_clip's ViT-H-14


# Curled quotes, which open_clip makes straight (ftfy's `uncurl_quotes`).
STRAIGHT = str.maketrans(
    dict.fromkeys("\u02bc\u2018\u2019\u201a\u201b", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f", '"')
)


def clean(prompt: str) -> str:
    """open_clip's cleaning of a prompt, of whose repairs by `ftfy` only that of quotes."""
    return html.unescape(html.unescape(prompt.translate(STRAIGHT))).strip()


def opened(file: Folder, tokenizer: Folder, dtype: DTypeLike = jnp.float32) -> Opened:
    """The scorer, without its parameters.

    Args:
      file: of open_clip's tensors, written by torch.save.
      tokenizer: folder of a CLIPTokenizer, or its hub id; every published CLIP has the same.
      dtype: of parameters and arithmetic.

    Raises:
      ValueError: names the file or tensor that is missing, unsafe or does not fit.
    """
    arrays = open_arrays(file)
    try:
        config = open_clip.config_of(arrays, HEADS)
    except ValueError as error:
        raise ValueError(f"{file} has no CLIP of open_clip: {error}") from error
    network = CLIPModel(config, jnp.dtype(dtype))
    template = in_dtype(clip.shapes(network), dtype)
    stored = as_stored(pathlib.Path(file), open_clip.renamed(arrays))
    read = functools.partial(read_tree, stored, template, clip.LISTS, ignore=open_clip.IGNORED)
    size = config.vision.image_size
    prepare = functools.partial(tensor_pad, processor=Processor(edge=size, size=size))
    words = read_tokenizer(resolve_folder(tokenizer), config.text)
    scorer = Similarity(network, prepare, words, divisor=None, clean=clean)
    return Opened(scorer, template, read)


def load(
    file: Folder, tokenizer: Folder, dtype: DTypeLike = jnp.float32, shardings: object = None
) -> tuple[Similarity, Params]:
    """The scorer and its parameters: see `opened` and `Opened.load`."""
    return opened(file, tokenizer, dtype).load(shardings)


def make(*, file: str, tokenizer: str, batch: int = 16, dtype: str = "float32") -> RewardModel:
    """The reward on the host; for the settings see `opened` and `on_host`."""
    return on_host(*load(file, tokenizer, dtype), batch)
