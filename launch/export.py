"""Exports a training run to diffusers' format.

python launch/export.py --workdir runs/shapes --output runs/shapes-tuned
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib

from absl import flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import prefix_errors

_WORKDIR = define_path("workdir", None, "Workdir of a training run.")
_OUTPUT = define_path("output", None, "Output folder; it must not exist.")
_LORA = flags.DEFINE_boolean(
    "lora",
    None,
    "For a run that trains a LoRA: export only the LoRA, for load_lora_weights (default), or with "
    "--lora=false a complete pipeline with the merged LoRA.",
)
flags.mark_flags_as_required(["workdir", "output"])


def main() -> None:
    """Reads the newest checkpoint and exports it."""
    from digen_jax.process.job import prepare

    prepare()

    from digen_jax.inference.export import export, first_average, how_to_load

    workdir, output = pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value)
    with prefix_errors("--output: ", (OSError,)):
        run = export(workdir, output, _LORA.value)
    print(f"{workdir} after step {run.step} is in {output}; to load it:")
    print(how_to_load(run, output))
    if first := first_average(run):
        print(
            "These are the initial weights of the run: with config.trainer.ema_every, the average is first "
            f"updated in step {first}."
        )


if __name__ == "__main__":
    run_main(main)
