"""Computes the mean reward of a model on a prompt file, by task and guidance.

python launch/evaluate.py --model assets/shapes-sd3 --prompts assets/prompts/shapes_heldout.jsonl \
    --reward shapes_geneval --steps 8 --guidance 1,2,3,4,5
python launch/evaluate.py --model runs/shapes
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import (
    LARGEST_SEED,
    ConfigError,
    check_no_images,
    check_output,
    check_positive,
    check_range,
    prefix_errors,
    user_input,
)
from digen_jax.files import write_output
from digen_jax.inference.flags import SamplingFlags
from digen_jax.rewards import RewardSettings

_SAMPLING = SamplingFlags(batch=32)
_PROMPTS = define_path(
    "prompts", None, "Prompt file (.jsonl or .txt); default: the run's evaluation prompts."
)
_REWARD = flags.DEFINE_list(
    "reward", [], "Reward or module:function, comma-separated; default: the run's rewards."
)
_WEIGHTS = flags.DEFINE_list(
    "reward_weights",
    [],
    "One number per reward; default: the run's weights for its rewards, otherwise 1.",
)
_GUIDANCE = flags.DEFINE_list(
    "guidance", [], "Guidance scales, comma-separated; default: of the run or the model."
)
_IMAGES = flags.DEFINE_integer(
    "images", None, "Number of prompts, from the start of the file; default: all."
)
_SEED = flags.DEFINE_integer(
    "seed",
    2**20,
    "Seed of the noise; the default is the seed of a run's evaluations.",
    0,
    LARGEST_SEED,
)
_OUTPUT = define_path("output", None, "JSON file for the scores.")
_IMAGE_FOLDER = define_path("image_folder", None, "Folder for all images with their scores.")


def main() -> None:
    """Reads model, prompts and reward, samples and scores, and prints the table."""
    from digen_jax.process.job import prepare

    prepare()

    from digen_jax.config.load import check_named, needs_of
    from digen_jax.data.prompt_checks import check_needs, report_odd_prompts
    from digen_jax.data.prompt_files import first_negative, read_prompt_file
    from digen_jax.inference.model import edited
    from digen_jax.logging.evaluation import score_table
    from digen_jax.models.text.tokenizers import known_words
    from digen_jax.rewards.built_in import resolve
    from digen_jax.rewards.dry_run import dry_run
    from digen_jax.rewards.sanity_check import run_sanity_checks

    _check_options()
    prompts, images, reward_settings = _task()
    with user_input():
        records = read_prompt_file(prompts)[:images]
        place = first_negative(prompts)
        check_named(prompts, reward_settings, training=False)
    rewards = resolve(reward_settings, field="")
    check_needs([prompts], needs_of(reward_settings))
    options = list(map(_SAMPLING.options, _guidances()))

    def fits(family: Any, sizes: Sequence[Any]) -> None:
        edited(family, records, size=sizes[0])
        run_sanity_checks(rewards, rewards.score)
        dry_run(rewards.score, [records], sizes[0])

    negative = f"{place}, has a negative prompt" if place else None
    model = _SAMPLING.open_model(options, negative, fits)
    size = model.sampler(options[0]).settings.size
    model = model._replace(family=edited(model.family, records, size=size))
    report_odd_prompts([prompts], model.family.is_truncated, known_words(model.family))
    samplers = list(map(model.sampler, options))
    animation = _SAMPLING.animation(size.height, size.width)
    found = _evaluated(model, samplers, records, rewards, animation)
    label = ", ".join(rewards.names)
    if _OUTPUT.value:
        _write(found, prompts, (label, rewards.weights), samplers[0])
    print(f"{label}, mean and standard error, {samplers[0].settings.steps} steps")
    print(score_table({f"guidance {guidance}": scores for guidance, scores in found.items()}))


def _check_options() -> None:
    """Checks the ranges of numbers, and that the outputs are writable."""
    _guidances()
    _SAMPLING.check()
    if _OUTPUT.value is not None:
        check_output("--output", _OUTPUT.value)
    if _IMAGE_FOLDER.value is not None:
        check_output("--image_folder", _IMAGE_FOLDER.value, folder=True)
        check_no_images("--image_folder", _IMAGE_FOLDER.value)


def _evaluated(
    model: Any,
    samplers: Sequence[Any],
    records: list[dict[str, Any]],
    rewards: Any,
    animation: str,
) -> dict[str, Any]:
    """Returns the scores by task for each sampler's guidance; writes images if --image_folder is given."""
    from digen_jax.inference.sampling import evaluate, evaluation_to_folder

    batch = model.batch(_SAMPLING.batch.value, len(records))
    found = {}
    for sampler in samplers:
        guidance = f"{sampler.policy.guidance:g}"
        head = f"guidance {guidance}"
        evaluation = evaluate(sampler, model.weights, records, rewards, batch, _SEED.value, head)
        found[guidance] = evaluation.by_task()
        if _IMAGE_FOLDER.value:
            folder = pathlib.Path(_IMAGE_FOLDER.value, head.replace(" ", "_"))
            with prefix_errors("--image_folder: ", (OSError,)):
                fps = _SAMPLING.fps.value or model.fps
                evaluation_to_folder(evaluation, folder, fps, animation)
    return found


def _task() -> tuple[str, int | None, tuple[RewardSettings, ...]]:
    """Returns (prompt file, number of prompts, rewards), which default to the run's."""
    from digen_jax.inference.model import is_run, read_run_config

    prompts, images = _PROMPTS.value, _IMAGES.value
    rewards = tuple(map(RewardSettings, _REWARD.value))
    if images is not None:
        check_positive("--images", images)
    if is_run(_SAMPLING.model.value):
        run = read_run_config(pathlib.Path(_SAMPLING.model.value))
        if prompts is None:
            images = images or run.evaluation.images or None
        return prompts or run.evaluation.prompts, images, _weighed(rewards or run.rewards)
    if not (prompts and rewards):
        raise ConfigError("a pipeline has no prompts and rewards: set --prompts and --reward")
    return prompts, images, _weighed(rewards)


def _weighed(rewards: tuple[RewardSettings, ...]) -> tuple[RewardSettings, ...]:
    """Returns the rewards with --reward_weights, if given."""
    if not _WEIGHTS.value:
        return rewards
    try:
        weights = tuple(map(float, _WEIGHTS.value))
    except ValueError:
        weights = ()
    if len(weights) != len(rewards):
        raise ConfigError(
            f"--reward_weights={','.join(_WEIGHTS.value)} must be {len(rewards)} numbers, one for each reward of "
            f"{', '.join(one.title for one in rewards)!r}"
        )
    pairs = zip(rewards, weights, strict=True)
    return tuple(dataclasses.replace(one, weight=weight) for one, weight in pairs)


def _guidances() -> list[float | None]:
    """Returns the values of --guidance. None means the model's default."""
    try:
        guidances = [float(text) for text in _GUIDANCE.value]
    except ValueError as error:
        raise ConfigError(
            f"--guidance={','.join(_GUIDANCE.value)} must be a number, or several separated by commas"
        ) from error
    for guidance in guidances:
        check_range("--guidance", guidance, 0, 1000)
    return [*guidances] or [None]


def _write(
    found: dict[str, Any], prompts: str, reward: tuple[str, tuple[float, ...]], sampler: Any
) -> None:
    settings = sampler.settings
    result = {
        "model": _SAMPLING.model.value,
        "lora": _SAMPLING.lora.value,
        "prompts": prompts,
        "reward": reward[0],
        "reward_weights": reward[1],
        "seed": _SEED.value,
        "steps": settings.steps,
        "height": settings.size.height,
        "width": settings.size.width,
        "frames": settings.size.frames,
        "true_cfg_scale": sampler.policy.true_cfg_scale,
        "guidance": {
            guidance: {task: score._asdict() for task, score in scores.items()}
            for guidance, scores in found.items()
        },
    }
    write_output(_OUTPUT.value, (json.dumps(result, indent=2) + "\n").encode())


if __name__ == "__main__":
    run_main(main)
