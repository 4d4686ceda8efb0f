"""The two stages: the autoencoder on images, then transformer and text encoders on its latents."""

import functools
import pathlib
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from digen_jax.logging.workdir import claim_workdir
from digen_jax.models.autoencoders.autoencoder_kl import scale_latents
from digen_jax.models.sd3.family import StableDiffusion3, TokenIds
from examples.shapes.fit import fit
from examples.shapes.pool import Pool
from examples.shapes.settings import PretrainSettings

ENCODE_BATCH = 500
# Fields that the first stage depends on; the second stage depends on these and on its own.
FIRST = ("seed", "images", "image_size", "autoencoder")


def autoencoder_loss(
    family: StableDiffusion3, kl_weight: float, params: Any, images: Array, key: Array
) -> tuple[Array, dict[str, Array]]:
    """Mean squared and absolute error of the reconstruction, plus a light KL to N(0, 1) that smooths the latents."""
    mean, logvar = family.vae.apply({"params": params}, images, method="encode")
    noise = jax.random.normal(key, mean.shape)
    latents = mean + jnp.exp(0.5 * logvar) * noise
    error = family.vae.apply({"params": params}, latents, method="decode") - images
    kl = 0.5 * jnp.mean(mean**2 + jnp.exp(logvar) - 1 - logvar)
    mse, mae = jnp.mean(error**2), jnp.mean(jnp.abs(error))
    return mse + 0.5 * mae + kl_weight * kl, {"mse": mse, "mae": mae, "kl": kl}


def flow_matching_loss(
    family: StableDiffusion3, params: Any, batch: tuple[Array, TokenIds], key: Array
) -> tuple[Array, dict[str, Array]]:
    """|v - (eps - x0)|^2 with sigma drawn from a logit-normal (Esser et al. 2024, eq. 19)."""
    latents, ids = batch
    noise_key, sigma_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, latents.shape)
    sigma = jax.nn.sigmoid(jax.random.normal(sigma_key, latents.shape[:1]))
    s = sigma[:, None, None, None]
    conditioning = family.encode(params, ids)
    variables = {"transformer": {"params": params["transformer"]}}
    v = family.velocity(variables, (1 - s) * latents + s * noise, sigma, conditioning)
    loss = jnp.mean((v - (noise - latents)) ** 2)
    return loss, {"loss": loss}


def train_autoencoder(
    family: StableDiffusion3,
    params: Any,
    pool: Pool,
    settings: PretrainSettings,
    workdir: pathlib.Path,
) -> Any:
    """Stage 1. Returns the autoencoder's parameters.

    Raises:
      ConfigError: `workdir` holds this stage of another config.
    """
    stage = settings.autoencoder

    def batch(step):
        rng = np.random.default_rng([settings.seed, step])
        rows = rng.integers(len(pool.images), size=stage.batch)
        return _to_signed(pool.images[rows])

    loss = functools.partial(autoencoder_loss, family, stage.kl_weight)
    with _claim(workdir, settings, "autoencoder", FIRST):
        return fit(params["vae"], loss, batch, stage.fit, workdir, jax.random.key(settings.seed))


def train_transformer(
    family: StableDiffusion3,
    params: Any,
    latents: Float[np.ndarray, "n h w c"],
    pool: Pool,
    settings: PretrainSettings,
    workdir: pathlib.Path,
) -> Any:
    """Stage 2: transformer and both text encoders together, the autoencoder frozen. Returns their parameters.

    Raises:
      ConfigError: `workdir` holds this stage of another config.
    """
    ids = family.tokenize([{"prompt": caption} for caption in pool.captions])
    empty, stage = family.tokenize_null([]), settings.transformer

    def batch(step):
        rng = np.random.default_rng([settings.seed, step])
        rows = rng.integers(len(latents), size=stage.batch)
        # A tenth of the captions is dropped, which trains the unconditional velocity for guidance.
        dropped = rng.random(len(rows)) < stage.caption_dropout
        chosen = jax.tree.map(
            lambda given, none: np.where(dropped[:, None], none, given[rows]), ids, empty
        )
        return latents[rows], chosen

    trained = {name: tree for name, tree in params.items() if name != "vae"}
    loss = functools.partial(flow_matching_loss, family)
    fields = (*FIRST, "text", "transformer", "dtype")
    with _claim(workdir, settings, "transformer", fields):
        return fit(trained, loss, batch, stage.fit, workdir, jax.random.key(settings.seed + 1))


def encode_pool(family: StableDiffusion3, vae: Any, pool: Pool) -> Float[np.ndarray, "n h w c"]:
    """Posterior means of all images, raw (not yet scaled)."""
    encode = jax.jit(lambda images: family.vae.apply({"params": vae}, images, method="encode")[0])
    return np.concatenate(
        [
            np.asarray(encode(_to_signed(pool.images[i : i + ENCODE_BATCH])))
            for i in range(0, len(pool.images), ENCODE_BATCH)
        ]
    )


def latent_statistics(latents: Float[np.ndarray, "n h w c"]) -> dict[str, float]:
    """shift_factor and scaling_factor that make latents zero-mean and unit-variance over all channels."""
    return {
        "shift_factor": float(np.mean(latents, dtype=np.float64)),
        "scaling_factor": float(1 / np.std(latents, dtype=np.float64)),
    }


def scaled(
    family: StableDiffusion3, latents: Float[np.ndarray, "n h w c"]
) -> Float[np.ndarray, "n h w c"]:
    """What the transformer sees."""
    return np.asarray(scale_latents(family.vae.config, jnp.asarray(latents)))


def _claim(
    workdir: pathlib.Path, settings: PretrainSettings, stage: str, fields: tuple[str, ...]
) -> IO[str]:
    """Claims a stage's folder for this process, and for settings that agree in the stage's `fields`.

    The number of steps may change, which stretches the rest of the learning rate's cosine.
    """
    given = settings.as_json()
    free = [f"{stage}.fit.{name}" for name in ("steps", "checkpoint_every", "log_every")]
    return claim_workdir(workdir, {name: given[name] for name in fields}, free)


def _to_signed(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 127.5 - 1
