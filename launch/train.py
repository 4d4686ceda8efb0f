"""Tune a text-to-image model by reinforcement learning.

python launch/train.py --config configs/shapes_demo.py --workdir runs/shapes [--config.field=value]

On several hosts start the same command on each, with --coordinator=auto, or where nothing can be detected with
--coordinator=HOST:PORT --processes=N --process=I.
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib
from typing import Any

from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import check_output

_CONFIG = config_flags.DEFINE_config_file("config", None, "A configs/*.py file.", lock_config=True)
_WORKDIR = define_path(
    "workdir", None, "Folder for everything that the run writes; give it again to continue."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "For several processes: HOST:PORT of the first one, or auto on a cluster."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes.")
_PROCESS = flags.DEFINE_integer("process", None, "Number of this process, from 0.")
_MESH = flags.DEFINE_string(
    "mesh", None, "In place of --process: joins a run as a rollout mesh of this name."
)
_HOST = flags.DEFINE_string(
    "host", None, "This host's address for the other processes; found if it is not given."
)
_LINK = flags.DEFINE_enum(
    "link", "bytes", ["bytes", "transfer"], "How arrays come from other processes."
)
_ONE_JOB = flags.DEFINE_boolean(
    "one_job",
    None,
    "All processes are one job of JAX, as on TPU slices, where it is found if it is not given.",
)
_RAY = flags.DEFINE_string(
    "ray",
    None,
    "Rollout workers in processes of their own, on Ray: local, or a cluster's address (auto or HOST:PORT).",
)
_TLS = {
    name: define_path(f"tls_{name}", None, f"For TLS between processes: a PEM file, {what}.")
    for name, what in {
        "certificate": "this process's certificate",
        "key": "its key",
        "authority": "the authority that has signed all certificates",
    }.items()
}
flags.mark_flags_as_required(["config", "workdir"])


def main() -> int | None:
    """Check the config, set up the devices and train; returns the exit code where a signal stopped the run."""
    from digen_jax.config.door import open_recipe
    from digen_jax.process.launching import join, prepare, take_devices
    from digen_jax.run.roles import Told, take_part

    recipe = open_recipe(_CONFIG.value)
    if _RAY.value is not None:
        return on_ray(recipe)
    told = _COORDINATOR.value, _PROCESSES.value, _PROCESS.value
    tls = {name: flag.value for name, flag in _TLS.items()}
    others = _MESH.value, _HOST.value, _LINK.value, tls, _ONE_JOB.value
    apart = take_part(recipe.placement, Told(*told, *others))
    if apart is None or apart.role.kind == "trainer":
        check_output("--workdir", _WORKDIR.value, folder=True)
    if apart is None:
        prepare(recipe.placement.cpu_devices)
        join(*told)
    else:
        take_devices(apart.place)
        prepare(apart.role.own)

    from digen_jax.run.train import train

    return train(recipe, pathlib.Path(_WORKDIR.value), apart)


def on_ray(recipe: Any) -> int | None:
    """Start the trainer's process on Ray; in that process, train."""
    from digen_jax.distributed import launch
    from digen_jax.process.launching import prepare

    launch.check(recipe)
    check_output("--workdir", _WORKDIR.value, folder=True)
    address = launch.cluster_address()
    if address is None:
        return launch.run(recipe, _RAY.value)
    prepare(recipe.placement.meshes.trainer.devices)

    from digen_jax.run.train import train_with_workers

    return train_with_workers(recipe, pathlib.Path(_WORKDIR.value), address)


if __name__ == "__main__":
    run_main(main)
