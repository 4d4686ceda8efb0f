"""A model opened to sample from: a pipeline folder, a hub id, or a training run at its newest checkpoint."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from digen_jax.checkpoints.checkpoint_folder import read_checkpoint
from digen_jax.checkpoints.folder import SAMPLING, read_json
from digen_jax.checkpoints.lora import merge
from digen_jax.checkpoints.lora_files import open_lora, read_lora
from digen_jax.config.load import read_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError, check_positive, user_input
from digen_jax.families import (
    check_parts,
    editing,
    load_family,
    open_pipeline,
    read_frozen,
    read_parts,
)
from digen_jax.images import read_image
from digen_jax.logging.environment import started_in
from digen_jax.models.family import Family, Params, Record, Size
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from digen_jax.policies import check_negative, make_policy, trained_of


class Defaults(NamedTuple):
    """How a model is sampled by default."""

    height: int
    width: int
    steps: int
    guidance: float
    true_cfg_scale: float = 1.0  # see `Policy`


class Asked(NamedTuple):
    """What is asked of a sampler; None takes the model's default."""

    guidance: float | None = None
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    true_cfg_scale: float | None = None


class TunedRun(NamedTuple):
    """A training run at its newest checkpoint."""

    recipe: TrainConfig
    step: int
    folder: pathlib.Path  # the pipeline it started from
    policy: Policy
    tuned: Any
    base: Params  # the trained components as that pipeline has them

    def whole(self) -> Params:
        """The trained components with what was tuned in them; LoRA is merged."""
        return self.policy.merged(self.tuned, self.base)


class Model(NamedTuple):
    """A model with its parameters on a mesh, every device holding all of them."""

    family: Family
    group: DeviceGroup
    weights: Weights
    defaults: Defaults
    run: TrainConfig | None  # of the training run that made it

    def sampler(
        self,
        guidance: float | None,
        steps: int | None,
        height: int | None,
        width: int | None,
        true_cfg_scale: float | None = None,
    ) -> Sampler:
        """The sampler without noise between the steps; None takes the model's default.

        Raises:
          ConfigError: no step, or a size that does not fit the model.
        """
        asked = Asked(guidance, steps, height, width, true_cfg_scale)
        return _sampler(self.family, self.group, self.defaults, asked)

    def editing(self, records: Sequence[Record], source: Size | None = None) -> "Model":
        """The model for the pictures of some records, which it edits if it can.

        Args:
          records: of prompts, each with an `image` or none with one.
          source: the size that pictures are resized to; None: the run's, or as diffusers' pipeline chooses.

        Raises:
          ConfigError: pictures that are missing, cannot be read, or need different sizes; or a size without them.
        """
        family = edited(self.family, records, source)
        return self if family is self.family else self._replace(family=family)

    def batch(self, wanted: int, images: int) -> int:
        """The batch size: `wanted`, at most the number of images, rounded up to a multiple of the devices."""
        check_positive("the batch", wanted)
        devices = self.group.images
        return -(-min(wanted, images) // devices) * devices


def open_model(
    name: str,
    devices: Sequence[jax.Device],
    lora: str | None = None,
    dtype: str | None = None,
    asked: Sequence[Asked] = (),
    negative: str | None = None,
    fits: Callable[[Family], None] = lambda family: None,
) -> Model:
    """Reads a model onto the devices.

    Args:
      name: a diffusers pipeline folder, a hub id "owner/name", or the workdir of a training run.
      devices: images are split over all of them.
      lora: a folder or file with a LoRA (`lora_files.open_lora`), which is merged into what it adapts.
      dtype: of the network's arithmetic; None takes the run's, or float32.
      asked: of the samplers that will be made; what does not fit is refused before weights are read.
      negative: what gives prompts a negative one, as the beginning of a sentence; refused if no sampler reads it.
      fits: a check of the caller's own at that time; raises ConfigError.

    Raises:
      ConfigError: one sentence on what cannot be read, or does not fit the model.
    """
    group = all_devices(devices)

    def check(family: Family, folder: pathlib.Path, defaults: Defaults) -> None:
        fits(family)
        if lora is not None:
            shapes = trained_of(family, family.shapes())
            open_lora(lora, shapes, family.lists)
        policies = [_sampler(family, group, defaults, one).policy for one in asked]
        if negative is not None:
            check_negative(negative, policies, "--")
        check_parts(family, folder, family.shapes())

    with user_input():
        if is_run(name):
            run = read_run(name, group, dtype, check)
            recipe, folder, family = run.recipe, run.folder, run.policy.family
            trained, defaults = run.whole(), defaults_of_run(recipe)
        else:
            recipe, folder = None, open_pipeline(name)
            family = load_family(folder, dtype or "float32")
            defaults = _defaults_of_folder(folder, family)
            check(family, folder, defaults)
            trained = read_parts(family, folder, family.trained, group)
        if lora is not None:
            trained = _with_lora(family, trained, lora, group)
        frozen = read_frozen(family, folder, group)
    tuned, base = Policy(family).split(jax.random.key(0), trained, reference=False)
    return Model(family, group, Weights(tuned, base, frozen), defaults, recipe)


def edited(family: Family, records: Sequence[Record], source: Size | None = None) -> Family:
    """The family for the pictures of some records; arguments and errors as in `Model.editing`."""
    with user_input():
        given = [record["image"] for record in records if "image" in record and family.edits]
        # As (width, height), because all of the pictures together may be large.
        shapes = [read_image(image).size for image in given]
    if not shapes and family.source is None:
        if source is not None:
            raise ConfigError("a size of pictures is given, but there is none to edit")
        return family
    if len(shapes) < len(records):
        which = next(record["prompt"] for record in records if "image" not in record)
        raise ConfigError(
            f"the prompt {which!r} has no image to edit: give each prompt one"
            + (", as in the model's run" if family.source else " or none")
        )
    source = source or family.source or _common_size(family, records, shapes)
    return editing(family, source)


def all_devices(devices: Sequence[jax.Device]) -> DeviceGroup:
    """One mesh of all the devices: images are split over them, parameters are whole on each."""
    return DeviceGroup(make_mesh(devices, data=len(devices)))


def _sampler(family: Family, group: DeviceGroup, defaults: Defaults, asked: Asked) -> Sampler:
    """The sampler without noise between the steps; ConfigError where what is asked does not fit the family."""
    given = {name: value for name, value in asked._asdict().items() if value is not None}
    chosen = defaults._replace(**given)
    check_positive("the number of steps", chosen.steps)
    settings = SamplerSettings(Size(chosen.height, chosen.width), chosen.steps, Ode())
    with user_input():
        policy = Policy(family, chosen.guidance, true_cfg_scale=chosen.true_cfg_scale)
        return Sampler(policy, group, settings)


def is_run(name: str | pathlib.Path) -> bool:
    """Whether a name is the workdir of a training run; ConfigError for any other folder but a pipeline's."""
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
    """The newest checkpoint of a training run, which may be in progress; its average where it keeps one.

    Args:
      workdir: of the run.
      group: the devices that the parameters are read onto.
      dtype: of the network's arithmetic; None takes the run's.
      check: called before weights are read.

    Raises:
      ConfigError: there is no run or no checkpoint, or its base model is gone.
    """
    workdir = pathlib.Path(workdir).expanduser()
    recipe = run_recipe(workdir)
    with user_input():
        given = recipe.model
        folder = open_pipeline(given.folder, given.without)
        family = load_family(
            folder,
            dtype or recipe.precision.arithmetic,
            without=given.without,
            max_sequence_length=given.max_sequence_length,
            source=given.source,
        )
        if check is not None:
            check(family, folder, defaults_of_run(recipe))
        policy = make_policy(recipe, family)
        tree = "ema" if recipe.trainer.ema else "tuned"
        found = _read_tree(workdir, tree, policy, group)
        base = read_parts(family, folder, family.trained, group)
    return TunedRun(recipe, found.step, folder, policy, found.arrays[tree], base)


def run_recipe(workdir: pathlib.Path) -> TrainConfig:
    """The recipe of the run in a workdir; fields that were introduced later have their defaults.

    Relative paths are those seen from the folder in which the run was started, if they still exist there.
    """
    if not (workdir / "config.json").exists():
        raise ConfigError(
            f"{workdir} is no training run's workdir, as it has no config.json: give the --workdir of launch/train.py"
        )
    with user_input():
        given = read_json(workdir / "config.json")
    if {"_class_name", "architectures"} & given.keys():
        raise ConfigError(
            f"{workdir} is one component of a pipeline: give the folder above it, which has a model_index.json, or a "
            "training run's workdir"
        )
    try:
        recipe = read_config(given)
    except ConfigError as error:
        raise ConfigError(f"{workdir} is no training run's workdir: {error}") from error
    return _located(recipe, started_in(workdir))


def _located(recipe: TrainConfig, start: pathlib.Path | None) -> TrainConfig:
    """The recipe with the paths that exist relative to `start` as absolute ones; None leaves all as they are."""

    def at_start(name: Any) -> Any:
        if start is None or start == pathlib.Path.cwd() or not (name and isinstance(name, str)):
            return name
        return str(start / name) if (start / name).exists() else name

    prompts = recipe.prompts
    files = tuple(map(at_start, prompts.files))
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, folder=at_start(recipe.model.folder)),
        prompts=dataclasses.replace(prompts, file=at_start(prompts.file), files=files),
        evaluation=dataclasses.replace(
            recipe.evaluation, prompts=at_start(recipe.evaluation.prompts)
        ),
        rewards=tuple(
            dataclasses.replace(one, settings={k: at_start(v) for k, v in one.settings.items()})
            for one in recipe.rewards
        ),
    )


def _common_size(
    family: Family, records: Sequence[Record], shapes: Sequence[tuple[int, int]]
) -> Size:
    """The size that the pipeline chooses for all of the records' pictures, of (width, height)."""
    sizes = [family.source_size(height, width) for width, height in shapes]
    for record, size in zip(records, sizes, strict=True):
        if size != sizes[0]:
            raise ConfigError(
                f"the pipeline resizes the images of {records[0]['prompt']!r} and {record['prompt']!r} to "
                f"{sizes[0].height}x{sizes[0].width} and {size.height}x{size.width}: sample them in two calls, or give "
                "one size for all, --source_height and --source_width"
            )
    return sizes[0]


def _defaults_of_folder(folder: pathlib.Path, family: Family) -> Defaults:
    """The defaults of the pipeline's own `SAMPLING` file, or those of diffusers' pipeline."""
    defaults = {"steps": family.default_steps, "guidance": family.default_guidance}
    if family.guidance == "both":
        defaults["true_cfg_scale"] = 1.0
    path = folder / SAMPLING
    own = read_json(path) if path.exists() else {}
    for name, value in own.items():
        if name not in defaults or type(value) not in (int, type(defaults[name])):
            raise ConfigError(
                f"{path} has {name!r}: {value!r}; it may have steps, a whole number, and a number for "
                + " and ".join(one for one in defaults if one != "steps")
            )
    height, width, _ = family.default_size()
    return Defaults(height, width, **defaults | own)


def defaults_of_run(recipe: TrainConfig) -> Defaults:
    """The sampling settings of the run's own evaluation."""
    size, evaluation = recipe.evaluation_size, recipe.evaluation
    guidances = evaluation.guidance, evaluation.true_cfg_scale
    return Defaults(size.height, size.width, recipe.evaluation_steps, *guidances)


def _read_tree(workdir: pathlib.Path, tree: str, policy: Policy, group: DeviceGroup) -> Any:
    """One tree of parameters from the newest checkpoint, replicated."""
    shapes = jax.eval_shape(
        lambda key, trained: policy.split(key, trained, reference=False)[0],
        jax.random.key(0),
        trained_of(policy.family, policy.family.shapes()),
    )
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=group.replicated),
        shapes,
    )
    try:
        return read_checkpoint(workdir / "checkpoints", {tree: template})
    except FileNotFoundError as error:
        raise ConfigError(
            f"the run in {workdir} has saved no checkpoint yet: wait for its first one"
        ) from error


def _with_lora(family: Family, trained: Params, lora: str, group: DeviceGroup) -> Params:
    found = read_lora(lora, trained, family.lists, shardings=group.replicated)
    return dict(trained) | {
        part: merge(trained[part], factors, alpha / rank)
        for part, (factors, rank, alpha) in found.items()
    }
