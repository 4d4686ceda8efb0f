"""Trains an embedded model from scratch: tokenizer, autoencoder, then transformer and text encoders on its latents.

The configs are configs/shapes_pretrain.py and configs/moving_shapes_pretrain.py. Each stage continues after a kill and
a restart.
"""

import functools
import json
import pathlib
import runpy
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from digen_jax.config.fields import flat
from digen_jax.errors import ANY, LARGEST_SEED, ConfigError, check_range
from digen_jax.files import shipped
from digen_jax.logging.workdir import claim_workdir
from digen_jax.process.job import MOST_CPU_DEVICES
from examples.shapes.fit import FitSettings, fit
from examples.shapes.networks import PIPELINES, Family
from examples.shapes.pool import Pool, cached_pool

NETWORKS = "config.text.encoder.", "config.autoencoder.network.", "config.transformer.network."
ENCODE_BATCH = 500
# Fields that the first stage depends on; the second stage depends on these and on its other fields.
FIRST = ("seed", "images", "image_size", "frames", "autoencoder")
SECOND = (*FIRST, "text", "transformer", "dtype")


def check_config(config: ConfigDict) -> None:
    """Checks a config's fields; the fields of networks are unrestricted.

    Raises:
      ConfigError: a number is not finite or out of range, or a field is missing or unknown.
    """
    if config.get("pipeline") not in PIPELINES:
        raise ConfigError(f"config.pipeline must be one of {', '.join(PIPELINES)}")
    like = PIPELINES[config.pipeline].config
    found, known = flat(config), flat(runpy.run_path(shipped(like))["get_config"]())
    for name, value in found.items():
        if isinstance(value, float):
            ANY.check(name, value)
    for name in sorted(found.keys() ^ known.keys()):
        if not name.startswith(NETWORKS):
            problem = "is not a field" if name in found else "is missing"
            raise ConfigError(f"{name} {problem}: see the fields in {like}")
    check_range("config.seed", config.seed, 0, LARGEST_SEED)
    check_range("config.cpu_devices", config.cpu_devices, 0, MOST_CPU_DEVICES, "least")


def pretrain(config: ConfigDict, workdir: pathlib.Path, output: pathlib.Path) -> None:
    """Trains every component and writes the pipeline folder.

    Args:
      config: Config from `check_config`.
      workdir: Folder with the pool, checkpoints and curves.
      output: Pipeline folder, which is written last.
    """
    kind = "images" if config.frames == 1 else "clips"
    print(f"rendering {config.images} {kind}, unless they are there", flush=True)
    key = config.images, config.image_size, config.seed, config.frames
    pool, pipeline = cached_pool(workdir / "pool.npz", *key), PIPELINES[config.pipeline]
    tokenizer = pipeline.build_tokenizer(pool.captions, config.text.max_length)
    networks = pipeline.network_configs(config, tokenizer)
    family = pipeline.build_family(networks, tokenizer, config.dtype)
    params = jax.jit(family.init)(jax.random.key(config.seed))

    print("stage 1 of 2: the autoencoder", flush=True)
    params["vae"] = train_autoencoder(family, params, pool, config, workdir / "autoencoder")
    latents = encode_pool(family, params["vae"], pool)
    networks["vae"] |= pipeline.latent_statistics(latents)
    family = pipeline.build_family(networks, tokenizer, config.dtype)

    print("stage 2 of 2: transformer and text encoders", flush=True)
    latents = np.asarray(pipeline.scale_latents(family.vae.config, jnp.asarray(latents)))
    params |= train_transformer(family, params, latents, pool, config, workdir / "transformer")
    pipeline.write(output, family, networks, params)
    print(f"the pipeline is in {output}")


def train_autoencoder(
    family: Family, params: Any, pool: Pool, config: ConfigDict, workdir: pathlib.Path
) -> Any:
    """Trains stage 1 and returns the autoencoder's parameters.

    Raises:
      ConfigError: `workdir` contains this stage of another config.
    """
    stage = config.autoencoder

    def batch(step):
        rng = np.random.default_rng([config.seed, step])
        if step < stage.get("image_steps", 0):
            size = stage.image_batch, 1  # one frame of each clip
            frames = rng.integers(config.frames, size=size)
            return _to_signed(pool.images[rng.integers(len(pool.images), size=size), frames])
        return _to_signed(pool.images[rng.integers(len(pool.images), size=stage.batch)])

    loss = functools.partial(autoencoder_loss, family, stage.kl_weight, stage.mae_weight)
    with _claim(workdir, config, "autoencoder", FIRST):
        settings, key = FitSettings(**stage.fit), jax.random.key(config.seed)
        start = PIPELINES[config.pipeline].start_autoencoder(params["vae"])
        return fit(start, loss, batch, settings, workdir, key)


def train_transformer(
    family: Family,
    params: Any,
    latents: Float[np.ndarray, "n *t h w c"],
    pool: Pool,
    config: ConfigDict,
    workdir: pathlib.Path,
) -> Any:
    """Trains stage 2 (transformer and text encoders, with a frozen autoencoder) and returns their parameters.

    Raises:
      ConfigError: `workdir` contains this stage of another config.
    """
    ids = family.tokenize([{"prompt": caption} for caption in pool.captions])
    empty, stage = family.tokenize_null([]), config.transformer

    def batch(step):
        rng = np.random.default_rng([config.seed, step])
        rows = rng.integers(len(latents), size=stage.batch)
        # Dropped captions train the unconditional velocity for guidance.
        dropped = rng.random(len(rows)) < stage.caption_dropout
        chosen = jax.tree.map(
            lambda given, none: np.where(dropped[:, None], none, given[rows]), ids, empty
        )
        return latents[rows], chosen

    trained = {name: tree for name, tree in params.items() if name != "vae"}
    loss = functools.partial(flow_matching_loss, family)
    with _claim(workdir, config, "transformer", SECOND):
        settings, key = FitSettings(**stage.fit), jax.random.key(config.seed + 1)
        return fit(trained, loss, batch, settings, workdir, key)


def _claim(
    workdir: pathlib.Path, config: ConfigDict, stage: str, fields: tuple[str, ...]
) -> AbstractContextManager:
    """Claims a stage's folder for this process, and for configs with equal values of the stage's `fields`.

    The numbers of steps may change; `fit.steps` stretches the rest of the learning rate's cosine.
    """
    values = json.loads(json.dumps(config.to_dict(), sort_keys=True))
    free = [f"{stage}.fit.{name}" for name in ("steps", "checkpoint_every", "log_every")]
    free.append("autoencoder.image_steps")
    return claim_workdir(workdir, {name: values[name] for name in fields}, free)


def autoencoder_loss(
    family: Family, kl_weight: float, mae_weight: float, params: Any, images: Array, key: Array
) -> tuple[Array, dict[str, Array]]:
    """Returns the mean squared and absolute reconstruction error, plus a small KL to N(0, 1) to smooth latents."""
    options = PIPELINES[family.pipeline].at_once
    mean, logvar = family.vae.apply({"params": params}, images, method="encode", **options)
    noise = jax.random.normal(key, mean.shape)
    latents = mean + jnp.exp(0.5 * logvar) * noise
    error = family.vae.apply({"params": params}, latents, method="decode", **options) - images
    kl = 0.5 * jnp.mean(mean**2 + jnp.exp(logvar) - 1 - logvar)
    mse, mae = jnp.mean(error**2), jnp.mean(jnp.abs(error))
    return mse + mae_weight * mae + kl_weight * kl, {"mse": mse, "mae": mae, "kl": kl}


def flow_matching_loss(
    family: Family, params: Any, batch: tuple[Array, Any], key: Array
) -> tuple[Array, dict[str, Array]]:
    """Returns |v - (eps - x0)|^2 with sigma sampled from a logit-normal (Esser et al. 2024, eq. 19)."""
    latents, ids = batch
    noise_key, sigma_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, latents.shape)
    sigma = jax.nn.sigmoid(jax.random.normal(sigma_key, latents.shape[:1]))
    s = sigma.reshape(-1, *[1] * (latents.ndim - 1))
    conditioning = family.encode(params, ids)
    variables = {"transformer": {"params": params["transformer"]}}
    v = family.velocity(variables, (1 - s) * latents + s * noise, sigma, conditioning)
    loss = jnp.mean((v - (noise - latents)) ** 2)
    return loss, {"loss": loss}


def encode_pool(family: Family, vae: Any, pool: Pool) -> Float[np.ndarray, "n *t h w c"]:
    """Returns the posterior means of all images or clips, not yet scaled."""
    options = PIPELINES[family.pipeline].at_once

    @jax.jit
    def encode(vae, images):
        return family.vae.apply({"params": vae}, images, method="encode", **options)[0]

    starts = range(0, len(pool.images), ENCODE_BATCH)
    batches = (_to_signed(pool.images[i : i + ENCODE_BATCH]) for i in starts)
    return np.concatenate([np.asarray(encode(vae, batch)) for batch in batches])


def _to_signed(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 127.5 - 1
