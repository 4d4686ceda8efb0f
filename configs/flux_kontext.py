"""FLUX.1 Kontext [dev], which edits images, with the published settings of Flow-GRPO, on GPUs of 80 GB.

python launch/train.py --config configs/flux_kontext.py:8 --workdir runs/kontext \
    --config.rewards=my_rewards:likeness \
    --config.prompts.file=train.jsonl --config.evaluation.prompts=test.jsonl

The argument is the number of GPUs: 1, 2, 3, 4, 6, 7, 8, 12, 14, 21, 24, 28, 42, 56, 84 or 168. docs/flux.md lists what
the model requires, and has examples of a prompt file, whose lines name source images, and of a reward.

Separate GPUs for rollout and training, four each of eight:
--config.placement.rollout.data=4 --config.placement.trainer.data=4
Layout chosen by the planner: --config.placement=auto

Sources, in github.com/yifan123/flow_grpo (arXiv 2505.05470), `counting_flux_kontext`, for 28 GPUs:
- config/grpo.py (31c71b9): 48 groups of 21 images in two updates, micro-batch of 3 images per GPU, 512 x 512, 6 steps,
  28 in evaluation, guidance 2.5 in both, noise 0.9, 99% of the steps, no KL, std of the step, no shared start noise,
  bfloat16, evaluation and checkpoint every 30, 2 images per GPU in evaluation. Its rewards are a similarity to the
  source image and GenEval's score, half each; its images are not in the repository
- config/base.py (54809b5): seed 42, learning rate 3e-4, weight decay 1e-4, Adam's settings, gradient norm 1, advantages
  clipped to 5, clip range 1e-4
- scripts/train_flux_kontext.py (74db691): Gaussian LoRA of rank 64, alpha 128, on attention, the feed-forward layers of
  dual blocks and `proj_mlp` of single blocks; EMA of 0.9 every 8 updates, mixed after each micro-batch, 6 times with 28
  GPUs, as here; 128 T5 tokens; source images resized to 512 x 512. A group has one prompt and one source image. Images
  without an advantage are dropped
- EMA warm-up: flow_grpo/ema.py (ac4c86e). The step "flow": flow_grpo/diffusers_patch/sd3_sde_with_logprob.py (54809b5)

Our choices: rematerialized blocks, number of steps, sample images, number of checkpoints, all placements. The source's
copy of the pipeline was not found; in that of github.com/Jayce-Ping/Flow_GRPO,
flow_grpo/diffusers_patch/flux_kontext_pipeline_with_logprob.py (9043160), source images have the images' size, as here.

Differences from the source: it first resizes source images with Pillow's default filter, here only the pipeline resizes
them; it drops each image whose advantage is 0 and divides the rest evenly among both updates, with some of the dropped
images to fill micro-batches, here groups of equal rewards are dropped; and those of Flow-GRPO in configs/flux_dev.py
(the sixth step without noise, exact sigmas) and of all recipes (docs/evidence.md).

docs/performance.md has the estimated memory and time, and the smallest TPU slice.

The transformer attends to 1024 tokens of the source image, 1024 of the image and 128 of the text, so a pass has 2.0
times the operations of FLUX.1-dev at this size.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import number_of_gpus, published

# Images per update, divided by those per GPU and pass: 1008 / 2 / 3.
PASSES = 168


def get_config(argument: str = "8") -> ConfigDict:
    n = number_of_gpus(argument, PASSES, "8")
    recipe = dict(
        seed=42,
        model=dict(
            folder="black-forest-labs/FLUX.1-Kontext-dev",
            height=512,
            width=512,
            source_height=512,
            source_width=512,
            max_sequence_length=128,
        ),
        prompts=dict(cache_limit=250.0),
        batch=dict(groups=48, images=21),
        sampler=dict(
            kind="flow",
            noise_level=0.9,
            steps=6,
            guidance=2.5,
            window=dict(length=5),
            chunk=3 * n,
        ),
        algorithm=dict(clip_range=1e-4, adv_clip=5.0),
        advantages=dict(std="global", drop_zero_std=True),
        lora=dict(rank=64, alpha=128.0, init="gaussian"),
        trainer=dict(
            micro_batch=3 * n,
            updates=2,
            learning_rate=3e-4,
            weight_decay=1e-4,
            clip_norm=1.0,
            ema=0.9,
            ema_warm_up=True,
            ema_every=8,
            # Micro-batches of an update on 28 GPUs: 1008 / (28 * 3) / 2.
            ema_repeats=6,
        ),
        placement=dict(trainer=dict(data=n)),
        evaluation=dict(every=30, steps=28, guidance=2.5, batch=2 * n),
        checkpoint=dict(every=30),
    )
    return published(recipe)
