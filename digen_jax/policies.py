"""The policies of a config: trained parameters, guidance, placement, and checks that config, model and meshes fit."""

import dataclasses
import functools
import math
import pathlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.attention.kernels import choose
from digen_jax.checkpoints.lora import check_rank
from digen_jax.config.checks import check_devices
from digen_jax.config.load import fit_config
from digen_jax.config.sections import (
    AUTO,
    GIVEN,
    EvaluationSection,
    PlacementSection,
    SamplerSection,
)
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import first_negative, numbered_records
from digen_jax.diffusion.steps import make_step
from digen_jax.errors import ConfigError, prefix_errors, user_input
from digen_jax.models.family import Family, Params, frozen_shapes
from digen_jax.models.linear import FLOAT32_NAMES
from digen_jax.parallel.encoding import example_record
from digen_jax.parallel.mesh import SEQUENCE, TENSOR
from digen_jax.parallel.placement import (
    ONE_DEVICE,
    PROCESS_FIELDS,
    MeshSizes,
    Placement,
    RolloutAxes,
    TrainerAxes,
)
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import steps_of_experts

# Names of published models that were distilled to be sampled in few steps.
FEW_STEPS = re.compile(r"turbo|schnell|lightning|lcm|hyper|distill|(?<!\d)[1-8]-?steps?", re.I)

PRECOMPUTED, EACH_STEP = "precomputed", "each_step"
# Bytes of text encoders above which "auto" precomputes prompts instead of keeping the encoders on rollout workers.
# The two CLIPs of Stable Diffusion 3 have 3.3 GB in float32; T5-XXL has 9.5 GB in bfloat16.
LARGE = 4 * 10**9


def make_policy(config: TrainConfig, family: Family) -> Policy:
    """Returns the sampling policy: trained parameters, the sampler's guidance and schedule."""
    sampler = config.sampler
    family = family.scheduled(sampler.steps, config.model.size)
    lora = None
    if config.lora.rank:
        targets = config.lora.targets or family.lora_targets
        lora = dataclasses.replace(config.lora, targets=targets)
    options = _guidances(sampler) | {"components": config.model.trained}
    sampled = config.advantages.kl_reward > 0
    return Policy(family, lora=lora, samples_reference=sampled, **options)


def trained_policy(policy: Policy, algorithm: Algorithm) -> Policy:
    """Returns the policy in the trainer: policy gradients use the sampler's guidance, others the algorithm's."""
    policy = dataclasses.replace(policy, detach_unconditional=algorithm.detach_unconditional)
    if algorithm.guidances is None:
        return policy
    guidance, reference = algorithm.guidances
    return dataclasses.replace(
        policy,
        guidance=guidance,
        reference_guidance=None if reference == guidance else reference,
        # Another guidance than the sampler's applies to all experts.
        guidance_2=policy.guidance_2 if guidance == policy.guidance else 0.0,
    )


def evaluation_policy(config: TrainConfig, family: Family, lora: Any = None) -> Policy:
    """Returns the policy with the guidance of evaluations; `lora` is a `LoraConfig`, if any."""
    options = _guidances(config.evaluation) | {"components": config.model.trained}
    return Policy(family, lora=lora, **options)


def _guidances(section: SamplerSection | EvaluationSection) -> dict[str, Any]:
    """Returns the guidance scales of a section by field of `Policy`."""
    names = "guidance", "guidance_2", "true_cfg_scale"
    return {name: getattr(section, name) for name in names}


def reads_null(config: TrainConfig, family: Family) -> bool:
    """Returns whether the sampler, the trainer or the evaluation of a run reads the pass without the prompt."""
    sampling, evaluation = make_policy(config, family), evaluation_policy(config, family)
    return sampling.reads_null or evaluation.reads_null


def encoder_shapes(config: TrainConfig, family: Family) -> Params:
    """Returns the text encoders' abstract parameters as the run stores them."""
    return frozen_shapes(family, family.encoders, config.precision.stored)


def is_precomputed(config: TrainConfig, family: Family) -> bool:
    """Returns whether prompts are encoded before sampling starts."""
    if config.prompts.encoding != "auto":
        return config.prompts.encoding == PRECOMPUTED
    return encoder_bytes(config, family) > LARGE


def encoder_bytes(config: TrainConfig, family: Family) -> int:
    """Returns the size of the text encoders' parameters in bytes."""
    leaves = jax.tree.leaves(encoder_shapes(config, family))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def check_negative(given: str, policies: Sequence[Policy], prefix: str) -> None:
    """Refuses a negative prompt that none of the policies, all of one family, reads in a second pass.

    `given` is the source of the negative prompt, as the start of a message; `prefix` is that of guidance names in the
    message, such as "--".
    """
    if any(max(policy.sequences, policy.reference_sequences) == 2 for policy in policies):
        return
    kind = policies[0].family.guidance
    if kind in ("none", "embedded"):
        raise ConfigError(
            f"{given}, but this model's guidance is {kind!r}, which has no unconditional pass: remove it, or "
            "choose another model"
        )
    name = prefix + ("true_cfg_scale" if kind == "both" else "guidance")
    raise ConfigError(
        f"{given}, but {name} is not above 1, so there is no unconditional pass: set {name} to a number above "
        "1, or remove the negative prompt"
    )


def trained_of(family: Family, components: Params) -> Params:
    """Returns the components that may be trained, in the family's order."""
    return {part: components[part] for part in family.trained}


def check_model(config: TrainConfig, family: Family, placement: Placement) -> None:
    """Checks that config and model fit, by shapes alone.

    Raises:
      ConfigError: The model does not support an image size or a guidance, nothing reads the negative prompts, a window
        has steps that cannot be trained, an attention kernel does not support the model, heads cannot be split, a
        LoRA has no layers or too large a rank, or no sharding rule matches a parameter.
    """
    _check_source_images(config, family)
    sampler, shapes = config.sampler, family.shapes()
    with prefix_errors("config.model.height, config.model.width and config.model.frames: "):
        family.latent_shape(config.model.size)
    with prefix_errors(
        "config.evaluation.height, config.evaluation.width and config.evaluation.frames: "
    ):
        family.latent_shape(config.evaluation_size)
    with prefix_errors("config.sampler.steps: "):
        sigmas = family.sigmas(sampler.steps, config.model.size)
    with prefix_errors("config.evaluation.steps: "):
        family.sigmas(config.evaluation_steps, config.evaluation_size)
    _check_guidance(config, family)
    attention_kernels(config, family, placement)
    check_heads(family, placement)
    if config.noisy_steps:
        with prefix_errors("config.sampler.window: "):
            config.sampler.window.check_noise(make_step(sampler.kind, sampler.noise_level), sigmas)
        _check_experts(config, family)
    with prefix_errors("config.lora.targets: "):
        split = functools.partial(make_policy(config, family).split, reference=False)
        tuned, _ = jax.eval_shape(split, jax.random.key(0), trained_of(family, shapes))
    _check_negatives(config, family)
    if config.lora.rank:
        with prefix_errors("config.lora."):
            check_rank(config.lora.rank, tuned)
    for tree in (tuned, shapes):
        (placement.home or placement.rollout).params(tree)


def start_warnings(config: TrainConfig, family: Family) -> list[str]:
    """Returns a warning for each valid choice that has degraded runs of comparable libraries."""
    model, found = config.model, []
    few_steps = family.guidance == "none" or FEW_STEPS.search(pathlib.PurePath(model.folder).name)
    matching = config.algorithm.objective == "matching"
    if matching and few_steps and not config.algorithm.differentiates_rewards:
        found.append(
            f"config.algorithm.name = {config.algorithm.name!r} fits velocities at all noise levels, but "
            f"{model.folder} looks like a model distilled for few steps, which this often blurs or breaks: prefer "
            "policy_gradient, or the model that it was distilled from"
        )
    best, trained = family.default_size(), model.size
    if trained == config.evaluation_size != best:
        found.append(
            f"training and evaluation are at {trained} alone, but the model was made for {best}, where "
            "artefacts would not be noticed: to evaluate at that size add "
            f"--config.evaluation.height={best.height} --config.evaluation.width={best.width}"
            + f" --config.evaluation.frames={best.frames}"
            * (best.frames > 1)
        )
    return found


def attention_kernels(config: TrainConfig, family: Family, placement: Placement) -> dict[str, str]:
    """Returns the attention kernels for "sampling" and "training", as far as they run here: see `attention.kernels`.

    Raises:
      ConfigError: The configured kernel does not support the network.
    """
    precision, kernels = config.precision, {}
    for work, group, dtype in (
        ("sampling", placement.rollout, precision.rollout or precision.arithmetic),
        ("training", placement.home, precision.arithmetic),
    ):
        if group is not None:
            mesh = group.mesh
            heads = family.heads.split(mesh.shape[TENSOR] * mesh.shape[SEQUENCE])
            kernels[work] = choose(group.attention, mesh.devices.flat[0], dtype, heads)
    return kernels


def describe_computation(config: TrainConfig, family: Family, placement: Placement) -> str:
    """Returns one line for the console: devices, attention kernel, and precision."""
    groups = [group for group in (placement.home, *placement.rollouts) if group is not None]
    devices = {device for group in groups for device in group.mesh.devices.flat}
    kinds = Counter(device.device_kind for device in devices)
    precision = config.precision
    arithmetic = {"sampling": precision.rollout or precision.arithmetic}
    if placement.home is not None:
        arithmetic["training"] = precision.arithmetic
    products = ""
    platform = groups[0].mesh.devices.flat[0].platform
    if platform != "cpu" and "float32" in arithmetic.values():
        chosen = jax.config.jax_default_matmul_precision
        products = f", float32 products: {chosen or FLOAT32_NAMES[platform]}"
    return (
        f"{', '.join(f'{count} x {kind}' for kind, count in sorted(kinds.items()))}; "
        f"attention: {_by_work(attention_kernels(config, family, placement))}; "
        f"precision: {_by_work(arithmetic)}{products}, frozen weights {precision.frozen}"
    )


def _by_work(named: Mapping[str, str]) -> str:
    """Returns a name, or the names of each kind of work if they differ."""
    if len(set(named.values())) == 1:
        return next(iter(named.values()))
    return ", ".join(f"{name} in {work}" for work, name in named.items())


def check_heads(family: Family, placement: Placement) -> None:
    """Refuses a mesh whose axes `tensor` and `sequence` do not divide the model's heads, which they split."""
    meshes = {} if placement.home is None else {"trainer": placement.home.mesh}
    if placement.rollouts:
        meshes["rollout"] = placement.rollout.mesh
    heads = family.heads.number
    for name, mesh in meshes.items():
        sizes = {axis: mesh.shape[axis] for axis in (SEQUENCE, TENSOR)}
        parts = math.prod(sizes.values())
        if heads % parts:
            terms = [f"config.placement.{name}.{axis}" for axis, size in sizes.items() if size > 1]
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"{' x '.join(terms)} = {parts} does not divide the model's {heads} attention heads, which are split "
                f"over these devices: make it one of {fitting}"
            )


def _check_source_images(config: TrainConfig, family: Family) -> None:
    """Refuses source images that would not be edited although the model can edit, and models that need them."""
    if not family.edits or family.source is not None:
        return
    for file in (*config.prompts.paths, config.evaluation.prompts):
        for number, record in numbered_records(file) if file else ():
            if "image" in record:
                raise ConfigError(
                    f"config.model.source_height and config.model.source_width are 0, but {file}, line {number}, has "
                    "an image to edit: set them to the size that source images are resized to, such as 1024, or remove "
                    "the images"
                )
    with user_input():
        family.tokenize([example_record(family)])


def _check_guidance(config: TrainConfig, family: Family) -> None:
    """Checks that the model supports the guidance of the sampler, evaluation and training."""
    for name, section in (("sampler", config.sampler), ("evaluation", config.evaluation)):
        with prefix_errors(f"config.{name}."):
            Policy(family, **_guidances(section))
    with prefix_errors("config.model.trained: "):
        Policy(family, components=config.model.trained)
    with prefix_errors("config.algorithm."):
        trained_policy(Policy(family), config.algorithm)


def _check_experts(config: TrainConfig, family: Family) -> None:
    """Refuses ratios of full trajectories if a window has steps of several experts, which train one after another."""
    sampler = config.sampler
    family = family.scheduled(sampler.steps, config.model.size)
    sigmas = family.sigmas(sampler.steps, config.model.size)
    first = steps_of_experts(family, sigmas)[0]
    if config.algorithm.differentiates_rewards and len(family.trained) > 1:
        raise ConfigError(
            f"config.algorithm.name = {config.algorithm.name!r} does not train a model with several experts: choose "
            "another algorithm"
        )
    crossed = any(start < first < start + sampler.window.length for start in sampler.window.places)
    if crossed and config.algorithm.needs_full_trajectories:
        raise ConfigError(
            "config.algorithm.ratio combines the steps of an image, but the model's experts, which change at step "
            f"{first}, train in separate passes: move config.sampler.window to one side of that step, or set the ratio "
            "to 'plain'"
        )


def _check_negatives(config: TrainConfig, family: Family) -> None:
    """Refuses negative prompts that nothing in the run reads; a file may be for both training and evaluation."""
    sampled = make_policy(config, family)
    trained = trained_policy(sampled, config.algorithm)
    policies = sampled, trained, evaluation_policy(config, family)
    held_out = [config.evaluation.prompts] if config.evaluation.prompts else []
    files = "prompts.files" if config.prompts.files else "prompts.file"
    for name, section, paths in (
        (files, "sampler", config.prompts.paths),
        ("evaluation.prompts", "evaluation", held_out),
    ):
        with prefix_errors(f"config.{name}: "):
            if place := next(filter(None, map(first_negative, paths)), None):
                check_negative(f"{place}, has a negative prompt", policies, f"config.{section}.")


def on_devices(config: TrainConfig, devices: int) -> TrainConfig:
    """Returns the config with its meshes for `devices`, fitted ones, or one mesh of all if the planner would choose.

    Raises:
      ConfigError: The meshes need more devices, or do not divide the batches.
    """
    config = config.fitted(devices)
    if config.placement.mode == AUTO:
        batch = config.trainer.micro_batch
        most = max(n for n in range(1, devices + 1) if batch % n == 0)
        config = config.with_meshes(MeshSizes(RolloutAxes(data=0), TrainerAxes(data=most)))
    check_devices(config, devices)
    return config


def place_here(config: TrainConfig) -> TrainConfig:
    """Returns a config placed on the available devices; prints its meshes if they were reduced to fit.

    Raises:
      ConfigError: A setting cannot work here, or there is one device for configured meshes of several.
    """
    devices, (rollout, trainer) = jax.device_count(), config.placement.meshes
    wanted = rollout.devices * rollout.workers, trainer.devices * trainer.workers
    # A config without mesh sizes has the default ones and trains on one device.
    chosen = config.placement.meshes != PlacementSection().meshes
    if devices == 1 < sum(wanted) and chosen and config.placement.mode == GIVEN:
        raise ConfigError(
            f"config.placement.rollout wants {wanted[0]} and config.placement.trainer {wanted[1]} devices, but there "
            "is 1: set config.placement.mode to 'fitted', which samples and trains on it alternately"
        )
    placed = fit_config(config, devices)
    sizes = placed.placement.meshes
    if sizes != config.placement.meshes and devices > 1:
        print(f"config.placement is fitted to {devices} devices: {sizes.as_dict()}", flush=True)
    return placed


def place_processes(config: TrainConfig) -> TrainConfig:
    """Returns a config whose workers are separate processes; meshes are not reduced to this process's devices.

    Raises:
      ConfigError: A setting cannot work.
    """
    rollout, trainer = config.placement.meshes
    return fit_config(config, rollout.devices * rollout.workers + trainer.devices * trainer.workers)


def place_on_one_device(config: TrainConfig) -> TrainConfig:
    """Returns a config on one device, which samples and trains, regardless of its placement.

    Raises:
      ConfigError: A setting cannot work there.
    """
    return fit_config(config.with_meshes(ONE_DEVICE), jax.device_count())


def check_without_ray(config: TrainConfig, options: dict[str, bool]) -> None:
    """Raises ConfigError if a field or a named option is set that only --ray uses."""
    for name, given in options.items():
        if given:
            raise ConfigError(f"--{name} needs --ray: add --ray=local or a cluster's address")
    for name, axes in config.placement.meshes._asdict().items():
        for field in dataclasses.fields(axes):
            given = getattr(axes, field.name)
            if field.name in PROCESS_FIELDS and given != field.default:
                raise ConfigError(
                    f"config.placement.{name}.{field.name} = {given}, but only --ray starts other processes: add "
                    f"--ray=local or a cluster's address, or set it to {field.default}"
                )
