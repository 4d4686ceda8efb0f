"""Base class of families whose prompts are formatted as a chat and encoded by a language model."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from digen_jax.models.family import Params, Record
from digen_jax.models.linear import exact_products
from digen_jax.models.pipeline_family import PipelineFamily
from digen_jax.models.text import tokenizers
from digen_jax.models.text.language_model import LanguageModel


class Tokens(NamedTuple):
    """Token ids of each prompt's chat, and a mask that is False for trailing padding."""

    ids: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    mask: Bool[Array, "b n"] | Bool[np.ndarray, "b n"]


class MaskedConditioning(NamedTuple):
    """Transformer inputs of a prompt.

    Attributes:
      context: States of the prompt's tokens and of trailing padding.
      mask: False for padding, which the transformer does not attend to.
    """

    context: Float[Array, "b n d"]
    mask: Bool[Array, "b n"]


class ChatFamily(PipelineFamily):
    """Base of a frozen dataclass with these networks and one tokenizer.

    Attributes:
      max_sequence_length: Tokens of a prompt's chat, without the first `dropped`.
      template: Chat text with {} for the prompt. None means a user turn in the tokenizer's chat template.
      dropped: Number of leading template tokens whose states the transformer does not read.
      thinking: Qwen3's `enable_thinking` of the tokenizer's chat template.
      tokenizer_folder: Folder of the tokenizer.
    """

    text_encoder: LanguageModel
    tokenizer: Any

    default_tokens: ClassVar[int] = 512
    template: ClassVar[str | None] = None
    dropped: ClassVar[int] = 0
    thinking: ClassVar[bool] = True
    tokenizer_folder: ClassVar[str] = "tokenizer"
    masked: ClassVar[Mapping[str, str]] = {"context": "mask"}
    # Defaults of the three diffusers pipelines.
    default_steps: ClassVar[int] = 50
    encoded_prompts: ClassVar[int] = 16

    @classmethod
    def read_tokenizers(
        cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int
    ) -> dict[str, Any]:
        """Reads the tokenizer; raises ValueError if it does not fit the language model or the template."""
        head: Any = cls.template and (cls.template.partition("{}")[0], cls.dropped)
        tokenizer = tokenizers.read_language_model(
            folder / cls.tokenizer_folder,
            configs["text_encoder"],
            tokens + cls.dropped,
            chats=cls.template is None,
            head=head,
        )
        return {"tokenizer": tokenizer}

    def tokenize(self, records: Sequence[Record]) -> Tokens:
        """Returns token ids of each prompt's chat, padded or truncated."""
        chats = self._chats([record["prompt"] for record in records])
        return Tokens(*tokenizers.padded(self.tokenizer, chats, self._chat_tokens))

    def is_truncated(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Returns which chats exceed the text encoder's input length, so that `tokenize` truncates them."""
        return tokenizers.longer([(self.tokenizer, self._chat_tokens)], self._chats(prompts))

    def _chats(self, prompts: Sequence[str]) -> list[str]:
        if self.template is not None:
            return [self.template.format(prompt) for prompt in prompts]
        return tokenizers.chat(self.tokenizer, prompts, self.thinking)

    @property
    def _chat_tokens(self) -> int:
        return self.dropped + self.context_tokens

    def states(self, params: Params, tokens: Tokens) -> tuple[Float[Array, "b n d"], ...]:
        """Returns the hidden states that the language model is configured to output."""
        return cast(Any, self.text_encoder).apply({"params": params["text_encoder"]}, *tokens)

    @exact_products
    def encode(self, params: Params, tokens: Tokens) -> MaskedConditioning:
        """Returns the hidden state of each prompt's chat after the dropped tokens, and the padding mask."""
        (states,) = self.states(params, tokens)
        mask = jnp.asarray(tokens.mask)
        return MaskedConditioning(states[:, self.dropped :], mask[:, self.dropped :])
