"""Pipeline folder with a random transformer of Stable Diffusion 3.5 Medium's width, and few layers."""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Iterator

from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.families import open_pipeline
from digen_jax.models.sd3.family import StableDiffusion3

HEADS, CHANNELS = 24, 64
POSITIONS = 64  # in each direction


@contextlib.contextmanager
def with_wide_model(config: TrainConfig, layers: int) -> Iterator[TrainConfig]:
    """Yields a config for such a model and removes its folder afterwards; with 0 layers, yields it unchanged."""
    if layers < 0:
        raise ConfigError(f"--wide must not be below 0, but is {layers}")
    if not layers:
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        source = open_pipeline(config.model.folder, config.model.without)
        write_wide(pathlib.Path(folder), source, layers)
        yield dataclasses.replace(config, model=dataclasses.replace(config.model, folder=folder))


def write_wide(
    folder: pathlib.Path,
    source: pathlib.Path,
    layers: int,
    heads: int = HEADS,
    channels: int = CHANNELS,
) -> None:
    """Writes the folder of a pipeline whose other components are those of `source`.

    The transformer has torch's random initialization. The first half of the layers has a second attention, as in
    Stable Diffusion 3.5 Medium; the default number and channels of the heads are also the same.
    """
    import torch
    from diffusers import SD3Transformer2DModel

    source = source.resolve()
    for name in ("model_index.json", *StableDiffusion3.classes()):
        if name != "transformer" and (source / name).exists():
            (folder / name).symlink_to(source / name)
    config = json.loads((source / "transformer" / "config.json").read_text()) | {
        "num_layers": layers,
        "num_attention_heads": heads,
        "attention_head_dim": channels,
        "caption_projection_dim": heads * channels,
        "dual_attention_layers": list(range(layers // 2)),
        "qk_norm": "rms_norm",
        "pos_embed_max_size": POSITIONS,
    }
    torch.manual_seed(0)
    model = SD3Transformer2DModel.from_config(config)
    model.save_pretrained(folder / "transformer", max_shard_size="100GB")
