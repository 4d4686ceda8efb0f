"""A tiny pipeline folder with random weights, made by the project's own writer: real files, no training."""

import functools
import importlib.util
import os
import pathlib
from typing import Any

import jax
import numpy as np

from digen_jax.diffusion.sampling import Trajectory
from digen_jax.parallel.sampler import Sampler, Weights
from tests.compiling import quick_flags

ROOT = pathlib.Path(__file__).parents[1]


def environment(devices: int, **variables: str) -> dict[str, str]:
    """The environment of a process: a number of virtual devices, and programs that compile quickly and run slowly."""
    return os.environ | {"XLA_FLAGS": quick_flags(devices)} | variables


def decode_floats(sampler: Sampler, weights: Weights, trajectory: Trajectory) -> jax.Array:
    """Clips [b t h w 3] in [0, 1], which `Sampler.decode` rounds to bytes."""
    latents = trajectory.latents.astype(np.float32)
    return jax.jit(sampler.policy.family.decode)(weights.frozen, latents)


def shipped_config(name: str) -> Any:
    """The config of configs/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def tiny_pretrain_config() -> Any:
    """configs/shapes_pretrain.py, shrunk."""
    config = shipped_config("shapes_pretrain")
    config.text.encoder.update(hidden_size=16, intermediate_size=32, projection_dim=8)
    config.autoencoder.network.update(
        block_out_channels=(8, 8, 8), norm_num_groups=4, latent_channels=4
    )
    config.transformer.network.update(
        in_channels=4,
        out_channels=4,
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=8,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=16,
    )
    return config


def tiny_moving_config() -> Any:
    """configs/moving_shapes_pretrain.py, shrunk."""
    config = shipped_config("moving_shapes_pretrain")
    config.text.encoder.update(d_model=16, d_kv=8, d_ff=32, num_heads=2)
    config.autoencoder.network.update(
        base_dim=4, z_dim=4, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4
    )
    config.transformer.network.update(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, text_dim=16, ffn_dim=32
    )
    return config


def write_tiny_pipeline(folder: pathlib.Path, seed: int = 0, heads: int = 2) -> pathlib.Path:
    """Every parameter random, so that no zero or one hides a mistake."""
    from digen_jax.models.layers import sincos_2d_table
    from examples.shapes.captions import train_records
    from examples.shapes.networks import PIPELINES

    config = tiny_pretrain_config()
    config.transformer.network.update(num_attention_heads=heads, attention_head_dim=16 // heads)
    pipeline, texts = PIPELINES[config.pipeline], [r["prompt"] for r in train_records()]
    tokenizer = pipeline.build_tokenizer(texts, config.text.max_length)
    networks = pipeline.network_configs(config, tokenizer)
    networks["vae"] |= {"scaling_factor": 1.3, "shift_factor": 0.1}
    family = pipeline.build_family(networks, tokenizer, config.dtype)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        functools.partial(_random, rng), jax.eval_shape(family.init, jax.random.key(0))
    )
    net = family.transformer.config
    table = sincos_2d_table(net.pos_embed_max_size, net.sample_size // net.patch_size, net.dim)
    params["transformer"]["pos_embed"]["pos_embed"] = np.asarray(table)
    pipeline.write(folder, family, networks, params)
    return folder


def _random(rng: np.random.Generator, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    fan_in = int(np.prod(leaf.shape[:-1])) if len(leaf.shape) > 1 else 4
    values = rng.normal(size=leaf.shape) / np.sqrt(max(fan_in, 1))
    return (values + (len(leaf.shape) == 1)).astype(leaf.dtype)
