"""The sections of a config that belong to no other module: their fields with type, range and default.

A field's comment is its text in docs/configuration.md; `config.train_config` has all sections.
"""

import dataclasses
from typing import Annotated, Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from digen_jax.attention.kernels import Kernel
from digen_jax.diffusion.schedule import Window
from digen_jax.errors import (
    LARGEST_SIDE,
    LONGEST,
    Count,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    Scale,
)
from digen_jax.models.family import Size
from digen_jax.models.layers import Remat
from digen_jax.parallel.mesh import REPLICATED
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.process.job import MOST_CPU_DEVICES

Side = Annotated[int, Range(1, LARGEST_SIDE)]  # in pixels
OptionalSide = Annotated[int, Range(0, LARGEST_SIDE)]
DType = Literal["float32", "bfloat16"]
Mode = Literal["given", "fitted", "auto"]  # see `PlacementSection.mode`
GIVEN, FITTED, AUTO = get_args(Mode)
Encoding = Literal["auto", "precomputed", "each_step"]  # see `PromptsSection.encoding`


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The model that is tuned, and the size of its images."""

    folder: str = "assets/shapes-sd3"  # a diffusers pipeline: a local folder or a hub id
    height: Side = 32  # height of the images, in pixels
    width: Side = 32  # width of the images, in pixels
    frames: Annotated[int, Range(1, LONGEST)] = 1  # frames of a clip; 1: images
    # components of the pipeline that are not loaded: "text_encoder_3", the T5 of Stable Diffusion 3
    without: tuple[str, ...] = ()
    # tokens of a prompt that a T5 or a language model reads, or empty tokens in a T5's place, as in the call of
    # diffusers' pipeline; 0: the pipeline's default
    max_sequence_length: Annotated[int, Range(0, 2**12)] = 0
    # height that source images ("image" in a prompt file) are resized to before a model edits them, in pixels;
    # 0: prompts have no source images
    source_height: OptionalSide = 0
    source_width: OptionalSide = 0  # their width
    # what the backward pass recomputes, for less memory and more time: "none"; "blocks": all but the inputs of the
    # transformer's blocks; "keep_attention": not attention; "keep_products": not linear layers either
    remat: Remat = "none"
    # what computes attention: "packed" or "splash" on TPUs, "cudnn" on NVIDIA's GPUs in bfloat16, "xla" anywhere,
    # with more memory; "auto": the kernel for the devices, or XLA where none can compute the model's
    attention: Kernel = "auto"

    @property
    def size(self) -> Size:
        """Size of the images or clips."""
        return Size(self.height, self.width, self.frames)

    @property
    def source(self) -> Size | None:
        """Size of source images to edit. None means that there are none."""
        return Size(self.source_height, self.source_width) if self.source_height else None


@dataclasses.dataclass(frozen=True)
class PrecisionSection:
    """Types of numbers.

    Trained parameters, their moments and averages are float32, and so are log-probabilities and the sampler's steps.
    """

    # of the networks' arithmetic, in training and in sampling
    arithmetic: DType = "float32"
    # of parameters that are never trained: text encoders, autoencoder, the weights under a LoRA, the KL's reference
    frozen: DType = "float32"
    # of the weights that samplers are sent, and of their arithmetic; "": both as in training
    rollout: Literal["", DType] = ""
    # of the stored transitions; the sampler continues from the rounded images, so every step is rounded to it
    trajectory: DType = "float32"

    @property
    def exact_ratios(self) -> bool:
        """Whether sampler and trainer both compute in float32, so that stored log-probabilities equal the trainer's."""
        return {self.arithmetic, self.rollout or self.arithmetic} == {"float32"}

    @property
    def sent(self) -> np.dtype | None:
        """Type of weights in a weight sync. None means the parameters' type."""
        return jnp.dtype(self.rollout) if self.rollout else None


@dataclasses.dataclass(frozen=True)
class PromptsSection:
    """The prompts to train on, and when the text encoders read them."""

    # one prompt a line (.txt), or one JSON object with a "prompt" a line (.jsonl), as GenEval's metadata; a
    # "negative_prompt" is for the pass without the prompt, an "image" is the path of an image to edit, relative to the
    # file
    file: str = "assets/prompts/shapes_train.jsonl"
    # several such files instead of `file`; on the command line one option for each. A step's groups are drawn from all
    # of them, and the metadata that rewards get has "prompt_file", the file of a prompt
    files: tuple[str, ...] = ()
    # the share of each of `files` in a step's groups, in any unit; empty: all the same
    weights: tuple[float, ...] = ()
    # "each_step": the text encoders stay on the workers that sample; "precomputed": a run encodes all prompts that it
    # will use before it samples, then frees the text encoders; "auto": precomputed if they take more than 4 GB
    encoding: Encoding = "auto"
    # folder of precomputed prompt embeddings, which runs share; "": digen_jax/prompts in the user's cache folder
    cache: str = ""
    cache_limit: PositiveFloat = 100.0  # GB that this folder may take

    @property
    def paths(self) -> tuple[str, ...]:
        """Prompt files to train on; empty if none is configured."""
        return self.files or ((self.file,) if self.file else ())


@dataclasses.dataclass(frozen=True)
class RewardPoolSection:
    """Where the rewards score, in parallel with generation, except those on a mesh (`rewards[i].where`)."""

    # processes that score, each a batch with all rewards; 0: a thread of the run's own process, which cannot be
    # killed: where a reward hangs in it (`runtime.deadline`), the run saves and stops
    processes: Annotated[int, Range(0, 1000)] = 1
    # how often a reward that raises, dies or hangs is called again; then the run saves and stops
    retries: Annotated[int, Range(0, 1000)] = 2


@dataclasses.dataclass(frozen=True)
class BatchSection:
    """The images of a step."""

    # groups a step; a group is the images of one prompt
    groups: Annotated[int, Range(1, 10**5)] = 12
    images: Annotated[int, Range(2, 10**4)] = 12  # images a group; at least 2


@dataclasses.dataclass(frozen=True)
class SamplerSection:
    """How training images are sampled."""

    steps: Annotated[int, Range(1, 1000)] = 8  # denoising steps
    # "ode", "dpm2" and "unipc" add no noise; "flow" is Flow-GRPO's SDE, "dance" DanceGRPO's, "cps" keeps
    # coefficients, "flow_capped" bounds the noise of a step
    kind: str = "cps"
    # noise of the steps in the window, in the unit of `kind`; 0 without noise
    noise_level: float = 0.8
    window: Window = Window()
    # a group's images start from one noise (DanceGRPO; an option in Flow-GRPO's code)
    shared_noise: bool = False
    # guidance scale, 1 or less: none; policy gradients train at it too, other algorithms at algorithm.guidance
    guidance: Scale = 1.0
    # scale of a second pass without the prompt, 1 or less: none, for models with `guidance` as an input (FLUX.1-dev,
    # Kontext; diffusers' true_cfg_scale); all algorithms train at it too
    true_cfg_scale: Scale = 1.0
    # images that one call generates: the unit passed from rollout to trainer
    chunk: PositiveInt = 144


@dataclasses.dataclass(frozen=True)
class PlacementSection:
    """Which devices do what.

    One word instead of the section sets `mode`, in a config file as on the command line: --config.placement=auto.
    """

    # "given": the sizes below; "fitted": smaller ones where there are fewer devices; "auto": the
    # planner chooses, from costs that it measures first
    mode: Mode = GIVEN
    rollout: RolloutAxes = dataclasses.field(default=RolloutAxes(data=4, fsdp=1, workers=1))
    trainer: TrainerAxes = dataclasses.field(default=TrainerAxes(data=4, fsdp=1, time=1))
    # (regular expression, tactic) or (regular expression, logical axis, mesh axis), of parameters' names such
    # as transformer/proj_out/kernel; tactics are "replicate" and "fsdp": see `parallel.mesh.Layout`
    rules: tuple[tuple[str, ...], ...] = REPLICATED
    # virtual CPU devices where there is no accelerator
    cpu_devices: Annotated[int, Range(1, MOST_CPU_DEVICES)] = 8

    @property
    def meshes(self) -> MeshSizes:
        """Sizes of the meshes."""
        return MeshSizes(self.rollout, self.trainer)


@dataclasses.dataclass(frozen=True)
class RuntimeSection:
    """The order in which meshes sample and train."""

    # weight versions that a trajectory may be behind; 0: strictly on policy
    max_policy_lag: Count = 0
    # largest fraction of a step's groups that may begin before the step; 0 to 1
    max_off_policy_fraction: Annotated[float, Range(0, 1)] = 0.5
    # weights from which a trainer samples next to rollout workers: its own, or a copy on each device ("resharded")
    tag_weights: Literal["in place", "resharded"] = "in place"
    # dynamic sampling: groups tried for a step, as those of equal rewards are replaced; 0: off
    max_candidates: Annotated[int, Range(0, 10**5)] = 0
    # groups generated in addition, so that no replacement has to be waited for
    oversampled_groups: Annotated[int, Range(0, 10**5)] = 0
    # each worker samples and trains its own chunks in their order, so that a repeated run gives the same bits;
    # "auto": unless chunks are trained early or stale, or the trainer samples next to rollout workers
    deterministic_order: Literal["auto", "yes", "no"] = "auto"
    max_incomplete_groups: Count = 0  # incomplete groups that may be in training at a time; 0: none
    # seconds after which a command or a reward counts as hung, or ten times its measured duration if
    # that is longer; compilation does not count; 0: never
    deadline: NonNegativeFloat = 1800.0


@dataclasses.dataclass(frozen=True)
class EvaluationSection:
    """How the model is evaluated on held-out prompts."""

    prompts: str = "assets/prompts/shapes_heldout.jsonl"  # a prompt file, as prompts.file
    every: PositiveInt = 20  # steps between two evaluations
    height: OptionalSide = 0  # height of the images, in pixels; 0: as in training
    width: OptionalSide = 0  # width of the images, in pixels; 0: as in training
    frames: Annotated[int, Range(0, LONGEST)] = 0  # frames of a clip; 0: as in training
    # denoising steps of the noiseless sampler; 0: as many as in training
    steps: Annotated[int, Range(0, 1000)] = 0
    guidance: Scale = 1.0  # guidance scale, 1 or less: none
    true_cfg_scale: Scale = 1.0  # as sampler.true_cfg_scale
    batch: Annotated[int, Range(1, 10**6)] = 180  # images generated by one call
    images: Count = 0  # the first prompts of the file, one image each; 0: all of them


@dataclasses.dataclass(frozen=True)
class StoppingSection:
    """An early stop, before a run earns its reward at the cost of another one."""

    # the reward to watch on the held-out prompts, by its name in the metric evaluation/reward_of/NAME, such as one of
    # weight 0; "": the run never stops early
    reward: str = ""
    margin: NonNegativeFloat = 0.0  # how far below its best evaluation it counts as fallen
    evaluations: PositiveInt = 3  # evaluations in a row in which it must be


@dataclasses.dataclass(frozen=True)
class ImagesSection:
    """When sample images are written, and how many."""

    every: PositiveInt = 20  # steps between two sets of sample images
    # sample images in a set, of the first held-out prompts
    count: Annotated[int, Range(1, 1000)] = 12
    fps: Annotated[int, Range(1, 120)] = 16  # frames per second of sample clips


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """When the run is saved, and how many checkpoints stay."""

    every: PositiveInt = 20  # steps between two checkpoints
    keep: Annotated[int, Range(1, 10**6)] = 2  # the newest checkpoints that are kept


@dataclasses.dataclass(frozen=True)
class WandbSection:
    """Arguments of wandb.init; without a project there is no wandb. It needs `pip install wandb`."""

    project: str = ""  # project of the run; a name turns wandb on
    entity: str = ""  # user or team
    name: str = ""  # name of the run
    group: str = ""  # group of runs that it belongs to
    notes: str = ""  # a text about the run
    tags: tuple[str, ...] = ()  # words to find the run by
    # how wandb records; "": the environment variable WANDB_MODE, or "online"
    mode: Literal["", "online", "offline", "disabled", "shared"] = ""

    @property
    def options(self) -> dict[str, Any] | None:
        """Arguments of `wandb.init`. None means no project."""
        return {k: v for k, v in vars(self).items() if v} if self.project else None


@dataclasses.dataclass(frozen=True)
class TrackioSection:
    """Arguments of trackio.init; without a project there is no trackio. It needs `pip install trackio`."""

    project: str = ""  # project of the run; a name turns trackio on
    name: str = ""  # name of the run; "": made from that of the workdir
    group: str = ""  # group of runs that it belongs to
    # a Space of Hugging Face, such as "user/tracked", to which the run is sent; "": files of this machine only, in
    # the folder that the environment's TRACKIO_DIR names
    space_id: str = ""

    @property
    def options(self) -> dict[str, Any] | None:
        """Arguments of `trackio.init`. None means no project."""
        return {k: v for k, v in vars(self).items() if v} if self.project else None
