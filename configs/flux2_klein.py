"""FLUX.2 klein with the published settings of Flow-Factory, on GPUs of 80 GB.

python launch/train.py --config configs/flux2_klein.py:base_lora,8 --workdir runs/klein \
    --config.rewards="({'name': 'pickscore', 'settings': {'folder': 'pickscore', 'processor': 'clip-h'}},)" \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the recipe's name, a comma, and the number of GPUs: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128,
192 or 384. docs/flux2-klein.md lists what model, prompts and reward require.

Separate GPUs for rollout and training, four each of eight; use the second line to train all weights:
--config.placement.rollout.data=4 --config.placement.trainer.data=4
--config.placement.rollout.data=1 --config.placement.rollout.fsdp=4 --config.placement.trainer.fsdp=4
Layout chosen by the planner: --config.placement=auto

base_lora        FLUX.2-klein-base-9B, LoRA of rank 64, with guidance
base_full        FLUX.2-klein-base-4B, all weights, with guidance
distilled_lora   FLUX.2-klein-9B, LoRA of rank 64, in 4 steps without guidance
distilled_full   FLUX.2-klein-4B, all weights, in 4 steps without guidance

Sources, in github.com/X-GenGroup/Flow-Factory:
- examples/grpo/lora/flux2_klein_base/default.yaml, grpo/full/flux2_klein_base/default.yaml,
  grpo/lora/flux2_klein/default.yaml and grpo/full/flux2_klein/default.yaml, all at 3e615ee, in the order above: 48
  groups of 16 images in two updates, micro-batch of one image per GPU, 384 x 384; base: 8 steps, guidance 4, noise 0.7
  of Flow-GRPO's SDE in one of the steps 1, 2 and 3, 28 steps in evaluation; distilled: 4 steps, noise 0.5 in step 1 or
  2, 10 steps in evaluation; evaluation at 1024 x 1024, one image per GPU; clip range 1e-4, advantages clipped to 5,
  group std, no KL, learning rate 3e-4 (all weights: 1e-5), weight decay 1e-4, Adam's settings, gradient norm 1, EMA of
  0.9 every 4 training steps, rank 64 and alpha 128, bfloat16, evaluation and checkpoint every 20, 8 GPUs
- src/flow_factory/scheduler/flow_match_euler_discrete.py (351f744): Flow-GRPO's step; the step with noise is sampled in
  each training step
- src/flow_factory/models/flux/flux2_klein.py (3e615ee): LoRA layers, prompt tokens, the pipeline's sigmas
- src/flow_factory/models/abc.py (2520efe): Gaussian LoRA initialization;
  src/flow_factory/hparams/training_args.py (583008b): EMA warm-up
- config/accelerate_configs/fsdp2.yaml (d003d89): FSDP and rematerialized blocks if all weights are trained

Our choices: rematerialized blocks with a LoRA; the number of steps, as the source runs until it is stopped; sample
images, number of checkpoints, all placements. Its recipes for DiffusionNFT and AWM on the base models are not included.

Differences from the source, in addition to those of all recipes (docs/evidence.md):
- these settings train image editing there: all 128 training records of the examples' data have an image to edit, scaled
  to 384 x 384 (`condition_image_size`; at 3e615ee). Here images are generated from text, unless
  `--config.model.source_height=384 --config.model.source_width=384` is given (docs/flux2-klein.md);
- its advantages are "gdpo", which for one reward divides them once more by their std over the step; set
  advantages.combine to "gdpo" for several rewards. The published reward of distilled_full is the rank of an image
  within its group;
- it bounds a std by 1e-6 from below (src/flow_factory/advantage/advantage_processor.py, 3a2a482); here 1e-4 is added;
- trained weights are bfloat16 there, and trajectories float16; here both are float32, and so is the log-probability;
- diffusers' pipeline rounds the network's sigma to bfloat16; here it is exact.

docs/performance.md has the estimated memory and time, and the smallest TPU slice.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import published, recipe_and_gpus


def lora(n: int) -> dict:
    """LoRA on n GPUs, each with all parameters."""
    return dict(
        lora=dict(rank=64, alpha=128.0, init="gaussian"),
        trainer=dict(learning_rate=3e-4),
        placement=dict(trainer=dict(data=n, fsdp=1)),
    )


def full(n: int) -> dict:
    """All weights, sharded over n GPUs."""
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
# Model and changes to `base`, applied in order.
RECIPES = {
    "base_lora": ("FLUX.2-klein-base-9B", OF_BASE, lora),
    "base_full": ("FLUX.2-klein-base-4B", OF_BASE, full),
    "distilled_lora": ("FLUX.2-klein-9B", OF_DISTILLED, lora),
    "distilled_full": ("FLUX.2-klein-4B", OF_DISTILLED, full),
}
# Images per update, with one per GPU and pass: 768 / 2.
PASSES = dict.fromkeys(RECIPES, 384)


def base(n: int) -> dict:
    """Common settings of all recipes on n GPUs."""
    return dict(
        seed=42,
        model=dict(height=384, width=384),
        prompts=dict(cache_limit=250.0),
        batch=dict(groups=48, images=16),
        sampler=dict(kind="flow", chunk=n),
        algorithm=dict(clip_range=1e-4, adv_clip=5.0),
        advantages=dict(std="group"),
        trainer=dict(
            micro_batch=n,
            updates=2,
            weight_decay=1e-4,
            clip_norm=1.0,
            ema=0.9,
            ema_warm_up=True,
            ema_unit="step",  # at the end of training steps 4, 8, ...: after updates 8, 16, ...
            ema_every=4,
        ),
        evaluation=dict(every=20, height=1024, width=1024, batch=n),
        checkpoint=dict(every=20),
    )


def get_config(argument: str = "base_lora,8") -> ConfigDict:
    name, n = recipe_and_gpus(argument, PASSES, "base_lora,8")
    model, of_kind, tuning = RECIPES[name]
    folder = dict(model=dict(folder=f"black-forest-labs/{model}"))
    return published(base(n), folder, of_kind, tuning(n))
