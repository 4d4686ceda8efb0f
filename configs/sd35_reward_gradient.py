"""Stable Diffusion 3.5 Medium tuned by PickScore's gradient (DRaFT-1, arXiv 2309.17400), on GPUs of 80 GB.

python launch/train.py --config configs/sd35_reward_gradient.py:8 --workdir runs/draft \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the number of GPUs: 1, 2, 4 or 8. The reward is downloaded from the hub; docs/rewards.md has the other
networks whose gradient can be used. docs/algorithms.md explains the method.

Source: github.com/Tencent-Hunyuan/UniRL, experimental/refl/examples/sd3_pickscore_refl.yaml (735e098): 8 images in 4
steps without guidance, a gradient through the last one, 512 x 512, LoRA of rank 32 and alpha 64 of the joint attention,
learning rate 1e-4, no weight decay, gradient norm 1, 200 steps, 8 GPUs, bfloat16.

Our choices: the Gaussian initialization of the LoRA, rematerialized blocks, evaluation, sample images, checkpoints, all
placements.

Differences from the source: it has 8 prompts of one image each, here are 4 of two; all its steps start from the same
noise, here every image has its own; the T5 reads 128 tokens, as in configs/sd35_medium.py; the trained parameters are
float32 in both.

Expected result: not measured, because no such GPU was available.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import number_of_gpus, published

ATTENTION = r"transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
PICKSCORE = dict(
    folder="yuvalkirstain/PickScore_v1", processor="laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
)


def get_config(argument: str = "8") -> ConfigDict:
    n = number_of_gpus(argument, passes=8, example="8")
    config = dict(
        seed=42,
        steps=200,
        model=dict(
            folder="stabilityai/stable-diffusion-3.5-medium",
            height=512,
            width=512,
            max_sequence_length=128,
        ),
        rewards=(dict(name="pickscore", settings=PICKSCORE),),
        batch=dict(groups=4, images=2),
        sampler=dict(
            steps=4, kind="ode", noise_level=0.0, guidance=1.0, window=dict(length=0), chunk=8
        ),
        algorithm=dict(name="reward_gradient", gradient_steps=1),
        lora=dict(rank=32, alpha=64.0, targets=ATTENTION, init="gaussian"),
        trainer=dict(micro_batch=n, learning_rate=1e-4, weight_decay=0.0, clip_norm=1.0),
        placement=dict(trainer=dict(data=n)),
        evaluation=dict(every=20, steps=4, guidance=1.0, batch=8),
        checkpoint=dict(every=20),
    )
    return published(config)
