"""Flow-GRPO on Stable Diffusion 3.5 Medium, as published for GenEval, on one GPU of 80 GB or several.

python launch/train.py --config configs/sd35_medium_flow_grpo.py:8 --workdir runs/sd35 \
    --config.reward.name=my_rewards:geneval \
    --config.prompts.file=train_metadata.jsonl --config.evaluation.prompts=test_metadata.jsonl

The number after the colon is that of the GPUs: 1, 2, 4, 8, ... 64; without it, one. The reward and
the prompt files are yours, as no detector of GenEval's objects is shipped here. The hub repository
is gated: accept its licence there and log in with `hf auth login`, or set model.folder to a copy.

Source: the paper (arXiv 2505.05470) and its public code (github.com/yifan123/flow_grpo:
`geneval_sd3`, for one GPU `general_ocr_sd3_1gpu`, in config/grpo.py; the LoRA and the EMA in
scripts/train_sd3.py). For OCR only reward and prompts change; for PickScore kl_coefficient is 0.01.

Where this departs from the source:
- no T5: it is not supported yet, so both CLIPs and empty tokens in its place give the context;
- float32 and its TF32 matrix products in place of float16, whose 10 bits of mantissa TF32 has.
  Not bfloat16, with 7: between sampling and replay its rounding alone moved the ratio by 3e-5 in the
  first step to 5e-3 in the ninth (the embedded model on a CPU, 128 pixels, this sampler), against a
  clip range of 1e-4;
- noise in the nine trained steps only, none in the tenth; an update's groups are cut by index, not
  shuffled; groups with equal rewards stay in the loss, for the sake of their KL;
- LoRA's A starts as in PEFT's default, not Gaussian; the EMA moves at every update by an eighth of
  what the source's moves at every eighth.

Expected result: not measured here, for want of such a GPU. Published, with the T5 and on 32 GPUs:
GenEval 0.63 before, 0.95 after. The tests check all shapes of a step at this size.
"""

from ml_collections import ConfigDict

from digen_jax.recipe import complete
from digen_jax.settings import ConfigError

# The linear layers of the joint attention; not those of the second attention over the image alone.
ATTENTION = r"transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"


def get_config(gpus: str = "1") -> ConfigDict:
    if not gpus.isdecimal() or int(gpus) < 1:
        raise ConfigError(f"the config's argument {gpus!r} must be a number of GPUs, such as :8")
    n = int(gpus)
    # What the public code sets for one GPU; else what it sets for 32, spread over those there are.
    groups, images, each = (8, 8, 8) if n == 1 else (48, 24, 9)
    c = ConfigDict()
    c.seed = 0
    c.steps = 3000  # the source runs until it is stopped; this may be raised in the same workdir
    c.model = ConfigDict(
        dict(
            folder="stabilityai/stable-diffusion-3.5-medium",
            height=512,
            width=512,
            dtype="float32",
            remat=True,
        )
    )
    c.prompts = ConfigDict(dict(file=""))
    c.reward = ConfigDict(dict(name=""))
    c.batch = ConfigDict(dict(groups=groups, images=images))
    c.sampler = ConfigDict(
        dict(
            steps=10,
            kind="flow",
            noise_level=0.7,
            window=dict(first=0, length=9),
            guidance=4.5,
            fragment=n * each,
        )
    )
    c.algorithm = ConfigDict(
        dict(
            name="policy_gradient",
            clip_range=1e-4,
            adv_clip=5.0,
            kl_coefficient=0.04,
        )
    )
    c.advantages = ConfigDict(dict(std="global"))
    c.lora = ConfigDict(dict(rank=32, alpha=64.0, targets=ATTENTION))
    c.trainer = ConfigDict(
        dict(
            # As many as are sampled at once: kernels, and with them roundings, go by the batch.
            micro_batch=n * each,
            updates=2,
            learning_rate=3e-4,
            weight_decay=1e-4,
            clip_norm=1.0,
            ema=0.987,  # 0.9 ** (1 / 8)
        )
    )
    # Sampling and training take turns, so on the same devices neither waits for the other's.
    c.placement = ConfigDict(dict(rollout=dict(data=0, fsdp=1), trainer=dict(data=n, fsdp=1)))
    c.evaluation = ConfigDict(
        dict(
            prompts="",
            every=60,
            steps=40,
            guidance=4.5,
            batch=14 * n,
            images=280 if n == 1 else 0,
        )
    )
    c.pictures = ConfigDict(dict(every=20, images=12))
    c.checkpoint = ConfigDict(dict(every=20, keep=2))
    return complete(c)  # so that every field can be given on the command line
