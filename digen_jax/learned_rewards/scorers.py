"""Networks of the learned rewards, and readers of their published files.

CLIP score: the logit of image and prompt by OpenAI's CLIP, divided by 30. Hessel et al., CLIPScore, arXiv 2104.08718,
as in Flow-GRPO (flow_grpo/clip_scorer.py; copied in zhtmike/flow_grpo, 19d5169): openai/clip-vit-large-patch14, with
logits of 100 * cosine similarity. Images are resized by torchvision's antialiased bilinear filter instead of the
processor's bicubic one.

PickScore: the logit of image and prompt by a CLIP fine-tuned on human choices, divided by 26. Kirstain et al.,
Pick-a-Pic, arXiv 2305.01569: yuvalkirstain/PickScore_v1, with the processor and tokenizer of
laion/CLIP-ViT-H-14-laion2B-s32B-b79K. The divisor is Flow-GRPO's (flow_grpo/pickscore_scorer.py, ac4c86e).

HPSv2.1: the cosine similarity of image and prompt by a CLIP fine-tuned on human preferences. Wu et al., Human
Preference Score v2, arXiv 2306.09341: xswu/HPSv2, HPS_v2.1_compressed.pt, and the code tgxs002/HPSv2
(hpsv2/img_score.py and hpsv2/src/open_clip, 866735e). Non-square images are padded with black bars. Resizing is
antialiased, as in the source since torchvision 0.17 (not before).

Aesthetic score: a rating of the image, about 1 to 10, from its CLIP embedding; prompts are ignored.
christophschuhmann/improved-aesthetic-predictor (simple_inference.py and sac+logos+ava1-l14-linearMSE.pth, 6934dd8):
five linear layers without activations, on the L2-normalized embedding of openai/clip-vit-large-patch14. Flow-GRPO
uses this score as reward unchanged (flow_grpo/aesthetic_scorer.py, ac4c86e).
"""

import dataclasses
import functools
import html
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Num

from digen_jax.checkpoints.folder import Folder, read_params, resolve_folder
from digen_jax.checkpoints.tensors import read_tree
from digen_jax.checkpoints.torch_file import as_stored, open_arrays
from digen_jax.files import read_json
from digen_jax.models.linear import exact_products
from digen_jax.models.text import tokenizers
from digen_jax.models.text.tokenizers import padded
from digen_jax.models.vision import clip, open_clip
from digen_jax.models.vision.clip import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)
from digen_jax.models.vision.preprocess import Processor, pil_crop, tensor_crop, tensor_pad
from digen_jax.parallel.reward_model import Scorer

Params = dict[str, Any]
Prepare = Callable[[Num[Array, "b h w 3"]], Float[Array, "b s s 3"]]

# Preprocessing of each reward: takes images and a `Processor`.
PREPARE: dict[str, Callable[..., Any]] = {
    "clip_score": functools.partial(tensor_crop, kind="bilinear"),
    "pickscore": pil_crop,
    "hpsv2": tensor_pad,
    "aesthetic": pil_crop,
}
HPS_HEADS = 16  # attention heads of both towers of open_clip's ViT-H-14
# Straightens curly quotes like open_clip (ftfy's `uncurl_quotes`).
_SINGLE = dict.fromkeys("\u02bc\u2018\u2019\u201a\u201b", "'")
STRAIGHT = str.maketrans(_SINGLE | dict.fromkeys("\u201c\u201d\u201e\u201f", '"'))
# Widths of the aesthetic head's linear layers, by index in the source's list, which also contains dropouts.
WIDTHS = {0: 1024, 2: 128, 4: 64, 6: 16, 7: 1}
# Text tensors of a full CLIPModel.
TEXT_TENSORS = (*clip.IGNORED, "text_model.*", "text_projection.*", "logit_scale")


class RewardFiles(NamedTuple):
    """A learned reward with open files and unread weights."""

    scorer: Scorer
    shapes: Params  # of the parameters
    # maps shardings, or None (see `read_params`), to the parameters; raises ValueError, which names the invalid tensor
    read: Callable[[Any], Params]


# Reads parameters, given their shapes and shardings; see `RewardFiles.read`.
Reader = Callable[[Params, Any], Params]


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Scores image and prompt by the cosine similarity of their embeddings, or by the CLIP logit."""

    network: CLIPModel
    prepare: Prepare  # preprocesses images to the network's pixels
    tokenizer: Any  # transformers' CLIPTokenizer
    divisor: float | None = None  # of the logits; None: the score is the cosine similarity
    clean: Callable[[str], str] = str  # applied to prompts before tokenization

    @property
    def tokens(self) -> int:
        """Sequence length of the text encoder."""
        return self.network.config.text.max_position_embeddings

    def tokenize(self, prompts: Sequence[str]) -> Int[np.ndarray, "b n"]:
        """Returns token ids, truncated or padded to the sequence length.

        The padding token has no effect: it follows the end token, and attention is causal.
        """
        return padded(self.tokenizer, list(map(self.clean, prompts)), self.tokens)[0]

    @exact_products
    def score(
        self, params: Params, images: Num[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """Returns one score per image."""
        cosine, scale = self.network.apply({"params": params}, self.prepare(images), ids)
        return cosine if self.divisor is None else scale * cosine / self.divisor


class AestheticHead(nn.Module):
    """Maps L2-normalized embeddings to ratings."""

    @nn.compact
    def __call__(self, x: Float[Array, "b p"]) -> Float32[Array, "b"]:
        """Computes in float32."""
        for i, width in WIDTHS.items():
            x = nn.Dense(width, dtype=jnp.float32, name=f"layers_{i}")(x)
        return x[:, 0]


@dataclasses.dataclass(frozen=True)
class Aesthetic:
    """Rates images; the parameters are "clip" and "head"."""

    network: CLIPVisionModelWithProjection
    prepare: Prepare  # preprocesses images to the network's pixels

    @property
    def tokens(self) -> int:
        """Sequence length of the unused prompts."""
        return 1

    def tokenize(self, prompts: Sequence[str]) -> Int[np.ndarray, "b n"]:
        """Returns one zero per prompt, since prompts are ignored."""
        return np.zeros((len(prompts), 1), np.int32)

    @exact_products
    def score(
        self, params: Params, images: Num[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """Returns one rating per image."""
        embeddings: Any = self.network.apply({"params": params["clip"]}, self.prepare(images))
        return cast(Any, AestheticHead()).apply({"params": params["head"]}, clip.unit(embeddings))


def similarity(
    config: CLIPConfig,
    dtype: DTypeLike,
    read: Reader,
    prepare: Prepare,
    tokenizer: Any,
    **fields: Any,
) -> RewardFiles:
    """Returns a `Similarity` with further `fields`."""
    network = CLIPModel(config, jnp.dtype(dtype))
    shapes = _in_dtype(clip.shapes(network), dtype)
    scorer = Similarity(network, prepare, tokenizer, **fields)
    return RewardFiles(scorer, shapes, functools.partial(read, shapes))


def aesthetic(
    config: CLIPVisionConfig, dtype: DTypeLike, read: Reader, prepare: Prepare
) -> RewardFiles:
    """Returns an `Aesthetic`; the dtype is that of the CLIP."""
    network, key = CLIPVisionModelWithProjection(config, jnp.dtype(dtype)), jax.random.key(0)
    pixels = jnp.zeros((1, config.image_size, config.image_size, 3))
    vision = jax.eval_shape(network.init, key, pixels)["params"]
    embedding = jnp.zeros((1, config.projection_dim))
    head = jax.eval_shape(AestheticHead().init, key, embedding)["params"]
    shapes = {"clip": _in_dtype(vision, dtype), "head": head}
    return RewardFiles(Aesthetic(network, prepare), shapes, functools.partial(read, shapes))


def open_clip_model(
    folder: Folder,
    processor: Folder = "",
    dtype: DTypeLike = jnp.float32,
    *,
    name: str,
    divisor: float,
) -> RewardFiles:
    """Opens CLIP score or PickScore (`name`) in the folder or Hub id of a CLIPModel.

    `processor` is the folder or Hub id of tokenizer and processor, by default `folder`.

    Raises:
      ValueError: Names the file that is missing or invalid.
    """
    folder = resolve_folder(folder)
    parts = resolve_folder(processor) if processor else folder
    config = _read_config(folder)
    found = _read_processor(parts, config.vision.image_size)

    def read(shapes: Params, shardings: Any) -> Params:
        return read_params(folder, shapes, clip.LISTS, shardings, ignore=clip.IGNORED)

    prepare = functools.partial(PREPARE[name], processor=found)
    tokenizer = tokenizers.read_clip(parts, config.text)
    return similarity(config, dtype, read, prepare, tokenizer, divisor=divisor)


def open_hpsv2(file: Folder, tokenizer: Folder, dtype: DTypeLike = jnp.float32) -> RewardFiles:
    """Opens HPSv2.1 in a checkpoint of open_clip, written by torch.save.

    `tokenizer` is the folder or Hub id of a CLIPTokenizer; all published CLIPs use the same.

    Raises:
      ValueError: Names the file or tensor that is missing, unsafe or invalid.
    """
    arrays = open_arrays(file)
    try:
        config = open_clip.config_of(arrays, HPS_HEADS)
    except ValueError as error:
        raise ValueError(f"{file} has no CLIP of open_clip: {error}") from error
    stored = as_stored(file, open_clip.renamed(arrays))

    def read(shapes: Params, shardings: Any) -> Params:
        return read_tree(stored, shapes, clip.LISTS, shardings, ignore=open_clip.IGNORED)

    size = config.vision.image_size
    prepare = functools.partial(PREPARE["hpsv2"], processor=Processor(edge=size, size=size))
    words = tokenizers.read_clip(resolve_folder(tokenizer), config.text)
    return similarity(config, dtype, read, prepare, words, clean=clean_prompt)


def clean_prompt(prompt: str) -> str:
    """Cleans a prompt like open_clip; of the `ftfy` fixes, only that of quotes."""
    return html.unescape(html.unescape(prompt.translate(STRAIGHT))).strip()


def open_aesthetic(folder: Folder, head: Folder, dtype: DTypeLike = jnp.float32) -> RewardFiles:
    """Opens the aesthetic score in the folder or Hub id of a CLIPModel with its processor.

    `head` is the file of the linear layers, written by torch.save.

    Raises:
      ValueError: Names the file or tensor that is missing, unsafe or invalid.
    """
    folder = resolve_folder(folder)
    config = _read_config(folder).vision
    processor = _read_processor(folder, config.image_size)
    stored = as_stored(head, open_arrays(head))

    def read(shapes: Params, shardings: Any) -> Params:
        each: Any = dict.fromkeys(shapes)
        if shardings is not None:
            each = jax.tree.broadcast(shardings, shapes)
        given = shapes["clip"], clip.LISTS, each["clip"]
        vision = read_params(folder, *given, ignore=TEXT_TENSORS)
        layers = read_tree(stored, shapes["head"], ("layers",), each["head"])
        return {"clip": vision, "head": layers}

    prepare = functools.partial(PREPARE["aesthetic"], processor=processor)
    return aesthetic(config, dtype, read, prepare)


# The argument `dtype` of each is that of parameters and computation.
OPEN = {
    "clip_score": functools.partial(open_clip_model, name="clip_score", divisor=30.0),
    "pickscore": functools.partial(open_clip_model, name="pickscore", divisor=26.0),
    "hpsv2": open_hpsv2,
    "aesthetic": open_aesthetic,
}


def _in_dtype(template: Params, dtype: DTypeLike) -> Params:
    """Casts a template to a dtype, except for the logit scale, which would be off by 1% in bfloat16."""
    leaves = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), template)
    return leaves | {name: template[name] for name in ("logit_scale",) if name in template}


def _read_config(folder: Folder) -> CLIPConfig:
    """Reads the config of a CLIPModel. Raises ValueError, which names the file and the field."""
    return _parse(pathlib.Path(folder) / "config.json", CLIPConfig.from_config)


def _read_processor(folder: Folder, size: int) -> Processor:
    """Reads the processor for images of `size` pixels. Raises ValueError if it does not match."""
    path = pathlib.Path(folder) / "preprocessor_config.json"
    processor = _parse(path, Processor.from_config)
    if (crop := processor.size) != size:
        raise ValueError(f"{path}: crop_size is {crop}, but the network's image_size is {size}")
    return processor


def _parse(path: pathlib.Path, parse: Callable[[dict[str, Any]], Any]) -> Any:
    config = read_json(path)
    try:
        return parse(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
