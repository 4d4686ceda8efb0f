"""What a learned reward is to those who run it, and the one that compares a picture with its prompt."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt8

from digen_jax.models.precision import exact_products
from digen_jax.models.text.tokenizer_files import padded
from digen_jax.models.vision.clip import CLIPModel

Params = dict[str, Any]
Prepare = Callable[[UInt8[Array, "b h w 3"]], Float[Array, "b s s 3"]]


@runtime_checkable
class Scorer(Protocol):
    """A network that scores pictures; its parameters are passed to each call."""

    def tokenize(self, prompts: Sequence[str]) -> Int[np.ndarray, "b n"]:
        """Token ids for `score`, on the host."""
        ...

    def score(
        self, params: Params, images: UInt8[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """One score a picture, for `jax.jit`."""
        ...


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

    def tokenize(self, prompts: Sequence[str]) -> Int[np.ndarray, "b n"]:
        """Ids, truncated or padded to as many as the network has positions.

        The kind of padding has no effect: it comes behind the end token, and attention is causal.
        """
        length = self.network.config.text.max_position_embeddings
        return padded(self.tokenizer, list(map(self.clean, prompts)), length)[0]

    @exact_products
    def score(
        self, params: Params, images: UInt8[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> Float32[Array, "b"]:
        """One score a picture."""
        cosine, scale = self.network.apply({"params": params}, self.prepare(images), ids)
        return cosine if self.divisor is None else scale * cosine / self.divisor
