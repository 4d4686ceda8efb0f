"""Options of both launch/sample.py and launch/evaluate.py: the model, and how it samples."""

from typing import TYPE_CHECKING, Any

from absl import flags

from digen_jax.config.command_line import define_path
from digen_jax.errors import LARGEST_SIDE, LONGEST, check_positive, check_range, prefix_errors

if TYPE_CHECKING:  # a script imports JAX after the checks of its options
    from digen_jax.inference.model import Model, SamplingOptions

flags.disclaim_key_flags()  # --help lists the options under the script


class SamplingFlags:
    """Defines the options; `batch` is the default of --batch."""

    def __init__(self, batch: int):
        default = "default: of the run or the model."

        def integer(name: str, text: str, most: int) -> flags.FlagHolder:
            return flags.DEFINE_integer(name, None, text, 1, most)

        self.model = define_path("model", None, "Pipeline folder, Hub id, or workdir of a run.")
        self.lora = define_path("lora", None, "Folder or file of a LoRA for the model.")
        self.guidance_2 = flags.DEFINE_float(
            "guidance_2",
            None,
            f"Guidance scale of Wan 2.2 A14B at low noise levels; 0 means --guidance; {default}",
        )
        self.true_cfg_scale = flags.DEFINE_float(
            "true_cfg_scale",
            None,
            f"Scale of the unconditional pass of models with embedded guidance; {default}",
        )
        self.steps = integer("steps", f"Denoising steps; {default}", 1000)
        self.height = integer("height", f"Image height in pixels; {default}", LARGEST_SIDE)
        self.width = integer("width", f"Image width in pixels; {default}", LARGEST_SIDE)
        self.frames = integer("frames", f"Frames of a clip; {default}", LONGEST)
        rate = "Frames per second of clips; default: images.fps of the run, or 16."
        self.fps = integer("fps", rate, 120)
        self.format = flags.DEFINE_enum(
            "format",
            None,
            ["mp4", "webp", "gif"],
            "File format of clips; default: mp4, or webp if PyAV is not installed.",
        )
        self.batch = flags.DEFINE_integer("batch", batch, "Images per call of the sampler.")
        self.dtype = flags.DEFINE_enum(
            "dtype", None, ["float32", "bfloat16"], "Compute dtype of the network."
        )
        flags.mark_flag_as_required("model")

    def check(self) -> None:
        """Raises ConfigError if a number is out of range, or the file format of clips is not possible."""
        for flag in (self.guidance_2, self.true_cfg_scale):
            if flag.value is not None:
                check_range(f"--{flag.name}", flag.value, 0, 1000)
        check_positive("--batch", self.batch.value)
        # Before weights are read; the defaults of models are even.
        self.animation(self.height.value or 2, self.width.value or 2)

    def animation(self, height: int, width: int) -> str:
        """Returns the file format of clips. Raises ConfigError if it is not possible."""
        from digen_jax.logging.images import check_animation

        with prefix_errors("--format: "):
            return check_animation(self.format.value, height, width)

    def options(self, guidance: float | None) -> "SamplingOptions":
        """Returns the options of a sampler with a guidance scale."""
        names = ("steps", "height", "width", "true_cfg_scale", "frames", "guidance_2")
        return {"guidance": guidance, **{name: getattr(self, name).value for name in names}}

    def open_model(self, options: list, negative: str | None, fits: Any) -> "Model":
        """Opens the model on all devices; see `model.open_model` for the arguments."""
        import jax

        from digen_jax.inference.model import open_model

        where = self.model.value, jax.devices(), self.lora.value, self.dtype.value
        return open_model(*where, options, negative, fits)
