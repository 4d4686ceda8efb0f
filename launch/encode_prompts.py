"""Precomputes the prompt embeddings of a config, so that its run needs no text encoders.

python launch/encode_prompts.py --config configs/sd35_medium.py:geneval,1 \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

If interrupted, the same command resumes. Stored embeddings are not encoded again.
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import run_main

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
flags.mark_flags_as_required(["config"])


def main() -> None:
    """Encodes on the config's rollout mesh, or on all devices if the planner chooses the meshes."""
    from digen_jax.config.load import load_config
    from digen_jax.process.job import prepare

    config = load_config(_CONFIG.value)
    prepare(config.placement.cpu_devices)

    from digen_jax.precompute import precompute_all

    precompute_all(config)


if __name__ == "__main__":
    run_main(main)
