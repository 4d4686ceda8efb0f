"""Exports a training run as files that diffusers loads."""

import functools
import pathlib
from typing import Any

import jax

from digen_jax.checkpoints.folder import (
    absent_components,
    copy_pipeline,
    read_json,
    read_model_index,
    write_params,
)
from digen_jax.checkpoints.lora_files import write_lora
from digen_jax.errors import ConfigError, check_output
from digen_jax.inference.model import TunedRun, all_devices, defaults_of_run, read_run


def export(workdir: pathlib.Path, output: pathlib.Path, lora: bool | None = None) -> TunedRun:
    """Writes the newest checkpoint of a run, or its EMA of the weights if it has one.

    Args:
      workdir: of the run.
      output: a folder that does not exist yet. It becomes a complete pipeline, or gets a LoRA for
        `pipe.load_lora_weights`.
      lora: whether to write a LoRA alone or merged into a pipeline. None means alone.

    Returns:
      The run whose weights were written.

    Raises:
      ConfigError: the run cannot be read, or has no LoRA but `lora` is True, or the output exists.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already: choose another folder or delete it")
    check_output("--output", output, folder=True)
    run = read_run(workdir, all_devices(jax.devices()[:1]))
    has_lora = run.policy.lora is not None
    if lora and not has_lora:
        raise ConfigError(
            f"the run in {workdir} tunes all weights (its config.lora.rank is 0), so there is no "
            "LoRA to write: leave --lora out"
        )
    if has_lora and lora is not False:
        write_lora(output, run.tuned, run.policy.lora.alpha, run.policy.family.lists)
    else:
        merged = run.merged()
        write = {part: functools.partial(_write, run, part, tree) for part, tree in merged.items()}
        sampling = defaults_of_run(run.config)
        own = {"steps": sampling.steps, "guidance": sampling.guidance}
        if run.policy.family.guidance == "both":
            own["true_cfg_scale"] = sampling.true_cfg_scale
        copy_pipeline(run.folder, output, write, own)
    return run


def how_to_load(run: TunedRun, output: pathlib.Path) -> str:
    """Returns the Python code that loads the export in `output` with diffusers."""
    is_pipeline = (output / "model_index.json").exists()
    source = str(output) if is_pipeline else run.config.model.folder
    # diffusers needs an argument for each absent component, although model_index.json names them.
    without = absent_components(output if is_pipeline else run.folder)
    name = read_model_index(run.folder)["_class_name"]
    arguments = ", ".join([repr(source), *(f"{part}=None" for part in without)])
    lines = [f"from diffusers import {name}", f"pipe = {name}.from_pretrained({arguments})"]
    return "\n".join(lines + ([] if is_pipeline else [f"pipe.load_lora_weights({str(output)!r})"]))


def first_average(run: TunedRun) -> int | None:
    """Returns the step that mixes weights into the run's average for the first time, or None if it is over.

    Until then the average is the model that the run started from.
    """
    average = run.config.trainer.average
    return average.first_step if average.decay and run.step < average.first_step else None


def _write(run: TunedRun, part: str, tree: Any, folder: pathlib.Path) -> None:
    config = read_json(run.folder / part / "config.json")
    write_params(folder, tree, run.policy.family.lists[part], config)
