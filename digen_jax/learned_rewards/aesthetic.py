"""LAION's aesthetic score: a rating of the picture, about 1 to 10, from its CLIP embedding; prompts have no effect.

christophschuhmann/improved-aesthetic-predictor (simple_inference.py and sac+logos+ava1-l14-linearMSE.pth, 6934dd8):
five linear layers without activations, on the embedding of openai/clip-vit-large-patch14 divided by its length.
Flow-GRPO's reward is this score itself (flow_grpo/aesthetic_scorer.py, ac4c86e).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, UInt8

from digen_jax.checkpoints.folder import Folder, read_params, resolve_folder
from digen_jax.checkpoints.tensors import read_tree
from digen_jax.checkpoints.torch_file import as_stored, open_arrays
from digen_jax.learned_rewards.files import in_dtype, read_config, read_processor
from digen_jax.learned_rewards.host import on_host
from digen_jax.learned_rewards.scorer import Opened, Params, Prepare
from digen_jax.models.linear import exact_products
from digen_jax.models.vision import clip
from digen_jax.models.vision.clip import CLIPVisionModelWithProjection
from digen_jax.models.vision.preprocess import pil_crop
from digen_jax.parallel.reward_model import RewardModel

# The linear layers' widths by their places in the source's list, between which are dropouts.
WIDTHS = {0: 1024, 2: 128, 4: 64, 6: 16, 7: 1}
LISTS = ("layers",)
# Of a whole CLIPModel's tensors, those of texts.
IGNORED = (*clip.IGNORED, "text_model.*", "text_projection.*", "logit_scale")


class Head(nn.Module):
    """From embeddings of length 1 to ratings."""

    @nn.compact
    def __call__(self, x: Float[Array, "b p"]) -> Float32[Array, "b"]:
        """In float32."""
        for place, width in WIDTHS.items():
            x = nn.Dense(width, dtype=jnp.float32, name=f"layers_{place}")(x)
        return x[:, 0]


@dataclasses.dataclass(frozen=True)
class Aesthetic:
    """The rating of a picture.

    Attributes:
      network: of pictures.
      prepare: from pictures to the network's pixels.
    """

    network: CLIPVisionModelWithProjection
    prepare: Prepare

    @property
    def tokens(self) -> int:
        """A zero for each prompt."""
        return 1

    def tokenize(self, prompts: Sequence[str]) -> Int[np.ndarray, "b n"]:
        """A zero for each prompt, since prompts have no effect."""
        return np.zeros((len(prompts), 1), np.int32)

    @exact_products
    def score(
        self, params: Params, images: UInt8[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """One rating a picture."""
        embeddings = self.network.apply({"params": params["clip"]}, self.prepare(images))
        return Head().apply({"params": params["head"]}, clip.unit(embeddings))


def opened(folder: Folder, head: Folder, dtype: DTypeLike = jnp.float32) -> Opened:
    """The scorer, without its parameters, "clip" and "head".

    Args:
      folder: of a CLIPModel with its processor, or its hub id.
      head: file of the linear layers, written by torch.save.
      dtype: of the CLIP's parameters and arithmetic.

    Raises:
      ValueError: names the file or tensor that is missing, unsafe or does not fit.
    """
    folder = resolve_folder(folder)
    config = read_config(folder).vision
    network = CLIPVisionModelWithProjection(config, jnp.dtype(dtype))
    processor = read_processor(folder, config.image_size)
    template = shapes(network)
    stored = as_stored(pathlib.Path(head), open_arrays(head))

    def read(shardings: object = None) -> Params:
        each: Any = dict.fromkeys(template)
        if shardings is not None:
            each = jax.tree.broadcast(shardings, template)
        return {
            "clip": read_params(folder, template["clip"], clip.LISTS, each["clip"], ignore=IGNORED),
            "head": read_tree(stored, template["head"], LISTS, each["head"]),
        }

    scorer = Aesthetic(network, functools.partial(pil_crop, processor=processor))
    return Opened(scorer, template, read)


def shapes(network: CLIPVisionModelWithProjection) -> Params:
    """The tree of all parameters as shapes, those of the CLIP in the type of its arithmetic."""
    config = network.config
    pixels = jnp.zeros((1, config.image_size, config.image_size, 3))
    seen = jax.eval_shape(network.init, jax.random.key(0), pixels)["params"]
    layers = jax.eval_shape(Head().init, jax.random.key(0), jnp.zeros((1, config.projection_dim)))
    return {"clip": in_dtype(seen, network.dtype), "head": layers["params"]}


def load(
    folder: Folder, head: Folder, dtype: DTypeLike = jnp.float32, shardings: object = None
) -> tuple[Aesthetic, Params]:
    """The scorer and its parameters: see `opened` and `Opened.load`."""
    return opened(folder, head, dtype).load(shardings)


def make(*, folder: str, head: str, batch: int = 16, dtype: str = "float32") -> RewardModel:
    """The reward on the host; for the settings see `opened` and `on_host`."""
    return on_host(*load(folder, head, dtype), batch)
