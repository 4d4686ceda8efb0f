"""The sections of a config that belong to no other module: their fields with type, range and default.

A field's comment is its text in docs/configuration.md; `config.train_config` has all sections.
"""

import dataclasses
from typing import Annotated, Literal, get_args

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
Frozen = Literal[DType, "int8", "float8"]
Mode = Literal["given", "fitted", "auto"]  # see `PlacementSection.mode`
GIVEN, FITTED, AUTO = get_args(Mode)
Encoding = Literal["auto", "precomputed", "each_step"]  # see `PromptsSection.encoding`


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The model to train, and the size of its images."""

    folder: str = "assets/shapes-sd3"  # diffusers pipeline: a local folder or a Hugging Face Hub id
    height: Side = 32  # image height in pixels
    width: Side = 32  # image width in pixels
    frames: Annotated[int, Range(1, LONGEST)] = 1  # frames of a clip; 1: images
    # components to train, such as "transformer", which is the expert of high noise levels in Wan 2.2 A14B; empty means
    # all transformers
    trained: tuple[str, ...] = ()
    # pipeline components that are not loaded; only "text_encoder_3", the T5 of Stable Diffusion 3, is optional
    without: tuple[str, ...] = ()
    # prompt length in tokens of a T5 or language-model encoder, as in the call of diffusers' pipeline; also the number
    # of empty tokens that replace a T5 that is not loaded; 0 means the pipeline's default
    max_sequence_length: Annotated[int, Range(0, 2**12)] = 0
    # height in pixels to which source images ("image" in a prompt file) are resized, to edit them or to generate clips
    # that start with them, which have the same size; 0 means that prompts have no source images
    source_height: OptionalSide = 0
    source_width: OptionalSide = 0  # width of source images in pixels
    # source images of each prompt; several need FLUX.2 klein or Qwen-Image-Edit and a list of paths as "image"
    source_images: Annotated[int, Range(1, 16)] = 1
    # activations that the backward pass recomputes to save memory, from fewest to most: "none"; "keep_products", all
    # except the results of attention and linear layers; "keep_attention", all except the results of attention;
    # "blocks", all
    remat: Remat = "none"
    # attention kernel: "packed" or "splash" on TPUs, "cudnn" on NVIDIA GPUs in bfloat16, "xla" on any device, with
    # more memory; "auto" selects a kernel for the devices, or XLA if none supports the model
    attention: Kernel = "auto"

    @property
    def size(self) -> Size:
        """Size of the images or clips."""
        return Size(self.height, self.width, self.frames)

    @property
    def source(self) -> Size | None:
        """Size of source images, with the clips' frames. None means that there are none."""
        source = self.size._replace(height=self.source_height, width=self.source_width)
        return source if self.source_height else None


@dataclasses.dataclass(frozen=True)
class PrecisionSection:
    """Dtypes of parameters and computations.

    Trained parameters, their moments and averages, log-probabilities and the sampler's steps are always float32.
    """

    arithmetic: DType = "float32"  # compute dtype of the networks, in training and sampling
    # dtype of parameters that are never trained: text encoders, autoencoder, base weights under a LoRA, reference
    # policy of the KL; "int8" and "float8", only with a LoRA, quantize kernels of linear layers of transformers and
    # text encoders, with a scale per output channel, and store the others in bfloat16
    frozen: Frozen = "float32"
    # dtype of the weights sent to samplers, and of their compute; "" means that both are as in training
    rollout: Literal["", DType] = ""
    # dtype of stored transitions; the sampler continues from the rounded latents, so every step is rounded
    trajectory: DType = "float32"

    @property
    def exact_ratios(self) -> bool:
        """Whether sampler and trainer both compute in float32, so that stored log-probabilities equal the trainer's."""
        return {self.arithmetic, self.rollout or self.arithmetic} == {"float32"}

    @property
    def stored(self) -> np.dtype:
        """Type of frozen parameters; int8 and float8 are only of kernels (see `quantization.stored_shapes`)."""
        return jnp.dtype("float8_e4m3fn" if self.frozen == "float8" else self.frozen)

    @property
    def sent(self) -> np.dtype | None:
        """Type of weights in a weight sync. None means the parameters' type."""
        return jnp.dtype(self.rollout) if self.rollout else None


@dataclasses.dataclass(frozen=True)
class PromptsSection:
    """Prompts to train on, and when they are encoded."""

    # prompt file: one prompt per line (.txt), or one JSON object with a "prompt" per line (.jsonl), as in GenEval;
    # optional fields are "negative_prompt", for the unconditional pass, and "image", the path of an image to edit,
    # relative to the file; "chosen" and "rejected" are the images of algorithms that train image files
    file: str = "assets/prompts/shapes_train.jsonl"
    # several prompt files instead of `file`; on the command line, repeat the option. Each step samples groups from all
    # of them, and rewards receive the prompt's file as "prompt_file" in the metadata
    files: tuple[str, ...] = ()
    # share of each of `files` in a step's groups, in any unit; empty means equal shares
    weights: tuple[float, ...] = ()
    # when prompts are encoded: "each_step", by text encoders on the sampling workers; "precomputed", all prompts of
    # the run before sampling, after which the text encoders are freed; "auto", precomputed if the encoders take more
    # than 4 GB
    encoding: Encoding = "auto"
    # folder of precomputed prompt embeddings, shared by runs; "" means digen_jax/prompts in the user's cache folder
    cache: str = ""
    cache_limit: PositiveFloat = 100.0  # maximum size of this folder in GB

    @property
    def paths(self) -> tuple[str, ...]:
        """Prompt files to train on; empty if none is configured."""
        return self.files or ((self.file,) if self.file else ())


@dataclasses.dataclass(frozen=True)
class RewardPoolSection:
    """Processes that compute rewards during generation, except rewards on a mesh (`rewards[i].where`)."""

    # number of processes, each of which scores a batch with all rewards; 0 means a thread of the run's process, which
    # cannot be killed: if a reward hangs in it (`runtime.deadline`), the run saves and stops
    processes: Annotated[int, Range(0, 1000)] = 1
    # maximum retries of a reward that raises, dies or times out; then the run saves and stops
    retries: Annotated[int, Range(0, 1000)] = 2


@dataclasses.dataclass(frozen=True)
class BatchSection:
    """Number of images per step."""

    # groups per step; a group is the images of one prompt
    groups: Annotated[int, Range(1, 10**5)] = 12
    # images per group; 1 only for gradients of rewards and sft; with image files their number in a line
    images: Annotated[int, Range(1, 10**4)] = 12


@dataclasses.dataclass(frozen=True)
class SamplerSection:
    """How training images are sampled."""

    steps: Annotated[int, Range(1, 1000)] = 8  # denoising steps
    # "ode" and "dpm2" add no noise; "flow" is the SDE of Flow-GRPO, "dance" of DanceGRPO; "cps" is
    # coefficients-preserving sampling; "flow_capped" limits the noise per step; "linear" is
    # that of Flow-GRPO's code for Wan, with noise_level 1
    kind: str = "cps"
    # noise scale of the steps in the window, in the unit of `kind`; 0 means no noise
    noise_level: float = 0.8
    window: Window = Window()
    # whether all images of a group start from the same noise (DanceGRPO; optional in Flow-GRPO's code)
    shared_noise: bool = False
    # guidance scale; policy gradients also train with it, other algorithms with `algorithm.guidance`; 1 or less means
    # none
    guidance: Scale = 1.0
    # `guidance` of Wan 2.2 A14B's expert of low noise levels; 0 means `guidance`
    guidance_2: Scale = 0.0
    # scale of a second, unconditional pass, for models that take `guidance` as an input (FLUX.1-dev, Kontext;
    # true_cfg_scale in diffusers); all algorithms also train with it; 1 or less means none
    true_cfg_scale: Scale = 1.0
    # images per call of the sampler; a chunk is the unit passed from rollout to trainer
    chunk: PositiveInt = 144


@dataclasses.dataclass(frozen=True)
class PlacementSection:
    """Devices of the rollout workers and of the trainer.

    A single word instead of the section sets `mode`, in a config file and on the command line: --config.placement=auto.
    """

    # "given": the sizes below; "fitted": reduced if fewer devices are available; "auto": chosen by the planner, which
    # measures costs first
    mode: Mode = GIVEN
    rollout: RolloutAxes = dataclasses.field(default=RolloutAxes(data=4, fsdp=1, workers=1))
    trainer: TrainerAxes = dataclasses.field(default=TrainerAxes(data=4, fsdp=1, time=1))
    # sharding rules: (regular expression, tactic) or (regular expression, logical axis, mesh axis) for parameter names
    # such as transformer/proj_out/kernel; the tactics are "replicate" and "fsdp" (see `parallel.mesh.ShardingRules`)
    rules: tuple[tuple[str, ...], ...] = REPLICATED
    # virtual CPU devices if there is no accelerator
    cpu_devices: Annotated[int, Range(1, MOST_CPU_DEVICES)] = 8

    @property
    def meshes(self) -> MeshSizes:
        """Sizes of the meshes."""
        return MeshSizes(self.rollout, self.trainer)


@dataclasses.dataclass(frozen=True)
class RuntimeSection:
    """Order of sampling and training, and their overlap."""

    # maximum policy lag of a trajectory in weights versions; 0 means strictly on-policy
    max_policy_lag: Count = 0
    # maximum fraction of a step's groups that may start before the step, 0 to 1
    max_off_policy_fraction: Annotated[float, Range(0, 1)] = 0.5
    # weights with which a trainer samples in addition to rollout workers: "in place", as sharded for training, or
    # "resharded", a copy on each device
    tag_weights: Literal["in place", "resharded"] = "in place"
    # dynamic sampling: maximum groups per step, including replacements of groups with equal rewards; 0 disables it
    max_candidates: Annotated[int, Range(0, 10**5)] = 0
    # additional groups to generate, so that replacements are available without waiting
    oversampled_groups: Annotated[int, Range(0, 10**5)] = 0
    # whether each worker samples and trains its chunks in a fixed order, so that a repeated run is bit-identical;
    # "auto" means yes, unless chunks are trained early or off-policy, or the trainer samples in addition to rollout
    # workers
    deterministic_order: Literal["auto", "yes", "no"] = "auto"
    # maximum incomplete groups in training at the same time; 0 means that only complete groups train
    max_incomplete_groups: Count = 0
    # timeout of a command or reward in seconds, or ten times its measured duration if that is longer; excludes
    # compilation; 0 disables it
    deadline: NonNegativeFloat = 1800.0


@dataclasses.dataclass(frozen=True)
class EvaluationSection:
    """How the model is evaluated on held-out prompts."""

    # prompt file, in the format of `prompts.file`
    prompts: str = "assets/prompts/shapes_heldout.jsonl"
    every: PositiveInt = 20  # steps between evaluations
    height: OptionalSide = 0  # image height in pixels; 0 means as in training
    width: OptionalSide = 0  # image width in pixels; 0 means as in training
    frames: Annotated[int, Range(0, LONGEST)] = 0  # frames of a clip; 0: as in training
    # denoising steps of the noiseless sampler; 0 means as in training
    steps: Annotated[int, Range(0, 1000)] = 0
    guidance: Scale = 1.0  # guidance scale; 1 or less means none
    guidance_2: Scale = 0.0  # as `sampler.guidance_2`
    true_cfg_scale: Scale = 1.0  # as `sampler.true_cfg_scale`
    batch: Annotated[int, Range(1, 10**6)] = 180  # images per call of the sampler
    images: Count = 0  # number of prompts from the start of the file, one image each; 0 means all


@dataclasses.dataclass(frozen=True)
class StoppingSection:
    """Early stopping, if the trained reward is improved at the cost of another one."""

    # held-out reward to monitor, as named in the metric evaluation/reward_of/NAME, such as a reward of weight 0; ""
    # disables early stopping
    reward: str = ""
    # drop below the reward's best evaluation from which it counts as decreased
    margin: NonNegativeFloat = 0.0
    # consecutive evaluations with a decreased reward after which the run stops
    evaluations: PositiveInt = 3


@dataclasses.dataclass(frozen=True)
class ImagesSection:
    """Frequency and number of sample images."""

    every: PositiveInt = 20  # steps between sets of sample images
    count: Annotated[int, Range(1, 1000)] = 12  # images per set, from the first held-out prompts
    fps: Annotated[int, Range(1, 120)] = 16  # frames per second of sample clips


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """Frequency and number of checkpoints."""

    every: PositiveInt = 20  # steps between checkpoints
    keep: Annotated[int, Range(1, 10**6)] = 2  # number of latest checkpoints to keep


@dataclasses.dataclass(frozen=True)
class WandbSection:
    """Arguments of wandb.init. Requires `pip install wandb`; off without a project."""

    project: str = ""  # project name; enables wandb
    entity: str = ""  # user or team
    name: str = ""  # run name
    group: str = ""  # group of runs
    notes: str = ""  # description of the run
    tags: tuple[str, ...] = ()  # tags of the run
    # logging mode; "" means the environment variable WANDB_MODE, or "online"
    mode: Literal["", "online", "offline", "disabled", "shared"] = ""


@dataclasses.dataclass(frozen=True)
class TrackioSection:
    """Arguments of trackio.init. Requires `pip install trackio`; off without a project."""

    project: str = ""  # project name; enables trackio
    name: str = ""  # run name; "" derives it from the name of the workdir
    group: str = ""  # group of runs
    # Hugging Face Space that receives the run, such as "user/tracked"; "" stores it locally, in the folder of the
    # environment variable TRACKIO_DIR
    space_id: str = ""
