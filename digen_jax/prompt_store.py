"""Cache of precomputed prompt embeddings, and the decision whether a run uses it."""

import functools
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from digen_jax.checkpoints.folder import fingerprint, read_model_index
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.embedding_cache import EmbeddingCache, models
from digen_jax.errors import ConfigError, blame
from digen_jax.models.family import Family, Params
from digen_jax.parallel.encoding import PrecomputedPrompts, Rows
from digen_jax.parallel.system import shapes_in_dtype
from digen_jax.process.job import CACHE
from digen_jax.process.shutdown import Stopped

PRECOMPUTED, EACH_STEP = "precomputed", "each_step"
# Bytes of text encoders above which "auto" precomputes prompts instead of keeping the encoders on rollout workers.
# The two CLIPs of Stable Diffusion 3 have 3.3 GB in float32; T5-XXL has 9.5 GB in bfloat16.
LARGE = 4 * 10**9


def encoder_shapes(config: TrainConfig, family: Family) -> Params:
    """Returns the text encoders' abstract parameters in the run's dtype."""
    shapes = family.shapes()
    parts = {part: shapes[part] for part in family.encoders}
    return shapes_in_dtype(parts, jnp.dtype(config.precision.frozen))


def is_precomputed(config: TrainConfig, family: Family) -> bool:
    """Returns whether prompts are encoded before sampling starts."""
    if config.prompts.encoding != "auto":
        return config.prompts.encoding == PRECOMPUTED
    return encoder_bytes(config, family) > LARGE


def encoder_bytes(config: TrainConfig, family: Family) -> int:
    """Returns the size of the text encoders' parameters in bytes."""
    leaves = jax.tree.leaves(encoder_shapes(config, family))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


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
    with blame("config.prompts.cache: "):
        model = _description(config, folder, family)
        limit = round(config.prompts.cache_limit * 1e9)
        return EmbeddingCache(store_folder(config), model, limit)


def stored_prompts(
    config: TrainConfig, folder: pathlib.Path | None, family: Family
) -> PrecomputedPrompts:
    """Returns precomputed embeddings to use instead of text encoders. The cache is opened on first read.

    Args:
      config: Config of the run.
      folder: Folder of the model. None means that nothing will be read.
      family: Family of the model.
    """
    opened = functools.cache(lambda: open_store(config, folder, family))
    lock = threading.Lock()  # the cache is not thread-safe, and each rollout worker has a thread

    def read(texts: Sequence[str]) -> list[Rows]:
        try:
            with lock:
                return opened().read(texts)
        except ValueError as error:
            raise Stopped(
                f"{error}; the same command encodes what is missing and continues"
            ) from error

    return PrecomputedPrompts(family, encoder_shapes(config, family), read)


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
        known["source"] = list(family.source)
    if not (absent := missing_weights(folder, family)):
        return known | {"encoders": fingerprint(folder, sorted(family.encoders))}
    store = store_folder(config)
    found = [model for model in models(store) if known.items() <= model.items()]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"{folder / absent[0]} holds no weights, and {store} holds prompts that were encoded by "
        f"{len(found)} models that agree with this one: "
        + (
            "bring the weights back, or keep one of these models in a folder of its own"
            if found
            else "bring the weights back, or encode the prompts where they are, by launch/encode_prompts.py with the "
            "same config"
        )
    )
