"""Wan 2.2 with the published settings of verl-omni (5B), Flow-Factory and UniRL (A14B), on GPUs of 80 GB.

python launch/train.py --config configs/wan22.py:pickscore_a14b,8 --workdir runs/wan22 \
    --config.rewards="({'name': 'pickscore', 'settings': {'folder': 'pickscore', 'processor': 'clip-h'}},)" \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the recipe's name, a comma, and the number of GPUs, which must divide the passes of an update:
- hpsv3_5b: 1, 2, 4, 8, 16 or 32
- the others: these, 3, 6, 12, 24, 48, 64, 96, 128, 192 or 384
Reward and prompt files are not included. docs/wan.md gives the reward of hpsv3_5b, which needs a reward server, and the
rewards and the prompt files with images of image to video.

Separate GPUs for rollout and training, four each of eight:
--config.placement.rollout.data=1 --config.placement.rollout.fsdp=4 --config.placement.trainer.fsdp=4
Layout chosen by the planner: --config.placement=auto

hpsv3_5b          verl-omni's DanceGRPO (arXiv 2505.07818): 5B, all weights, 704x1280, 9 frames, for 8 GPUs
pickscore_a14b    Flow-Factory's GRPO: A14B, LoRA, 480x480, 5 frames, for 8 GPUs
flow_factory_i2v  Flow-Factory's GRPO: image to video of I2V-A14B, LoRA, 480x480, 5 frames, for 8 GPUs
unirl_i2v         UniRL's GRPO: image to video of I2V-A14B, LoRA, 480x640, 9 frames, for 8 GPUs

Sources, in github.com/verl-project/verl-omni, at a1139ba:
- examples/dancegrpo_trainer/wan22/run_wan22_5b_t2v_hpsv3_auto.sh (ef02664, `hpsv3_5b`): 64 groups of 8 clips in four
  updates (train_batch_size, rollout.n, ppo_mini_batch_size), micro-batch of 4 clips per GPU; 10 steps, guidance 5,
  1024 prompt tokens, noise 1.2 of kind "dance_sde" ("dance" here), a window of 2 steps within the first 5; learning
  rate 1e-5, weight decay 1e-4; evaluation in 50 steps without noise; evaluation and checkpoint every 30 steps, 120
  steps; 8 GPUs; seed 42. It asks for 8 frames
- verl_omni/pipelines/wan22_dance_grpo/vllm_omni_rollout_adapter.py (8b0f0f9): 8 frames become 9; shift 5; clips of a
  prompt start from the same noise
- verl_omni/trainer/config/diffusion/actor/diffusion_actor.yaml (0a4a399): clip range 1e-4, advantages clipped to 5, no
  KL; _generated_diffusion_trainer.yaml in verl_omni/trainer/config: all weights are trained (lora_rank 0), which the
  script's title calls LoRA; gradient norm 1, AdamW's settings, a constant learning rate, rematerialized blocks
- verl_omni/trainer/config/diffusion_trainer.yaml (6f8f830): std of the step, recomputed old log-probabilities;
  verl_omni/trainer/diffusion/diffusion_algos.py (0a4a399): sample std, to which 1e-4 is added
- verl_omni/utils/reward_score/hpsv3_reward.py (57a9441): the mean of HPSv3 over every fourth frame, divided by 10
In github.com/X-GenGroup/Flow-Factory, at a0b2bc5:
- examples/grpo/lora/wan22/t2v.yaml (3e615ee, `pickscore_a14b`): 8 GPUs; 48 groups of 16 clips in two updates, one clip
  per GPU; 10 steps, noise 0.9 in one of the second, third and fourth; guidance 4, and 3 for the expert of low noise
  levels; clip range 1e-4, advantages clipped to 5, gdpo, no KL; learning rate 1e-4, weight decay 1e-4, gradient norm
  1; EMA of 0.9 every 4 training steps; LoRA of rank 64, alpha 128; bfloat16; evaluation of 720x720 with 21 frames in
  28 steps, and checkpoint, every 20; seed 42
- src/flow_factory/rewards/pick_score.py (3e615ee): the mean of PickScore over all frames
- files of its recipe for Wan 2.1, in configs/wan21.py: tokens, the LoRA's layers and init, the EMA's warm-up, the SDE
- examples/grpo/lora/wan22/i2v.yaml (3e615ee, `flow_factory_i2v`): as t2v.yaml, but for the folder, 8 steps, noise in
  the second, guidance 3.5 for both experts, and the LoRA, which only the first expert has
In github.com/Tencent-Hunyuan/UniRL, at 1a7b501:
- examples/diffusion/wan22_i2v.yaml (a1f8596, `unirl_i2v`; the same values at 756a958, in examples/diffusion/wan22): 8
  GPUs; 48 groups of 16 clips in two updates, one clip per GPU; 10 steps without guidance, noise 0.7 in the first two,
  which are trained; clip range 1e-4, no KL; learning rate 3e-4, no weight decay, Adam's settings, gradient norm 1; LoRA
  of rank 64, alpha 128, on attention of both experts; bfloat16; 512 tokens; 1000 steps; seed 42
- files of its recipe for Wan 2.1, in configs/wan21.py: advantages, reward, the LoRA's init, the SDE;
  unirl/models/wan22/diffusion.py: the boundary between the experts

Our choices: rematerialized blocks in all but hpsv3_5b, clips per call of the sampler in hpsv3_5b, evaluation batches,
number of training steps of Flow-Factory's (which run until they are stopped), sample clips, number of checkpoints,
evaluations and checkpoints of unirl_i2v, and placement: GPUs shard all parameters but the autoencoder's.

Differences from the sources, in addition to those of all recipes (docs/evidence.md):
- pickscore_a14b trains only the expert of high noise levels. The source names both, but with the folder's flow_shift of
  3 the first four of 10 steps are this expert's, and noise is in one of the second to fourth: the other LoRA has no
  gradient and stays zero. With another window or shift, `--config.model.trained="()"` trains both;
- unirl_i2v also trains only that expert, which has the first two of 10 steps; the source's other LoRA stays zero;
- flow_factory_i2v evaluates clips of 720x720 with 21 frames; here evaluations have the size of the training clips, as
  all clips that start with an image (docs/wan.md);
- unirl_i2v: the source has shift 5 and boundary 0.875; the folder has 3 and 0.9, Wan's authors have 5 and 0.9. Sigmas,
  std, prompts and images differ from the source as in configs/wan21.py;
- noise levels are those of UniPC in diffusers' pipeline, from 1 - 1e-6. verl-omni has Euler's, from 1 and up to 2.3e-3
  lower, and evaluates by Euler steps. Its sampler gives the network times with their fractions, and its trainer without
  them; here both are whole numbers, as in diffusers' pipeline;
- each clip has a separate window in verl-omni; here all clips of a step share one;
- verl-omni cleans no prompts, and its negative prompt is a space; here it is empty (docs/wan.md). It leaves out prompts
  with Chinese characters;
- verl-omni keeps weights and moments in bfloat16 and offloads them to host memory
  (verl_omni/workers/engine/fsdp/diffusers_impl.py, 786dd36); here they are float32 and stay on the GPUs;
- Flow-Factory's advantages are "gdpo", which for one reward divides them once more by their std over the step; set
  advantages.combine to "gdpo" for several rewards. Its UniPC and its weights differ as in configs/wan21.py.

docs/performance.md and docs/wan.md have the estimated memory and time.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import published, recipe_and_gpus

# PEFT's to_q, to_k, to_v and to_out.0.
ATTENTION = r"blocks\.\d+\.attn[12]\.(to_[qkv]|to_out\.0)"


def verl_omni(n: int) -> dict:
    """verl-omni's 5B on n GPUs."""
    size = dict(height=704, width=1280, frames=9)
    return dict(
        steps=120,
        model=dict(folder="Wan-AI/Wan2.2-TI2V-5B-Diffusers", max_sequence_length=1024, **size),
        batch=dict(groups=64, images=8),
        sampler=dict(
            kind="dance",
            noise_level=1.2,
            guidance=5.0,
            window=dict(mode="random", length=2, end=5),
            shared_noise=True,
            chunk=4 * n,
        ),
        advantages=dict(std="global", ddof=1),
        trainer=dict(learning_rate=1e-5, micro_batch=4 * n, updates=4),
        evaluation=dict(every=30, steps=50, guidance=5.0, batch=4 * n),
        checkpoint=dict(every=30),
    )


def flow_factory(n: int) -> dict:
    """Flow-Factory's A14B on n GPUs."""
    size = dict(height=480, width=480, frames=5)
    evaluation = dict(every=20, height=720, width=720, frames=21, steps=28, batch=n)
    return dict(
        model=dict(
            folder="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            trained=("transformer",),
            max_sequence_length=512,
            **size,
        ),
        batch=dict(groups=48, images=16),
        sampler=dict(
            kind="flow",
            noise_level=0.9,
            guidance=4.0,
            guidance_2=3.0,
            window=dict(mode="random", first=1, length=1, end=4),
            chunk=n,
        ),
        advantages=dict(std="group"),
        lora=dict(rank=64, alpha=128.0, init="gaussian"),
        trainer=dict(
            learning_rate=1e-4,
            micro_batch=n,
            updates=2,
            ema=0.9,
            ema_unit="step",
            ema_every=4,
            ema_warm_up=True,
        ),
        evaluation=dict(guidance=4.0, guidance_2=3.0, **evaluation),
        checkpoint=dict(every=20),
    )


def flow_factory_i2v(n: int) -> dict:
    """Changes to Flow-Factory's A14B for image to video."""
    folder = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
    guidance = dict(guidance=3.5, guidance_2=0.0)
    return dict(
        model=dict(folder=folder, source_height=480, source_width=480),
        sampler=dict(steps=8, window=dict(end=2), **guidance),
        evaluation=dict(height=480, width=480, frames=5, **guidance),
    )


def unirl_i2v(n: int) -> dict:
    """UniRL's image to video of A14B on n GPUs."""
    return dict(
        steps=1000,
        model=dict(
            folder="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
            trained=("transformer",),
            max_sequence_length=512,
            height=480,
            width=640,
            frames=9,
            source_height=480,
            source_width=640,
        ),
        batch=dict(groups=48, images=16),
        sampler=dict(kind="flow", noise_level=0.7, guidance=1.0, window=dict(length=2), chunk=n),
        algorithm=dict(adv_clip=1000.0),  # the source's loss does not clip advantages
        advantages=dict(std="global", ddof=1),
        lora=dict(rank=64, alpha=128.0, targets=ATTENTION),
        trainer=dict(learning_rate=3e-4, weight_decay=0.0, micro_batch=n, updates=2),
        evaluation=dict(every=50, steps=40, guidance=1.0, batch=n),
        checkpoint=dict(every=50),
    )


# Changes to `BASE` by number of GPUs, applied in order.
RECIPES = {
    "hpsv3_5b": lambda n: (verl_omni(n),),
    "pickscore_a14b": lambda n: (flow_factory(n),),
    "flow_factory_i2v": lambda n: (flow_factory(n), flow_factory_i2v(n)),
    "unirl_i2v": lambda n: (unirl_i2v(n),),
}
# Clips per update, divided by those per GPU and call of the sampler: 512 / 4 / 4 and 768 / 2.
PASSES = dict(hpsv3_5b=32, pickscore_a14b=384, flow_factory_i2v=384, unirl_i2v=384)


# Common settings of all recipes.
BASE = dict(
    seed=42,
    sampler=dict(steps=10),
    algorithm=dict(clip_range=1e-4, adv_clip=5.0),
    trainer=dict(weight_decay=1e-4, clip_norm=1.0),
    placement=dict(rules=(("^vae/", "replicate"), (".*", "fsdp"))),
    images=dict(every=30, count=4),
)


def get_config(argument: str = "hpsv3_5b,8") -> ConfigDict:
    name, n = recipe_and_gpus(argument, PASSES, "hpsv3_5b,8")
    return published(BASE, *RECIPES[name](n), dict(placement=dict(trainer=dict(fsdp=n))))
