"""Generates images from prompts with a pipeline folder, a Hub id or the latest checkpoint of a training run.

python launch/sample.py --model assets/shapes-sd3 --prompt "a red circle above a blue star" --output runs/samples
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib
import sys
import textwrap
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
from digen_jax.inference.flags import SamplingFlags

_SAMPLING = SamplingFlags(batch=8)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Prompt; can be repeated.")
_PROMPTS = define_path("prompts", None, "Prompt file (.jsonl or .txt) instead of --prompt.")
_NEGATIVE = flags.DEFINE_string(
    "negative_prompt",
    None,
    "Negative prompt for all prompts; overrides those of a prompt file.",
)
_IMAGES = define_path(
    "image",
    None,
    "Image to edit, or to start a clip with; can be repeated for models that edit several images at once. A prompt "
    "file has a field for it.",
    several=True,
)
_SOURCE_HEIGHT = flags.DEFINE_integer(
    "source_height", None, "Height to which images to edit are resized; default: as in diffusers."
)
_SOURCE_WIDTH = flags.DEFINE_integer("source_width", None, "Width of resized images to edit.")
_COUNT = flags.DEFINE_integer("images", 1, "Images per prompt.")
_OUTPUT = define_path("output", None, "Output folder.")
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the noise; the images do not depend on --batch.", 0, LARGEST_SEED
)
_GUIDANCE = flags.DEFINE_float(
    "guidance", None, "Guidance scale; 1 or less means none; default: of the run or the model."
)
flags.mark_flag_as_required("output")


def main() -> None:
    """Reads the prompts and the model, and samples."""
    from digen_jax.process.job import prepare

    if _GUIDANCE.value is not None:
        check_range("--guidance", _GUIDANCE.value, 0, 1000)
    _SAMPLING.check()
    check_output("--output", _OUTPUT.value, folder=True)
    check_no_images("--output", _OUTPUT.value)
    source = _source()
    records = _read_records()
    check_positive("--images", _COUNT.value)
    prepare()

    from digen_jax.inference.model import edited
    from digen_jax.inference.sampling import sample_to_folder

    options = _SAMPLING.options(_GUIDANCE.value)

    def fits(family: Any, sizes: Any) -> None:
        if _IMAGES.value and not family.edits:
            raise ConfigError(
                f"--image is given, but {_SAMPLING.model.value} generates images from prompts only: remove it, or "
                "choose a model that edits"
            )
        edited(family, records, source, sizes[0])

    model = _SAMPLING.open_model([options], _negative(), fits)
    size = model.sampler(options).settings.size
    model = model._replace(family=edited(model.family, records, source, size))
    sampler = model.sampler(options)
    animation = _SAMPLING.animation(size.height, size.width)
    output = pathlib.Path(_OUTPUT.value)
    _report_odd_texts(model.family)
    with prefix_errors("--output: ", (OSError,)):
        rest = _SEED.value, _COUNT.value, _SAMPLING.fps.value or model.fps, animation
        sample_to_folder(model, sampler, records, output, _SAMPLING.batch.value, *rest)
    count = len(records) * _COUNT.value
    kind = "image" if size.frames == 1 else "clip"
    print(f"{count} {kind}{'s' * (count > 1)} and grid.png are in {output}")


def _report_odd_texts(family: Any) -> None:
    """Warns about prompts with words that the model does not know, and about prompts that it truncates."""
    from digen_jax.data.prompt_checks import list_unknown, report_odd_prompts, unknown_words
    from digen_jax.models.text.tokenizers import known_words

    words = known_words(family)
    if _PROMPTS.value:
        report_odd_prompts([_PROMPTS.value], family.is_truncated, words)
    texts = _texts()
    cuts = family.is_truncated([text for _, text in texts] or [""])
    for (name, text), cut in zip(texts, cuts, strict=False):
        if unread := unknown_words([text], words):
            warning = f"--{name}={text!r} has words that this model does not know"
            print(f"{warning}: {list_unknown(unread, words)}", file=sys.stderr)
        elif cut:
            shown = textwrap.shorten(text, 80, placeholder=" ...")
            warning = f"--{name}={shown!r} is longer than the text encoders read"
            print(f"{warning}, so that its end is cut off", file=sys.stderr)


def _source() -> Any:
    """Returns the size to which images are resized. None means unchanged."""
    from digen_jax.models.family import Size

    height, width = _SOURCE_HEIGHT.value, _SOURCE_WIDTH.value
    if height is width is None:
        return None
    if height is None or width is None:
        raise ConfigError("--source_height and --source_width are one size: give both or neither")
    return Size(height, width)


def _texts() -> list[tuple[str, str]]:
    """Returns (name, text) of each option that has a text."""
    negatives = [] if _NEGATIVE.value is None else [_NEGATIVE.value]
    given = [(_PROMPT.name, text) for text in _PROMPT.value]
    return given + [(_NEGATIVE.name, text) for text in negatives]


def _negative() -> str | None:
    """Returns the source of negative prompts, as the start of an error message, or None."""
    from digen_jax.data.prompt_files import first_negative

    if _NEGATIVE.value is not None:
        return "--negative_prompt is given"
    place = first_negative(_PROMPTS.value) if _PROMPTS.value else None
    return f"{place}, has a negative prompt" if place else None


def _read_records() -> list[dict[str, Any]]:
    from digen_jax.data.prompt_files import read_prompt_file
    from digen_jax.images import check_image_file

    if bool(_PROMPT.value) == bool(_PROMPTS.value):
        raise ConfigError("there must be either --prompt (several times if need be) or --prompts")
    for name, text in _texts():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"--{name}={text!r} is not UTF-8 at character {error.start + 1}: write the prompt in that encoding"
            ) from error
    image = {"image": _IMAGES.value} if _IMAGES.value else {}
    negative = {} if _NEGATIVE.value is None else {"negative_prompt": _NEGATIVE.value}
    if _PROMPT.value:
        if image:
            with user_input():
                for path in _IMAGES.value:
                    check_image_file(path)
        return [{"prompt": prompt, **image, **negative} for prompt in _PROMPT.value]
    if image:
        raise ConfigError(
            '--image is for --prompt; in a prompt file, each line has a field "image"'
        )
    with user_input():
        return [record | negative for record in read_prompt_file(_PROMPTS.value)]


if __name__ == "__main__":
    run_main(main)
