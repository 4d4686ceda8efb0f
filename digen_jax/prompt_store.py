"""Decides whether a run's prompts are precomputed, and opens the cache of their embeddings."""

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
# Above these bytes of text encoders, "auto" precomputes prompts instead of keeping the encoders on rollout workers. The
# two CLIPs of Stable Diffusion 3 take 3.3 GB in float32; a T5-XXL takes 9.5 GB in bfloat16.
LARGE = 4 * 10**9


def encoder_shapes(config: TrainConfig, family: Family) -> Params:
    """Returns the text encoders' parameters as shapes, with the run's dtype."""
    shapes = family.shapes()
    parts = {part: shapes[part] for part in family.encoders}
    return shapes_in_dtype(parts, jnp.dtype(config.precision.frozen))


def is_precomputed(config: TrainConfig, family: Family) -> bool:
    """Returns whether the prompts are encoded before the run samples."""
    if config.prompts.encoding != "auto":
        return config.prompts.encoding == PRECOMPUTED
    return encoder_bytes(config, family) > LARGE


def encoder_bytes(config: TrainConfig, family: Family) -> int:
    """Returns the bytes of the text encoders' parameters."""
    leaves = jax.tree.leaves(encoder_shapes(config, family))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def store_folder(config: TrainConfig) -> pathlib.Path:
    """Returns the folder of the embedding cache."""
    given = config.prompts.cache
    return pathlib.Path(given) if given else CACHE.with_name("prompts")


def open_store(config: TrainConfig, folder: pathlib.Path, family: Family) -> EmbeddingCache:
    """Opens the embedding cache of a run's model, which is in `folder`.

    Raises:
      ConfigError: the text encoders' weights are not in the folder, and the cached model cannot be identified without
        them; or a file of the cache is damaged.
    """
    with blame("config.prompts.cache: "):
        model = _description(config, folder, family)
        limit = round(config.prompts.cache_limit * 1e9)
        return EmbeddingCache(store_folder(config), model, limit)


def stored_prompts(
    config: TrainConfig, folder: pathlib.Path | None, family: Family
) -> PrecomputedPrompts:
    """Returns precomputed embeddings instead of text encoders. The cache is opened at the first read.

    Args:
      config: of the run.
      folder: the model's. None means that nothing will be read.
      family: the model's.
    """
    opened = functools.cache(lambda: open_store(config, folder, family))
    lock = threading.Lock()  # the cache is for one thread, and each rollout worker has one

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
    """Returns the text encoders whose weights are not in a pipeline's folder."""
    return [part for part in family.encoders if not any((folder / part).glob("*.safetensors"))]


def _description(config: TrainConfig, folder: pathlib.Path, family: Family) -> dict[str, Any]:
    """Returns everything that the embeddings of a text depend on.

    If the text encoders' weights are missing, their hash is that of the only cached model that agrees otherwise.
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
