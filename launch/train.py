"""Trains a text-to-image model with reinforcement learning.

python launch/train.py --config configs/shapes_demo.py --workdir runs/shapes [--config.field=value]

With --ray=local, or the address of a Ray cluster, all workers except the home worker are separate processes. If all
processes sample and train together, start the same command in each with --coordinator=auto or, without a supported
cluster, with --coordinator=HOST:PORT --processes=N --process=I.
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib

from absl import flags
from ml_collections import config_flags

from digen_jax.config.command_line import define_path, profiled_steps, run_main
from digen_jax.errors import check_output

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_WORKDIR = define_path(
    "workdir", None, "Output folder of the run; the same folder resumes the run."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "For several processes: HOST:PORT of the first, or auto on a cluster."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes.")
_PROCESS = flags.DEFINE_integer("process", None, "Index of this process, from 0.")
_RAY = flags.DEFINE_string(
    "ray",
    None,
    "Workers in separate processes, on Ray: local, or a cluster's address (auto or HOST:PORT).",
)
_RAY_OPEN = flags.DEFINE_bool(
    "ray_open", False, "Allow a Ray cluster of several hosts without a token."
)
_ONE_JOB = flags.DEFINE_bool(
    "one_job",
    False,
    "With --ray: all processes form one JAX job, as on one TPU slice; if one fails, all end.",
)
_PROFILE = flags.DEFINE_string(
    "profile",
    None,
    "Step or range of steps, such as 3 or 3-5, of which jax.profiler writes a trace to the workdir.",
)
flags.mark_flags_as_required(["config", "workdir"])


def main() -> int | None:
    """Checks the config, sets up the devices and trains; returns the exit code if a signal stopped the run."""
    from digen_jax.config.load import load_config
    from digen_jax.policies import check_without_ray
    from digen_jax.process.job import join_job, prepare, resolve_place

    config = load_config(_CONFIG.value)
    profiled = profiled_steps(_PROFILE.value, config.steps)
    place = _COORDINATOR.value, _PROCESSES.value, _PROCESS.value
    part = None
    if _RAY.value is None:
        check_without_ray(config, dict(ray_open=_RAY_OPEN.value, one_job=_ONE_JOB.value))
        check_output("--workdir", _WORKDIR.value, folder=True)
        prepare(config.placement.cpu_devices)
        if (own := resolve_place(*place)) is not None:
            join_job(own)
    else:
        from digen_jax.distributed import launch  # only runs with Ray import it

        launch.check(config, place, _ONE_JOB.value)
        part = launch.trainer_part()
        check_output("--workdir", _WORKDIR.value, folder=True)
        if part is None:
            options = _RAY.value, _RAY_OPEN.value, _ONE_JOB.value
            return launch.run(config, _WORKDIR.value, *options)
        launch.check_part(part, config, _WORKDIR.value)
        trainer = config.placement.meshes.trainer
        prepare(trainer.devices // trainer.hosts)

    from digen_jax.train import train

    return train(config, pathlib.Path(_WORKDIR.value), part, profiled)


if __name__ == "__main__":
    run_main(main)
