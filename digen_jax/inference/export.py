"""Exports the weights of a training run in diffusers format."""

import functools
import pathlib
from typing import Any

import jax

from digen_jax.checkpoints.folder import (
    absent_components,
    copy_pipeline,
    read_sampling,
    write_params,
)
from digen_jax.checkpoints.lora_files import lora_folder, write_lora
from digen_jax.errors import ConfigError, check_output
from digen_jax.files import read_json
from digen_jax.inference.model import TunedRun, all_devices, defaults_of_run, read_run


def export(workdir: pathlib.Path, output: pathlib.Path, lora: bool | None = None) -> TunedRun:
    """Exports the newest checkpoint of a run, or its EMA weights if there are any.

    Args:
      workdir: Folder of the run.
      output: Folder that does not exist yet, for a complete pipeline or for a LoRA for
        `pipe.load_lora_weights`.
      lora: Whether to write only the LoRA or to merge it into a pipeline. None means only the LoRA, if there is one.

    Returns:
      The run with the exported weights.

    Raises:
      ConfigError: The run cannot be read, has no LoRA although `lora` is True, or the output exists.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already: choose another folder or delete it")
    check_output("--output", output, folder=True)
    run = read_run(workdir, all_devices(jax.devices()[:1]))
    used = run.policy.lora
    if lora and used is None:
        raise ConfigError(
            f"the run in {workdir} trains all weights (its config.lora.rank is 0), so there is no LoRA to "
            "write: remove --lora"
        )
    if used is not None and lora is not False:
        write_lora(output, run.tuned, used.alpha, run.policy.family.lists)
    else:
        merged = run.merged()
        write = {part: functools.partial(_write, run, part, tree) for part, tree in merged.items()}
        sampling = defaults_of_run(run.config)
        kept = ("height", "width", "frames", "max_sequence_length")
        own = {name: one for name, one in read_sampling(run.folder).items() if name in kept}
        own |= {"steps": sampling.steps, "guidance": sampling.guidance}
        if run.policy.family.guidance == "both":
            own["true_cfg_scale"] = sampling.true_cfg_scale
        if len(run.policy.family.trained) > 1:
            own["guidance_2"] = sampling.guidance_2
        copy_pipeline(run.folder, output, write, own)
    return run


def how_to_load(run: TunedRun, output: pathlib.Path) -> str:
    """Returns diffusers code that loads the export in `output`."""
    is_pipeline = (output / "model_index.json").exists()
    source = str(output) if is_pipeline else run.config.model.folder
    # diffusers requires an argument for each absent component, even if model_index.json lists it as null.
    without = absent_components(output if is_pipeline else run.folder)
    name = run.policy.family.pipeline
    arguments = ", ".join([repr(source), *(f"{part}=None" for part in without)])
    lines = [f"from diffusers import {name}", f"pipe = {name}.from_pretrained({arguments})"]
    if not is_pipeline:
        family = run.policy.family
        first = family.trained[0]
        for part in run.tuned:
            argument = "" if part == first else f", load_into_{part}=True"
            file = repr(str(lora_folder(output, part, first)))
            lines.append(f"pipe.{family.lora_loader.format(file + argument)}")
    return "\n".join(lines)


def first_average(run: TunedRun) -> int | None:
    """Returns the step of the first EMA update, or None if it is already done.

    Until then the EMA equals the model that the run started from.
    """
    average = run.config.trainer.average
    return average.first_step if average.decay and run.step < average.first_step else None


def _write(run: TunedRun, part: str, tree: Any, folder: pathlib.Path) -> None:
    config = read_json(run.folder / part / "config.json")
    write_params(folder, tree, run.policy.family.lists[part], config)
