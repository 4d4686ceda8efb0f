"""Export a training run as files that diffusers loads.

python launch/export.py --workdir runs/shapes --output runs/shapes-tuned
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib

from absl import flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import blame

_WORKDIR = define_path("workdir", None, "The workdir of a training run.")
_OUTPUT = define_path("output", None, "The folder to write; it must not exist yet.")
_LORA = flags.DEFINE_boolean(
    "lora",
    None,
    "For a run that trains a LoRA: the LoRA alone, for load_lora_weights (as by default), or with "
    "--lora=false a complete pipeline with the LoRA merged in.",
)
flags.mark_flags_as_required(["workdir", "output"])


def main() -> None:
    """Reads the newest checkpoint and exports it."""
    from digen_jax.process.job import prepare

    prepare()

    from digen_jax.inference.export import export, first_average, how_to_load

    workdir, output = pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value)
    with blame("--output: ", (OSError,)):
        run = export(workdir, output, _LORA.value)
    print(f"{workdir} after step {run.step} is in {output}; to load it:")
    print(how_to_load(run, output))
    if first := first_average(run):
        print(
            f"These are the weights that the run started with: because of config.trainer.ema_every, its average is "
            f"updated for the first time in step {first}."
        )


if __name__ == "__main__":
    run_main(main)
