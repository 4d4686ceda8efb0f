"""A learned reward before its weights are read, and the scorer that compares a picture with its prompt."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt8

from digen_jax.models.linear import exact_products
from digen_jax.models.text.tokenizers import padded
from digen_jax.models.vision.clip import CLIPModel
from digen_jax.parallel.reward_model import Scorer

Params = dict[str, Any]
Prepare = Callable[[UInt8[Array, "b h w 3"]], Float[Array, "b s s 3"]]


class Opened(NamedTuple):
    """A learned reward whose files are open, and whose weights are not yet read."""

    scorer: Scorer
    shapes: Params  # of the parameters
    read: Callable[[Any], Params]  # gives them with shardings, which are as in `read_params`

    def load(self, shardings: Any = None) -> tuple[Any, Params]:
        """The scorer and its parameters; raises ValueError, which names the file or tensor that does not fit."""
        return self.scorer, self.read(shardings)


@dataclasses.dataclass(frozen=True)
class Similarity:
    """The cosine of the embeddings of a picture and its prompt, or the logit that CLIP makes of it.

    Attributes:
      network: of both.
      prepare: from pictures to the network's pixels.
      tokenizer: transformers' CLIPTokenizer.
      divisor: of logits; None: the score is the cosine.
      clean: what is done to a prompt before it is tokenized.
    """

    network: CLIPModel
    prepare: Prepare
    tokenizer: Any
    divisor: float | None = None
    clean: Callable[[str], str] = str

    @property
    def tokens(self) -> int:
        """The positions of the network."""
        return self.network.config.text.max_position_embeddings

    def tokenize(self, prompts: Sequence[str]) -> Int[np.ndarray, "b n"]:
        """Ids, truncated or padded to as many as the network has positions.

        The kind of padding has no effect: it comes behind the end token, and attention is causal.
        """
        return padded(self.tokenizer, list(map(self.clean, prompts)), self.tokens)[0]

    @exact_products
    def score(
        self, params: Params, images: UInt8[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """One score a picture."""
        cosine, scale = self.network.apply({"params": params}, self.prepare(images), ids)
        return cosine if self.divisor is None else scale * cosine / self.divisor
