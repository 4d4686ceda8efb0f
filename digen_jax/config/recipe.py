"""The typed fields of a training config, and which of them a resumed run may change.

A recipe in configs/ states the fields that matter to it; `complete` fills in the rest; `checks` refuses what cannot
work. The door does all of this once.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.algorithms.subsets import share_of_timesteps
from digen_jax.config import algorithm_section, reward_sections
from digen_jax.config.fields import check_fields, check_types
from digen_jax.config.sections import (
    FITTED,
    GIVEN,
    AdvantagesSection,
    BatchSection,
    CheckpointSection,
    EvaluationSection,
    LoraSection,
    ModelSection,
    PicturesSection,
    PlacementSection,
    PrecisionSection,
    PromptsSection,
    RewardPoolSection,
    RuntimeSection,
    SamplerSection,
    StoppingSection,
    TrackioSection,
    TrainerSection,
    WandbSection,
)
from digen_jax.engine.draws import Draws
from digen_jax.engine.placement import MeshSizes, fitted
from digen_jax.errors import ConfigError
from digen_jax.files import in_home
from digen_jax.flow.windows import Window
from digen_jax.models.family import Size
from digen_jax.prompts.label import prompts_label
from digen_jax.rewards.settings import RewardSettings
from digen_jax.scheduling.settings import Settings

# Where a step's work is done and how it is divided: the result is the same up to rounding.
LAYOUT = (
    "placement",
    "rewards[i].where",
    "sampler.chunk",
    "trainer.micro_batch",
    "trainer.pack",
)
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
# All fields that a resumed run may change; only those in TURNED change what a step computes.
MAY_CHANGE = (
    *LAYOUT,
    *TURNED,
    "algorithm.spread_limit",
    "evaluation.batch",
    "evaluation.every",
    "checkpoint",
    "pictures",
    "prompts.encoding",
    "prompts.store",
    "prompts.store_limit",
    "reward_pool",
    "rewards[i].limit",
    "runtime.deadline",
    "steps",
    "stopping",
    "wandb",
    "trackio",
)

# Fields of the scheduler's settings, and their names in a config.
SCHEDULED = {
    "groups": "config.batch.groups",
    "images": "config.batch.images",
    "chunk_images": "config.sampler.chunk",
    "updates": "config.trainer.updates",
    "max_candidates": "config.runtime.max_candidates",
    "redundant_groups": "config.runtime.redundant_groups",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete config with typed sections; fields that depend on other sections are settled.

    `asked` is the section `algorithm` as the config has it, where "auto" or 0 may stand for another section's value.
    """

    seed: int = 0  # seed of all random numbers of a run
    steps: int = 100  # training steps
    model: ModelSection = dataclasses.field(default=ModelSection())
    precision: PrecisionSection = dataclasses.field(default=PrecisionSection())
    prompts: PromptsSection = dataclasses.field(default=PromptsSection())
    rewards: tuple[RewardSettings, ...] = (RewardSettings(),)
    reward_pool: RewardPoolSection = dataclasses.field(default=RewardPoolSection())
    batch: BatchSection = dataclasses.field(default=BatchSection())
    sampler: SamplerSection = dataclasses.field(default=SamplerSection())
    algorithm: Algorithm
    advantages: AdvantageSettings
    lora: LoraSection = dataclasses.field(default=LoraSection())
    trainer: TrainerSection = dataclasses.field(default=TrainerSection())
    placement: PlacementSection = dataclasses.field(default=PlacementSection())
    runtime: RuntimeSection = dataclasses.field(default=RuntimeSection())
    evaluation: EvaluationSection = dataclasses.field(default=EvaluationSection())
    stopping: StoppingSection = dataclasses.field(default=StoppingSection())
    pictures: PicturesSection = dataclasses.field(default=PicturesSection())
    checkpoint: CheckpointSection = dataclasses.field(default=CheckpointSection())
    wandb: WandbSection = dataclasses.field(default=WandbSection())
    trackio: TrackioSection = dataclasses.field(default=TrackioSection())
    asked: Mapping[str, Any]

    @property
    def trackers(self) -> dict[str, dict[str, Any]]:
        """The arguments of each tracker's `init`, by its name; only of those that are asked for."""
        found = {"wandb": self.wandb.options, "trackio": self.trackio.options}
        return {name: options for name, options in found.items() if options is not None}

    @property
    def noisy_steps(self) -> int:
        """Number of steps in the sampler's window, which have noise and are stored."""
        return self.sampler.window.length

    @property
    def trained_steps(self) -> int:
        """Number of training samples of each image: transitions, or noise levels of the forward process.

        Raises:
          ValueError: the window's fraction gives no transition, or more than the window has.
        """
        if self.algorithm.objective == "matching":
            return self.algorithm.times.count
        return share_of_timesteps(self.noisy_steps, self.sampler.window.fraction)

    @property
    def window(self) -> Window:
        """The noisy steps of the schedule, if there are any."""
        given = {k: v for k, v in vars(self.sampler.window).items() if k != "fraction"}
        return Window(**given, seed=self.seed)

    @property
    def draws(self) -> Draws:
        """The random draws for the images of every step."""
        noisy = self.window if self.noisy_steps else None
        return Draws(self.seed, noisy, self.sampler.window.fraction, self.sampler.shared_noise)

    @property
    def scheduler(self) -> Settings:
        """The scheduler's settings."""
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
            redundant_groups=runtime.redundant_groups,
            score_retries=self.reward_pool.retries,
        )

    def scheduled(self, held_out: int) -> Settings:
        """The scheduler's settings of a run that evaluates on so many prompts. 0 means that it does not evaluate."""
        settings, algorithm = self.scheduler, self.algorithm
        if not held_out:
            return settings
        return dataclasses.replace(
            settings,
            evaluate_every=self.evaluation.every,
            evaluation_images=held_out,
            show_every=self.pictures.every,
            shown_images=self.pictures.images,
            evaluation_batch=self.evaluation.batch,
            # The trained parameters are not what samples, or their average is evaluated.
            evaluated_apart=self.trainer.ema > 0
            or algorithm.publishes_copy
            or algorithm.set_steps > 0,
        )

    @property
    def in_order(self) -> bool:
        """Whether each worker samples and trains its own chunks, in their order: see `runtime.ordered`."""
        runtime, placement = self.runtime, self.placement
        if runtime.ordered != "auto":
            return runtime.ordered == "yes"
        assisted = placement.trainer.samples and placement.rollout.data > 0
        return not (runtime.max_policy_lag or runtime.max_incomplete_groups or assisted)

    @property
    def drawn_groups(self) -> int:
        """Number of groups for which every step draws prompts: with dynamic sampling all possible candidates.

        The number is fixed, so that the next step's prompts, which asynchrony reads before this step has
        ended, and the position in the file after a step do not depend on what happens in the step.
        """
        return self.runtime.max_candidates or self.batch.groups

    @property
    def evaluation_steps(self) -> int:
        """Denoising steps of the sampler that evaluates."""
        return self.evaluation.steps or self.sampler.steps

    @property
    def evaluation_size(self) -> Size:
        """The size of the images of an evaluation."""
        own, model = self.evaluation, self.model
        return Size(own.height or model.height, own.width or model.width)

    @property
    def evaluated_prompts(self) -> str:
        """The label of the evaluation's prompts: see `prompts_label`."""
        return prompts_label(self.prompts.paths, self.evaluation.prompts)

    @property
    def layout(self) -> str:
        """Where a step's work is done and how it is divided, as a string: the costs of commands depend on it."""
        placement = dataclasses.asdict(self.placement)
        del placement["cpu_devices"], placement["sizes"], placement["trainer"]["samples"]
        cut = self.sampler.chunk, self.trainer.micro_batch, self.trainer.pack
        known: dict[str, Any] = {"placement": placement, "cut": cut}
        if any(where := [one.where for one in self.rewards]):
            known["where"] = where
        return json.dumps(known, sort_keys=True)

    def as_json(self) -> dict[str, Any]:
        """The complete config as it was asked for, as JSON values: all files of a run store it in this form."""
        sections = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        asked = {"algorithm": dict(sections.pop("asked"))}
        own = {field.name for field in dataclasses.fields(AdvantagesSection)}
        asked["advantages"] = {k: v for k, v in vars(self.advantages).items() if k in own}
        plain = {name: _plain(section) for name, section in (sections | asked).items()}
        return json.loads(json.dumps(plain, sort_keys=True))

    def fitted(self, devices: int) -> "Recipe":
        """The same recipe, with "fitted" meshes made smaller where there are fewer devices."""
        if self.placement.sizes != FITTED:
            return self
        return self.with_meshes(fitted(self.placement.meshes, devices))

    def with_meshes(self, sizes: MeshSizes) -> "Recipe":
        """The same recipe with given meshes, of other sizes."""
        placement = dataclasses.replace(self.placement, sizes=GIVEN, **sizes._asdict())
        return dataclasses.replace(self, placement=placement)


def reference(
    algorithm: str = "policy_gradient", rewards: Sequence[ConfigDict | None] = (None,)
) -> ConfigDict:
    """Every field with its default; the section `algorithm` has the fields of the given algorithm.

    The list `rewards` has a section for each of the given ones, whose own names in it are fields, too.
    """
    own = {
        "algorithm": algorithm_section.section(algorithm),
        "advantages": _plain(AdvantagesSection()),
        "rewards": tuple(map(reward_sections.default, rewards)),
    }
    return ConfigDict({name: _plain(section) for name, section in _defaults().items()} | own)


def typed(config: ConfigDict) -> Recipe:
    """The recipe of a complete config whose single fields are valid: see `checks.check_each`."""
    sections = {name: _section(default, config[name]) for name, default in _defaults().items()}
    sections["rewards"] = tuple(map(reward_sections.typed, config.rewards))
    asked = config.algorithm.to_dict()
    algorithm = algorithm_section.settled(
        asked,
        sections["precision"],
        sections["sampler"],
        sections["runtime"].max_policy_lag > 0,
        sections["trainer"].updates,
    )
    advantages = _section(AdvantagesSection(), config.advantages).settings(sections["rewards"])
    return Recipe(**sections, algorithm=algorithm, advantages=advantages, asked=asked)


def _defaults() -> dict[str, Any]:
    """Defaults by name, of all fields that a recipe takes from the config unchanged."""
    fields = dataclasses.fields(Recipe)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _section(default: Any, given: Any) -> Any:
    """A section of its default's type with a config's values."""
    if dataclasses.is_dataclass(default):
        names = [field.name for field in dataclasses.fields(default)]
        return type(default)(**{k: _section(getattr(default, k), given[k]) for k in names})
    return _fixed(given) if isinstance(default, tuple) else given


def _fixed(value: Any) -> Any:
    """Tuples instead of the lists of JSON."""
    return tuple(map(_fixed, value)) if isinstance(value, list | tuple) else value


def _plain(section: Any) -> Any:
    if isinstance(section, tuple):
        return tuple(map(_plain, section))
    return dataclasses.asdict(section) if dataclasses.is_dataclass(section) else section


def complete(config: ConfigDict) -> ConfigDict:
    """The config with defaults for every missing field.

    Raises:
      ConfigError: an unknown field or one of another algorithm, or a value of another type than the
        default's.
    """
    if isinstance(config.get("placement"), str):
        config = replaced(config, placement=ConfigDict(dict(sizes=config.placement)))
    if "rewards" in config:
        config = replaced(config, rewards=reward_sections.sections(config.rewards))
    asked = config.get("rewards", (None,))
    defaults = reference(algorithm_section.chosen(config), asked)
    algorithm_section.check_own(config)
    full = _filled(config, defaults)
    _check_window_is_a_section(full)
    check_fields(full, defaults)
    check_types(full, defaults)
    return full


def replaced(config: ConfigDict, **sections: Any) -> ConfigDict:
    """A config with other sections, which may have another type."""
    changed = ConfigDict({k: v for k, v in config.items() if k not in sections})
    for name, section in sections.items():
        changed[name] = section
    return changed


def _filled(config: ConfigDict, defaults: ConfigDict) -> ConfigDict:
    """`config` over `defaults`, section by section; unknown fields stay and are refused later.

    `~` at the start of a text is the home folder.
    """
    merged = ConfigDict(defaults)
    with merged.unlocked():
        for name, value in config.items():
            inner = defaults.get(name)
            if isinstance(value, ConfigDict) and isinstance(inner, ConfigDict) and len(inner):
                value = _filled(value, inner)
            elif name == "rewards":
                value = tuple(map(_filled, value, inner))
            elif type(inner) is float and type(value) is int:
                value = float(value)
            elif type(inner) is tuple and type(value) is str:
                value = (value,)  # as on the command line
            if name in merged:
                del merged[name]
            merged[name] = _in_home(value)
    return merged


def _in_home(value: Any) -> Any:
    """A field's value, with `~` replaced in a text or in each of a list."""
    if isinstance(value, tuple | list):
        return type(value)(map(_in_home, value))
    return in_home(value) if isinstance(value, str) else value


def _check_window_is_a_section(config: ConfigDict) -> None:
    """Says how to rewrite the old form (first trained step, number of trained steps)."""
    window = config.sampler.window if isinstance(config.sampler, ConfigDict) else ConfigDict()
    if isinstance(window, ConfigDict):
        return
    pair = isinstance(window, tuple | list) and len(window) == 2
    first, length = window if pair else (0, 4)
    raise ConfigError(
        f"config.sampler.window must be a section, such as dict(first={first}, length={length}), not {window!r}"
    )
