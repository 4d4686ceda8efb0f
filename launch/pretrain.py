"""Trains the embedded shapes model from scratch and writes a diffusers pipeline folder.

python launch/pretrain.py --config configs/shapes_pretrain.py --workdir runs/pretrain --output runs/shapes-sd3
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib

from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import check_output
from digen_jax.files import make_examples_importable

make_examples_importable()

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_WORKDIR = define_path(
    "workdir", None, "Folder for pool, checkpoints and curves; the same folder resumes the run."
)
_OUTPUT = define_path("output", None, "Output folder of the pipeline.")
flags.mark_flags_as_required(["config", "workdir", "output"])


def main() -> None:
    """Sets up the devices and pretrains."""
    from digen_jax.process.job import prepare
    from examples.shapes.pretrain import check_config, pretrain

    config = _CONFIG.value
    check_config(config)
    for flag in (_WORKDIR, _OUTPUT):
        check_output(f"--{flag.name}", flag.value, folder=True)
    prepare(config.cpu_devices)
    pretrain(config, pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value))


if __name__ == "__main__":
    run_main(main)
