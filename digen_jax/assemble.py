"""From a recipe to the parts of a run: the one module that sees models and meshes together."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from digen_jax.checkpoints.folder import has_weights
from digen_jax.checkpoints.lora import LoraConfig
from digen_jax.checkpoints.lora_start import read_start
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_file
from digen_jax.data.prompt_order import PromptBatches, prompt_batches
from digen_jax.diffusion.steps import Ode, make_step
from digen_jax.errors import blame
from digen_jax.families import check_parts, editing, load_family, open_pipeline, read_parts
from digen_jax.learned_rewards.on_mesh import outlined, read
from digen_jax.models.family import Family, Params
from digen_jax.parallel.encoding import PrecomputedPrompts
from digen_jax.parallel.placement import (
    DeviceGroup,
    MeshRole,
    Placement,
    check_processes,
    make_placement,
    make_process_placement,
)
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.reward_model import RewardModel
from digen_jax.parallel.sampler import Sampler, SamplerSettings
from digen_jax.parallel.sharding import Layout
from digen_jax.parallel.system import Rollout, System, reshard, shapes_in_dtype, sharded_shapes
from digen_jax.parallel.trainer import Trainer
from digen_jax.policies import (
    check_heads,
    check_model,
    evaluation_policy,
    make_policy,
    trained_of,
    trained_policy,
)
from digen_jax.prompt_store import encoder_shapes, is_ahead, stored
from digen_jax.rewards.built_in import on_mesh


def recipe_model(recipe: TrainConfig) -> tuple[pathlib.Path, Family]:
    """The folder of a recipe's model, and its family.

    Raises:
      ConfigError: the model's folder cannot be used.
    """
    model, arithmetic = recipe.model, recipe.precision.arithmetic
    with blame("config.model.folder: "):
        folder = open_pipeline(model.folder, model.without)
        family = load_family(
            folder, arithmetic, model.remat, model.without, model.max_sequence_length
        )
    return folder, family if model.source is None else editing(family, model.source)


def build(
    recipe: TrainConfig,
    devices: Sequence[jax.Device],
    mesh: MeshRole | None = None,
    encoded: PrecomputedPrompts | None = None,
) -> System:
    """All parts of a run; what does not fit the model is found before its weights are read.

    If prompts are encoded ahead, the text encoders are not read: those that the run draws must be stored, on this host
    unless `encoded` is another store. `mesh` is as in `open_parts`.

    Raises:
      ConfigError: the model's first mistake, or devices that do not suffice.
    """
    folder, family, placement, start = open_parts(recipe, devices, mesh)
    with blame("config.model.folder: "):
        shapes = parameter_shapes(recipe, family)
        check_parts(family, folder, {*family.trained, *shapes.frozen})
        kept = recipe.precision.frozen
        # What is tuned itself is float32; under a LoRA nothing of it is.
        own = kept if recipe.lora.rank else "float32"
        trained = read_parts(family, folder, family.trained, placement.trainer, own)
        frozen = read_parts(family, folder, shapes.frozen, placement.rollout, kept)
    if shapes.ahead:
        encoded = encoded or stored(recipe, folder, family)
    return connect(recipe, placement, family, trained, frozen, start, encoded)


def build_trainer(
    recipe: TrainConfig, devices: Sequence[jax.Device], encoded: PrecomputedPrompts | None = None
) -> System:
    """As `build` in the process of one training worker.

    With rollout workers, components that only sampling needs are read if this one has to sample.

    Raises:
      ConfigError: the model's first mistake, or devices that do not suffice.
    """
    if not recipe.placement.rollout.data:
        system = build(recipe, devices, "trainer", encoded)
        return system.with_scorers(read(on_mesh(recipe.rewards), system.placement.rollout))
    folder, family, placement, lora = parts = open_parts(recipe, devices, "trainer")
    start, base = _split_on(recipe, parts, placement.trainer)
    policy = make_policy(recipe, family)
    if encoded is None and is_ahead(recipe, family):
        encoded = stored(recipe, folder, family)

    def sampling_on(group: DeviceGroup) -> Rollout:
        print("the trainer reads what sampling needs in addition to its own parameters", flush=True)
        return _rollout_on(recipe, parts, group, policy.sampler_base(base), encoded)

    start = start if lora is None else lora
    return make_system(recipe, placement, policy, start, base, (), sampling_on)


def build_rollout(
    recipe: TrainConfig, devices: Sequence[jax.Device], encoded: PrecomputedPrompts | None
) -> Rollout:
    """A rollout worker in its own process, with all parameters but the tuned ones, which the trainer sends.

    `encoded` are precomputed prompts. None means that this process encodes.

    Raises:
      ConfigError: as `build_trainer`.
    """
    _, family, placement, _ = parts = open_parts(recipe, devices, "rollout")
    group = placement.rollout
    _, base = _split_on(recipe, parts, group)
    base = make_policy(recipe, family).sampler_base(base)
    return _rollout_on(recipe, parts, group, base, encoded)


def _split_on(recipe: TrainConfig, parts: "Parts", group: DeviceGroup) -> tuple[Params, Params]:
    """As `split`, of components that are read onto a mesh of this process."""
    with blame("config.model.folder: "):
        check_parts(parts.family, parts.folder, parts.family.trained)
        own = recipe.precision.frozen if recipe.lora.rank else "float32"
        trained = read_parts(parts.family, parts.folder, parts.family.trained, group, own)
    return split(recipe, parts.family, trained, group)


def _rollout_on(
    recipe: TrainConfig,
    parts: "Parts",
    group: DeviceGroup,
    base: Any,
    encoded: PrecomputedPrompts | None,
) -> Rollout:
    folder, family, *_ = parts
    with blame("config.model.folder: "):
        shapes = parameter_shapes(recipe, family).frozen
        check_parts(family, folder, shapes)
        frozen = read_parts(family, folder, shapes, group, recipe.precision.frozen)
    found = make_rollout(recipe, make_policy(recipe, family), group, base, frozen, encoded)
    return found._replace(scorers=read(on_mesh(recipe.rewards), group))


def read_scorers(recipe: TrainConfig, devices: Sequence[jax.Device]) -> tuple[RewardModel, ...]:
    """The rewards that a run computes on its sampling meshes, on the first of these; for `System.with_scorers`.

    Raises:
      ConfigError: a file is missing or does not fit, or the devices do not suffice.
    """
    layout = Layout(recipe.placement.rules)  # their parameters have no logical axes
    placement = make_placement(recipe.placement.meshes, layout, devices)
    return read(on_mesh(recipe.rewards), placement.rollout)


class Parts(NamedTuple):
    """What a run is built of, without the model's weights."""

    folder: pathlib.Path  # the model's
    family: Family
    placement: Placement
    start: Any  # the factors of a LoRA to continue, None: there is none


def open_parts(
    recipe: TrainConfig, devices: Sequence[jax.Device], mesh: MeshRole | None = None
) -> Parts:
    """Opens a run's model, and finds what does not fit it; components without weights may stay so until they are read.

    `mesh` is the only one of this process; None: it has all.

    Raises:
      ConfigError: the model's first mistake, or devices that do not suffice.
    """
    if mesh is None:
        check_processes(recipe.placement.meshes, devices)
    folder, family = recipe_model(recipe)
    placement = placed(recipe, family, devices, mesh)
    check_model(recipe, family, placement)
    with blame("config.model.folder: "):
        check_parts(family, folder, [p for p in family.shapes() if has_weights(folder / p)])
    start = None
    if recipe.lora.path:
        with blame("config.lora.path: "):
            lora, shapes = make_policy(recipe, family).lora, trained_of(family, family.shapes())
            start = read_start(recipe.lora.path, lora, shapes, family.lists)
    return Parts(folder, family, placement, start)


def placed(
    recipe: TrainConfig,
    family: Family,
    devices: Sequence[jax.Device],
    mesh: MeshRole | None = None,
) -> Placement:
    """The meshes of a recipe, with its rules for the model's parameters; `mesh` as in `open_parts`.

    Raises:
      ConfigError: the devices do not suffice, or rules that contradict one another.
    """
    layout = Layout.of(recipe.placement.rules, family.axes())
    layout.check()
    sizes, attention = recipe.placement.meshes, recipe.model.attention
    if mesh is not None:
        return make_process_placement(sizes, layout, devices, attention, mesh)
    return make_placement(sizes, layout, devices, attention)


def connect(
    recipe: TrainConfig,
    placement: Placement,
    family: Family,
    trained: Params,
    frozen: Params,
    lora: Any = None,
    encoded: PrecomputedPrompts | None = None,
) -> System:
    """The parts of a run around a model: components by name, `trained` on the trainer mesh, `frozen` on the rollout's.

    `lora` holds the factors to begin with, None: fresh ones; `encoded` are prompts in the text encoders' place.
    """
    start, base = split(recipe, family, trained, placement.trainer)
    start = start if lora is None else lora
    return _around(recipe, placement, make_policy(recipe, family), start, base, frozen, encoded)


def split(
    recipe: TrainConfig, family: Family, trained: Params, group: DeviceGroup
) -> tuple[Params, Params]:
    """(tuned parameters, other parameters of the trained components), on their mesh: see `Policy.split`."""
    policy, key = make_policy(recipe, family), jax.random.key(recipe.seed)
    start, base = policy.split(key, trained, recipe.algorithm.reads_reference)
    if recipe.precision.frozen != "float32":
        base = reshard(base, group, recipe.precision.frozen)
    return start, base


def outline(recipe: TrainConfig, devices: Sequence[jax.Device]) -> System:
    """The system of `build` with shapes instead of all parameters: its programs can be lowered and compiled.

    Nothing is read but the model's configuration, and nothing is allocated.

    Raises:
      ConfigError: the model's folder cannot be used, the devices do not suffice, or heads cannot be split over them.
    """
    _, family = recipe_model(recipe)
    placement = placed(recipe, family, devices)
    check_heads(family, placement)
    shapes = parameter_shapes(recipe, family)
    start, base = (sharded_shapes(tree, placement.trainer) for tree in (shapes.tuned, shapes.base))
    frozen = sharded_shapes(shapes.frozen, placement.rollout)
    encoded = stored(recipe, None, family) if shapes.ahead else None
    policy = make_policy(recipe, family)
    system = _around(recipe, placement, policy, start, base, frozen, encoded)
    return system.with_scorers(outlined(on_mesh(recipe.rewards), placement.rollout))


class ParameterShapes(NamedTuple):
    """All parameters of a run by what they are for; `tuned` and `base` as in `Policy`."""

    tuned: Params
    base: Params
    frozen: Params  # the other components, on the sampling meshes
    ahead: Params  # text encoders, on a sampling mesh before the run samples, and then gone


def parameter_shapes(recipe: TrainConfig, family: Family) -> ParameterShapes:
    """The parameters of a recipe's run as shapes, in the types that it keeps them in."""
    policy, shapes = make_policy(recipe, family), family.shapes()
    split = functools.partial(policy.split, reference=recipe.algorithm.reads_reference)
    tuned, base = jax.eval_shape(split, jax.random.key(0), trained_of(family, shapes))
    ahead = encoder_shapes(recipe, family) if is_ahead(recipe, family) else {}
    others = {*shapes} - {*family.trained, *ahead} | {*family.decoders}
    frozen = {part: tree for part, tree in shapes.items() if part in others}
    return ParameterShapes(tuned, *shapes_in_dtype((base, frozen), recipe.precision.frozen), ahead)


def _around(
    recipe: TrainConfig,
    placement: Placement,
    policy: Policy,
    start: Any,
    base: Any,
    frozen: Params,
    encoded: PrecomputedPrompts | None,
) -> System:
    """The parts of a run around parameters that lie where they belong."""
    sampler_base = policy.sampler_base(base)
    first = make_rollout(recipe, policy, placement.rollout, sampler_base, frozen, encoded)
    others = (first.moved(group, sampler_base) for group in placement.rollouts[1:])
    return make_system(recipe, placement, policy, start, base, (first, *others))


def make_rollout(
    recipe: TrainConfig,
    policy: Policy,
    group: DeviceGroup,
    base: Any,
    frozen: Params,
    encoded: PrecomputedPrompts | None,
) -> Rollout:
    """A sampling mesh: `base` is `Policy.sampler_base`, and may lie elsewhere; `frozen` lies on the mesh."""
    algorithm = recipe.algorithm
    settings = SamplerSettings(
        recipe.model.size,
        recipe.sampler.steps,
        make_step(recipe.sampler.kind, recipe.sampler.noise_level),
        recipe.noisy_steps,
        algorithm.stores_means,
        recipe.precision.trajectory,
    )
    dtype = recipe.precision.sent
    sampling = policy.family.in_dtype(dtype) if dtype else policy.family
    sampler = Sampler(dataclasses.replace(policy, family=sampling), group, settings, encoded)
    evaluator = evaluation_sampler(sampling, group, recipe, policy.lora, encoded)
    return Rollout(sampler, evaluator, dtype, reshard(base, group, dtype), frozen)


def make_system(
    recipe: TrainConfig,
    placement: Placement,
    policy: Policy,
    start: Any,
    base: Any,
    rollouts: tuple[Rollout, ...],
    sampling_on: Callable[[DeviceGroup], Rollout] | None = None,
) -> System:
    """The parts of a run around its sampling meshes; the trainer's parameters lie on its mesh."""
    algorithm = recipe.algorithm

    def trainer(group: DeviceGroup) -> Trainer:
        step = make_step(recipe.sampler.kind, recipe.sampler.noise_level)
        tuned = trained_policy(policy, algorithm)
        return Trainer(tuned, group, step, algorithm, recipe.trainer)

    # A LoRA's optimizer state is small, so the home worker updates alone.
    several = placement.others and not recipe.lora.rank
    return System(
        placement,
        policy,
        recipe.rng,
        rollouts,
        trainer(placement.trainer),
        base,
        start,
        recipe.advantages,
        recipe.precision.sent,
        sampling_on,
        tuple(map(trainer, placement.others)),
        trainer(placement.training) if several else None,
    )


def drawn_prompts(recipe: TrainConfig, cache: str | os.PathLike[str]) -> PromptBatches:
    """The prompt records of each step of a run; the data set of the prompt files is kept in `cache`."""
    return prompt_batches(
        recipe.prompts.paths,
        recipe.drawn_groups,
        recipe.seed,
        cache,
        set_steps=recipe.algorithm.set_steps,
        weights=recipe.prompts.weights,
    )


def held_out_prompts(recipe: TrainConfig) -> list[dict[str, Any]]:
    """The prompt records of a run's evaluations."""
    return read_prompt_file(recipe.evaluation.prompts)[: recipe.evaluation.images or None]


def evaluation_sampler(
    family: Family,
    group: DeviceGroup,
    recipe: TrainConfig,
    lora: LoraConfig | None = None,
    encoded: PrecomputedPrompts | None = None,
) -> Sampler:
    """Builds a sampler without noise, with the evaluation's own size, steps and guidance."""
    settings = SamplerSettings(recipe.evaluation_size, recipe.evaluation_steps, Ode())
    return Sampler(evaluation_policy(recipe, family, lora), group, settings, encoded)
