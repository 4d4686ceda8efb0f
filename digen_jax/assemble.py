"""Builds the parts of a run from its config. Only this module imports both models and meshes."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.typing import DTypeLike

from digen_jax import policies
from digen_jax.checkpoints.folder import has_weights
from digen_jax.checkpoints.quantization import OTHERS, stored_shapes
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import PromptBatches, prompt_batches, read_prompt_file
from digen_jax.diffusion.steps import make_step
from digen_jax.errors import prefix_errors
from digen_jax.families import check_parts, editing, load_family, open_pipeline, read_parts
from digen_jax.models.family import Family, Params, frozen_shapes
from digen_jax.parallel import placement as meshes
from digen_jax.parallel.encoding import PrecomputedPrompts
from digen_jax.parallel.mesh import ShardingRules, with_shardings
from digen_jax.parallel.objectives import DifferentiableRewards
from digen_jax.parallel.placement import DeviceGroup, MeshRole, Placement
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings
from digen_jax.parallel.system import Rollout, System, reshard, sharded_shapes
from digen_jax.parallel.trainer import Trainer
from digen_jax.policies import encoder_shapes, is_precomputed
from digen_jax.rewards.built_in import on_mesh

if TYPE_CHECKING:  # imported with the learned rewards
    from digen_jax.parallel.reward_model import RewardModel


def pipeline_of(config: TrainConfig) -> tuple[pathlib.Path, Family]:
    """Returns the folder and family of a config's model. Raises ConfigError if the folder is invalid."""
    model, arithmetic = config.model, config.precision.arithmetic
    with prefix_errors("config.model.folder: "):
        folder = open_pipeline(model.folder, model.without)
        options = model.remat, model.without, model.max_sequence_length
        family = load_family(folder, arithmetic, *options)
    if model.source is None:
        return folder, family
    return folder, editing(family, model.source, model.source_images)


def build(config: TrainConfig, devices: Sequence[jax.Device]) -> System:
    """Builds a run on all its devices; see `open_parts` and `load_system`."""
    return load_system(config, open_parts(config, devices))


def load_system(
    config: TrainConfig, parts: "Parts", encoded: PrecomputedPrompts | None = None
) -> System:
    """Builds all parts of a run, after checking that its model is complete.

    A trainer whose rollout workers are separate processes loads the components that only sampling needs when it has to
    sample. Without `encoded`, precomputed prompts are read from the local cache.

    Raises:
      ConfigError: The model is invalid.
    """
    family, placement = parts.family, parts.placement
    late = parts.mesh is not None and config.placement.rollout.data > 0
    frozen = {} if late else parameter_shapes(config, family).frozen
    with prefix_errors("config.model.folder: "):
        check_parts(family, parts.folder, frozen)
    encoded = encoded or _stored_prompts(config, parts.folder, family)
    given = None
    if config.algorithm.given_images:
        from digen_jax.prompt_store import stored_latents  # only such runs need it

        given = stored_latents(config, parts.folder, family)
    start, base = _read_trained(config, parts, placement.trainer)
    rewards = None
    if config.algorithm.differentiates_rewards:
        decoders = _read(parts, family.decoders, placement.trainer, config.precision.stored)
        rewards = differentiable_rewards(config, decoders, placement.trainer)
    if not late:
        frozen = _read_frozen(config, parts, placement.rollout)
        system = connect(config, placement, family, start, base, frozen, encoded, rewards)
        if parts.mesh is not None:
            system = system.with_scorers(read_scorers(config, placement.rollout))
        return system._replace(given=given)
    policy = policies.make_policy(config, family)

    def sampling_on(group: DeviceGroup) -> Rollout:
        print("loading text encoders and VAE so that the trainer can sample", flush=True)
        return _read_rollout(config, parts, group, policy.sampler_base(base), encoded)

    return make_system(config, placement, policy, start, base, (), sampling_on, rewards)


def load_rollout(
    config: TrainConfig, parts: "Parts", encoded: PrecomputedPrompts | None
) -> Rollout:
    """Builds a rollout worker in a separate process, without the trained parameters, which it gets from the trainer.

    Without `encoded`, precomputed prompts, this process encodes. Raises ConfigError if the model is invalid.
    """
    group = parts.placement.rollout
    _, base = _read_trained(config, parts, group)
    base = policies.make_policy(config, parts.family).sampler_base(base)
    return _read_rollout(config, parts, group, base, encoded)


def _read_rollout(
    config: TrainConfig, parts: "Parts", group: DeviceGroup, base: Any, encoded: Any
) -> Rollout:
    policy, frozen = policies.make_policy(config, parts.family), _read_frozen(config, parts, group)
    rollout = make_rollout(config, policy, group, base, frozen, encoded)
    return rollout._replace(scorers=read_scorers(config, group))


def _read_trained(config: TrainConfig, parts: "Parts", group: DeviceGroup) -> tuple:
    """Loads the trained components onto a mesh and splits them; see `split`."""
    # Trained parameters are float32; with a LoRA, the base parameters are frozen.
    dtype = config.precision.stored if config.lora.rank else "float32"
    trained = _read(parts, parts.family.trained, group, dtype)
    start, base = split(config, parts.family, trained, group)
    return start if parts.start is None else parts.start, base


def _read_frozen(config: TrainConfig, parts: "Parts", group: DeviceGroup) -> Params:
    """Loads the components that are never trained onto a mesh, except text encoders of precomputed prompts."""
    shapes = parameter_shapes(config, parts.family).frozen
    return _read(parts, shapes, group, config.precision.stored)


def _read(parts: "Parts", names: Iterable[str], group: DeviceGroup, dtype: DTypeLike) -> Params:
    """Loads components onto a mesh, after checking the files of all of them."""
    with prefix_errors("config.model.folder: "):
        check_parts(parts.family, parts.folder, names)
        return read_parts(parts.family, parts.folder, names, group, dtype)


def read_scorers(
    config: TrainConfig, group: DeviceGroup, abstract: bool = False
) -> "tuple[RewardModel, ...]":
    """Loads the rewards that run on a mesh, or only their shapes if `abstract`.

    Raises ConfigError if a file is missing or invalid.
    """
    sections = on_mesh(config.rewards)
    if not sections:
        return ()
    # Most runs use none of these networks.
    from digen_jax.learned_rewards.on_mesh import read

    return read(sections, group, weights=not abstract)


def differentiable_rewards(
    config: TrainConfig, decoders: Params, group: DeviceGroup, abstract: bool = False
) -> DifferentiableRewards:
    """Loads the rewards on a trainer mesh, or only their shapes if `abstract`; `decoders` are parameters or shapes.

    Raises ConfigError if a file is missing or invalid.
    """
    models = read_scorers(config, group, abstract)
    weights = config.advantages.reward_weights
    scorers = tuple((one.scorer, weight) for one, weight in zip(models, weights, strict=True))
    params = decoders, tuple(one.params for one in models)
    place = with_shardings if abstract else jax.device_put
    return DifferentiableRewards(scorers, place(params, group.replicated))


class Parts(NamedTuple):
    """Parts of a run without model weights."""

    folder: pathlib.Path  # of the model
    family: Family
    placement: Placement
    start: Any  # initial LoRA factors from a file, or None
    mesh: MeshRole | None = None  # the only one of this process, if workers are separate processes


def open_parts(
    config: TrainConfig, devices: Sequence[jax.Device], mesh: MeshRole | None = None
) -> Parts:
    """Opens a run's model, and checks config and devices against it. Weights may be missing.

    `devices` are those of the run, or of this process if it has only one of the meshes, `mesh`.

    Raises:
      ConfigError: The model is invalid, or there are too few devices.
    """
    if mesh is None:
        meshes.check_processes(config.placement.meshes, devices)
    folder, family = pipeline_of(config)
    placement = placed(config, family, devices, mesh)
    policies.check_model(config, family, placement)
    with prefix_errors("config.model.folder: "):
        check_parts(family, folder, [p for p in family.shapes() if has_weights(folder / p)])
    start, policy = None, policies.make_policy(config, family)
    if config.lora.path and policy.lora is not None:
        from digen_jax.checkpoints.lora_files import read_initial_lora  # few runs read one

        with prefix_errors("config.lora.path: "):
            shapes = family.shapes()
            tuned = {part: shapes[part] for part in policy.tuned}
            start = read_initial_lora(config.lora.path, policy.lora, tuned, family.lists)
    return Parts(folder, family, placement, start, mesh)


def _stored_prompts(
    config: TrainConfig, folder: pathlib.Path | None, family: Family
) -> PrecomputedPrompts | None:
    """See `prompt_store.stored_prompts`. Returns None if the text encoders run in each step."""
    if not is_precomputed(config, family):
        return None
    from digen_jax.prompt_store import stored_prompts  # only runs that precompute prompts need it

    return stored_prompts(config, folder, family)


def placed(
    config: TrainConfig, family: Family, devices: Sequence[jax.Device], mesh: MeshRole | None = None
) -> Placement:
    """Creates the meshes of a config, with its sharding rules for the model; see `open_parts` for `mesh`.

    Raises:
      ConfigError: There are too few devices, or sharding rules conflict.
    """
    layout = ShardingRules.of(config.placement.rules, family.axes())
    layout.check()
    sizes, attention = config.placement.meshes, config.model.attention
    if mesh is not None:
        return meshes.make_process_placement(sizes, layout, devices, attention, mesh)
    return meshes.make_placement(sizes, layout, devices, attention)


def connect(
    config: TrainConfig,
    placement: Placement,
    family: Family,
    start: Any,
    base: Any,
    frozen: Params,
    encoded: PrecomputedPrompts | None = None,
    rewards: DifferentiableRewards | None = None,
) -> System:
    """Builds the parts of a run from its parameters, or from their shapes.

    `start`, `base` (see `split`) and differentiable `rewards` are on the trainer's mesh, the components `frozen` on the
    rollout mesh. `encoded` are precomputed prompts, instead of text encoders.
    """
    policy = policies.make_policy(config, family)
    sampler_base = policy.sampler_base(base)
    first = make_rollout(config, policy, placement.rollout, sampler_base, frozen, encoded)
    others = (first.moved(group, sampler_base) for group in placement.rollouts[1:])
    rollouts = first, *others
    return make_system(config, placement, policy, start, base, rollouts, None, rewards)


def split(config: TrainConfig, family: Family, trained: Params, group: DeviceGroup) -> tuple:
    """Returns (trained, base) parameters of the trained components, on their mesh; see `Policy.split`."""
    policy, key = policies.make_policy(config, family), jax.random.key(config.seed)
    start, base = policy.split(key, trained, config.reads_reference)
    if config.precision.frozen != "float32":
        base = reshard(base, group, OTHERS)  # does not change quantized kernels
    return start, base


def outline(config: TrainConfig, devices: Sequence[jax.Device]) -> System:
    """Builds the abstract system of `build` (shapes instead of parameters), to lower and compile its programs.

    Reads only the model's configuration, and allocates nothing.

    Raises:
      ConfigError: The model's folder is invalid, there are too few devices, or heads cannot be split over them.
    """
    _, family = pipeline_of(config)
    placement = placed(config, family, devices)
    policies.check_heads(family, placement)
    shapes = parameter_shapes(config, family)
    start, base = (sharded_shapes(tree, placement.trainer) for tree in (shapes.tuned, shapes.base))
    frozen = sharded_shapes(shapes.frozen, placement.rollout)
    encoded, rewards = _stored_prompts(config, None, family), None
    if config.algorithm.differentiates_rewards:
        decoders = {part: shapes.frozen[part] for part in family.decoders}
        rewards = differentiable_rewards(config, decoders, placement.trainer, abstract=True)
    system = connect(config, placement, family, start, base, frozen, encoded, rewards)
    return system.with_scorers(read_scorers(config, placement.rollout, abstract=True))


class ParameterShapes(NamedTuple):
    """Abstract parameters of a run by use; `tuned` and `base` as in `Policy`."""

    tuned: Params
    base: Params
    frozen: Params  # the other components, on the rollout meshes
    encode: Params  # text encoders that only run before sampling starts


def parameter_shapes(config: TrainConfig, family: Family) -> ParameterShapes:
    """Returns the abstract parameters of a run, in their stored dtypes."""
    policy, shapes = policies.make_policy(config, family), family.shapes()
    split = functools.partial(policy.split, reference=config.reads_reference)
    tuned, base = jax.eval_shape(split, jax.random.key(0), policies.trained_of(family, shapes))
    encode = encoder_shapes(config, family) if is_precomputed(config, family) else {}
    others = {*shapes} - {*family.trained, *encode} | {*family.decoders}
    dtype = config.precision.stored
    base = {part: stored_shapes(tree, dtype) for part, tree in base.items()}
    frozen = frozen_shapes(family, [part for part in shapes if part in others], dtype)
    return ParameterShapes(tuned, base, frozen, encode)


def make_rollout(
    config: TrainConfig,
    policy: Policy,
    group: DeviceGroup,
    base: Any,
    frozen: Params,
    encoded: PrecomputedPrompts | None,
) -> Rollout:
    """Builds a rollout worker; `base` (`Policy.sampler_base`) may be on another mesh than `group`."""
    step = make_step(config.sampler.kind, config.sampler.noise_level)
    algorithm, rounded = config.algorithm, config.precision.trajectory
    stored = config.noisy_steps, algorithm.stores_means, rounded
    latents = algorithm.stored_latents(config.sampler.steps)
    settings = SamplerSettings(config.model.size, config.sampler.steps, step, *stored, latents)
    dtype = config.precision.sent
    sampling = policy.family.in_dtype(dtype) if dtype else policy.family
    sampler = Sampler(dataclasses.replace(policy, family=sampling), group, settings, encoded)
    evaluated = policies.evaluation_policy(config, sampling, policy.lora)
    settings = SamplerSettings(config.evaluation_size, config.evaluation_steps, sampling.solver)
    evaluator = Sampler(evaluated, group, settings, encoded)
    return Rollout(sampler, evaluator, dtype, reshard(base, group, dtype), frozen)


def make_system(
    config: TrainConfig,
    placement: Placement,
    policy: Policy,
    start: Any,
    base: Any,
    rollouts: tuple[Rollout, ...],
    sampling_on: Callable[[DeviceGroup], Rollout] | None = None,
    rewards: DifferentiableRewards | None = None,
) -> System:
    """Builds the parts of a run from its rollout workers and the trainer's placed parameters."""
    algorithm = config.algorithm

    def trainer(group: DeviceGroup) -> Trainer:
        step = make_step(config.sampler.kind, config.sampler.noise_level)
        tuned = policies.trained_policy(policy, algorithm)
        own = rewards
        if rewards is not None and group is not placement.trainer:
            own = rewards.placed(group.replicated)
        return Trainer(tuned, group, step, algorithm, config.trainer, own)

    # With a LoRA, the optimizer state is small and not sharded over training workers.
    several = placement.others and not config.lora.rank
    parts = placement, policy, config.rng, rollouts, trainer(placement.trainer), base, start
    settings = config.advantages, config.precision.sent, sampling_on
    joint = trainer(placement.training) if several else None
    return System(*parts, *settings, tuple(map(trainer, placement.others)), joint)


def train_prompts(config: TrainConfig) -> PromptBatches:
    """Returns the prompt records of each step of a run."""
    return prompt_batches(
        config.prompts.paths,
        config.max_groups,
        config.seed,
        set_steps=config.algorithm.set_steps,
        weights=config.prompts.weights,
    )


def held_out_prompts(config: TrainConfig) -> list[dict[str, Any]]:
    """Returns the prompt records of a run's evaluations."""
    if not config.rewards:  # no evaluation
        return []
    return read_prompt_file(config.evaluation.prompts)[: config.evaluation.images or None]
