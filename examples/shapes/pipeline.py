"""From an empty workdir to a diffusers pipeline folder: tokenizer, autoencoder, transformer, in this order."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from digen_jax.checkpoints import folder as weights
from digen_jax.models.sd3.family import (
    COMPONENTS,
    PIPELINE_CLASS,
    StableDiffusion3,
)
from examples.shapes import stages
from examples.shapes.pool import cached_pool
from examples.shapes.settings import PretrainSettings
from examples.shapes.tokenizer import build_tokenizer


def pretrain(settings: PretrainSettings, workdir: pathlib.Path, output: pathlib.Path) -> None:
    """Train every component and write the pipeline folder. It continues after a kill and a restart.

    `settings` are configs/shapes_pretrain.py's; `workdir` keeps pool, checkpoints and curves; `output` is written last.
    """
    print(f"rendering {settings.images} pictures, unless they are there", flush=True)
    pool = cached_pool(workdir / "pool.npz", settings.images, settings.image_size, settings.seed)
    tokenizer = build_tokenizer(pool.captions, settings.text.max_length)
    networks = network_configs(settings, tokenizer)
    family = build_family(networks, tokenizer, settings)
    params = jax.jit(family.init)(jax.random.key(settings.seed))

    print("stage 1 of 2: the autoencoder", flush=True)
    params["vae"] = stages.train_autoencoder(
        family, params, pool, settings, workdir / "autoencoder"
    )
    latents = stages.encode_pool(family, params["vae"], pool)
    networks["vae"] |= stages.latent_statistics(latents)
    family = build_family(networks, tokenizer, settings)

    print("stage 2 of 2: transformer and text encoders", flush=True)
    latents = stages.scaled(family, latents)
    params |= stages.train_transformer(
        family, params, latents, pool, settings, workdir / "transformer"
    )
    write_pipeline(output, family, networks, params)
    print(f"the pipeline is in {output}")


def network_configs(settings: PretrainSettings, tokenizer: Any) -> dict[str, dict]:
    """config.json of each network, in diffusers' and transformers' fields."""
    text = {
        "architectures": ["CLIPTextModelWithProjection"],
        "model_type": "clip_text_model",
        "vocab_size": len(tokenizer),
        "max_position_embeddings": settings.text.max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **settings.text.encoder,
    }
    networks = {
        "transformer": {"_class_name": "SD3Transformer2DModel", **settings.transformer.network},
        "vae": {
            "_class_name": "AutoencoderKL",
            "sample_size": settings.image_size,
            **settings.autoencoder.network,
        },
        "text_encoder": text,
        "text_encoder_2": {**text, "hidden_act": "gelu"},
        "scheduler": {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": 1000,
            "shift": settings.shift,
        },
    }
    # Tuples become lists, as in a file that is read.
    return json.loads(json.dumps(networks))


def build_family(
    networks: dict[str, dict], tokenizer: Any, settings: PretrainSettings
) -> StableDiffusion3:
    """The family object of freshly designed networks; both text encoders read the same tokens."""
    dtype = jnp.dtype(settings.dtype)
    return StableDiffusion3.from_configs(networks, (tokenizer, tokenizer), dtype)


def write_pipeline(
    output: pathlib.Path, family: StableDiffusion3, networks: dict[str, dict], params: Any
) -> None:
    """The folder that `StableDiffusion3Pipeline.from_pretrained` reads; model_index.json comes last."""
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        weights.write_params(
            output / part,
            jax.tree.map(np.asarray, params[part]),
            family.lists[part],
            config=networks[part],
            kind="transformers" if part.startswith("text") else "diffusers",
        )
    for part, tokenizer in zip(("tokenizer", "tokenizer_2"), family.tokenizers, strict=True):
        tokenizer.save_pretrained(output / part)
    (output / "scheduler").mkdir(parents=True, exist_ok=True)
    _write_json(output / "scheduler" / "scheduler_config.json", networks["scheduler"])
    index = {name: list(where) for name, where in COMPONENTS.items()}
    _write_json(output / "model_index.json", {"_class_name": PIPELINE_CLASS, **index})


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
