"""HunyuanVideo 1.5 with the published settings of UniRL's DanceGRPO, on GPUs of 80 GB.

python launch/train.py --config configs/hunyuan_video15.py:8 --workdir runs/hunyuan15 \
    --config.rewards="({'name': 'pickscore', \
        'settings': {'folder': 'pickscore', 'processor': 'clip-h', 'reduce': 'first'}},)" \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the number of GPUs: 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36, 48, 64, 72, 96, 144, 192, 288 or 576.
The prompts of the source are not included. docs/rewards.md says what the reward's folders contain.

Separate GPUs for rollout and training, four each of eight:
--config.placement.rollout.data=4 --config.placement.trainer.data=4
Layout chosen by the planner: --config.placement=auto

Sources, in github.com/Tencent-Hunyuan/UniRL:
- examples/diffusion/hunyuan_video15/hunyuan_video15_t2v_dancegrpo_trainside.yaml (36547bd): 8 GPUs; 48 groups of 24
  clips in two updates, one clip per GPU and call; 480 x 480, 5 frames; 16 steps without guidance, noise 0.25 in 8 of
  the first 9; PickScore of the first frame, divided by the std of all clips; clip range 1e-4; learning rate 1e-5,
  weight decay 1e-4, Adam's settings, gradient norm 1; LoRA of rank 64, alpha 64, on attention and feed-forward
  networks; shift 5, as in the published folder; bfloat16; rematerialized blocks; seed 42
- unirl/sde/kernels.py (4154868): Flow-GRPO's SDE, in which the second sigma replaces a sigma of 1
- unirl/models/hunyuan_video15/vae.py (500c7d1): float32 autoencoder
- unirl/types/rollout_resp.py (4a9e013, `compute_advantages`; the same at 0cbc038): the mean of the group is subtracted
  and the result divided by the sample std of all clips; unirl/algorithms/flowgrpo.py (a1f8596): no clip of advantages

Our choices: evaluation, number of training steps, sample clips, checkpoints, and all placements: each GPU has all
parameters.

Differences from the source, in addition to those of all recipes (docs/evidence.md):
- the source draws the 8 steps with noise once for all clips of a step, and the ninth has none; here all 9 have noise,
  and each clip trains 8 of them;
- it stores trajectories in bfloat16, here in float32;
- it adds 1e-8 to the std, here 1e-4 is added.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import number_of_gpus, published

# Clips per update, with one per GPU in a call of the sampler: 48 * 24 / 2.
PASSES = 576


def recipe(n: int) -> dict:
    """Settings on n GPUs, each with all parameters."""
    return dict(
        seed=42,
        model=dict(
            folder="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
            height=480,
            width=480,
            frames=5,
            max_sequence_length=1000,
        ),
        batch=dict(groups=48, images=24),
        sampler=dict(
            kind="flow",
            noise_level=0.25,
            steps=16,
            window=dict(length=9, timestep_fraction=0.89),  # int(0.89 * 9) = 8
            guidance=1.0,
            chunk=n,
        ),
        # The source's loss does not clip advantages.
        algorithm=dict(clip_range=1e-4, adv_clip=1000.0),
        advantages=dict(std="global", ddof=1),
        lora=dict(rank=64, alpha=64.0),
        trainer=dict(
            micro_batch=n, updates=2, learning_rate=1e-5, weight_decay=1e-4, clip_norm=1.0
        ),
        placement=dict(trainer=dict(data=n)),
        evaluation=dict(every=50, steps=50, guidance=1.0, batch=n),
        images=dict(every=50, count=4, fps=24),
        checkpoint=dict(every=50),
    )


def get_config(argument: str = "8") -> ConfigDict:
    n = number_of_gpus(argument, PASSES, "8")
    return published(recipe(n))
