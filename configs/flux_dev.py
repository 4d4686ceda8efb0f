"""FLUX.1-dev with the published settings of Flow-GRPO and DanceGRPO, on GPUs of 80 GB.

python launch/train.py --config configs/flux_dev.py:dance_ema,8 --workdir runs/flux \
    --config.rewards="({'name': 'hpsv2', 'settings': {'file': 'HPS_v2.1_compressed.pt', 'tokenizer': 'clip-h'}},)" \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the recipe's name, a comma, and the number of GPUs, which must divide the passes of an update:
- pickscore, pickscore_fast, geneval_fast: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96 or 192
- dance: 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48; dance_ema, dance_lora: these, 32 or 96
docs/flux.md lists what model, prompts and rewards require.

Separate GPUs for rollout and training, four each of eight; use the second line to train all weights:
--config.placement.rollout.data=4 --config.placement.trainer.data=4
--config.placement.rollout.data=1 --config.placement.rollout.fsdp=4 --config.placement.trainer.fsdp=4
Layout chosen by the planner: --config.placement=auto

pickscore                    Flow-GRPO (arXiv 2505.05470): LoRA of rank 64, five of six steps trained
pickscore_fast,              Flow-GRPO-Fast: the first three of six steps have noise and are trained, cps, clip range
    geneval_fast             1e-5; std of the group and of the step
dance                        DanceGRPO (arXiv 2505.07818): all weights, HPS-v2.1, for 16 GPUs
dance_ema                    the same for 8 GPUs, with an EMA and a hundredth of the gradient norm
dance_lora                   the same for 8 GPUs, with a LoRA of rank 128

Sources, in github.com/yifan123/flow_grpo:
- config/grpo.py (31c71b9), `pickscore_flux`, `pickscore_flux_8gpu`, `pickscore_flux_fast`, `geneval_flux_fast`: 48
  groups of 24 images in two updates, micro-batch of 3 images per GPU, 512 x 512, 6 steps, 28 in evaluation, guidance
  3.5, noise 0.9 (fast: cps 0.8), 99% of the steps, window of 3 within the first 3, clip range of the fast ones, no KL,
  std of the step (pickscore_flux_fast: of the group), no shared noise, bfloat16, evaluation and checkpoint every 30
- config/base.py (54809b5): seed 42, learning rate 3e-4, weight decay 1e-4, Adam's settings, gradient norm 1, advantages
  clipped to 5, clip range 1e-4
- scripts/train_flux.py (74db691): Gaussian LoRA of rank 64, alpha 128, on attention and the feed-forward layers of dual
  blocks; EMA of 0.9 every 8 updates; 128 T5 tokens. The EMA is mixed after each micro-batch: 6 times with the 32 GPUs
  of `pickscore_flux`, as here, 24 times with the 8 of `pickscore_flux_8gpu`
- EMA warm-up: flow_grpo/ema.py (ac4c86e). The steps "flow" and "cps":
  flow_grpo/diffusers_patch/sd3_sde_with_logprob.py (54809b5)
In github.com/XueZeyue/DanceGRPO:
- scripts/finetune/finetune_flux_grpo.sh (`dance`), _8gpus.sh (`dance_ema`), _8gpus_lora.sh (`dance_lora`), all at
  15cc71d: 16 groups of 12 images, 720 x 720, 16 steps (LoRA: 12), noise 0.3, shared start noise, 60% of all steps but
  the last, clip range 1e-4, advantages clipped to 5, learning rate 1e-5 (LoRA: 3e-4), weight decay 1e-4, gradient norm
  1 (dance_ema: 0.01), EMA of 0.995, rank 128 and alpha 256, 300 training steps (LoRA: 301), rematerialized blocks
- fastvideo/train_grpo_flux.py (15cc71d): guidance 3.5, sample std of the group, one image per GPU, EMA mixed once per
  training step, float32 weights with bfloat16 compute
- fastvideo/train_grpo_flux_lora.py (15cc71d): PEFT's default initialization, LoRA on the image projections of attention
- scripts/visualization/vis_flux.py (15cc71d): 50 steps with guidance 3.5, here in evaluation, and 512 T5 tokens

Our choices: rematerialized blocks in Flow-GRPO's recipes; the number of steps of Flow-GRPO, which runs until it is
stopped; LoRA, EMA and tokens of the fast recipes as in train_flux.py, because their script was not found; evaluation
every 40 steps at 720 x 720 in DanceGRPO's recipes, its batch, and their seed; sample images, number of checkpoints, all
placements. Frozen weights are bfloat16 in all recipes; in the sources only the text encoders of Flow-GRPO are.

Differences from the sources, in addition to those of all recipes (docs/evidence.md):
- DanceGRPO shifts the sigmas by 3. Here they are the pipeline's, whose shift at 720 x 720 is 2.22. A copy of the
  model whose scheduler_config.json has `"use_dynamic_shifting": false` uses DanceGRPO's, because its `shift` is 3;
- `dance` has four updates of four groups; the source has three, of four images of every group. The other two scripts
  have two updates of complete groups, as here;
- in DanceGRPO both prompts of a GPU share the start noise; here each group has a separate one. It adds 1e-8 to a std;
  here 1e-4 is added;
- only the trained steps of `pickscore` have noise, not the sixth. DanceGRPO's last step also has noise, but it decodes
  the result without it, as here;
- DanceGRPO rounds the network's sigma down to thousandths, and FluxPipeline rounds it to bfloat16. Here sigmas and
  FLUX.1's positions are exact.

docs/performance.md has the estimated memory and time, and the smallest TPU slice.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import published, recipe_and_gpus

# PEFT's to_q, to_k, to_v and to_out.0 match the ends of names: they exclude the text's projections, and single blocks
# have no to_out.0.
OF_IMAGES = r"(single_)?transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0)"


def flow_grpo(n: int) -> dict:
    """Flow-GRPO on n GPUs, each with all parameters."""
    return dict(
        model=dict(height=512, width=512, max_sequence_length=128),
        batch=dict(groups=48, images=24),
        sampler=dict(kind="flow", noise_level=0.9, steps=6, window=dict(length=5), chunk=3 * n),
        algorithm=dict(clip_range=1e-4),
        advantages=dict(std="global"),
        lora=dict(rank=64, alpha=128.0, init="gaussian"),
        trainer=dict(
            micro_batch=3 * n,
            updates=2,
            learning_rate=3e-4,
            ema=0.9,
            ema_warm_up=True,
            ema_every=8,
            # Micro-batches of an update on 32 GPUs: 1152 / (32 * 3) / 2.
            ema_repeats=6,
        ),
        placement=dict(trainer=dict(data=n, fsdp=1)),
        evaluation=dict(every=30, steps=28, batch=16 * n),
        checkpoint=dict(every=30),
    )


def dance(n: int) -> dict:
    """DanceGRPO, with parameters sharded over n GPUs."""
    return dict(
        steps=300,
        model=dict(height=720, width=720, max_sequence_length=512),
        batch=dict(groups=16, images=12),
        sampler=dict(
            kind="dance",
            noise_level=0.3,
            steps=16,
            window=dict(length=15, timestep_fraction=0.6),
            shared_noise=True,
            chunk=n,
        ),
        algorithm=dict(clip_range=1e-4),
        advantages=dict(std="group", ddof=1),
        trainer=dict(micro_batch=n, updates=2, learning_rate=1e-5),
        placement=dict(trainer=dict(data=1, fsdp=n), rules=((".*", "fsdp"),)),
        evaluation=dict(every=40, steps=50, batch=n),
        checkpoint=dict(every=40),
    )


# Flow-GRPO-Fast: the published window moves within the first half of the steps, which is as long as the window.
FAST = dict(
    sampler=dict(kind="cps", noise_level=0.8, window=dict(length=3)),
    algorithm=dict(clip_range=1e-5),
)


def dance_lora(n: int) -> dict:
    """Changes for DanceGRPO with a LoRA on n GPUs, each with all parameters."""
    return dict(
        steps=301,
        sampler=dict(steps=12, window=dict(length=11)),
        lora=dict(rank=128, alpha=256.0, targets=OF_IMAGES),
        trainer=dict(learning_rate=3e-4),
        placement=dict(trainer=dict(data=n, fsdp=1), rules=((".*", "replicate"),)),
        checkpoint=dict(every=60),
    )


# Changes to `BASE` by number of GPUs, applied in order.
RECIPES = {
    "pickscore": lambda n: (flow_grpo(n),),
    "pickscore_fast": lambda n: (flow_grpo(n), FAST, dict(advantages=dict(std="group"))),
    "geneval_fast": lambda n: (flow_grpo(n), FAST, dict(evaluation=dict(batch=14 * n))),
    "dance": lambda n: (dance(n), dict(trainer=dict(updates=4))),
    # The average is mixed at the end of each training step: after updates 2, 4, 6, ...
    "dance_ema": lambda n: (
        dance(n),
        dict(trainer=dict(clip_norm=0.01, ema=0.995, ema_unit="step")),
    ),
    "dance_lora": lambda n: (dance(n), dance_lora(n)),
}
# Images per update, divided by those per GPU and pass: 1152 / 2 / 3, 192 / 4 and 192 / 2.
PASSES = dict.fromkeys(RECIPES, 192) | dict(dance=48, dance_ema=96, dance_lora=96)


# Common settings of all recipes.
BASE = dict(
    seed=42,
    model=dict(folder="black-forest-labs/FLUX.1-dev"),
    prompts=dict(cache_limit=250.0),
    sampler=dict(guidance=3.5),
    algorithm=dict(adv_clip=5.0),
    trainer=dict(weight_decay=1e-4, clip_norm=1.0),
    evaluation=dict(guidance=3.5),
)


def get_config(argument: str = "pickscore,8") -> ConfigDict:
    name, n = recipe_and_gpus(argument, PASSES, "pickscore,8")
    return published(BASE, *RECIPES[name](n))
