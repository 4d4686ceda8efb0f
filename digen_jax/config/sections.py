"""The settings that the parts of a run take of a complete config."""

from typing import Any

from ml_collections import ConfigDict

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.algorithms.guidance import choose_guidance
from digen_jax.algorithms.old_log_probs import OldLogProbs, choose_old_log_probs
from digen_jax.algorithms.subsets import share_of_timesteps
from digen_jax.config import algorithm_section
from digen_jax.engine.draws import Draws
from digen_jax.engine.optimisation import TrainerSettings
from digen_jax.flow.windows import Window
from digen_jax.rewards import names_in
from digen_jax.scheduling.settings import Settings


def algorithm_settings(config: ConfigDict) -> Algorithm:
    """The algorithm's own settings, with what they leave to others resolved."""
    section, resolved = config.algorithm, {}
    if "old_log_probs" in section:
        resolved["old_log_probs"] = _old_log_probs(config)
    if "guidance" in section:
        given = section.guidance, section.reference_guidance
        found = choose_guidance(*given, config.sampler.guidance)
        resolved |= zip(("guidance", "reference_guidance"), found, strict=True)
    return algorithm_section.settings(section, **resolved)


def _old_log_probs(config: ConfigDict) -> OldLogProbs:
    return choose_old_log_probs(
        config.algorithm.old_log_probs,
        # Else the weights are rounded, too, which an importance weight to what sampled corrects.
        same_dtype=not config.sampler.dtype or config.algorithm.get("importance_cap", 0) > 0,
        stale=config.runtime.staleness > 0,
        updates=config.trainer.updates,
        stored=algorithm_section.kind(config).objective == "transitions",
    )


def noisy_steps(config: ConfigDict) -> int:
    """Steps of the sampler's window, which have noise and are stored."""
    return config.sampler.window.length


def trained_steps(config: ConfigDict) -> int:
    """Samples that are trained of each image: transitions, or noise levels of the forward process.

    Raises:
      ValueError: no transition, or more than the window has.
    """
    if algorithm_section.kind(config).objective == "matching":
        return config.algorithm.times.count
    return share_of_timesteps(noisy_steps(config), config.sampler.window.fraction)


def window(config: ConfigDict) -> Window:
    """Where the noisy steps are, if there are any."""
    settings = {k: v for k, v in config.sampler.window.items() if k != "fraction"}
    return Window(**settings | {"end": settings["end"] or None, "seed": config.seed})


def draws(config: ConfigDict) -> Draws:
    """What the images of every step are drawn by."""
    sampler, noisy = config.sampler, window(config) if noisy_steps(config) else None
    return Draws(config.seed, noisy, sampler.window.fraction, sampler.shared_noise)


def advantage_settings(config: ConfigDict) -> AdvantageSettings:
    """How rewards become advantages, and which images train."""
    weights = config.reward.weights or (1.0,) * len(names_in(config.reward.name))
    return AdvantageSettings(**config.advantages, reward_weights=tuple(map(float, weights)))


def trainer_settings(config: ConfigDict) -> TrainerSettings:
    """The trainer's."""
    return TrainerSettings(**{k: v for k, v in config.trainer.items() if k != "updates"})


def scheduler_settings(config: ConfigDict) -> Settings:
    """The scheduler's.

    By default fragments are trained in their order strictly on policy, unless that is to be early: a
    run is then the same to the last bit whenever it is done again.
    """
    runtime = config.runtime
    on_policy = runtime.staleness == 0 and not runtime.early_groups
    return Settings(
        steps=config.steps,
        groups=config.batch.groups,
        images=config.batch.images,
        fragment_images=config.sampler.fragment,
        updates=config.trainer.updates,
        readiness=algorithm_settings(config).needs(advantage_settings(config)),
        open_groups=runtime.early_groups,
        ordered={"auto": on_policy, "yes": True, "no": False}[runtime.ordered],
        staleness=runtime.staleness,
        stale_share=runtime.stale_share,
        tag_fragments=runtime.tag_fragments,
        max_candidates=runtime.max_candidates,
        redundant_groups=runtime.redundant_groups,
        score_retries=config.reward.retries,
    )


def drawn_groups(config: ConfigDict) -> int:
    """Groups for which every step draws prompts: with dynamic sampling all that may be candidates.

    Their number is fixed, so that the next step's prompts, which asynchrony begins before this step is
    known, and the place in the file after a step depend on nothing that happens in it.
    """
    return config.runtime.max_candidates or config.batch.groups


def wandb_options(config: ConfigDict) -> dict[str, Any] | None:
    """What `wandb.init` is given; None where no project is named."""
    given = {name: value for name, value in config.wandb.items() if value}
    return given if config.wandb.project else None


def fixed_set_steps(config: ConfigDict) -> int:
    """Steps after which prompts and images come again, as they are a fixed set; 0: they never do."""
    return algorithm_settings(config).set_steps
