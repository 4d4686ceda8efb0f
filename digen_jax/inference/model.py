"""Opens a model for sampling: a pipeline folder, a Hub id, or the newest checkpoint of a training run."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from digen_jax.checkpoints.checkpointer import read_checkpoint
from digen_jax.checkpoints.folder import SAMPLING, read_sampling
from digen_jax.checkpoints.lora import merge
from digen_jax.checkpoints.lora_files import open_lora, read_lora
from digen_jax.config.load import read_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, check_positive, user_input
from digen_jax.families import (
    check_parts,
    editing,
    load_family,
    open_pipeline,
    read_frozen,
    read_parts,
)
from digen_jax.files import read_json
from digen_jax.images import read_image, source_images
from digen_jax.logging.workdir import started_in
from digen_jax.models.family import Family, Params, Record, Size
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from digen_jax.policies import check_negative, make_policy, trained_of

FPS = 16  # frames per second of clips


class Defaults(NamedTuple):
    """Default sampling settings of a model."""

    height: int
    width: int
    steps: int
    guidance: float
    true_cfg_scale: float = 1.0  # see `Policy`
    frames: int = 1
    guidance_2: float = 0.0  # see `Policy`


# Fields of `Defaults` to replace; None means the default.
SamplingOptions = Mapping[str, Any]


class TunedRun(NamedTuple):
    """Newest checkpoint of a training run."""

    config: TrainConfig
    step: int
    folder: pathlib.Path  # the base pipeline
    policy: Policy
    tuned: Any
    base: Params  # base weights of the trained components

    def merged(self) -> Params:
        """Returns the full weights of the trained components, with a LoRA merged."""
        return self.policy.merged(self.tuned, self.base)


class Model(NamedTuple):
    """A model with parameters replicated on all devices of a mesh."""

    family: Family
    group: DeviceGroup
    weights: Weights
    defaults: Defaults
    run: TrainConfig | None  # config of the run that trained the model

    @property
    def fps(self) -> int:
        """Default frames per second of clips."""
        return self.run.images.fps if self.run else FPS

    def sampler(self, options: SamplingOptions = MappingProxyType({})) -> Sampler:
        """Returns a sampler without noise between steps.

        Raises:
          ConfigError: No steps, or a size that the model does not support.
        """
        given = {name: value for name, value in options.items() if value is not None}
        chosen = self.defaults._replace(**given)
        check_positive("the number of steps", chosen.steps)
        size = Size(chosen.height, chosen.width, chosen.frames)
        settings = SamplerSettings(size, chosen.steps, self.family.solver)
        with user_input():
            policy = Policy(
                self.family,
                chosen.guidance,
                true_cfg_scale=chosen.true_cfg_scale,
                guidance_2=chosen.guidance_2,
            )
            return Sampler(policy, self.group, settings)

    def batch(self, wanted: int, images: int) -> int:
        """Returns min(`wanted`, `images`), rounded up to a multiple of the number of devices."""
        check_positive("the batch", wanted)
        devices = self.group.images
        return -(-min(wanted, images) // devices) * devices


def open_model(
    name: str,
    devices: Sequence[jax.Device],
    lora: str | None = None,
    dtype: str | None = None,
    options: Sequence[SamplingOptions] = (),
    negative: str | None = None,
    fits: Callable[[Family, Sequence[Size]], Any] = lambda family, sizes: None,
) -> Model:
    """Loads a model onto the devices.

    Args:
      name: Diffusers pipeline folder, Hub id "owner/name", or workdir of a training run.
      devices: Devices to shard images over.
      lora: Folder or file of a LoRA (`lora_files.open_lora`) to merge.
      dtype: Compute dtype of the network. None means the run's, or float32.
      options: Options of the samplers to be created, validated before weights are read.
      negative: Source of a negative prompt, as the start of an error message; rejected if no sampler uses it.
      fits: Additional check of the family and the samplers' sizes before weights are read; raises ConfigError.

    Raises:
      ConfigError: A file cannot be read, or an argument does not fit the model.
    """
    group = all_devices(devices)

    def check(family: Family, folder: pathlib.Path, defaults: Defaults) -> None:
        if lora is not None:
            shapes = trained_of(family, family.shapes())
            open_lora(lora, shapes, family.lists)
        model = Model(family, group, Weights(None, None, None), defaults, None)
        samplers = list(map(model.sampler, options))
        if negative is not None:
            check_negative(negative, [one.policy for one in samplers], "--")
        check_parts(family, folder, family.shapes())
        fits(family, [one.settings.size for one in samplers])

    with user_input():
        if is_run(name):
            run = read_run(name, group, dtype, check)
            config, folder, family = run.config, run.folder, run.policy.family
            trained, defaults = run.merged(), defaults_of_run(config)
        else:
            config, folder = None, open_pipeline(name)
            family = load_family(folder, dtype or "float32")
            defaults = _defaults_of_folder(folder, family)
            check(family, folder, defaults)
            trained = read_parts(family, folder, family.trained, group)
        if lora is not None:
            trained = _with_lora(family, trained, lora, group)
        frozen = read_frozen(family, folder, group)
    tuned, base = Policy(family).split(jax.random.key(0), trained, reference=False)
    return Model(family, group, Weights(tuned, base, frozen), defaults, config)


def edited(
    family: Family,
    records: Sequence[Record],
    source: Size | None = None,
    size: Size | None = None,
) -> Family:
    """Returns the family for the input images of the records, if it reads images.

    Args:
      family: The model's family.
      records: Prompt records; all or none must have an `image`.
      source: Size that images are resized to. None means the run's, or that of diffusers' pipeline.
      size: Size of the clips to sample. None means the default of diffusers' pipeline.

    Raises:
      ConfigError: Images are missing, unreadable, of different target sizes or different in number, or a size is given
        without images.
    """
    given = [source_images(record) if family.edits else [] for record in records]
    with user_input():
        # Only (width, height), because all images may not fit in memory.
        shapes = [[read_image(image).size for image in images] for images in given]
    if not any(shapes) and family.source is None:
        if source is not None:
            raise ConfigError("a size of images is given, but there is no image to edit")
        return family
    if not all(shapes):
        which = next(r["prompt"] for r, images in zip(records, given, strict=True) if not images)
        raise ConfigError(
            f"the prompt {which!r} has no image to edit: give each prompt one"
            + (", as in the model's run" if family.source else " or none")
        )
    counts = [len(images) for images in given]
    for record, count in zip(records, counts, strict=True):
        if count != counts[0]:
            raise ConfigError(
                f"{records[0]['prompt']!r} has {counts[0]} images and {record['prompt']!r} has {count}: sample them in "
                "two calls"
            )
    size = size or family.default_size()
    source = source or family.source or _common_size(family, records, shapes, size)
    return editing(family, source._replace(frames=size.frames), counts[0])


def all_devices(devices: Sequence[jax.Device]) -> DeviceGroup:
    """Returns a mesh of all devices: images are sharded, parameters are replicated."""
    return DeviceGroup(make_mesh(devices, data=len(devices)))


def is_run(name: str | pathlib.Path) -> bool:
    """Returns whether a name is a training workdir. Raises ConfigError for an unknown kind of folder."""
    folder = pathlib.Path(name).expanduser()
    if not folder.is_dir() or (folder / "model_index.json").exists():
        return False
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} is neither a pipeline folder (it has no model_index.json) nor the workdir of "
            "a run (it has no config.json): give the path of one of these, or a hub id"
        )
    return True


def read_run(
    workdir: str | pathlib.Path,
    group: DeviceGroup,
    dtype: str | None = None,
    check: Callable[[Family, pathlib.Path, Defaults], None] | None = None,
) -> TunedRun:
    """Loads the newest checkpoint of a training run, or its EMA weights if any. The run may be in progress.

    Args:
      workdir: Folder of the run.
      group: Devices for the parameters.
      dtype: Compute dtype of the network. None means the run's.
      check: Called before weights are read.

    Raises:
      ConfigError: There is no run or no checkpoint, or the base model is missing.
    """
    workdir = pathlib.Path(workdir).expanduser()
    config = read_run_config(workdir)
    with user_input():
        given = config.model
        folder = open_pipeline(given.folder, given.without)
        family = load_family(
            folder,
            dtype or config.precision.arithmetic,
            without=given.without,
            max_sequence_length=given.max_sequence_length,
            source=given.source,
            sources=given.source_images,
        )
        if check is not None:
            check(family, folder, defaults_of_run(config))
        policy = make_policy(config, family)
        tree = "ema" if config.trainer.ema else "tuned"
        found = _read_tree(workdir, tree, policy, group)
        base = read_parts(family, folder, family.trained, group)
    return TunedRun(config, found.step, folder, policy, found.arrays[tree], base)


def read_run_config(workdir: pathlib.Path) -> TrainConfig:
    """Reads the config of the run in a workdir. Fields that were added later have their defaults.

    Relative paths are resolved against the working directory of the run, if they still exist there.
    """
    if not (workdir / "config.json").exists():
        raise ConfigError(
            f"{workdir} is not the workdir of a training run, as it has no config.json: give the --workdir of "
            "launch/train.py"
        )
    with user_input():
        given = read_json(workdir / "config.json")
    if {"_class_name", "architectures"} & given.keys():
        raise ConfigError(
            f"{workdir} is one component of a pipeline: give the folder above it, which has a model_index.json, or a "
            "training run's workdir"
        )
    try:
        config = read_config(given)
    except ConfigError as error:
        raise ConfigError(f"{workdir} is not the workdir of a training run: {error}") from error
    return _with_absolute_paths(config, started_in(workdir))


def _with_absolute_paths(config: TrainConfig, start: pathlib.Path | None) -> TrainConfig:
    """Returns the config with absolute paths if they exist relative to `start`. None means no change."""

    def at_start(name: Any) -> Any:
        if start is None or start == pathlib.Path.cwd() or not (name and isinstance(name, str)):
            return name
        return str(start / name) if (start / name).exists() else name

    prompts = config.prompts
    files = tuple(map(at_start, prompts.files))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, folder=at_start(config.model.folder)),
        prompts=dataclasses.replace(prompts, file=at_start(prompts.file), files=files),
        evaluation=dataclasses.replace(
            config.evaluation, prompts=at_start(config.evaluation.prompts)
        ),
        rewards=tuple(
            dataclasses.replace(one, settings={k: at_start(v) for k, v in one.settings.items()})
            for one in config.rewards
        ),
    )


def _common_size(
    family: Family, records: Sequence[Record], shapes: Sequence[list[tuple[int, int]]], clip: Size
) -> Size:
    """Returns the size that the pipeline chooses for all images. `shapes` are (width, height) by record."""
    first, *_ = found = [
        (record["prompt"], family.source_size(height, width, clip))
        for record, images in zip(records, shapes, strict=True)
        for width, height in images
    ]
    for prompt, size in found:
        if size != first[1]:
            raise ConfigError(
                f"the pipeline resizes images of {first[0]!r} and {prompt!r} to {first[1]} and {size}: sample them in "
                "two calls, or give one size for all, --source_height and --source_width"
            )
    return first[1]


def _defaults_of_folder(folder: pathlib.Path, family: Family) -> Defaults:
    """Returns the defaults from the folder's `SAMPLING` file, or those of the diffusers pipeline."""
    size = family.default_size()._asdict()
    defaults = {"steps": family.default_steps, "guidance": family.default_guidance, **size}
    if family.guidance == "both":
        defaults["true_cfg_scale"] = 1.0
    if len(family.trained) > 1:
        defaults["guidance_2"] = 0.0
    own = read_sampling(folder)
    own.pop("max_sequence_length", None)  # see `load_family`
    if "true_guidance" in own:  # the name in older exports
        own["true_cfg_scale"] = own.pop("true_guidance")
    for name, value in own.items():
        if name not in defaults or type(value) not in (int, type(defaults[name])):
            numbers = [one for one, default in defaults.items() if isinstance(default, float)]
            whole = [one for one in defaults if one not in numbers]
            raise ConfigError(
                f"{folder / SAMPLING} has {name!r}: {value!r}; it may have integers for {', '.join(whole)} and "
                f"max_sequence_length, and numbers for {' and '.join(numbers)}"
            )
    return Defaults(**defaults | own)


def defaults_of_run(config: TrainConfig) -> Defaults:
    """Returns the evaluation sampling settings of a run."""
    size, evaluation = config.evaluation_size, config.evaluation
    return Defaults(
        size.height,
        size.width,
        config.evaluation_steps,
        evaluation.guidance,
        evaluation.true_cfg_scale,
        size.frames,
        evaluation.guidance_2,
    )


def _read_tree(workdir: pathlib.Path, tree: str, policy: Policy, group: DeviceGroup) -> Any:
    """Restores one parameter tree of the newest checkpoint, replicated."""
    shapes = jax.eval_shape(
        lambda key, trained: policy.split(key, trained, reference=False)[0],
        jax.random.key(0),
        trained_of(policy.family, policy.family.shapes()),
    )
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=group.replicated), shapes
    )
    try:
        return read_checkpoint(workdir / "checkpoints", {tree: template})
    except FileNotFoundError as error:
        raise ConfigError(
            f"the run in {workdir} has not saved a checkpoint yet: wait for its first one"
        ) from error


def _with_lora(family: Family, trained: Params, lora: str, group: DeviceGroup) -> Params:
    found = read_lora(lora, trained, family.lists, shardings=group.replicated)
    return dict(trained) | {
        part: merge(trained[part], factors, alpha / rank)
        for part, (factors, rank, alpha) in found.items()
    }
