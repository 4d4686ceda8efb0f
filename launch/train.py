"""Tune a text-to-image model by reinforcement learning.

python launch/train.py --config configs/shapes_demo.py --workdir runs/shapes [--config.field=value]

On several hosts start the same command on each, with --coordinator=auto, or where nothing can be detected with
--coordinator=HOST:PORT --processes=N --process=I.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import run_main
from digen_jax.errors import check_output

_CONFIG = config_flags.DEFINE_config_file("config", None, "A configs/*.py file.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for everything that the run writes; give it again to continue."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "For several processes: HOST:PORT of the first one, or auto on a cluster."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes.")
_PROCESS = flags.DEFINE_integer("process", None, "Number of this process, from 0.")
flags.mark_flags_as_required(["config", "workdir"])


def main() -> int | None:
    """Check the config, set up the devices and train; returns the exit code where a signal stopped the run."""
    check_output("--workdir", _WORKDIR.value, folder=True)
    from digen_jax.config.door import open_recipe
    from digen_jax.process.launching import join, prepare

    recipe = open_recipe(_CONFIG.value)
    prepare(recipe.placement.cpu_devices)
    join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)

    from digen_jax.run.train import train

    return train(recipe, pathlib.Path(_WORKDIR.value))


if __name__ == "__main__":
    run_main(main)
