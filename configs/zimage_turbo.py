"""Z-Image-Turbo with the published settings of Flow-Factory's GRPO, on GPUs of 80 GB.

python launch/train.py --config configs/zimage_turbo.py:8 --workdir runs/zimage \
    --config.rewards="({'name': 'pickscore', 'settings': {'folder': 'pickscore', 'processor': 'clip-h'}},)" \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the number of GPUs: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192 or 384. Reward and prompt
files are not included: the source uses PickScore and 1,000 of its prompts; docs/rewards.md names the weights. The
expected result is a LoRA in `runs/zimage` and a higher reward on held-out prompts. The increase is unknown: the source
gives no number for this recipe, and none was measured here.

Separate GPUs for rollout and training, four each of eight:
--config.placement.rollout.data=4 --config.placement.trainer.data=4
Layout chosen by the planner: --config.placement=auto

Sources: github.com/X-GenGroup/Flow-Factory (5f6cda1), examples/grpo/lora/z_image_turbo/default.yaml:
- 8 GPUs; Tongyi-MAI/Z-Image-Turbo; LoRA of rank 64, alpha 128, float32, on its default layers
- 48 groups of 16 images in two updates, micro-batch of one image per GPU, 512 x 512, 6 steps, guidance 0, which is 1 in
  our convention (`digen_jax/models/zimage/family.py`): no second pass
- the SDE of Flow-GRPO with noise 0.7 in one step, sampled per training step from the second, third and fourth
- clip range 1e-4, advantages clipped to 5, group std, no KL
- learning rate 3e-4, weight decay 1e-4, Adam's settings, gradient norm 1
- EMA of 0.9, mixed at the end of training steps 4, 8, ..., that is after updates 8, 16, ...
- bfloat16 compute; evaluation in 10 steps without guidance, and a checkpoint, every 40 training steps; seed 42
The rest of that repository, at a0b2bc5:
- src/flow_factory/models/abc.py: Gaussian LoRA initialization
- src/flow_factory/models/z_image/z_image.py: 512 tokens; the default layers, which are the family's
- src/flow_factory/hparams/training_args.py: the EMA schedule "power"; no limit on training steps
- src/flow_factory/ema/ema_utils.py: that schedule, (1 + n) / (10 + n) during warm-up
- src/flow_factory/scheduler/flow_match_euler_discrete.py: the step, its sigmas from 1 to 1/steps, steps counted from 0

Our choices: rematerialized blocks, the number of training steps, the evaluation batch, sample images, the number of
checkpoints, and all placements: each GPU has all parameters.

Differences from the source, in addition to those of all recipes (docs/evidence.md):
- its transformer's frozen weights are float32, and autocast rounds them for each matrix product; here they are
  bfloat16. `--config.precision.frozen=float32` matches the source, with twice the memory for them;
- its `gdpo` (src/flow_factory/advantage/advantage_processor.py), with one reward, also divides the advantages by their
  std over the step, which is 1 except for groups of equal rewards; here they are only divided by the group std;
- here 1e-4 is added to a std, which is at least 1e-6 there;
- latents are rounded to float16 between steps there, and are float32 here.

docs/performance.md has the estimated memory and time, and the smallest TPU slice.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import number_of_gpus, published

# Images per update, with one per GPU and pass: 768 / 2.
PASSES = 384


def get_config(argument: str = "8") -> ConfigDict:
    n = number_of_gpus(argument, PASSES, "8")
    recipe = dict(
        seed=42,
        model=dict(
            folder="Tongyi-MAI/Z-Image-Turbo", height=512, width=512, max_sequence_length=512
        ),
        batch=dict(groups=48, images=16),
        sampler=dict(
            kind="flow",
            noise_level=0.7,
            steps=6,
            window=dict(mode="random", first=1, length=1, end=4),
            guidance=1.0,
            chunk=n,
        ),
        algorithm=dict(clip_range=1e-4, adv_clip=5.0, kl_coefficient=0.0),
        advantages=dict(std="group"),
        lora=dict(rank=64, alpha=128.0, init="gaussian"),
        trainer=dict(
            micro_batch=n,
            updates=2,
            learning_rate=3e-4,
            weight_decay=1e-4,
            clip_norm=1.0,
            ema=0.9,
            ema_warm_up=True,
            ema_unit="step",
            ema_every=4,
        ),
        placement=dict(trainer=dict(data=n)),
        evaluation=dict(every=40, steps=10, guidance=1.0, batch=4 * n),
        checkpoint=dict(every=40),
    )
    return published(recipe)
