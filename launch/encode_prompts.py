"""Precompute the prompt embeddings of a config, so that its run needs no text encoders.

python launch/encode_prompts.py --config configs/sd35_medium.py:geneval,1 \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

Interrupted, the same command continues. What is stored already is not encoded again.
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import run_main

_CONFIG = config_flags.DEFINE_config_file("config", None, "A configs/*.py file.", lock_config=True)
flags.mark_flags_as_required(["config"])


def main() -> None:
    """Encodes on the config's rollout mesh, or on all devices if the planner chooses the meshes."""
    from digen_jax.config.load import load_config
    from digen_jax.process.job import prepare

    recipe = load_config(_CONFIG.value)
    prepare(recipe.placement.cpu_devices)

    from digen_jax.precompute import precompute_all

    precompute_all(recipe)


if __name__ == "__main__":
    run_main(main)
