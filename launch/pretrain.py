"""Train the embedded shapes model from scratch and write it as a diffusers pipeline folder.

python launch/pretrain.py --config configs/shapes_pretrain.py --workdir runs/pretrain --output runs/shapes-sd3
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import run_main
from digen_jax.config.fields import flat
from digen_jax.errors import LARGEST_SEED, check_finite, check_output, check_range

_CONFIG = config_flags.DEFINE_config_file("config", None, "A configs/*.py file.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Pool, checkpoints and curves; give it again to continue."
)
_OUTPUT = flags.DEFINE_string("output", None, "The pipeline folder to write.")
flags.mark_flags_as_required(["config", "workdir", "output"])


def main() -> None:
    """Set up the devices and pretrain."""
    from digen_jax.process.launching import prepare

    for name, value in flat(_CONFIG.value).items():
        check_finite(name, value)
    check_range("config.seed", _CONFIG.value.seed, 0, LARGEST_SEED)
    for flag in (_WORKDIR, _OUTPUT):
        check_output(f"--{flag.name}", flag.value, folder=True)
    prepare(_CONFIG.value.cpu_devices)

    from digen_jax.pretraining.pipeline import pretrain

    pretrain(_CONFIG.value, pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value))


if __name__ == "__main__":
    run_main(main)
