"""HunyuanVideo with the published settings of DanceGRPO, on GPUs of 80 GB.

python launch/train.py --config configs/hunyuan_video.py:8 --workdir runs/hunyuan \
    --config.rewards="({'name': 'served', 'settings': {'servers': ('http://127.0.0.1:8101',), 'every': 2}},)" \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the number of GPUs: 1, 2, 4, 8, 16 or 32. All weights are trained, so several are needed. Reward and
prompt files are not included: the source uses VideoAlign's visual quality, which docs/rewards.md describes, and the
prompts in assets/video_prompts.txt of its repository.

Separate GPUs for rollout and training, four each of eight:
--config.placement.rollout.data=1 --config.placement.rollout.fsdp=4 --config.placement.trainer.fsdp=4
Layout chosen by the planner: --config.placement=auto

Sources, in github.com/XueZeyue/DanceGRPO:
- scripts/finetune/finetune_hunyuan_grpo.sh (15cc71d): 32 GPUs with one prompt each, 24 clips of a prompt, of which the
  best 4 and the worst 4 are trained; 480 x 480, 53 frames; 16 steps, noise 0.25, shared start noise, 60% of all steps
  but the last; learning rate 1e-5, weight decay 1e-4, gradient norm 1; 202 training steps, a checkpoint every 50; clips
  of 8 frames per second; rematerialized blocks; visual quality counts 1, motion quality 0; bfloat16; seed 42. An update
  for 4 of the 8 clips of each GPU: 2 updates
- fastvideo/train_grpo_hunyuan.py (15cc71d): DanceGRPO's SDE, clip range 1e-4, advantages clipped to 5, sample std of
  the group, no KL, Adam's settings, no EMA, float32 weights with bfloat16 compute; guidance 6018 in bfloat16, which is
  6016: here 6.016

Our choices: evaluation every 50 steps by 50 steps, its batch, sample clips, number of checkpoints, all placements.

Differences from the source, in addition to those of all recipes (docs/evidence.md):
- it shifts the sigmas by 5; the published folder has 7, which is used here. Change `shift` in
  scheduler/scheduler_config.json of a local copy;
- updates have the selected clips of 16 prompts each; the source's have 4 clips of each of the 32;
- the source rounds 1000 sigma down to an integer for the network; here it is exact. It adds 1e-8 to a std; here 1e-4 is
  added. Its last step has noise, too, but it decodes the result without it, as here;
- it decodes in bfloat16 with tiles over height and width (`enable_tiling`); here the autoencoder is float32 with tiles
  over frames;
- a clip whose reward fails has the reward -1 there; here failed rewards are retried, and then end the run.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import number_of_gpus, published

# Clips per update, with 12 per GPU in a call of the sampler: 32 * 24 / 2 / 12.
PASSES = 32


def recipe(n: int) -> dict:
    """Settings on n GPUs, which share all parameters."""
    return dict(
        seed=42,
        steps=202,
        model=dict(
            folder="hunyuanvideo-community/HunyuanVideo",
            height=480,
            width=480,
            frames=53,
            max_sequence_length=256,
        ),
        batch=dict(groups=32, images=24),
        sampler=dict(
            kind="dance",
            noise_level=0.25,
            steps=16,
            window=dict(length=15, timestep_fraction=0.6),
            guidance=6.016,
            shared_noise=True,
            chunk=12 * max(n, 2),  # complete groups of 24
        ),
        algorithm=dict(clip_range=1e-4, adv_clip=5.0, kl_coefficient=0.0),
        advantages=dict(std="group", ddof=1, best_and_worst=4),
        trainer=dict(
            micro_batch=n, updates=2, learning_rate=1e-5, weight_decay=1e-4, clip_norm=1.0
        ),
        placement=dict(trainer=dict(fsdp=n), rules=((".*", "fsdp"),)),
        evaluation=dict(every=50, steps=50, guidance=6.016, batch=n),
        images=dict(every=50, count=4, fps=8),
        checkpoint=dict(every=50),
    )


def get_config(argument: str = "8") -> ConfigDict:
    n = number_of_gpus(argument, PASSES, "8")
    return published(recipe(n))
