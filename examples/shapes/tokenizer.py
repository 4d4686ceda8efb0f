"""Tokenizers of CLIP and T5 for a small vocabulary, in which each known word is one token."""

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5Tokenizer

END_OF_WORD = "</w>"
BEGIN_OF_TEXT, END_OF_TEXT = "<|startoftext|>", "<|endoftext|>"


def build_clip_tokenizer(texts: Iterable[str], max_length: int) -> CLIPTokenizer:
    """Learns a byte-pair encoding from `texts`; unknown words fall back to bytes, so no text is lost.

    Ids are ordered as in CLIP: bytes, bytes that end a word, merges, then the two special tokens. Padding is the
    end-of-text token, as for CLIP-L. The words of `texts` are a field of the saved tokenizer_config.json, so that a
    run can report prompt words that the model does not know.
    """
    texts = sorted(set(texts))
    learned = Tokenizer(models.BPE(end_of_word_suffix=END_OF_WORD))
    learned.normalizer = normalizers.Lowercase()
    learned.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    learned.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    trainer = trainers.BpeTrainer(
        vocab_size=10_000, min_frequency=1, end_of_word_suffix=END_OF_WORD, show_progress=False
    )
    learned.train_from_iterator(texts, trainer)
    merges = _merges(learned)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [byte + END_OF_WORD for byte in alphabet]
    tokens += [left + right for left, right in merges]
    tokens += [BEGIN_OF_TEXT, END_OF_TEXT]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(
        vocab=vocab, merges=merges, model_max_length=max_length, words=_words(texts)
    )


def build_t5_tokenizer(texts: Iterable[str], max_length: int) -> T5Tokenizer:
    """Returns a Unigram tokenizer of the words in `texts`; all other words are unknown tokens.

    Its field `words` is that of `build_clip_tokenizer`.
    """
    words = _words(texts)
    pieces = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")] + [("▁", -3.0)]
    pieces += [(f"▁{word}", -6.0) for word in words]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_length, words=words)


def _words(texts: Iterable[str]) -> list[str]:
    return sorted({word for text in texts for word in text.lower().split()})


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Returns the merges in the order in which they were learned."""
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
