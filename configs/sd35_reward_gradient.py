"""Stable Diffusion 3.5 Medium tuned by the gradient of rewards, on GPUs of 80 GB.

python launch/train.py --config configs/sd35_reward_gradient.py:flowbp_lagrange,8 --workdir runs/flowbp \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is a recipe (draft, refl, leap_align, flowbp_sparse, flowbp_bridge, flowbp_lagrange) and the number of
GPUs, for draft 1, 2, 4 or 8, else a divisor of 64. docs/rewards.md has the networks whose gradient can be used and
where their files come from. docs/algorithms.md explains the methods.

Sources:

- draft (DRaFT-1, arXiv 2309.17400): github.com/Tencent-Hunyuan/UniRL,
  experimental/refl/examples/sd3_pickscore_refl.yaml (735e098): 8 prompts of one image in 4 steps without guidance, a
  gradient through the last one, 512 x 512, PickScore, LoRA of rank 32 and alpha 64 of the joint attention, learning
  rate 1e-4, no weight decay, gradient norm 1, 200 steps, 8 GPUs, bfloat16.
- the others: github.com/RuoyuWang-2077/FlowBP, configs/final/sd35/sd3_5_*.yaml (93b220a), the code in
  flowbp/trainers/sd35, and scripts/preprocess/preprocess_sd35_embeddings.sh for the T5's 512 tokens: 64 prompts of one
  image in 25 steps with guidance 3.5, 512 x 512, HPSv2.1, all weights, learning rate 1e-5, weight decay 1e-4, gradient
  norm 1, an average of 0.995 from the first update on, 300 steps, evaluation of the average with 40 steps every 50.

Our choices: the Gaussian initialization of draft's LoRA, rematerialized blocks, sample images, checkpoints every 20
steps of draft, all placements.

Differences from the sources:

- draft: all steps of the source start from the same noise, here every image has its own; the T5 reads 128 tokens, as
  in configs/sd35_medium.py; the trained parameters are float32 in both.
- The others: the source trains parameters in bfloat16, here they are float32. All images of a batch on a GPU have the
  same steps with a gradient there; here each draws its own. The loss is there max(0, 0.55 - reward), which has the
  same gradient below 0.55: HPSv2.1 is 0.28 at the start and 0.40 at the end in its README. Latents are rounded to
  bfloat16 after every step there. Its prompts are `assets/prompts.txt`; here prompts are given by the user.

Expected result: not measured, because no such GPU was available.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import published, recipe_and_gpus

ATTENTION = r"transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
PICKSCORE = dict(
    folder="yuvalkirstain/PickScore_v1", processor="laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
)
HPS = dict(file="HPS_v2.1_compressed.pt", tokenizer="laion/CLIP-ViT-H-14-laion2B-s32B-b79K")

ODE = dict(kind="ode", noise_level=0.0, window=dict(length=0))


def draft(n: int) -> dict:
    return dict(
        steps=200,
        model=dict(max_sequence_length=128),
        rewards=(dict(name="pickscore", settings=PICKSCORE),),
        batch=dict(groups=8, images=1),
        sampler=ODE | dict(steps=4, guidance=1.0, chunk=8),
        algorithm=dict(name="reward_gradient", gradient_steps=1),
        lora=dict(rank=32, alpha=64.0, targets=ATTENTION, init="gaussian"),
        trainer=dict(micro_batch=n, learning_rate=1e-4, weight_decay=0.0, clip_norm=1.0),
        placement=dict(trainer=dict(data=n)),
        evaluation=dict(every=20, steps=4, guidance=1.0, batch=8),
        checkpoint=dict(every=20),
    )


def flowbp(n: int, **algorithm: str | float) -> dict:
    return dict(
        steps=300,
        model=dict(max_sequence_length=512),
        rewards=(dict(name="hpsv2", settings=HPS),),
        batch=dict(groups=64, images=1),
        sampler=ODE | dict(steps=25, guidance=3.5, chunk=n),
        algorithm=dict(algorithm),
        trainer=dict(
            micro_batch=n, learning_rate=1e-5, weight_decay=1e-4, clip_norm=1.0, ema=0.995
        ),
        placement=dict(trainer=dict(data=1, fsdp=n), rules=((".*", "fsdp"),)),
        evaluation=dict(every=50, steps=40, guidance=3.5, batch=n),
        checkpoint=dict(every=100),
    )


# Changes to `BASE` by number of GPUs.
RECIPES = {
    "draft": draft,
    "refl": lambda n: flowbp(n, name="refl", last_steps=11, detach_unconditional=True),
    "leap_align": lambda n: flowbp(n, name="leap_align", anchor_gradient=0.3, tau=0.1),
    "flowbp_sparse": lambda n: flowbp(
        n,
        name="flowbp_sparse",
        gradient_steps=4,
        late_bias=1.0,
        rescale=0.5,
        detach_unconditional=True,
    ),
    "flowbp_bridge": lambda n: flowbp(
        n,
        name="flowbp_bridge",
        gradient_steps=5,
        late_bias=4.0,
        anchor_gradient=0.5,
        detach_unconditional=True,
    ),
    "flowbp_lagrange": lambda n: flowbp(
        n,
        name="flowbp_lagrange",
        order=3,
        second_gradient=0.25,
        anchor_gradient=0.1,
        tau=0.2,
        after_anchor=2.5,
        between=6.0,
        before_first=2.0,
        last_steps=10,
        detach_unconditional=True,
    ),
}
PASSES = dict.fromkeys(RECIPES, 64) | dict(draft=8)
BASE = dict(
    seed=42,
    model=dict(folder="stabilityai/stable-diffusion-3.5-medium", height=512, width=512),
)


def get_config(argument: str = "draft,8") -> ConfigDict:
    name, n = recipe_and_gpus(argument, PASSES, "draft,8")
    return published(BASE, RECIPES[name](n))
