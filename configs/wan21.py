"""Wan 2.1 with the published settings of GenRL, Flow-GRPO, Flow-Factory and UniRL, on GPUs of 80 GB.

python launch/train.py --config configs/wan21.py:ocr,8 --workdir runs/wan \
    --config.rewards=ocr \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the recipe's name, a comma, and the number of GPUs, which must divide the passes of an update:
- ocr, flow_grpo_ocr: 1, 2, 4 or 8
- longcat: these, 16, 32 or 64
- clip_pickscore_14b, flow_factory_i2v: these, 3, 6, 12, 24, 48, 96, 128, 192 or 384
- unirl_i2v: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 or 96
Reward and prompt files are not included. The prompts of the first three are in datasets/ of github.com/ModelTC/GenRL.
docs/wan.md gives the rewards of longcat, which need two reward servers, and of the others, and the prompt files with
images of flow_factory_i2v and unirl_i2v.

Separate GPUs for rollout and training, four each of eight:
--config.placement.rollout.data=4 --config.placement.trainer.data=4
Layout chosen by the planner: --config.placement=auto

ocr                 GenRL's default: 1.3B, clips of 240x416 with 33 frames, the SDE of Flow-GRPO, for 8 GPUs
flow_grpo_ocr       Flow-GRPO's own: the same with another SDE and more KL
longcat             LongCat-Video's method (arXiv 2510.22200) as in GenRL: 1.3B, 480x832, 81 frames, for 64 GPUs
clip_pickscore_14b  Flow-Factory's GRPO: 14B, 256x256, 5 frames, for 8 GPUs
flow_factory_i2v    Flow-Factory's GRPO: image to video of 14B, 240x240, 5 frames, for 8 GPUs
unirl_i2v           UniRL's GRPO: image to video of 14B, 720x1280, 9 frames, for 8 GPUs

Sources, in github.com/ModelTC/GenRL (82a867e):
- config/default.yaml (`ocr`): 8 GPUs with two batches of 8 clips, 4 of a prompt, in two updates; 20 steps, 50 in
  evaluation, guidance 4.5 in both; noise 0.7 in all steps, 99% of them trained; clip range 1e-3, advantages clipped
  to 5, group std; KL 3e-4; learning rate 1e-4, weight decay 1e-4, Adam's settings, gradient norm 1; EMA of 0.9 every
  8 updates; LoRA of rank 32, alpha 64, on attention; bfloat16; evaluation every 30 steps, checkpoint every 60; seed
  42
- config/longcat.yaml (`longcat`): 4 clips per GPU, 4 of a prompt from one start noise, in one update; 16 steps, noise
  1 with a std of at most 0.45 in one step, a random one of the first six; sum of the advantages of four rewards, each
  divided by the largest std of a group; step weights; LoRA of rank 128, alpha 64, also on feed-forward layers;
  evaluation and checkpoint every 100 steps. Number of GPUs: README.md
- genrl/trainer/wan_trainer.py: Gaussian LoRA; samples of advantage 0 are dropped; KL of the step's full std; step
  weights; the EMA after each update, with warm-up (genrl/ema.py); float32 autoencoder, 512 tokens, an empty negative
  prompt
- genrl/diffusers_patch/wan_pipeline_with_logprob.py: the SDE, and the bound on its std; genrl/stat_tracking.py: 1e-4
  is added to a std; genrl/trainer/base_trainer.py: updates per step
In github.com/yifan123/flow_grpo:
- config/grpo.py (54809b5), `general_ocr_wan2_1` (`flow_grpo_ocr`): as config/default.yaml above, but for KL 4e-3. It
  names no number of GPUs: 8 are those of GenRL's comparison, and of scripts/accelerate_configs/multi_gpu.yaml
- scripts/train_wan2_1.py (74db691): LoRA, EMA and KL as above; the SDE has no noise level, which is 1 here
In github.com/X-GenGroup/Flow-Factory, at a0b2bc5:
- examples/grpo/lora/wan21/t2v.yaml (3e615ee, `clip_pickscore_14b`): 8 GPUs; 48 groups of 16 clips in two updates, one
  clip per GPU; 10 steps, noise 0.9 in one of the second, third and fourth; guidance 5; clip range 1e-4, advantages
  clipped to 5, gdpo, no KL; learning rate 1e-4, weight decay 1e-4, gradient norm 1; EMA of 0.9 every 4 training
  steps; LoRA of rank 64, alpha 128; bfloat16; evaluation of 480x480 with 13 frames in 28 steps, and checkpoint, every
  20; seed 42
- src/flow_factory/models/wan/wan2_t2v.py: 512 tokens, the LoRA's layers; src/flow_factory/models/abc.py: Gaussian
  LoRA; src/flow_factory/hparams/training_args.py: the EMA's warm-up; src/flow_factory/scheduler/unipc_multistep.py:
  the SDE
- examples/grpo/lora/wan21/i2v.yaml (3e615ee, `flow_factory_i2v`): as t2v.yaml, but for the folder, 240x240 and the
  reward, PickScore alone; src/flow_factory/rewards/pick_score.py: the mean of all frames;
  src/flow_factory/models/wan/wan2_i2v.py: the image's latents and states as in diffusers; the LoRA's layers, without
  those of the image (add_k_proj, add_v_proj)
In github.com/Tencent-Hunyuan/UniRL, at 1a7b501:
- examples/diffusion/wan21_i2v.yaml (a1f8596, `unirl_i2v`; the same values at 36547bd, in examples/diffusion/wan21): 8
  GPUs; 48 groups of 16 clips in two updates; four clips per GPU and call of the sampler, one per GPU in training; 14
  steps without guidance, noise 0.7 in the first half, all of it trained; clip range 1e-4, recomputed old
  log-probabilities, no KL; learning rate 3e-4, no weight decay, Adam's settings, gradient norm 1; LoRA of rank 64,
  alpha 128, on attention with the layers of the image; bfloat16; 512 tokens; 1000 steps; seed 42
- unirl/types/rollout_resp.py (4a9e013), `compute_advantages`: the mean of the group, the sample std of all clips;
  unirl/algorithms/flowgrpo.py: advantages are not clipped; unirl/train/inject.py: PEFT's default init
- unirl/reward/local/video_pickscore.py: PickScore of the first frame, which is nearly the given image;
  unirl/models/wan21/image_encode.py, clip_vision_encode.py: the image's latents and states as in diffusers;
  unirl/sde/kernels.py: Flow-GRPO's SDE; unirl/models/wan21/vae.py: float32 autoencoder

Our choices: rematerialized blocks in clip_pickscore_14b and image to video, micro-batches of one clip per GPU in
longcat (the same gradient), evaluation batches, number of training steps (but for unirl_i2v, the sources run until they
are stopped), sample clips, number of checkpoints, evaluations and checkpoints of unirl_i2v, and all placements: each
GPU has all parameters.

Differences from the sources, in addition to those of all recipes (docs/evidence.md):
- UniPC's schedule is that of diffusers 0.42, from 1 - 1e-6. GenRL pins 0.33.1, whose sigmas start at 0.99967 and are
  up to 0.003 lower. Its SDE replaces only a sigma of exactly 1: the first step of `ocr` has a std of 5.03 there and
  multiplies the noise by -11.7. Here its std is 0.70 (`digen_jax.diffusion.steps.FlowSde`). longcat's bound makes the
  first step equal;
- only trained steps have noise; in `ocr` and `flow_grpo_ocr` of the sources the last step has, too;
- evaluation is by UniPC, as in diffusers' pipeline and Flow-Factory; GenRL and Flow-GRPO evaluate by Euler steps;
- longcat's window is the same for all clips of a step; in GenRL it is random for each GPU. Its step weight is that of
  each clip's step; the source averages it over a GPU's batch, whose steps are equal;
- GenRL and Flow-GRPO do not clean prompts as diffusers' pipeline does (docs/wan.md);
- groups of equal rewards are dropped as a whole; the sources drop each clip of advantage 0, except a few to fill
  batches;
- the frozen transformer and the autoencoder are bfloat16; in the sources they are float32, and the transformer is
  rounded to bfloat16 for each product. Products of the autoencoder are TF32 in both;
- Flow-Factory's UniPC takes sigma from the integer time, at most 1e-3 lower; it divides by a std of at least 1e-6
  instead of adding 1e-4, and rounds latents to float16 between steps;
- flow_factory_i2v evaluates clips of 480x480; here evaluations have the size of the training clips, as all clips that
  start with an image (docs/wan.md);
- unirl_i2v: the source shifts the sigmas by 5, from 1 in equal steps to 0, and gives the network times with their
  fractions. The folder has 3; change `flow_shift` in scheduler/scheduler_config.json of a local copy, and sigmas are at
  most 2.8e-3 higher than the source's. It adds 1e-8 to a std, cleans no prompts, resizes images by bicubic instead of
  Lanczos filters, and rounds latents to float16 between steps; its GPUs share the transformer's parameters;
- `ocr` reads text with other models (`digen_jax/rewards/ocr.py`);
- longcat has one update per step, so the trainer takes the current log-probabilities, and ratios are 1.

docs/performance.md and docs/wan.md have the estimated memory and time.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import published, recipe_and_gpus

# PEFT's to_q, to_k, to_v and to_out.0. The other recipes also adapt feed-forward layers, as by the family's default.
ATTENTION = r"blocks\.\d+\.attn[12]\.(to_[qkv]|to_out\.0)"
# The same, and keys and values of an image.
IMAGE_ATTENTION = r"blocks\.\d+\.attn[12]\.(to_[qkv]|to_out\.0|add_[kv]_proj)"


def ocr(n: int) -> dict:
    """GenRL's default on n GPUs."""
    return dict(
        model=dict(height=240, width=416, frames=33),
        batch=dict(groups=32, images=4),
        sampler=dict(
            kind="flow",
            noise_level=0.7,
            steps=20,
            guidance=4.5,
            window=dict(length=19),
            chunk=8 * n,
        ),
        algorithm=dict(clip_range=1e-3, kl_coefficient=3e-4, kl="gaussian_dt"),
        advantages=dict(std="group", drop_zero_std=True),
        lora=dict(rank=32, alpha=64.0, targets=ATTENTION),
        trainer=dict(micro_batch=8 * n, updates=2, ema_every=8),
        evaluation=dict(every=30, steps=50, guidance=4.5, batch=8 * n),
        checkpoint=dict(every=60),
    )


def longcat(n: int) -> dict:
    """Changes to GenRL's default for LongCat-Video's method on n GPUs."""
    return dict(
        model=dict(height=480, width=832, frames=81),
        batch=dict(groups=64),
        sampler=dict(
            kind="flow_capped",
            noise_level=1.0,
            steps=16,
            window=dict(mode="random", length=1, end=6),
            shared_noise=True,
            chunk=4 * n,
        ),
        algorithm=dict(step_weight="longcat"),
        advantages=dict(std="max_group", combine="advantages"),
        lora=dict(rank=128, targets=""),
        trainer=dict(micro_batch=n, updates=1),
        evaluation=dict(every=100, batch=4 * n),
        checkpoint=dict(every=100),
    )


def flow_factory(n: int) -> dict:
    """Flow-Factory's 14B on n GPUs."""
    return dict(
        model=dict(folder="Wan-AI/Wan2.1-T2V-14B-Diffusers", height=256, width=256, frames=5),
        batch=dict(groups=48, images=16),
        sampler=dict(
            kind="flow",
            noise_level=0.9,
            steps=10,
            guidance=5.0,
            window=dict(mode="random", first=1, length=1, end=4),
            chunk=n,
        ),
        algorithm=dict(clip_range=1e-4),
        advantages=dict(std="group", combine="gdpo"),
        lora=dict(rank=64, alpha=128.0),
        trainer=dict(micro_batch=n, updates=2, ema_unit="step", ema_every=4),
        evaluation=dict(
            every=20, height=480, width=480, frames=13, steps=28, guidance=5.0, batch=n
        ),
        checkpoint=dict(every=20),
    )


def flow_factory_i2v(n: int) -> dict:
    """Changes to Flow-Factory's 14B for image to video."""
    folder, size = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", dict(height=240, width=240)
    return dict(
        model=dict(folder=folder, source_height=240, source_width=240, **size),
        advantages=dict(combine="rewards"),
        evaluation=dict(frames=5, **size),
    )


def unirl_i2v(n: int) -> dict:
    """UniRL's image to video of 14B on n GPUs."""
    return dict(
        steps=1000,
        model=dict(
            folder="Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
            height=720,
            width=1280,
            frames=9,
            source_height=720,
            source_width=1280,
        ),
        batch=dict(groups=48, images=16),
        sampler=dict(
            kind="flow",
            noise_level=0.7,
            steps=14,
            guidance=1.0,
            window=dict(length=7),
            chunk=4 * n,
        ),
        # The source's loss does not clip advantages.
        algorithm=dict(clip_range=1e-4, adv_clip=1000.0),
        advantages=dict(std="global", ddof=1),
        lora=dict(rank=64, alpha=128.0, init="kaiming", targets=IMAGE_ATTENTION),
        trainer=dict(
            learning_rate=3e-4,
            weight_decay=0.0,
            micro_batch=n,
            updates=2,
            ema=0.0,
            ema_warm_up=False,
        ),
        evaluation=dict(every=50, steps=40, guidance=1.0, batch=n),
        checkpoint=dict(every=50),
    )


# Changes to `BASE` by number of GPUs, applied in order.
RECIPES = {
    "ocr": lambda n: (ocr(n),),
    "flow_grpo_ocr": lambda n: (
        ocr(n),
        dict(sampler=dict(kind="linear", noise_level=1.0), algorithm=dict(kl_coefficient=4e-3)),
    ),
    "longcat": lambda n: (ocr(n), longcat(n)),
    "clip_pickscore_14b": lambda n: (flow_factory(n),),
    "flow_factory_i2v": lambda n: (flow_factory(n), flow_factory_i2v(n)),
    "unirl_i2v": lambda n: (unirl_i2v(n),),
}
# Clips per update, divided by those per GPU and call of the sampler: 128 / 2 / 8, 256 / 4, 768 / 2 and 768 / 2 / 4.
PASSES = dict(ocr=8, flow_grpo_ocr=8, longcat=64, clip_pickscore_14b=384)
PASSES |= dict(flow_factory_i2v=384, unirl_i2v=96)


# Common settings of all recipes.
BASE = dict(
    seed=42,
    model=dict(folder="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", max_sequence_length=512),
    algorithm=dict(adv_clip=5.0),
    lora=dict(init="gaussian"),
    trainer=dict(learning_rate=1e-4, weight_decay=1e-4, clip_norm=1.0, ema=0.9, ema_warm_up=True),
    images=dict(every=30, count=4),
)


def get_config(argument: str = "ocr,8") -> ConfigDict:
    name, n = recipe_and_gpus(argument, PASSES, "ocr,8")
    return published(BASE, *RECIPES[name](n), dict(placement=dict(trainer=dict(data=n))))
