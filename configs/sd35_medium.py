"""Stable Diffusion 3.5 Medium with the published settings of several methods, on one or more GPUs of 80 GB.

python launch/train.py --config configs/sd35_medium.py:geneval,8 --workdir runs/sd35 \
    --config.rewards=my_rewards:geneval \
    --config.prompts.file=train_metadata.jsonl --config.evaluation.prompts=test_metadata.jsonl

The argument is the recipe's name, a comma, and the number of GPUs: 1, 2, 4, 8, 16, 32 or 64, for nft_geneval and
nft_pickscore also 128. docs/stable-diffusion-3.5.md lists what model, prompts and reward require.

Separate GPUs for rollout and training, four each of eight:
--config.placement.rollout.data=4 --config.placement.trainer.data=4
Layout chosen by the planner: --config.placement=auto

geneval, ocr, pickscore              Flow-GRPO (arXiv 2505.05470), with different KL coefficients
geneval_fast_nocfg,                  Flow-GRPO-Fast: three noisy steps at a random position in the first half, cps, no
    pickscore_fast_nocfg             guidance, no KL, clip range 1e-5
geneval_guard, ocr_guard,            GRPO-Guard (arXiv 2510.22319): clip range 2e-6 (pickscore_guard: 4e-6), group std,
    pickscore_guard                  no KL
nft_geneval, nft_ocr, nft_pickscore  DiffusionNFT (arXiv 2509.16117), without guidance

Sources: the papers and their public code. github.com/yifan123/flow_grpo: `geneval_sd3`, `general_ocr_sd3`,
`pickscore_sd3`, `geneval_sd3_fast_nocfg`, `pickscore_sd3_fast_nocfg`, for one GPU `general_ocr_sd3_1gpu`, in
config/grpo.py; `geneval_sd3_rationorm`, `general_ocr_sd3_rationorm`, `pickscore_hps_sd3_ratio_norm` in
config/grpo_guard.py (2e2f712); the LoRA and the EMA in scripts/train_sd3.py; the seed in config/base.py.
github.com/NVlabs/DiffusionNFT: `sd3_geneval`, `sd3_ocr`, `sd3_pickscore` in config/nft.py, intervals of evaluation and
checkpoint in config/base.py. Some were read in copies of these repositories.
The T5 reads 128 tokens, in training and evaluation, not the pipeline's 256: `max_sequence_length=128` in
scripts/train_sd3.py of the former (ac4c86e) and in scripts/train_nft_sd3.py of the latter (24af555).

Differences from the sources, in addition to those of all recipes (docs/evidence.md):
- float32 with TF32 matrix products instead of float16; both have 10 bits of mantissa. bfloat16 has 7: after one update,
  its rounding alone changed the log-ratio by 5e-5 rms (measured once, with a LoRA of rank 8 of the embedded model on a
  CPU), compared with a clip range of 1e-4;
- only the nine trained steps have noise, not the tenth. Flow-GRPO and GRPO-Guard drop groups of equal rewards, also
  from the KL; the sources drop each image whose advantage is 0 and divide the rest evenly among both updates, with some
  of the dropped images to fill micro-batches;
- GRPO-Guard's ratio uses the std and KL of each image, not the batch means;
- on one GPU every recipe has the batch of `general_ocr_sd3_1gpu` (8 groups of 8).

float32 resolves GRPO-Guard's clip range. The clip acts on the log-ratio, which was at most 1.5e-8 between sampling and
replay with the same weights (the embedded model on a CPU, 10 steps; `pytest -s -m slow tests/parallel/test_ratios.py -k
guard` prints it). If a log-probability between 1 and 2 is rounded differently, it is 8e-8: a resolution of 1.2e-7,
times the first step's std of 0.7. bfloat16 could not resolve the range.

docs/performance.md has the estimated memory and time, and the smallest TPU slice.

Expected result: not measured, because no such GPU was available. Published for Flow-GRPO on 32 GPUs: GenEval 0.63
before, 0.95 after. The tests check all shapes of a step at this size.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import published, recipe_and_gpus

# Linear layers of the joint attention, without the second attention, which covers only the image.
ATTENTION = r"transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"

# The sources mix the average after every micro-batch, so as often per update as it has micro-batches.
# With 48 * 24 or 64 * 18 images on 32 GPUs, 9 per pass, in 2 updates: 1152 / (32 * 9) / 2. For GRPO-Guard on 16
# GPUs: 1152 / (16 * 9) / 2. With 8 * 8 images on one GPU, 8 per pass: 64 / 8 / 2.
REPEATS, REPEATS_OF_GUARD, REPEATS_ON_ONE = 2, 4, 4

FAST = dict(
    sampler=dict(
        kind="cps",
        noise_level=0.8,
        guidance=1.0,
        window=dict(mode="random", first=0, end=5, length=3),
    ),
    algorithm=dict(clip_range=1e-5),
    advantages=dict(drop_zero_std=True),
    evaluation=dict(guidance=1.0),
)


GUIDED = dict(kind="flow", noise_level=0.7, guidance=4.5, window=dict(first=0, length=9))


def flow_grpo(kl_coefficient: float) -> dict:
    return dict(
        sampler=GUIDED,
        algorithm=dict(clip_range=1e-4, adv_clip=5.0, kl_coefficient=kl_coefficient),
        advantages=dict(drop_zero_std=True),
    )


def guard(clip_range: float) -> dict:
    return dict(
        sampler=GUIDED,
        algorithm=dict(ratio="guard", clip_range=clip_range, adv_clip=5.0),
        advantages=dict(std="group", drop_zero_std=True),
        trainer=dict(learning_rate=1e-4, ema_repeats=REPEATS_OF_GUARD),
        evaluation=dict(every=30),
        checkpoint=dict(every=30),
    )


def nft(updates: int = 1, **algorithm: float) -> dict:
    return dict(
        sampler=dict(kind="dpm2", noise_level=0.0, guidance=1.0, window=dict(length=0)),
        algorithm=dict(name="diffusion_nft", kl_coefficient=1e-4, **algorithm),
        trainer=dict(updates=updates, ema_every=1, ema_repeats=1),
        evaluation=dict(every=10, guidance=1.0),
        checkpoint=dict(every=30),
    )


# Changes to `base`.
RECIPES = {
    "geneval": flow_grpo(kl_coefficient=0.04),
    "ocr": flow_grpo(kl_coefficient=0.04),
    "pickscore": flow_grpo(kl_coefficient=0.01),
    "geneval_fast_nocfg": FAST,
    "pickscore_fast_nocfg": FAST | dict(batch=dict(groups=64, images=18)),
    "geneval_guard": guard(clip_range=2e-6),
    "ocr_guard": guard(clip_range=2e-6),
    "pickscore_guard": guard(clip_range=4e-6),
    "nft_geneval": nft(beta=1.0, decay_type=1),
    "nft_ocr": nft(updates=2, beta=0.1, decay_type=2),
    "nft_pickscore": nft(beta=1.0, decay_type=1),
}
# Images per update on several GPUs, divided by those per GPU and pass: 1152 / 2 / 9, or 1152 / 9.
PASSES = dict.fromkeys(RECIPES, 64) | dict(nft_geneval=128, nft_pickscore=128)


def base(n: int) -> dict:
    """Common settings of all recipes on n GPUs."""
    each = 8 if n == 1 else 9  # images per GPU and pass
    return dict(
        seed=42,
        model=dict(
            folder="stabilityai/stable-diffusion-3.5-medium",
            height=512,
            width=512,
            max_sequence_length=128,
        ),
        precision=dict(arithmetic="float32", frozen="float32"),
        prompts=dict(cache_limit=200.0),
        batch=dict(groups=48, images=24),
        sampler=dict(steps=10, chunk=n * each),
        advantages=dict(std="global"),
        lora=dict(rank=32, alpha=64.0, targets=ATTENTION, init="gaussian"),
        trainer=dict(
            # As in sampling: kernels, and therefore rounding, depend on the batch size.
            micro_batch=n * each,
            updates=2,
            learning_rate=3e-4,
            weight_decay=1e-4,
            clip_norm=1.0,
            ema=0.9,
            ema_warm_up=True,
            ema_every=8,
            ema_repeats=REPEATS,
        ),
        placement=dict(trainer=dict(data=n)),
        evaluation=dict(
            every=60, steps=40, guidance=4.5, batch=14 * n, images=280 if n == 1 else 0
        ),
        checkpoint=dict(every=60),
    )


def get_config(argument: str = "geneval,1") -> ConfigDict:
    name, n = recipe_and_gpus(argument, PASSES, "geneval,8")
    on_one = dict[str, dict]()
    if n == 1:
        on_one = dict(batch=dict(groups=8, images=8))
        if not name.startswith("nft_"):
            on_one |= dict(trainer=dict(ema_repeats=REPEATS_ON_ONE))
    return published(base(n), RECIPES[name], on_one)
