"""From a recipe to the parts of a run: the one module that sees models, meshes and executors together."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.attention.kernels import choose
from digen_jax.config.recipe import Recipe
from digen_jax.engine.axes import SEQUENCE, TENSOR
from digen_jax.engine.placement import DeviceGroup, Placement, check_processes, make_placement
from digen_jax.engine.policy import Policy
from digen_jax.engine.sampler import Sampler, SamplerSettings
from digen_jax.engine.sharding import Layout
from digen_jax.engine.system import Rollout, System, in_dtype, lying, reshard
from digen_jax.engine.trainer import Trainer, TrainState
from digen_jax.errors import ConfigError, blame, user_input
from digen_jax.flow.steps import Ode, make_step
from digen_jax.models.family import Family, Params, Size
from digen_jax.models.remat import Remat
from digen_jax.models.stable_diffusion_3 import PIPELINE_CLASS, StableDiffusion3
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.driver import Begun, Driver
from digen_jax.runtime.evaluation import Evaluation
from digen_jax.runtime.executors import Duties, Executors
from digen_jax.runtime.log import CommandLog
from digen_jax.runtime.orders import Orders
from digen_jax.runtime.watch import Watch
from digen_jax.scheduling.commands import Command
from digen_jax.scheduling.costs import GUESSED
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Settings
from digen_jax.weights.folder import read_model_index, resolve_folder
from digen_jax.weights.lora import LoraConfig, check_rank
from digen_jax.weights.lora_start import read_start

# The model families, by the pipeline class that a folder's model_index.json names.
FAMILIES = {PIPELINE_CLASS: StableDiffusion3}


def open_pipeline(name: str) -> pathlib.Path:
    """The folder of a local path or hub id, without the components that its family does not use.

    Raises:
      ConfigError: no family is for its class; then nothing large is downloaded.
    """
    family = family_of(resolve_folder(name, index_only=True))
    return resolve_folder(name, without=family.unused)


def family_of(folder: pathlib.Path) -> Any:
    """The class of a pipeline folder's family; ConfigError where there is none."""
    with user_input():
        kind = read_model_index(folder)["_class_name"]
    if kind not in FAMILIES:
        raise ConfigError(
            f"{folder} is a {kind}; supported are {', '.join(FAMILIES)}: choose another folder"
        )
    return FAMILIES[kind]


def load_family(folder: pathlib.Path, dtype: str = "float32", remat: Remat = "none") -> Family:
    """The family of a pipeline folder; ConfigError where there is none for its class."""
    kind = family_of(folder)
    with user_input():
        return kind.from_folder(folder, jnp.dtype(dtype), remat)


def recipe_family(recipe: Recipe) -> Family:
    """The family of a recipe's model.

    Raises:
      ConfigError: the model's folder cannot be used.
    """
    with blame("config.model.folder: "):
        return load_family(
            open_pipeline(recipe.model.folder), recipe.precision.arithmetic, recipe.model.remat
        )


def build(recipe: Recipe, devices: Sequence[jax.Device]) -> System:
    """All parts of a run; what does not fit the model is found before its weights are read.

    Raises:
      ConfigError: the model's first mistake, or devices that do not suffice.
    """
    sizes = recipe.placement.meshes
    check_processes(sizes, devices)
    with blame("config.model.folder: "):
        folder = open_pipeline(recipe.model.folder)
        family = load_family(folder, recipe.precision.arithmetic, recipe.model.remat)
    layout = Layout.of(recipe.placement.rules, family.axes())
    layout.check()
    placement = make_placement(sizes, layout, devices, recipe.model.attention)
    check_model(recipe, family, placement)
    start = None
    if recipe.lora.start:
        with blame("config.lora.start: "):
            lora, shapes = make_policy(recipe, family).lora, trained_of(family, family.shapes())
            start = read_start(recipe.lora.start, lora, shapes, family.lists)
    with blame("config.model.folder: "):
        kept = recipe.precision.frozen
        # What is tuned itself is float32; under a LoRA nothing of it is.
        own = kept if recipe.lora.rank else "float32"
        trained = read_parts(family, folder, family.trained, placement.trainer, own)
        frozen = read_frozen(family, folder, placement.rollout, kept)
    return connect(recipe, placement, family, trained, frozen, start)


def check_model(recipe: Recipe, family: Family, placement: Placement) -> None:
    """Whether recipe and model fit, by shapes alone.

    Raises:
      ConfigError: an image size or a guidance that the model has not, a window with steps that cannot be trained,
        an attention kernel that cannot compute it, heads that cannot be split, a LoRA without layers or of too large
        a rank, or a parameter that no sharding rule matches.
    """
    sampler, shapes = recipe.sampler, family.shapes()
    size = Size(recipe.model.height, recipe.model.width)
    with blame("config.model.height and config.model.width: "):
        family.latent_shape(size)
    with blame("config.sampler.steps: "):
        sigmas = family.sigmas(sampler.steps, size)
    _check_guidance(recipe, family)
    attention_kernels(recipe, family, placement)
    check_heads(family, placement)
    if recipe.noisy_steps:
        with blame("config.sampler.window: "):
            recipe.window.check_noise(make_step(sampler.kind, sampler.noise_level), sigmas)
    with blame("config.lora.targets: "):
        split = functools.partial(make_policy(recipe, family).split, reference=False)
        tuned, _ = jax.eval_shape(split, jax.random.key(0), trained_of(family, shapes))
    if recipe.lora.rank:
        with blame("config.lora."):
            check_rank(recipe.lora.rank, tuned)
    for tree in (tuned, shapes):
        placement.trainer.params(tree)


def attention_kernels(recipe: Recipe, family: Family, placement: Placement) -> dict[str, str]:
    """The kernel of the network's attention in "sampling" and in "training": see `attention.kernels`.

    Raises:
      ConfigError: the one that was asked for cannot compute it.
    """
    precision, heads = recipe.precision, family.heads
    dtypes = {
        "sampling": (placement.rollout, precision.published or precision.arithmetic),
        "training": (placement.trainer, precision.arithmetic),
    }
    return {
        work: choose(
            group.attention,
            group.mesh.devices.flat[0],
            dtype,
            heads.split(group.mesh.shape[TENSOR] * group.mesh.shape[SEQUENCE]),
        )
        for work, (group, dtype) in dtypes.items()
    }


def check_heads(family: Family, placement: Placement) -> None:
    """Refuses a mesh that splits tokens, and with them heads, if it does not divide the model's heads.

    Raises:
      ConfigError: names the axes.
    """
    meshes = {"trainer": placement.trainer.mesh}
    if not placement.colocated:
        meshes["rollout"] = placement.rollout.mesh
    heads = family.heads.number
    for name, mesh in meshes.items():
        sizes = {axis: mesh.shape[axis] for axis in (SEQUENCE, TENSOR)}
        parts = math.prod(sizes.values())
        if sizes[SEQUENCE] > 1 and heads % parts:
            words = [f"config.placement.{name}.{axis}" for axis, size in sizes.items() if size > 1]
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"{' x '.join(words)} = {parts} does not divide the model's {heads} attention heads, for which tokens "
                f"are exchanged where they are split: make it one of {fitting}"
            )


def _check_guidance(recipe: Recipe, family: Family) -> None:
    """Whether the model has what the sampler, evaluation and training are guided by."""
    for name, section in (("sampler", recipe.sampler), ("evaluation", recipe.evaluation)):
        with blame(f"config.{name}."):
            Policy(family, section.guidance, true_guidance=section.true_guidance)
    with blame("config.algorithm."):
        trained_policy(Policy(family), recipe.algorithm)


def make_policy(recipe: Recipe, family: Family) -> Policy:
    """What is tuned, and the guidance it is sampled with."""
    sampler = recipe.sampler
    lora = recipe.lora.settings(family.lora_targets)
    return Policy(family, sampler.guidance, lora, true_guidance=sampler.true_guidance)


def trained_policy(policy: Policy, algorithm: Algorithm) -> Policy:
    """The policy as the trainer evaluates it: policy gradients at the sampler's guidance, others at their own."""
    if algorithm.guidances is None:
        return policy
    guidance, reference = algorithm.guidances
    return dataclasses.replace(policy, guidance=guidance, reference_guidance=reference)


def connect(
    recipe: Recipe,
    placement: Placement,
    family: Family,
    trained: Params,
    frozen: Params,
    lora: Any = None,
) -> System:
    """The parts of a run around a model: components by name, `trained` on the trainer mesh, `frozen` on the rollout's.

    `lora` holds the factors to begin with, None: fresh ones.
    """
    policy = make_policy(recipe, family)
    key, reference = jax.random.key(recipe.seed), recipe.algorithm.reads_reference
    start, base = policy.split(key, trained, reference)
    if recipe.precision.frozen != "float32":
        base = reshard(base, placement.trainer, recipe.precision.frozen)
    return _around(recipe, placement, policy, start if lora is None else lora, base, frozen)


def outline(recipe: Recipe, devices: Sequence[jax.Device]) -> System:
    """The system of `build` with shapes in place of all parameters: its programs can be lowered and compiled.

    Nothing is read but the model's configuration, and nothing is allocated.

    Raises:
      ConfigError: the model's folder cannot be used, the devices do not suffice, or heads cannot be split over them.
    """
    family = recipe_family(recipe)
    layout = Layout.of(recipe.placement.rules, family.axes())
    placement = make_placement(recipe.placement.meshes, layout, devices, recipe.model.attention)
    check_heads(family, placement)
    shapes = parameter_shapes(recipe, family)
    start, base = (lying(tree, placement.trainer) for tree in (shapes.tuned, shapes.base))
    frozen = lying(shapes.frozen, placement.rollout)
    return _around(recipe, placement, make_policy(recipe, family), start, base, frozen)


class ParameterShapes(NamedTuple):
    """All parameters of a run by what they are for; `tuned` and `base` as in `Policy`."""

    tuned: Params
    base: Params
    frozen: Params


def parameter_shapes(recipe: Recipe, family: Family) -> ParameterShapes:
    """The parameters of a recipe's run as shapes, in the types that it keeps them in."""
    policy, shapes = make_policy(recipe, family), family.shapes()
    split = functools.partial(policy.split, reference=recipe.algorithm.reads_reference)
    tuned, base = jax.eval_shape(split, jax.random.key(0), trained_of(family, shapes))
    frozen = {part: tree for part, tree in shapes.items() if part not in family.trained}
    return ParameterShapes(tuned, *in_dtype((base, frozen), recipe.precision.frozen))


def _around(
    recipe: Recipe, placement: Placement, policy: Policy, start: Any, base: Any, frozen: Params
) -> System:
    """The parts of a run around parameters that lie where they belong."""
    family, algorithm = policy.family, recipe.algorithm
    step = make_step(recipe.sampler.kind, recipe.sampler.noise_level)
    settings = SamplerSettings(
        Size(recipe.model.height, recipe.model.width),
        recipe.sampler.steps,
        step,
        recipe.noisy_steps,
        algorithm.stores_means,
        recipe.precision.trajectory,
    )
    dtype = recipe.precision.sent
    sampling = family.in_dtype(dtype) if dtype else family
    samplers = (
        Sampler(dataclasses.replace(policy, family=sampling), placement.rollout, settings),
        evaluation_sampler(sampling, placement.rollout, recipe, policy.lora),
    )
    sampler_base = policy.sampler_base(base)
    at_sampler = reshard(sampler_base, placement.rollout, dtype)
    first = Rollout(*samplers, dtype, at_sampler, frozen)
    others = (first.moved(group, sampler_base) for group in placement.rollouts[1:])
    return System(
        placement,
        policy,
        recipe.draws,
        (first, *others),
        Trainer(
            trained_policy(policy, algorithm),
            placement.trainer,
            step,
            algorithm,
            recipe.trainer.settings,
        ),
        base,
        start,
        recipe.advantages,
    )


def make_driver(
    system: System,
    recipe: Recipe,
    state: TrainState,
    batches: Iterator[list[dict[str, Any]]],
    rewards: RewardPool,
    first: int = 0,
    begun: Begun | None = None,
    log: CommandLog | list[Command] | None = None,
    orders: Orders | None = None,
    watch: Watch | None = None,
    held_out: Sequence[dict[str, Any]] = (),
    evaluated: Callable[[int, Evaluation], None] = lambda version, found: None,
) -> Driver:
    """What drives a run from a step on.

    Args:
      system: the parts of the run.
      recipe: of the run.
      state: of the trainer before the step `first`.
      batches: the prompt records of every step from `first` on.
      rewards: scores; closed by who opened it.
      first: the number of steps that are done.
      begun: what was in flight when `state` was saved; None: nothing, as before the first step.
      log: gets all commands in their order.
      orders: tells other processes what is done as it begins.
      watch: has what takes too long given up; None: nothing is.
      held_out: the prompts of evaluations; none: nothing is evaluated.
      evaluated: is called with a version and its evaluation.
    """
    if begun is None and first:
        raise ValueError(f"{first} steps are done, but what the scheduler knew of them is missing")
    kept, settings = begun.kept if begun else {}, scheduled(recipe, held_out)
    executors = Executors(system, settings, duties(recipe, held_out), state, batches, first, kept)
    if begun is None:
        scheduler = Scheduler(settings, GUESSED)
    else:
        costs = None if begun.layout == recipe.layout else GUESSED
        scheduler = Scheduler.resume(begun.scheduler, settings, costs)
    return Driver(executors, scheduler, rewards, begun, log, orders, watch, evaluated)


def duties(recipe: Recipe, held_out: Sequence[dict[str, Any]] = ()) -> Duties:
    """What the executors are told beside the scheduler's settings."""
    return Duties(recipe.reward.name, held_out, recipe.runtime.tag_weights)


def scheduled(recipe: Recipe, held_out: Sequence[dict[str, Any]]) -> Settings:
    """The scheduler's settings of a run that evaluates on these prompts; none: it does not."""
    settings, algorithm = recipe.scheduler, recipe.algorithm
    if not held_out:
        return settings
    return dataclasses.replace(
        settings,
        evaluate_every=recipe.evaluation.every,
        evaluation_images=len(held_out),
        show_every=recipe.pictures.every,
        shown_images=recipe.pictures.images,
        evaluation_batch=recipe.evaluation.batch,
        # The trained parameters are not what samples, or their average is evaluated.
        evaluated_apart=recipe.trainer.ema > 0
        or algorithm.publishes_copy
        or algorithm.set_steps > 0,
    )


def trained_of(family: Family, components: Params) -> Params:
    """Of all components those that may be tuned, in the family's order."""
    return {part: components[part] for part in family.trained}


def read_parts(
    family: Family,
    folder: pathlib.Path,
    parts: Iterable[str],
    group: DeviceGroup,
    dtype: str = "float32",
) -> Params:
    """The parameters of some components, read straight onto a mesh as its rules say, in a type."""
    shardings = group.params(family.shapes())
    return {part: family.read(folder, part, shardings[part], jnp.dtype(dtype)) for part in parts}


def read_frozen(
    family: Family, folder: pathlib.Path, group: DeviceGroup, dtype: str = "float32"
) -> Params:
    """The parameters of all components that are never tuned."""
    frozen = [part for part in family.shapes() if part not in family.trained]
    return read_parts(family, folder, frozen, group, dtype)


def evaluation_sampler(
    family: Family,
    group: DeviceGroup,
    recipe: Recipe,
    lora: LoraConfig | None = None,
) -> Sampler:
    """As the recipe's sampler, but without noise, and with steps and guidance of its own."""
    model, own = recipe.model, recipe.evaluation
    settings = SamplerSettings(Size(model.height, model.width), recipe.evaluation_steps, Ode())
    policy = Policy(family, own.guidance, lora, true_guidance=own.true_guidance)
    return Sampler(policy, group, settings)
