"""Checks of a config's fields, alone and together, that need neither a file nor a model.

Each field's type states its choices or range (`errors.Range`). A rule about several fields is a function that raises a
`ConfigError`. The object that has the fields checks it, if there is one (`check` of an algorithm,
`AdvantageSettings`, `Window`, the scheduler's `Settings`). All errors that can be found at once are reported at once.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from ml_collections import ConfigDict

from digen_jax.algorithms.losses import choose_old_log_probs
from digen_jax.checkpoints.quantization import LARGEST
from digen_jax.config.fields import flat
from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import TrainConfig, algorithm_class
from digen_jax.diffusion.noising import ScheduleTimes
from digen_jax.diffusion.schedule import share_of_timesteps
from digen_jax.diffusion.steps import KINDS, Ode, make_step
from digen_jax.errors import (
    ANY,
    ConfigError,
    Range,
    allowed_values,
    check_choice,
    check_divides,
    collect_errors,
    prefix_errors,
)
from digen_jax.models.family import NAMES
from digen_jax.parallel.mesh import MODEL, PARAMETERS, TACTICS, TIME
from digen_jax.parallel.placement import ONE_DEVICE, RolloutAxes, TrainerAxes, devices_per_mesh
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import on_mesh

WITHOUT_NOISE = tuple(kind for kind, step in KINDS.items() if issubclass(step, Ode))
NOISY = tuple(kind for kind in KINDS if kind not in WITHOUT_NOISE)


def check_fields(config: ConfigDict) -> None:
    """Refuses values that a field of a complete config cannot have, independent of other fields.

    Raises:
      ConfigError: One message for each invalid field.
    """
    fields, allowed = flat(config), allowed_of(config.algorithm.name)
    with collect_errors() as one:
        for name, value in fields.items():
            known = allowed.get(re.sub(r"\[\d+\]", "[i]", name).removeprefix("config."), ANY)
            with one():
                if isinstance(known, tuple):
                    check_choice(name, value, known)
                elif isinstance(value, int | float):
                    known.check(name, value)
        for check in (_check_tracker_projects, _check_weights, _check_files, _check_sharding_rules):
            with one():
                check(config)


def allowed_of(algorithm: str) -> dict[str, tuple[Any, ...] | Range]:
    """Returns the choices or the range of each field that has any, by dotted name, for a config's algorithm."""
    kind = algorithm_class(algorithm)
    found = dict(allowed_values(TrainConfig))
    found |= allowed_values(kind, "algorithm.")
    found |= allowed_values(RewardSettings, "rewards[i].")
    found["sampler.kind"] = NOISY if kind.objective == "transitions" else tuple(KINDS)
    if isinstance(choices := found.get("algorithm.old_log_probs"), tuple):
        found["algorithm.old_log_probs"] = ("auto", *choices)
    return found


def check_rules(config: TrainConfig) -> None:
    """Refuses fields that cannot be combined, independent of the devices.

    A group of rules is checked only if all earlier groups passed.

    Raises:
      ConfigError: One message for each error that can be found at once.
    """
    for rules in (
        # Groups, and the steps of an image.
        (
            _check_decay,
            _check_average,
            _check_source,
            _check_lora_start,
            _check_quantized,
            _check_watched_reward,
            _check_given_images,
            _check_advantages,
            _check_sampler,
            _check_incomplete_groups,
        ),
        # Division of a step.
        (
            _check_batches,
            _check_candidate_counts,
            _check_candidates,
            _check_chunks_of_incomplete_groups,
            _check_algorithm,
        ),
        # The complete step.
        (_check_noise_level, _check_lag),
    ):
        _run_checks(rules, config)


def check_meshes(config: TrainConfig, devices: int) -> None:
    """Refuses meshes that do not fit `devices` devices, or that cannot divide a pass or chunk.

    Raises:
      ConfigError: One message for each error that can be found at once.
    """
    on_devices = functools.partial(check_devices, devices=devices)
    _run_checks((_check_pack, _check_trajectories_on_mesh, on_devices), config)


def _run_checks(checks: Iterable[Callable[[TrainConfig], None]], config: TrainConfig) -> None:
    """Runs several checks, and raises one ConfigError with all their messages."""
    with collect_errors() as one:
        for check in checks:
            with one():
                check(config)


def _check_divides(config: TrainConfig, divisor: str, field: str, why: str) -> None:
    """Refuses a field's value that does not divide another one's."""
    value, divided = operator.attrgetter(divisor, field)(config)
    check_divides(f"config.{divisor}", value, f"config.{field}", divided, why)


def _check_tracker_projects(config: ConfigDict) -> None:
    with collect_errors() as one:
        for tracker in ("wandb", "trackio"):
            given = [name for name, value in config[tracker].items() if value and name != "mode"]
            with one():
                if given and not config[tracker].project:
                    needed = f"config.{tracker}.project: set the project"
                    raise ConfigError(f"config.{tracker}.{given[0]} has no effect without {needed}")


def _check_weights(config: ConfigDict) -> None:
    """Refuses reward weights that train nothing, and dicts of weights with values that are not numbers."""
    weights: list[float] = []
    with collect_errors() as one:
        for number, section in enumerate(config.rewards):
            given = section.weight
            several = given.to_dict() if isinstance(given, ConfigDict) else {"": given}
            weights += several.values()
            if not several or not all(type(w) in (int, float) for w in several.values()):
                with one():
                    must = "must be a number, or a dict from scores' names to numbers"
                    raise ConfigError(f"config.rewards[{number}].weight = {several!r} {must}")
    if weights and not any(weights):
        raise ConfigError("config.rewards trains nothing: give a reward a weight other than 0")


def _check_files(config: ConfigDict) -> None:
    """Refuses weights that do not match the prompt files."""
    files, weights = tuple(config.prompts.files), tuple(config.prompts.weights)
    for file in files:
        if not isinstance(file, str) or not file:
            raise ConfigError(f"config.prompts.files must hold paths of prompt files, not {file!r}")
        if files.count(file) > 1:
            raise ConfigError(f"config.prompts.files has {file!r} twice: give it a larger weight")
    given = f"config.prompts.weights = {weights}"
    if not all(type(one) in (int, float) and 0 < one < math.inf for one in weights):
        raise ConfigError(f"{given} must hold positive numbers: remove files of weight 0")
    if weights and len(weights) != len(files):
        each = f"a weight for each of the {len(files)} files of config.prompts.files"
        raise ConfigError(f"{given} must have {each}, or be () if all weigh the same")


def _check_sharding_rules(config: ConfigDict) -> None:
    """Refuses invalid sharding rules."""
    for rule in config.placement.rules:
        kinds = [type(part) for part in rule] if isinstance(rule, tuple | list) else []
        if kinds not in ([str] * 2, [str] * 3):
            raise ConfigError(
                "config.placement.rules must hold pairs of a regular expression and a tactic, such as ('.*', "
                f"'replicate'), and triples with axes, such as ('.*', 'mlp', 'tensor'), not {rule!r}"
            )
        pattern, *about = rule
        try:
            re.compile(pattern)
        except re.error as error:
            wrong = f"{pattern!r} is not a regular expression: {error}"
            raise ConfigError(f"config.placement.rules: {wrong}") from error
        named: dict[str, tuple[str, ...]] = {"logical axis": tuple(NAMES), "mesh axis": PARAMETERS}
        if len(about) == 1:
            named = {"tactic": TACTICS}
        for (kind, known), value in zip(named.items(), about, strict=True):
            check_choice(f"the {kind} of {pattern!r} in config.placement.rules", value, known)


def _check_decay(config: TrainConfig) -> None:
    trainer = config.trainer
    updates, rising = config.steps * trainer.updates, trainer.warmup + trainer.decay
    if trainer.decay and updates > rising:
        raise ConfigError(
            f"config.trainer.warmup + config.trainer.decay = {rising} are fewer updates than the run's {updates}, and "
            f"the learning rate is 0 after them: set config.trainer.decay to {updates - trainer.warmup} or more, or 0"
        )


def _check_average(config: TrainConfig) -> None:
    trainer = config.trainer
    is_set = trainer.ema_unit != "update" or trainer.ema_warm_up
    if not trainer.ema and (is_set or trainer.ema_every * trainer.ema_repeats > 1):
        raise ConfigError(
            "config.trainer.ema = 0 keeps no average: set it to a decay such as 0.9, or leave out ema_unit, "
            "ema_warm_up, ema_every and ema_repeats"
        )


def _check_source(config: TrainConfig) -> None:
    height, width = config.model.source_height, config.model.source_width
    if (height > 0) != (width > 0):
        raise ConfigError(
            f"config.model.source_height = {height} and config.model.source_width = {width} are no size: set both, or "
            "both to 0 if prompts have no source images"
        )
    if config.model.source_images > 1 and not height:
        raise ConfigError(
            f"config.model.source_images = {config.model.source_images} needs the size of source images: set "
            "config.model.source_height and config.model.source_width"
        )


def _check_lora_start(config: TrainConfig) -> None:
    if config.lora.path and not config.lora.rank:
        raise ConfigError(
            f"config.lora.path = {config.lora.path!r} needs config.lora.rank, config.lora.alpha and "
            "config.lora.targets: set them to that LoRA's"
        )


def _check_quantized(config: TrainConfig) -> None:
    """Refuses quantized weights without a LoRA, whose gradients would be lost."""
    if config.precision.stored in LARGEST and not config.lora.rank:
        raise ConfigError(
            f"config.precision.frozen = {config.precision.frozen!r} quantizes weights below a LoRA, but "
            "config.lora.rank = 0 trains them: set config.lora.rank, or config.precision.frozen to 'bfloat16'"
        )


def _check_watched_reward(config: TrainConfig) -> None:
    """Refuses early stopping by a score that no evaluation reports."""
    name, rewards = config.stopping.reward, config.rewards
    shown = [score for one in rewards for score in one.entries.values()]
    # The names of a reward's additional scores, which have no weight, are known only when it is called.
    if not name or name.startswith(tuple(f"{one.title}/" for one in rewards)):
        return
    check_choice("config.stopping.reward", name, shown)
    if len(shown) == 1:
        only = f"config.stopping.reward = {name!r} is the only reward, which is trained"
        raise ConfigError(f"{only}: add one to config.rewards with weight 0 and name that")


def _check_advantages(config: TrainConfig) -> None:
    with prefix_errors("config.advantages."):
        config.advantages.check(config.batch.images)
    given = f"config.advantages.kl_reward = {config.advantages.kl_reward}"
    if not config.advantages.kl_reward:
        return
    if config.algorithm.objective != "transitions":
        raise ConfigError(
            f"{given} is a KL of noisy steps, which config.algorithm.name = {config.algorithm.name!r} does not sample: "
            "set it to 0, or the algorithm to 'policy_gradient'"
        )
    if (fraction := config.sampler.window.timestep_fraction) < 1:
        raise ConfigError(
            f"{given} compares the same steps of a group's images, but config.sampler.window.timestep_fraction = "
            f"{fraction} trains other steps of each: set that to 1, or config.advantages.kl_reward to 0"
        )


def _check_given_images(config: TrainConfig) -> None:
    """Refuses groups that are not those of image files, and settings of sampled images without an effect."""
    given, images = config.algorithm.given_images, config.batch.images
    if not given:
        return
    named = f"config.algorithm.name = {config.algorithm.name!r} trains image files"
    if images != len(given):
        raise ConfigError(
            f"config.batch.images = {images}, but {named}, of which each line of the prompt file names "
            f"{' and '.join(given)}: set it to {len(given)}"
        )
    idle = {
        "runtime.max_candidates": 0,
        "runtime.max_policy_lag": 0,
        "advantages.baseline": "group_mean",
        "advantages.drop_zero_std": False,
        "advantages.best_and_worst": 0,
    }
    for field, value in idle.items():
        if (found := operator.attrgetter(field)(config)) != value:
            raise ConfigError(
                f"config.{field} = {found!r} is for sampled images, but {named}: set it to {value!r}"
            )
    if config.model.frames > 1:
        raise ConfigError(f"{named}, not clips: set config.model.frames to 1")
    if config.placement.mode == AUTO:
        raise ConfigError(
            f"config.placement = 'auto' measures sampling, but {named}: give the meshes, such as "
            "config.placement.rollout.data = 0 and config.placement.trainer.data"
        )


def _check_sampler(config: TrainConfig) -> None:
    """Refuses a window, a window fraction, or start noise that cannot work."""
    sampler, transitions = config.sampler, config.algorithm.objective == "transitions"
    if config.noisy_steps or transitions:
        with prefix_errors("config.sampler.window."):
            sampler.window.check(sampler.steps)
            if transitions:
                share_of_timesteps(config.noisy_steps, sampler.window.timestep_fraction)
    if sampler.shared_noise and sampler.kind in WITHOUT_NOISE:
        raise ConfigError(
            "config.sampler.shared_noise = True makes all images of a group equal with config.sampler.kind = "
            f"{sampler.kind!r}, which adds no noise: set it to False"
        )


def _check_noise_level(config: TrainConfig) -> None:
    with prefix_errors("config.sampler."):
        make_step(config.sampler.kind, config.sampler.noise_level)


def _check_pack(config: TrainConfig) -> None:
    """Checks that `pack` steps per pass, split over the mesh axis "time", leave no part with padding only."""
    why = "as the steps of a pass are split evenly over that axis"
    _check_divides(config, "placement.trainer.time", "trainer.pack", why)
    pack, steps = config.trainer.pack, config.trained_steps
    if pack > (most := steps + -steps % config.placement.trainer.time):
        where = "trained steps of config.sampler.window"
        if config.algorithm.objective == "matching":
            where = "noise levels of config.algorithm.times"
        more = f"config.trainer.pack = {pack} is more than the {steps} {where} fill"
        raise ConfigError(f"{more}: set it to {most} or less")


def _check_batches(config: TrainConfig) -> None:
    """Checks every division of a step's images: into update sets, chunks, micro-batches, devices."""
    batch, updates = config.batch, config.trainer.updates
    why = "as each update trains its own groups"
    _check_divides(config, "trainer.updates", "batch.groups", why)
    share = "config.batch.groups * config.batch.images / config.trainer.updates"
    count, why = batch.groups * batch.images // updates, "as a chunk belongs to one update"
    check_divides("config.sampler.chunk", config.sampler.chunk, share, count, why)
    if count := config.advantages.best_and_worst:
        why = f"as with config.advantages.best_and_worst = {count} a chunk holds complete groups"
        _check_divides(config, "batch.images", "sampler.chunk", why)
    if config.algorithm.images_per_sample == 1:
        name, why = "config.trainer.micro_batch", "as micro-batches are cut from a chunk"
        trained, chosen = config.advantages.kept(config.sampler.chunk, config.batch.images), ""
        if trained < config.sampler.chunk:
            chosen = " / config.batch.images * 2 * config.advantages.best_and_worst"
        images = f"config.sampler.chunk{chosen}", trained
        check_divides(name, config.trainer.micro_batch, *images, why)


def _check_candidate_counts(config: TrainConfig) -> None:
    """Refuses too few candidates, and oversampled groups without dynamic sampling."""
    most, extra = config.runtime.max_candidates, config.runtime.oversampled_groups
    least = config.batch.groups + extra
    if extra and not most:
        raise ConfigError(
            f"config.runtime.oversampled_groups = {extra} is for dynamic sampling, which is off: set "
            f"config.runtime.max_candidates to {least} or more, or config.runtime.oversampled_groups to 0"
        )
    if most and most < least:
        raise ConfigError(
            f"config.runtime.max_candidates = {most} must be at least config.batch.groups + "
            f"config.runtime.oversampled_groups = {least}, or 0 for no dynamic sampling"
        )


def _check_candidates(config: TrainConfig) -> None:
    """Refuses groups that share chunks if one of them may be replaced."""
    if config.runtime.max_candidates:
        why = "as with config.runtime.max_candidates a replaced group must not share a chunk"
        _check_one_group(config, why, config.batch.images)


def _check_one_group(config: TrainConfig, why: str, most: int) -> None:
    """Refuses chunks with several groups; `why` is the reason, `most` the largest size to suggest."""
    chunk, images = config.sampler.chunk, config.batch.images
    if images % chunk:
        change = _smaller_chunks(config, [n for n in range(1, most + 1) if images % n == 0])
        must = f"config.sampler.chunk = {chunk} must divide config.batch.images = {images}"
        raise ConfigError(f"{must}, {why}: set {change}")


def _smaller_chunks(config: TrainConfig, sizes: Sequence[int]) -> str:
    """Returns the fields to set, micro-batch included, for the largest of some sizes that the meshes can split."""
    split = math.lcm(*(max(1, mesh.images) for mesh in config.placement.meshes))
    size = max([size for size in sizes if size % split == 0] or sizes)
    micro_batch = " and config.trainer.micro_batch" if size % config.trainer.micro_batch else ""
    return f"config.sampler.chunk{micro_batch} to {size}"


def _check_lag(config: TrainConfig) -> None:
    """Refuses a policy lag without an effect."""
    runtime, settings = config.runtime, config.scheduler
    if not runtime.max_policy_lag or settings.off_policy_units:
        return
    images = settings.groups * settings.images // settings.updates
    sizes = [
        size
        for size in range(1, settings.chunk_images)
        if images % size == 0 and dataclasses.replace(settings, chunk_images=size).off_policy_units
    ]
    change = "config.runtime.max_off_policy_fraction higher"
    if sizes:
        change = _smaller_chunks(config, sizes)
    raise ConfigError(
        f"config.runtime.max_policy_lag = {runtime.max_policy_lag} has no effect, because "
        f"config.runtime.max_off_policy_fraction = {runtime.max_off_policy_fraction} of a step is less than "
        f"config.sampler.chunk = {config.sampler.chunk} images or a group: set {change}, or "
        "config.runtime.max_policy_lag to 0"
    )


def _check_incomplete_groups(config: TrainConfig) -> None:
    """Refuses training before groups are complete if it is not exact or has no effect.

    `Algorithm.check_early_training` checks the algorithm's settings.
    """
    runtime = config.runtime
    early = f"config.runtime.max_incomplete_groups = {runtime.max_incomplete_groups}"
    names = [name for one in config.rewards for name in one.entries.values()]
    if not runtime.max_incomplete_groups:
        return
    if not config.algorithm.supports_early_training:
        name = config.algorithm.name
        raise ConfigError(f"{early} is for losses of policy_gradient, not of {name}: set it to 0")
    needed = (
        ("runtime.max_policy_lag", 0, "older weights' ratios are not 1"),
        ("trainer.updates", 1, "after an update ratios are not 1"),
        ("placement.trainer.workers", 1, "one worker has to train a complete group"),
        ("runtime.max_candidates", 0, "only a complete group shows whether it is replaced"),
    )
    order = runtime.deterministic_order

    def refuse(name: str, given: Any, why: str, value: Any) -> None:
        raise ConfigError(
            f"{early} is incompatible with config.{name} = {given}, because {why}: set that to {value}, or "
            "config.runtime.max_incomplete_groups to 0"
        )

    with collect_errors() as one:
        for name, value, why in needed:
            if (given := operator.attrgetter(name)(config)) != value:
                with one():
                    refuse(name, given, why, value)
        with one():
            if len(names) > 1:
                why = "it is shown to be exact for a single reward only"
                refuse("rewards", ", ".join(names), why, names[0])
            with prefix_errors("config.advantages."):
                config.advantages.check_early_training()
        with one():
            if order == "yes":
                why = "the order of training depends on arrival"
                refuse("runtime.deterministic_order", repr(order), why, "'auto'")


def _check_chunks_of_incomplete_groups(config: TrainConfig) -> None:
    """Refuses chunks that hold several groups, or everything that the trainer would wait for."""
    early = f"config.runtime.max_incomplete_groups = {config.runtime.max_incomplete_groups}"
    chunk, images = config.sampler.chunk, config.batch.images
    if not config.runtime.max_incomplete_groups:
        return
    less = config.advantages.std == "group"
    most = images // 2 if less else images
    _check_one_group(config, f"as with {early} a chunk belongs to one group", most)
    if less and chunk == images:
        raise ConfigError(
            f"{early} changes nothing if config.sampler.chunk = {chunk} is a complete group: set that to less, or "
            "config.runtime.max_incomplete_groups to 0"
        )


def _check_algorithm(config: TrainConfig) -> None:
    """Refuses settings of the algorithm that cannot be combined with each other or with other sections."""
    algorithm, section = config.algorithm, config.algorithm_section
    with prefix_errors("config.algorithm."):
        if section.get("old_log_probs", "auto") != "auto":
            choose_old_log_probs(
                section["old_log_probs"],
                float32=True,
                stale=config.runtime.max_policy_lag > 0,
                updates=config.trainer.updates,
                stored=algorithm.objective == "transitions",
            )
    if isinstance(algorithm.times, ScheduleTimes):
        with prefix_errors("config.algorithm.times."):
            algorithm.times.check(config.sampler.steps)
    with prefix_errors("config.algorithm."):
        algorithm.check()
        algorithm.check_kind(config.sampler.kind)
        algorithm.check_steps(config.sampler.steps)
        if config.runtime.max_incomplete_groups:
            batch = config.batch
            algorithm.check_early_training(config.advantages, batch.images, batch.groups)
    alone = algorithm.differentiates_rewards or bool(algorithm.given_images)
    if config.batch.images == 1 and not alone:
        raise ConfigError(
            "config.batch.images is 1, so there is nothing to compare an image with: set it to 2 or more"
        )
    if algorithm.needs_full_trajectories:
        _check_trajectories(config)
    if algorithm.objective == "matching":
        _check_final_images(config)
    if algorithm.differentiates_rewards:
        _check_differentiable(config)
    if algorithm.ranks:
        _check_ranking(config)
    if algorithm.images_per_sample > 1:
        _check_complete_groups(config)


def _check_trajectories(config: TrainConfig) -> None:
    """Checks that all steps of an image are in one pass, which trajectory ratios need."""
    steps = config.trained_steps
    if config.trainer.pack < steps:
        raise ConfigError(
            f"{_ratio(config)}, so a pass must contain all of them: set config.trainer.pack to {steps}, and "
            "reduce config.trainer.micro_batch if memory requires it"
        )


def _check_trajectories_on_mesh(config: TrainConfig) -> None:
    """Refuses to split an image's steps over devices if the algorithm uses trajectory ratios."""
    time = config.placement.trainer.time
    if config.algorithm.needs_full_trajectories and time > 1:
        split = f"but config.placement.trainer.time = {time} splits them"
        raise ConfigError(f"{_ratio(config)}, {split}: set that to 1")


def _ratio(config: TrainConfig) -> str:
    algorithm = cast(Any, config.algorithm)  # no other has trajectory ratios
    return f"config.algorithm.ratio = {algorithm.ratio!r} combines the steps of an image"


def _check_differentiable(config: TrainConfig) -> None:
    """Refuses rewards without a gradient, and settings of rewards and advantages that a gradient ignores."""
    name = config.algorithm.name
    needed = f"config.algorithm.name = {name!r} differentiates the rewards"
    meshed = on_mesh(config.rewards)
    for number, reward in enumerate(config.rewards):
        if number not in meshed:
            raise ConfigError(
                f"{needed}, but config.rewards[{number}], {reward.title!r}, has no gradient: use networks on the mesh "
                "('aesthetic', 'clip_score', 'hpsv2', 'pickscore'), or another algorithm"
            )
    if config.model.frames > 1:
        raise ConfigError(f"{needed} of images, not of clips: set config.model.frames to 1")
    chosen = {
        "advantages.best_and_worst": config.advantages.best_and_worst,
        "advantages.drop_zero_std": config.advantages.drop_zero_std,
        "runtime.max_candidates": config.runtime.max_candidates,
    }
    for field, value in chosen.items():
        if value:
            raise ConfigError(
                f"{needed} of all images, but config.{field} = {value} selects some: set it to {type(value)()}"
            )


def _check_final_images(config: TrainConfig) -> None:
    """Refuses a noisy sampler if final images are trained: the noise would only reduce quality."""
    name = config.algorithm.name
    if config.noisy_steps or config.sampler.kind not in WITHOUT_NOISE:
        raise ConfigError(
            f"config.algorithm.name = {name!r} trains final images, which are sampled without noise: set "
            "config.sampler.window.length to 0, config.sampler.kind to 'ode', 'dpm2' or 'unipc', and "
            "config.sampler.noise_level to 0"
        )
    if (dtype := config.precision.trajectory) != "float32":
        raise ConfigError(
            f"config.precision.trajectory = {dtype!r} is of transitions, but config.algorithm.name = {name!r} trains "
            "final images: set it to 'float32'"
        )


def _check_ranking(config: TrainConfig) -> None:
    """Refuses settings of `advantages` without an effect: a pair depends only on the order of a group's images."""
    section = config.advantages
    without = dict(baseline="group_mean", ddof=0, best_and_worst=0, drop_zero_std=False)
    if section.combine == "rewards":
        without["std"] = "group"
    idle = {name: value for name, value in without.items() if getattr(section, name) != value}
    if idle:
        given = [f"config.advantages.{name} = {getattr(section, name)!r}" for name in idle]
        raise ConfigError(
            f"{' and '.join(given)} cannot change the best and worst image of a group, the pair that "
            f"{config.algorithm.name} trains: set that to {' and '.join(map(repr, idle.values()))}"
        )


def _check_complete_groups(config: TrainConfig) -> None:
    """Checks that chunks hold complete groups, which are samples or give a pair each, and passes complete samples."""
    groups, micro = config.sampler.chunk // config.batch.images, config.trainer.micro_batch
    name, field = config.algorithm.name, "config.trainer.micro_batch"
    if not config.algorithm.ranks:
        if config.advantages.best_and_worst:
            raise ConfigError(
                f"config.advantages.best_and_worst = {config.advantages.best_and_worst} trains a part of each group, "
                f"but {name} trains complete groups: set it to 0"
            )
        why = f"as {name} trains complete groups"
        _check_divides(config, "batch.images", "sampler.chunk", why)
        _check_divides(config, "batch.images", "trainer.micro_batch", why)
        return _check_divides(config, "trainer.micro_batch", "sampler.chunk", why)
    why = f"as {name} chooses a pair of each group of a chunk"
    _check_divides(config, "batch.images", "sampler.chunk", why)
    if micro % 2:
        raise ConfigError(f"{field} = {micro} must be even, as {name} trains pairs of images")
    why = f"as {name} trains one pair of images of each group"
    return check_divides(field, micro, "twice the groups of a chunk", 2 * groups, why)


def check_devices(config: TrainConfig, devices: int) -> None:
    """Refuses meshes that need more than `devices`, and batches that a mesh cannot divide."""
    sizes = config.placement.meshes if devices > 1 else ONE_DEVICE
    devices_per_mesh(sizes, devices)
    trainer = _split("trainer", sizes.trainer, MODEL)
    sampling = _split("rollout", sizes.rollout, MODEL) if sizes.rollout.data else trainer
    training = _split("trainer", sizes.trainer, (TIME, *MODEL))
    split = [(sampling, "sampler.chunk"), (sampling, "evaluation.batch")]
    split = [*[(trainer, "sampler.chunk")] * sizes.trainer.samples, *split]
    why = "as images are split evenly over a mesh's devices"
    for (mesh, size), name in (*split, (training, "trainer.micro_batch")):
        value, name = operator.attrgetter(name)(config), f"config.{name}"
        together = config.algorithm.images_per_sample
        if name == "config.trainer.micro_batch" and together > 1:
            what = "pairs" if config.algorithm.ranks else "groups"
            value, name = value // together, f"{name} / {together}, the {what} of a pass,"
        check_divides(f"the number of devices of config.placement.{mesh}", size, name, value, why)


def _split(mesh: str, axes: RolloutAxes | TrainerAxes, others: Sequence[str]) -> tuple[str, int]:
    """Returns the devices over which a mesh splits images, without its axes `others`, as text and number."""
    sizes = {axis: getattr(axes, axis) for axis in others}
    terms = [mesh, *(f"config.placement.{mesh}.{axis}" for axis, n in sizes.items() if n > 1)]
    return " / ".join(terms), axes.devices // math.prod(sizes.values())
