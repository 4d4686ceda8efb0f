"""From a config to the parts of a run: the one module that sees models, meshes and executors together."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from digen_jax import recipe
from digen_jax.flow.sampling import check_window
from digen_jax.flow.steps import Ode, make_step
from digen_jax.models.stable_diffusion_3 import PIPELINE_CLASS, StableDiffusion3
from digen_jax.runtime.placement import DeviceGroup, Placement, make_placement
from digen_jax.runtime.policy import Policy
from digen_jax.runtime.sampler import Sampler, SamplerSettings, Weights
from digen_jax.runtime.trainer import Trainer
from digen_jax.settings import ConfigError, user_input
from digen_jax.weights.folder import read_model_index, resolve_folder
from digen_jax.weights.lora import LoraConfig

# The model families, by the pipeline class that a folder's model_index.json names.
FAMILIES = {PIPELINE_CLASS: StableDiffusion3}


class System(NamedTuple):
    """The parts of a training run, their parameters loaded."""

    placement: Placement
    policy: Policy
    sampler: Sampler
    evaluator: Sampler
    trainer: Trainer
    base: Any  # on the trainer mesh, see Policy
    start: Any  # what is tuned, before the first update
    rollout_base: Any
    frozen: Any  # the other components, on the rollout mesh

    def publish(self, tuned: Any) -> Weights:
        """The tuned parameters resharded onto the rollout mesh, with all else the sampler needs."""
        shardings = self.placement.rollout.params(tuned)
        return Weights(jax.device_put(tuned, shardings), self.rollout_base, self.frozen)


def load_family(folder: pathlib.Path, dtype: str = "float32", remat: bool = False) -> Any:
    """The family of a pipeline folder; ConfigError where there is none for its class."""
    with user_input():
        kind = read_model_index(folder)["_class_name"]
        if kind not in FAMILIES:
            raise ConfigError(
                f"{folder} is a {kind}; supported are {', '.join(FAMILIES)}: choose another folder"
            )
        return FAMILIES[kind].from_folder(folder, jnp.dtype(dtype), remat)


def build(config: ConfigDict, devices: Sequence[jax.Device]) -> System:
    """All parts, after every check that can be made without compiling; `config` is complete.

    Raises:
      ConfigError: the first mistake found, in one sentence.
    """
    recipe.check(config)
    recipe.check_devices(config, len(devices))
    with user_input():
        folder = resolve_folder(config.model.folder, without=("text_encoder_3", "tokenizer_3"))
        family = load_family(folder, config.model.dtype, config.model.remat)
        placement = make_placement(config.placement, devices)
        lora = LoraConfig(**config.lora) if config.lora.rank else None
        policy = Policy(family, config.sampler.guidance, lora)
        sampler = _sampler(policy, placement.rollout, config)
        evaluator = evaluation_sampler(
            family, placement.rollout, config.evaluation.guidance, config, lora
        )
        transformer = read_part(family, folder, "transformer", placement.trainer)
        frozen = {
            part: read_part(family, folder, part, placement.rollout)
            for part in ("vae", "text_encoder", "text_encoder_2")
        }
        algorithm = recipe.algorithm_settings(config)
        reference = algorithm.kl_coefficient > 0
        start, base = policy.split(jax.random.key(config.seed), transformer, reference)
    trainer = Trainer(
        policy, placement.trainer, sampler.settings.step, algorithm, recipe.trainer_settings(config)
    )
    rollout_base = policy.sampler_base(base)
    rollout_base = jax.device_put(rollout_base, placement.rollout.params(rollout_base))
    return System(placement, policy, sampler, evaluator, trainer, base, start, rollout_base, frozen)


def read_part(family: Any, folder: pathlib.Path, part: str, group: DeviceGroup) -> Any:
    """A component's parameters, read straight onto a mesh as its rules say."""
    return family.read(folder, part, group.params(family.shapes()[part]))


def evaluation_sampler(
    family: Any,
    group: DeviceGroup,
    guidance: float,
    config: ConfigDict,
    lora: LoraConfig | None = None,
) -> Sampler:
    """As the config's sampler, but without noise and with a guidance of its own."""
    model, steps = config.model, config.sampler.steps
    settings = SamplerSettings(model.height, model.width, steps, Ode(), (0, 0))
    return Sampler(Policy(family, guidance, lora), group, settings)


def _sampler(policy: Policy, group: DeviceGroup, config: ConfigDict) -> Sampler:
    sampler, model = config.sampler, config.model
    step = make_step(sampler.kind, sampler.noise_level)
    settings = SamplerSettings(
        model.height, model.width, sampler.steps, step, tuple(sampler.window)
    )
    built = Sampler(policy, group, settings)
    try:
        check_window(step, built.sigmas, *settings.window)
    except ValueError as error:
        raise ConfigError(f"config.sampler.window: {error}") from error
    return built
