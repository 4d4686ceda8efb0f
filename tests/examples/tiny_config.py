"""A pretraining of seconds, for launch/pretrain.py too."""

from typing import Any

from tests.pipelines import tiny_moving_config, tiny_pretrain_config


def get_config(name: str = "shapes") -> Any:
    config = tiny_pretrain_config() if name == "shapes" else tiny_moving_config()
    config.images, config.cpu_devices = 48, 1
    config.autoencoder.batch = config.transformer.batch = 16
    short = dict(steps=24, warmup=4, checkpoint_every=8, log_every=2)
    # Without Muon, which has tests of its own, there is less to compile.
    config.autoencoder.fit.update(short, learning_rate=0.01, muon_rate=0.0)
    if name == "moving":
        config.autoencoder.update(image_steps=12, image_batch=16)
    config.transformer.fit.update(short, learning_rate=0.005, muon_rate=0.0)
    return config
