"""Cache of precomputed prompt embeddings, and of the latents of image files that a run trains."""

import functools
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from digen_jax.checkpoints.folder import fingerprint, read_model_index
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.embedding_cache import EmbeddingCache, models
from digen_jax.errors import ConfigError, prefix_errors, user_input
from digen_jax.images import image_hash
from digen_jax.models.family import Family
from digen_jax.parallel.encoding import PrecomputedPrompts, Rows
from digen_jax.parallel.system import GivenImages
from digen_jax.policies import encoder_shapes
from digen_jax.process.job import CACHE
from digen_jax.process.shutdown import Stopped


def store_folder(config: TrainConfig) -> pathlib.Path:
    """Returns the folder of the embedding cache."""
    given = config.prompts.cache
    return pathlib.Path(given) if given else CACHE.with_name("prompts")


def open_store(config: TrainConfig, folder: pathlib.Path, family: Family) -> EmbeddingCache:
    """Opens the embedding cache for the model in `folder`.

    Raises:
      ConfigError: A cache file is corrupt, or the text encoders' weights are missing and the cached model cannot be
        identified without them.
    """
    with prefix_errors("config.prompts.cache: "):
        model = _description(config, folder, family)
        limit = round(config.prompts.cache_limit * 1e9)
        return EmbeddingCache(store_folder(config), model, limit)


def open_latents(config: TrainConfig, folder: pathlib.Path, family: Family) -> EmbeddingCache:
    """Opens the cache of latents of images of the config's size, in the same folder. Raises like `open_store`."""
    with prefix_errors("config.prompts.cache: "):
        model = {
            "pipeline": read_model_index(folder)["_class_name"],
            "autoencoder": fingerprint(folder, sorted(family.decoders)),
            "size": [*config.model.size],
        }
        limit = round(config.prompts.cache_limit * 1e9)
        return EmbeddingCache(store_folder(config), model, limit)


def stored_prompts(config: TrainConfig, folder: Any, family: Family) -> PrecomputedPrompts:
    """Returns precomputed embeddings to use instead of text encoders. The cache is opened on first read.

    None for the model's `folder` means that nothing will be read.
    """
    read = _reader(lambda: open_store(config, folder, family))
    return PrecomputedPrompts(family, encoder_shapes(config, family), read)


def stored_latents(config: TrainConfig, folder: Any, family: Family) -> GivenImages | None:
    """Returns the image files that train, whose latents are stored. None means that images are sampled."""
    if not config.algorithm.given_images:
        return None
    read = _reader(lambda: open_latents(config, folder, family))

    def latents(paths: Sequence[str]) -> Float32[np.ndarray, "n *latent"]:
        with user_input():
            keys = [image_hash(path) for path in paths]
        return np.stack([rows["latents"] for rows in read(keys)])

    return GivenImages(config.algorithm.given_images, latents)


def _reader(open_cache: Callable[[], EmbeddingCache]) -> Callable[[Sequence[str]], list[Rows]]:
    """Returns a thread-safe function that reads from a cache, which it opens on first use."""
    opened = functools.cache(open_cache)
    lock = threading.Lock()  # the cache is not thread-safe, and each rollout worker has a thread

    def read(texts: Sequence[str]) -> list[Rows]:
        try:
            with lock:
                return opened().read(texts)
        except ValueError as error:
            again = "the same command encodes what is missing and continues"
            raise Stopped(f"{error}; {again}") from error

    return read


def missing_weights(folder: pathlib.Path, family: Family) -> list[str]:
    """Returns the text encoders without weights in a pipeline's folder."""
    return [part for part in family.encoders if not any((folder / part).glob("*.safetensors"))]


def _description(config: TrainConfig, folder: pathlib.Path, family: Family) -> dict[str, Any]:
    """Returns the cache key of a model: all settings and hashes that embeddings depend on.

    If the text encoders' weights are missing, uses the hash of the only cached model that matches otherwise.
    """
    known = {
        "pipeline": read_model_index(folder)["_class_name"],
        "components": sorted(family.encoders),
        "tokenizers": fingerprint(folder, sorted(set(family.encoders.values()) - {""})),
        "max_sequence_length": config.model.max_sequence_length,
        "arithmetic": config.precision.arithmetic,
        "frozen": config.precision.frozen,
    }
    if family.source is not None:
        known["source"] = [*family.source, *[family.sources] * (family.sources > 1)]
    if not (absent := missing_weights(folder, family)):
        return known | {"encoders": fingerprint(folder, sorted(family.encoders))}
    store = store_folder(config)
    found = [model for model in models(store) if known.items() <= model.items()]
    if len(found) == 1:
        return dict(found[0])
    advice = "encode the prompts where they are, by launch/encode_prompts.py with the same config"
    if found:
        advice = "keep one of these models in a separate folder"
    raise ConfigError(
        f"{folder / absent[0]} holds no weights, and {store} holds prompts that were encoded by "
        f"{len(found)} models that agree with this one: bring the weights back, or {advice}"
    )
