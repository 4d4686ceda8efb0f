"""Turn prompts into images with a pipeline folder, a hub id or a training run's newest checkpoint.

python launch/sample.py --model assets/shapes-sd3 --prompt "a red circle above a blue star" --output runs/samples
"""

import pathlib
import sys
import textwrap

from absl import flags

from digen_jax.config.command_line import run_main
from digen_jax.errors import (
    LARGEST_SEED,
    LARGEST_SIDE,
    ConfigError,
    check_output,
    check_positive,
    check_range,
    user_input,
)

_MODEL = flags.DEFINE_string("model", None, "A pipeline folder, a hub id, or a run's workdir.")
_LORA = flags.DEFINE_string("lora", None, "A folder with a LoRA for the model.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be given several times.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A .jsonl or .txt file of prompts instead.")
_IMAGES = flags.DEFINE_integer("images", 1, "Number of images of each prompt.")
_OUTPUT = flags.DEFINE_string("output", None, "The folder for the images.")
_SEED = flags.DEFINE_integer(
    "seed", 0, "The same seed gives the same images for any batch.", 0, LARGEST_SEED
)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Denoising steps; default: the run's or the model's.", 1, 1000
)
_GUIDANCE = flags.DEFINE_float(
    "guidance", None, "Guidance scale, 1 for none; default: as for steps."
)
_HEIGHT = flags.DEFINE_integer(
    "height", None, "Height in pixels; default: as for steps.", 1, LARGEST_SIDE
)
_WIDTH = flags.DEFINE_integer(
    "width", None, "Width in pixels; default: as for steps.", 1, LARGEST_SIDE
)
_BATCH = flags.DEFINE_integer("batch", 8, "Images in one call.")
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "Type of the network's arithmetic."
)
flags.mark_flags_as_required(["model", "output"])


def main() -> None:
    """Read the prompts and the model, and sample."""
    from digen_jax.process.launching import prepare

    if _GUIDANCE.value is not None:
        check_range("--guidance", _GUIDANCE.value, 0, 1000)
    check_output("--output", _OUTPUT.value, folder=True)
    prompts = _read_prompts()
    check_positive("--images", _IMAGES.value)
    check_positive("--batch", _BATCH.value)
    prepare()

    import jax

    from digen_jax.inference.model import Asked, open_model, sample_to_folder
    from digen_jax.prompts.notes import tell

    asked = Asked(_GUIDANCE.value, _STEPS.value, _HEIGHT.value, _WIDTH.value)
    model = open_model(_MODEL.value, jax.devices(), _LORA.value, _DTYPE.value, [asked])
    sampler = model.sampler(*asked)
    output = pathlib.Path(_OUTPUT.value)
    if _PROMPTS.value:
        tell(_PROMPTS.value, model.family.cut)
    for prompt, cut in zip(_PROMPT.value, model.family.cut(_PROMPT.value or [""]), strict=False):
        if cut:
            shown = textwrap.shorten(prompt, 80, placeholder=" ...")
            print(
                f"--prompt={shown!r} is longer than the text encoders read, so that its end is cut off",
                file=sys.stderr,
            )

    sample_to_folder(model, sampler, prompts, output, _BATCH.value, _SEED.value, _IMAGES.value)
    count = len(prompts) * _IMAGES.value
    print(f"{count} image{'s' * (count > 1)} and grid.png lie in {output}")


def _read_prompts() -> list[str]:
    from digen_jax.prompts.files import read_prompt_file

    if bool(_PROMPT.value) == bool(_PROMPTS.value):
        raise ConfigError("there must be either --prompt (several times if need be) or --prompts")
    for prompt in _PROMPT.value:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"--prompt={prompt!r} is not UTF-8 at character {error.start + 1}: write the prompt in that encoding"
            ) from error
    if _PROMPT.value:
        return _PROMPT.value
    with user_input():
        return [record["prompt"] for record in read_prompt_file(_PROMPTS.value)]


if __name__ == "__main__":
    run_main(main)
