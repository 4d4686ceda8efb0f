"""FLUX.2 klein with the published settings of Flow-Factory, on GPUs of 80 GB.

python launch/train.py --config configs/flux2_klein.py:base_lora,8 --workdir runs/klein \
    --config.rewards="({'name': 'pickscore', 'settings': {'folder': 'pickscore', 'processor': 'clip-h'}},)" \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the recipe's name, a comma, and the number of GPUs: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128,
192 or 384. Reward and prompt files are yours: docs/rewards.md lists the weights that PickScore needs. The hub
repositories of the 9B models are gated: accept the licence there and log in with `hf auth login`, or set model.folder
to a copy, or to another size of the same kind.

Separate GPUs for rollout and training, of eight four each; the second line where all weights are tuned:
--config.placement.rollout.data=4 --config.placement.trainer.data=4
--config.placement.rollout.data=1 --config.placement.rollout.fsdp=4 --config.placement.trainer.fsdp=4
Layout chosen by the planner: --config.placement=auto
By the compiled costs it chooses one worker of all GPUs on 8 H100s, with chunks of 8 images.

base_lora        FLUX.2-klein-base-9B, a LoRA of rank 64, with guidance
base_full        FLUX.2-klein-base-4B, all weights, with guidance
distilled_lora   FLUX.2-klein-9B, a LoRA of rank 64, in 4 steps without guidance
distilled_full   FLUX.2-klein-4B, all weights, in 4 steps without guidance

github.com/X-GenGroup/Flow-Factory:
- examples/grpo/lora/flux2_klein_base/default.yaml, grpo/full/flux2_klein_base/default.yaml,
  grpo/lora/flux2_klein/default.yaml and grpo/full/flux2_klein/default.yaml, all at 3e615ee, in the order above: 48
  groups of 16 images in two updates, one image a GPU at once, 384 x 384; base: 8 steps, guidance 4, noise 0.7 of
  Flow-GRPO's kind in one of the steps 1, 2 and 3, 28 steps in evaluation; distilled: 4 steps, noise 0.5 in step 1 or
  2, 10 steps in evaluation; evaluation at 1024 x 1024, one image a GPU at once; clip range 1e-4, advantages clipped to
  5, std of the group, no KL, learning rate 3e-4 (all weights: 1e-5), weight decay 1e-4, Adam's numbers, gradient norm
  1, average of 0.9 every 4 training steps, rank 64 and alpha 128, bfloat16, evaluation and checkpoint every 20, 8 GPUs
- src/flow_factory/scheduler/flow_match_euler_discrete.py (351f744): the one step with noise is drawn anew in each
  training step; that of the step with noise is Flow-GRPO's
- src/flow_factory/models/flux/flux2_klein.py (3e615ee): layers with a LoRA, tokens of a prompt, the pipeline's sigmas
- src/flow_factory/models/abc.py (2520efe): LoRA starts Gaussian; src/flow_factory/hparams/training_args.py (583008b):
  the average warms up
- config/accelerate_configs/fsdp2.yaml (d003d89): shared weights and recomputed blocks where all weights are tuned

Ours: recomputed blocks under a LoRA; the number of steps, as the source runs until it is stopped; sample images, the
number of checkpoints, and all placements. Its recipes for DiffusionNFT and AWM on the base models are not here.

Differences to the source:
- these settings train image editing there: all 128 training records of the examples' data have an image to edit, scaled
  to 384 x 384 (`condition_image_size`; at 3e615ee). Here images are generated from text alone;
- its advantages are "gdpo", which for one reward divides them by their std over the step once more; set
  advantages.combine to "gdpo" for several rewards. distilled_full is published with a rank among a group's images as
  its reward;
- a std below 1e-6 counts as 1e-6 there (src/flow_factory/advantage/advantage_processor.py, 3a2a482); here 1e-4 is
  added to each;
- a step's prompts are the next ones of a permutation of the file; the source takes the first ones of a new permutation
  in each step (src/flow_factory/data_utils/sampling_plan.py, 5f6cda1);
- trained weights are bfloat16 there, and trajectories float16; here both are float32, and so is the log-probability;
- an update's groups are split by index, not shuffled;
- with bfloat16 the trainer recomputes the old log-probabilities (algorithm.old_log_probs), once more per trained step;
- diffusers' pipeline rounds a sigma to bfloat16 for the network. That is not done here.

The smallest TPU slice for base_lora is one chip of 32 GB, v6e:1x1, by the compiler (estimated; nothing has run): 23.9
GiB and 1,334 s a step (`python launch/plan.py --config configs/flux2_klein.py:base_lora,1 --topology v6e:1x1`).

Needed on H100s, as compiled (docs/performance.md; nothing has run): at most 24 GiB of each of 8. One takes base_lora,1,
with as much; all weights take several.

Memory of each of 8 GPUs by the accounting of launch/plan.py, in GiB: weights, gradient, moments, average, the version
that sampled, autoencoder, trajectories, prompts, without the programs' temporary memory: base_lora and distilled_lora
20.9, base_full and distilled_full 11.3. On one GPU the former have 0.4 more trajectories; the latter take 87.6 and do
not fit. The text encoder, 10.9 or 5.8 unsharded, is there before, while it encodes the prompts.

Not measured: no recipe here was run on such GPUs. An encoded prompt takes 7.9 MB of disk for a 4B model and 12.6 MB for
a 9B one, 512 x 7680 or 512 x 12288 bfloat16 numbers (prompts.cache_limit).
"""

from ml_collections import ConfigDict

from digen_jax.config.arguments import recipe_and_gpus
from digen_jax.config.load import complete


def lora(n: int) -> dict:
    """A LoRA on n GPUs, each with all parameters."""
    return dict(
        lora=dict(rank=64, alpha=128.0, init="gaussian"),
        trainer=dict(learning_rate=3e-4),
        placement=dict(trainer=dict(data=n, fsdp=1)),
    )


def full(n: int) -> dict:
    """All weights on n GPUs, which share them."""
    return dict(
        trainer=dict(learning_rate=1e-5),
        placement=dict(trainer=dict(data=1, fsdp=n), rules=((".*", "fsdp"),)),
    )


# The source counts steps from 0: one of [1, 2, 3], or of [1, 2], has noise and is trained.
OF_BASE = dict(
    sampler=dict(
        steps=8,
        guidance=4.0,
        noise_level=0.7,
        window=dict(mode="random", first=1, end=4, length=1),
    ),
    evaluation=dict(steps=28, guidance=4.0),
)
OF_DISTILLED = dict(
    sampler=dict(
        steps=4,
        guidance=1.0,
        noise_level=0.5,
        window=dict(mode="random", first=1, end=3, length=1),
    ),
    evaluation=dict(steps=10, guidance=1.0),
)
# The model, and differences to `base`, the later ones to the earlier ones.
RECIPES = {
    "base_lora": ("FLUX.2-klein-base-9B", OF_BASE, lora),
    "base_full": ("FLUX.2-klein-base-4B", OF_BASE, full),
    "distilled_lora": ("FLUX.2-klein-9B", OF_DISTILLED, lora),
    "distilled_full": ("FLUX.2-klein-4B", OF_DISTILLED, full),
}
# Images of an update, of which a GPU has one at once: 768 / 2.
PASSES = dict.fromkeys(RECIPES, 384)


def base(n: int) -> ConfigDict:
    """The common settings of all recipes on n GPUs."""
    c = ConfigDict()
    c.seed = 42
    c.steps = 3000  # the source runs until it is stopped
    c.model = ConfigDict(dict(height=384, width=384, remat="blocks"))
    c.precision = ConfigDict(dict(arithmetic="bfloat16", frozen="bfloat16"))
    c.prompts = ConfigDict(dict(file="", cache_limit=250.0))
    c.rewards = ()
    c.batch = ConfigDict(dict(groups=48, images=16))
    c.sampler = ConfigDict(dict(kind="flow", chunk=n))
    c.algorithm = ConfigDict(dict(clip_range=1e-4, adv_clip=5.0))
    c.advantages = ConfigDict(dict(std="group"))
    c.trainer = ConfigDict(
        dict(
            micro_batch=n,
            updates=2,
            weight_decay=1e-4,
            clip_norm=1.0,
            ema=0.9,
            ema_warm_up=True,
            ema_unit="step",  # at the end of training steps 4, 8, ...: after updates 8, 16, ...
            ema_every=4,
        )
    )
    # Sampling and training take turns on the same devices, so no device waits for another.
    c.placement = ConfigDict(dict(rollout=dict(data=0, fsdp=1), trainer=dict(data=1, fsdp=1)))
    c.evaluation = ConfigDict(dict(prompts="", every=20, height=1024, width=1024, batch=n))
    c.images = ConfigDict(dict(every=20, count=12))
    c.checkpoint = ConfigDict(dict(every=20, keep=2))
    return c


def get_config(argument: str = "base_lora,8") -> ConfigDict:
    name, n = recipe_and_gpus(argument, PASSES, "base_lora,8")
    model, of_kind, tuning = RECIPES[name]
    c = base(n)
    c.model.folder = f"black-forest-labs/{model}"
    c.update(of_kind)
    c.update(tuning(n))
    return complete(c)  # so that every field can be given on the command line
