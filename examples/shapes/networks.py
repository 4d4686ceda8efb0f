"""Pipelines that are pretrained on shapes: tokenizer, config.json of each network, and the pipeline folder."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5Tokenizer

from digen_jax.checkpoints.folder import INDEX, SAMPLING, write_params
from digen_jax.models.autoencoders import autoencoder_kl, autoencoder_wan
from digen_jax.models.pipeline_family import PipelineFamily
from digen_jax.models.sd3.family import StableDiffusion3
from digen_jax.models.wan.family import Wan

Family = Any  # of one of `PIPELINES`
Configs = dict[str, dict]
Latents = Float[np.ndarray, "n *t h w c"]

END_OF_WORD = "</w>"
# Initial log variance of latents, whose variance is about 1.
LOG_VARIANCE = -6.0
BEGIN_OF_TEXT, END_OF_TEXT = "<|startoftext|>", "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline class without its optional components, and what pretraining needs to know about it.

    Attributes:
      family: Its family.
      config: Config that pretrains it; a config of this pipeline has the same fields.
      build_tokenizer: Returns a tokenizer for some texts and a number of tokens.
      make_configs: Returns the config.json of each network and the scheduler, for a config and its tokenizer. The entry
        "sampling", if any, is the content of the folder's sampling.json.
      latent_statistics: Returns the autoencoder's fields that give latents zero mean and unit variance.
      scale_latents: Scales latents by these fields of the autoencoder's config.
      at_once: Arguments of the autoencoder that process all frames of a clip together, which is fastest.
      dtype: Dtype of the weights in files of diffusers' networks, which diffusers reads as float32.
      start_autoencoder: Returns the autoencoder's parameters to start from, given random ones.
    """

    family: type[PipelineFamily]
    config: str
    build_tokenizer: Callable[[Iterable[str], int], Any]
    make_configs: Callable[[ConfigDict, Any], Configs]
    latent_statistics: Callable[[Latents], dict[str, Any]]
    scale_latents: Callable[[Any, Array], Array]
    at_once: Mapping[str, int] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    start_autoencoder: Callable[[Any], Any] = lambda vae: vae

    def network_configs(self, config: ConfigDict, tokenizer: Any) -> Configs:
        """Returns the config.json of each network, with the field names of diffusers and transformers."""
        # Tuples become lists, as in a file.
        return json.loads(json.dumps(self.make_configs(config, tokenizer)))

    def build_family(self, networks: Configs, tokenizer: Any, dtype: str) -> Any:
        """Returns a family with new networks; all text encoders use the same tokens."""
        readers = self.family.readers(without=self.family.optional)
        configs = {part: read(networks[part]) for part, read in readers.items()}
        classes = self.family.classes(self.family.optional).items()
        names = [name for name, (library, *_) in classes if library and "tokenizer" in name]
        tokenizers = dict.fromkeys(names, tokenizer)
        tokens = networks.get("sampling", {}).get("max_sequence_length", 0)
        return self.family.build(configs, tokenizers, jnp.dtype(dtype), max_sequence_length=tokens)

    def write(self, output: pathlib.Path, family: Any, networks: Configs, params: Any) -> None:
        """Writes a folder for `from_pretrained` of the pipeline; model_index.json is written last."""
        for part in family.networks:
            text = part.startswith("text")
            dtype = np.dtype("float32" if text else self.dtype)
            write_params(
                output / part,
                jax.tree.map(lambda leaf, dtype=dtype: np.asarray(leaf, dtype), params[part]),
                family.lists[part],
                config=networks[part],
                kind="transformers" if text else "diffusers",
            )
        for part in family.encoders.values():
            getattr(family, part).save_pretrained(output / part)
        (output / "scheduler").mkdir(parents=True, exist_ok=True)
        classes = self.family.classes(without=self.family.optional)
        index = {"_class_name": family.pipeline} | {name: one[:2] for name, one in classes.items()}
        files = {"scheduler/scheduler_config.json": networks["scheduler"], INDEX: index}
        if "sampling" in networks:
            files = {SAMPLING: networks["sampling"]} | files
        for name, value in files.items():
            (output / name).write_text(json.dumps(value, indent=2) + "\n")


def _sd3_configs(config: ConfigDict, tokenizer: Any) -> Configs:
    values = config.to_dict()
    text = {
        "architectures": ["CLIPTextModelWithProjection"],
        "model_type": "clip_text_model",
        "vocab_size": len(tokenizer),
        "max_position_embeddings": config.text.max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **values["text"]["encoder"],
    }
    return {
        "transformer": {"_class_name": "SD3Transformer2DModel", **values["transformer"]["network"]},
        "vae": {
            "_class_name": "AutoencoderKL",
            "sample_size": config.image_size,
            **values["autoencoder"]["network"],
        },
        "text_encoder": text,
        "text_encoder_2": {**text, "hidden_act": "gelu"},
        "scheduler": {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": 1000,
            "shift": config.shift,
        },
    }


def _wan_configs(config: ConfigDict, tokenizer: Any) -> Configs:
    values = config.to_dict()
    return {
        "transformer": {"_class_name": "WanTransformer3DModel", **values["transformer"]["network"]},
        "vae": {"_class_name": "AutoencoderKLWan", **values["autoencoder"]["network"]},
        "text_encoder": {
            "architectures": ["UMT5EncoderModel"],
            "model_type": "umt5",
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **values["text"]["encoder"],
        },
        "scheduler": {
            "_class_name": "UniPCMultistepScheduler",
            "num_train_timesteps": 1000,
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": config.shift,
        },
        "sampling": {
            **values["sampling"],
            "height": config.image_size,
            "width": config.image_size,
            "frames": config.frames,
            "max_sequence_length": config.text.max_length,
        },
    }


def _statistics_of_all(latents: Latents) -> dict[str, float]:
    """Returns shift_factor and scaling_factor of all channels together."""
    return {
        "shift_factor": float(np.mean(latents, dtype=np.float64)),
        "scaling_factor": float(1 / np.std(latents, dtype=np.float64)),
    }


def _statistics_of_channels(latents: Latents) -> dict[str, list[float]]:
    """Returns latents_mean and latents_std, with a number for each channel."""
    flat = latents.reshape(-1, latents.shape[-1])
    return {
        "latents_mean": np.mean(flat, axis=0, dtype=np.float64).tolist(),
        "latents_std": np.std(flat, axis=0, dtype=np.float64).tolist(),
    }


def _start_wan_autoencoder(vae: Any) -> Any:
    """Returns parameters that process each frame as an image, with latents of little noise.

    Like that of Wan (arXiv 2503.20314), pretraining starts with images. Kernels over time read the last
    frame only: latents are those of every fourth frame, and the decoder repeats frames. The second convolution of each
    residual block is zero.
    """

    def start(path: tuple, leaf: Array) -> Array:
        *_, module, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if module == "quant_conv" and name == "bias":
            return leaf.at[len(leaf) // 2 :].set(LOG_VARIANCE)
        if name != "kernel" or leaf.ndim != 5:
            return leaf
        frames, *_, inputs, outputs = leaf.shape
        last = leaf[-1] * frames**0.5  # keeps the outputs' variance
        if module == "time_conv":
            last = jnp.tile(jnp.eye(inputs), outputs // inputs)
        elif module == "conv2":
            last = jnp.zeros_like(last)
        return jnp.zeros_like(leaf).at[-1].set(last)

    return jax.tree_util.tree_map_with_path(start, vae)


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


PIPELINES = {
    "StableDiffusion3Pipeline": Pipeline(
        StableDiffusion3,
        "configs/shapes_pretrain.py",
        build_clip_tokenizer,
        _sd3_configs,
        _statistics_of_all,
        autoencoder_kl.scale_latents,
    ),
    "WanPipeline": Pipeline(
        Wan,
        "configs/moving_shapes_pretrain.py",
        build_t5_tokenizer,
        _wan_configs,
        _statistics_of_channels,
        autoencoder_wan.scale_latents,
        at_once={"at_once": 1000},
        dtype="float16",
        start_autoencoder=_start_wan_autoencoder,
    ),
}
