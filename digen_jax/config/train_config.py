"""The complete config of a run with typed sections, and the fields that a resumed run may change."""

import dataclasses
import json
import pkgutil
from collections.abc import Mapping
from typing import Annotated, Any, cast

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.checkpoints.lora import LoraConfig
from digen_jax.config import sections
from digen_jax.data.prompt_files import prompts_label
from digen_jax.diffusion.schedule import share_of_timesteps
from digen_jax.errors import LARGEST_SEED, Range
from digen_jax.models.family import Size
from digen_jax.parallel.placement import MeshSizes, fit_mesh_sizes
from digen_jax.parallel.sampler import SampleRng
from digen_jax.parallel.trainer import TrainerSettings
from digen_jax.rewards import RewardSettings
from digen_jax.scheduling.settings import Settings

# All algorithms, by name. A run imports only its own.
ALGORITHMS = {
    "policy_gradient": "digen_jax.algorithms.policy_gradient:PolicyGradient",
    "diffusion_nft": "digen_jax.algorithms.diffusion_nft:DiffusionNFT",
    "awm": "digen_jax.algorithms.awm:AWM",
    "crd": "digen_jax.algorithms.crd:CRD",
    "dgpo": "digen_jax.algorithms.dgpo:DGPO",
    "diffusion_dpo": "digen_jax.algorithms.preference:DiffusionDPO",
    "sft": "digen_jax.algorithms.sft:SFT",
    "reward_gradient": "digen_jax.algorithms.reward_gradient:RewardGradient",
    "refl": "digen_jax.algorithms.reward_gradient:Refl",
    "leap_align": "digen_jax.algorithms.flowbp:LeapAlign",
    "flowbp_sparse": "digen_jax.algorithms.flowbp:FlowBpSparse",
    "flowbp_bridge": "digen_jax.algorithms.flowbp:FlowBpBridge",
    "flowbp_lagrange": "digen_jax.algorithms.flowbp:FlowBpLagrange",
}
# Fields that set where a step's work runs and how it is divided; results are the same up to rounding.
LAYOUT = ("placement", "rewards[i].where", "sampler.chunk", "trainer.micro_batch", "trainer.pack")
# Fields that change the result and that a user may change between two starts of a run.
TURNED = (
    "algorithm.clip_range",
    "algorithm.kl_coefficient",
    "trainer.clip_norm",
    "trainer.decay",
    "trainer.learning_rate",
    "trainer.warmup",
    "trainer.weight_decay",
)
# All fields that a resumed run may change; only fields in TURNED change the computed result.
MAY_CHANGE = (
    *LAYOUT,
    *TURNED,
    "algorithm.spread_limit",
    "evaluation.batch",
    "evaluation.every",
    "checkpoint",
    "images",
    "prompts.encoding",
    "prompts.cache",
    "prompts.cache_limit",
    "reward_pool",
    "rewards[i].limit",
    "runtime.deadline",
    "steps",
    "stopping",
    "wandb",
    "trackio",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A complete config with typed sections; "auto" and fields that depend on other sections are resolved.

    `algorithm_section` is the unresolved section `algorithm`.
    """

    seed: Annotated[int, Range(0, LARGEST_SEED)] = 0  # random seed of the run
    steps: Annotated[int, Range(1, 10**9)] = 100  # training steps
    model: sections.ModelSection = sections.ModelSection()
    precision: sections.PrecisionSection = sections.PrecisionSection()
    prompts: sections.PromptsSection = sections.PromptsSection()
    rewards: tuple[RewardSettings, ...] = (RewardSettings(),)
    reward_pool: sections.RewardPoolSection = sections.RewardPoolSection()
    batch: sections.BatchSection = sections.BatchSection()
    sampler: sections.SamplerSection = sections.SamplerSection()
    algorithm: Algorithm
    advantages: AdvantageSettings = AdvantageSettings(std="group")
    lora: LoraConfig = LoraConfig()
    trainer: TrainerSettings = TrainerSettings()
    placement: sections.PlacementSection = sections.PlacementSection()
    runtime: sections.RuntimeSection = sections.RuntimeSection()
    evaluation: sections.EvaluationSection = sections.EvaluationSection()
    stopping: sections.StoppingSection = sections.StoppingSection()
    images: sections.ImagesSection = sections.ImagesSection()
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    wandb: sections.WandbSection = sections.WandbSection()
    trackio: sections.TrackioSection = sections.TrackioSection()
    algorithm_section: Mapping[str, Any]

    @property
    def trackers(self) -> dict[str, dict[str, Any]]:
        """Arguments of `init` by tracker, for trackers with a project."""
        sections = {"wandb": vars(self.wandb), "trackio": vars(self.trackio)}
        given = {name: {k: v for k, v in one.items() if v} for name, one in sections.items()}
        return {name: options for name, options in given.items() if "project" in options}

    @property
    def noisy_steps(self) -> int:
        """Number of steps in the sampler's window, which have noise and are stored."""
        return self.sampler.window.length

    @property
    def trained_steps(self) -> int:
        """Number of training samples of each image: transitions, or noise levels of the forward process.

        Raises:
          ValueError: The window's fraction selects no transition, or more than the window has.
        """
        if self.algorithm.objective == "matching":
            return cast(Any, self.algorithm.times).count
        return share_of_timesteps(self.noisy_steps, self.sampler.window.timestep_fraction)

    @property
    def reads_reference(self) -> bool:
        """Whether the trainer or the sampler reads the initial policy, which is then kept."""
        return self.algorithm.reads_reference or self.advantages.kl_reward > 0

    @property
    def rng(self) -> SampleRng:
        """Random keys for the images of every step."""
        window = self.sampler.window if self.noisy_steps else None
        return SampleRng(self.seed, window, self.sampler.shared_noise)

    @property
    def scheduler(self) -> Settings:
        """Settings of the scheduler, without evaluations."""
        runtime = self.runtime
        return Settings(
            steps=self.steps,
            groups=self.batch.groups,
            images=self.batch.images,
            chunk_images=self.sampler.chunk,
            passes=self.sampler.chunk
            // self.trainer.micro_batch
            * -(-self.trained_steps // self.trainer.pack),
            updates=self.trainer.updates,
            readiness=self.algorithm.needs(self.advantages),
            max_incomplete_groups=runtime.max_incomplete_groups,
            ordered=self.in_order,
            max_policy_lag=runtime.max_policy_lag,
            max_off_policy_fraction=runtime.max_off_policy_fraction,
            max_candidates=runtime.max_candidates,
            oversampled_groups=runtime.oversampled_groups,
            score_retries=self.reward_pool.retries,
        )

    def scheduled(self, held_out: int) -> Settings:
        """Returns the scheduler's settings for evaluations on `held_out` prompts. 0 means no evaluation."""
        settings, algorithm = self.scheduler, self.algorithm
        if not held_out:
            return settings
        return dataclasses.replace(
            settings,
            evaluate_every=self.evaluation.every,
            evaluation_images=held_out,
            show_every=self.images.every,
            shown_images=self.images.count,
            evaluation_batch=self.evaluation.batch,
            # The sampler does not use the trained parameters, or their average is evaluated.
            separate_eval_weights=self.trainer.ema > 0
            or algorithm.copy_samples_from is not None
            or algorithm.sampling_copy is not None
            or algorithm.set_steps > 0,
        )

    @property
    def in_order(self) -> bool:
        """Whether each worker samples and trains its own chunks in order: see `runtime.deterministic_order`."""
        runtime, placement = self.runtime, self.placement
        if runtime.deterministic_order != "auto":
            return runtime.deterministic_order == "yes"
        assisted = placement.trainer.samples and placement.rollout.data > 0
        return not (runtime.max_policy_lag or runtime.max_incomplete_groups or assisted)

    @property
    def max_groups(self) -> int:
        """Number of groups whose prompts are read per step: with dynamic sampling all possible candidates.

        The number is fixed so that neither the next step's prompts, which are read before this step ends, nor the
        position in the file after a step depend on events in the step.
        """
        return self.runtime.max_candidates or self.batch.groups

    @property
    def evaluation_steps(self) -> int:
        """Denoising steps of the evaluation sampler."""
        return self.evaluation.steps or self.sampler.steps

    @property
    def evaluation_size(self) -> Size:
        """Size of the images or clips of an evaluation."""
        own = self.evaluation
        given = zip((own.height, own.width, own.frames), self.model.size, strict=True)
        return Size(*(one or trained for one, trained in given))

    @property
    def evaluated_prompts(self) -> str:
        """Label of the evaluation's prompts: see `prompts_label`."""
        return prompts_label(self.prompts.paths, self.evaluation.prompts)

    @property
    def layout(self) -> str:
        """Placement and division of a step's work, as a string: the costs of commands depend on it."""
        placement = dataclasses.asdict(self.placement)
        del placement["cpu_devices"], placement["mode"], placement["trainer"]["samples"]
        cut = self.sampler.chunk, self.trainer.micro_batch, self.trainer.pack
        known: dict[str, Any] = {"placement": placement, "cut": cut}
        if any(where := [one.where for one in self.rewards]):
            known["where"] = where
        return json.dumps(known, sort_keys=True)

    def as_json(self) -> dict[str, Any]:
        """Returns the complete config as the user wrote it, as JSON values, the form stored in all files of a run."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["algorithm"] = fields.pop("algorithm_section")
        return json.loads(json.dumps(plain(fields), sort_keys=True))

    def fitted(self, devices: int) -> "TrainConfig":
        """Returns the config with "fitted" meshes reduced to the available devices."""
        if self.placement.mode != sections.FITTED:
            return self
        return self.with_meshes(fit_mesh_sizes(self.placement.meshes, devices))

    def with_meshes(self, sizes: MeshSizes) -> "TrainConfig":
        """Returns the config with meshes of given sizes."""
        placement = dataclasses.replace(self.placement, mode=sections.GIVEN, **sizes._asdict())
        return dataclasses.replace(self, placement=placement)


def algorithm_class(name: str) -> type[Algorithm]:
    """Returns the class of a name in `ALGORITHMS`."""
    return pkgutil.resolve_name(ALGORITHMS[name])


def plain(value: Any) -> Any:
    """Returns settings as dicts, tuples and plain values, without fields that are derived from other sections."""
    if dataclasses.is_dataclass(value):
        own = (f.name for f in dataclasses.fields(value) if "derived" not in f.metadata)
        value = {name: getattr(value, name) for name in own}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple | list) else value
