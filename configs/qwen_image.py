"""Qwen-Image and Qwen-Image-Edit with published settings of Flow-GRPO, on GPUs of 80 GB.

python launch/train.py --config configs/qwen_image.py:ocr,4 --workdir runs/qwen-image \
    --config.rewards=ocr \
    --config.prompts.file=train.txt --config.evaluation.prompts=test.txt

The argument is the recipe's name, a comma, and the number of GPUs: 1, 2, 4, 8 or 16 (published: 4); for `edit_2509`
also 3, 6, 12, 24, 32, 48, 64, 96, 128, 192 or 384 (published: 8). Reward and prompt files are not included;
docs/qwen-image.md lists what they require. Qwen-Image-2512 has the settings of Qwen-Image, and each Qwen-Image-Edit can
have the other's: --config.model.folder=Qwen/Qwen-Image-2512.

Separate GPUs for rollout and training, four each of eight:
--config.placement.rollout.data=1 --config.placement.rollout.fsdp=4 --config.placement.trainer.fsdp=4
Layout chosen by the planner: --config.placement=auto

ocr        verl-omni's Flow-GRPO (arXiv 2505.05470) for rendered text: LoRA of rank 64, two of ten steps trained, in a
           window at a random position
edit_2509  Flow-Factory's Flow-GRPO of Qwen-Image-Edit-2509: LoRA of rank 64, one of ten steps trained: 1, 2 or 3
edit_2511  verl-omni's Flow-GRPO of Qwen-Image-Edit-2511: LoRA of rank 64, three of twelve steps trained, in a window at
           a random position

Sources of `ocr`, in github.com/verl-project/verl-omni:
- examples/flowgrpo_trainer/qwen_image/run_qwen_image_ocr_lora.sh (8b0f0f9): 32 groups of 16 images in two updates
  (train_batch_size, rollout.n, ppo_mini_batch_size), micro-batch of 16 images per GPU; guidance 4 (true_cfg_scale), 256
  prompt tokens, noise 1.2 of kind "sde" ("flow" here), a window of 2 steps within the first 5; LoRA of rank 64, alpha
  128, on attention and feed-forward of both streams; learning rate 3e-4, weight decay 1e-4, clip range 1e-5; evaluation
  in 50 steps without noise; bfloat16 weights; 4 GPUs; evaluation and checkpoint every 30 steps, 300 steps
- verl_omni/trainer/config/diffusion/rollout/diffusion_rollout.yaml (786dd36): 512 x 512, 10 steps; one image per prompt
  in evaluation, with the guidance of training
- verl_omni/trainer/config/diffusion/model/diffusion_model.yaml (786dd36): Gaussian LoRA, rematerialized blocks
- verl_omni/trainer/config/diffusion/actor/diffusion_actor.yaml (0a4a399): advantages clipped to 5, no KL;
  dp_diffusion_actor.yaml next to it (173611f): gradient norm 1
- verl_omni/trainer/config/optim/fsdp.yaml (411d1d6): AdamW's settings, a constant learning rate
- verl_omni/trainer/config/diffusion_trainer.yaml (6f8f830): std of the step, recomputed old log-probabilities;
  verl_omni/trainer/diffusion/diffusion_algos.py (0a4a399): sample std, to which 1e-4 is added
- examples/flowgrpo_trainer/data_process/qwenimage_ocr.py (340b365): the negative prompt " ", the family's default
- verl_omni/pipelines/qwen_image_flow_grpo/common.py (bd34708): a token's guided velocity has the norm of the
  conditional one, as in diffusers' pipeline

Sources of `edit_2511`, in addition to those of `ocr` for all that it does not set:
- examples/flowgrpo_trainer/qwen_image_edit/run_qwen_image_edit_lora.sh (01c87ee): group std, noise 0.7, 12 steps, a
  window of 3 within the first 6, clip range 1e-4, evaluation in 40 steps every 20 steps, checkpoint every 5, a LoRA in
  float32, seed 42, 8 GPUs
- verl_omni/pipelines/qwen_image_edit_flow_grpo/vllm_omni_rollout_adapter.py (8b0f0f9): one source image of the aspect
  ratio of the generated one, in the pipeline's size for the autoencoder, 1024 x 1024
- examples/flowgrpo_trainer/qwen_image_edit/prepare_data.py (01c87ee): the negative prompt " "

Sources of `edit_2509`, in github.com/X-GenGroup/Flow-Factory:
- examples/grpo/lora/qwen_image_edit_plus/default.yaml (3e615ee): 48 groups of 16 images in two updates, micro-batch of
  one image per GPU; images and source images of 384 x 384; 10 steps, guidance 4, noise 1 of Flow-GRPO's SDE in one of
  the steps 1, 2 and 3, counted from 0; evaluation at 1024 x 1024 in 40 steps, one image per GPU; clip range 1e-4,
  advantages clipped to 5, group std, no KL, learning rate 3e-4, weight decay 1e-4, Adam's settings, gradient norm 1,
  EMA of 0.9 every 4 training steps, rank 64 and alpha 128, bfloat16, evaluation and checkpoint every 20, seed, 8 GPUs
- src/flow_factory/models/qwen_image/qwen_image_edit_plus.py (3e615ee): LoRA layers, which are those of `ocr`
- as for FLUX.2 klein (configs/flux2_klein.py): the step with noise, Gaussian LoRA, EMA warm-up

Our choices: 16 images per GPU in sampling and evaluation, 8 in training (the same gradient; with 16, the saved inputs
of the 60 blocks alone take 14 GiB), sample images, number of checkpoints, seed, and placement: GPUs shard all
parameters. For `edit_2511` 4 images per GPU in training, and for both edits 256 prompt tokens in addition to those of
images. For `edit_2509` rematerialized blocks and the number of steps; the source's recipes for all weights and for
DiffusionNFT are not included.

Differences from the source of `ocr`:
- each image has a separate window there (verl_omni/pipelines/request_batch.py); here all images of a step share one;
- in the source's reward, Qwen3-VL-8B reads the text in an image (verl_omni/utils/reward_score/genrm_ocr.py, 57a9441);
- the LoRA and its moments are bfloat16 there, as PEFT gives factors the dtype of the adapted weights
  (verl_omni/workers/engine/fsdp/diffusers_impl.py, 04e7572); here they are float32;
- diffusers rounds sigma to bfloat16 before it multiplies it by 1000, so that 0.99 becomes 988; here it is exact;
- the source offloads weights to host memory; here they stay on the GPUs.

Differences from the source of `edit_2511`, in addition to those of `ocr` except reward and LoRA, and to the last one of
`edit_2509`:
- source images are scaled to fit into the square there, with white bars; here their center is used.

Differences from the source of `edit_2509`, in addition to those of FLUX.2 klein (configs/flux2_klein.py):
- source images keep their aspect ratio there, with 384 x 384 pixels in training and 1024 x 1024 in evaluation, and
  generated images have the last one's; here all have one size, which square images have there, too;
- its second pass has the prompt "" unless a record has one; here it is " ", as in the model's README;
- with transformers 5, tokens of images have the positions of text there, as in diffusers (docs/qwen-image.md).

docs/performance.md has the estimated memory and time, and the smallest TPU slice.
"""

from ml_collections import ConfigDict

from digen_jax.config.published import published, recipe_and_gpus


def ocr(n: int) -> tuple[dict, ...]:
    """Flow-GRPO, with parameters sharded over n GPUs."""
    config = dict(
        seed=0,
        steps=300,
        model=dict(folder="Qwen/Qwen-Image", height=512, width=512, max_sequence_length=256),
        batch=dict(groups=32, images=16),
        sampler=dict(
            kind="flow",
            noise_level=1.2,
            steps=10,
            guidance=4.0,
            window=dict(mode="random", length=2, end=5),
            chunk=16 * n,
        ),
        algorithm=dict(clip_range=1e-5, adv_clip=5.0),
        advantages=dict(std="global", ddof=1),
        lora=dict(rank=64, alpha=128.0, init="gaussian"),
        trainer=dict(
            micro_batch=8 * n, updates=2, learning_rate=3e-4, weight_decay=1e-4, clip_norm=1.0
        ),
        placement=dict(trainer=dict(data=1, fsdp=n), rules=((".*", "fsdp"),)),
        evaluation=dict(every=30, steps=50, guidance=4.0, batch=16 * n),
        images=dict(every=30),
        checkpoint=dict(every=30),
    )
    return (config,)


def edit_2511(n: int) -> tuple[dict, ...]:
    """The same with source images."""
    changes = dict(
        seed=42,
        model=dict(folder="Qwen/Qwen-Image-Edit-2511", source_height=1024, source_width=1024),
        sampler=dict(noise_level=0.7, steps=12, window=dict(length=3, end=6)),
        algorithm=dict(clip_range=1e-4),
        advantages=dict(std="group"),
        trainer=dict(micro_batch=4 * n),
        evaluation=dict(every=20, steps=40),
        images=dict(every=20),
        checkpoint=dict(every=5),
    )
    return *ocr(n), changes


def edit_2509(n: int) -> tuple[dict, ...]:
    """Flow-GRPO with source images, with parameters sharded over n GPUs."""
    size = dict(height=384, width=384, source_height=384, source_width=384)
    config = dict(
        seed=42,
        model=dict(folder="Qwen/Qwen-Image-Edit-2509", max_sequence_length=256, **size),
        batch=dict(groups=48, images=16),
        sampler=dict(
            kind="flow",
            noise_level=1.0,
            steps=10,
            guidance=4.0,
            window=dict(mode="random", first=1, end=4, length=1),
            chunk=n,
        ),
        algorithm=dict(clip_range=1e-4, adv_clip=5.0),
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
            ema_unit="step",  # at the end of training steps 4, 8, ...: after updates 8, 16, ...
            ema_every=4,
        ),
        placement=dict(trainer=dict(data=1, fsdp=n), rules=((".*", "fsdp"),)),
        evaluation=dict(every=20, height=1024, width=1024, steps=40, guidance=4.0, batch=n),
        checkpoint=dict(every=20),
    )
    return (config,)


RECIPES = {"ocr": ocr, "edit_2509": edit_2509, "edit_2511": edit_2511}
# Images per update, divided by those per GPU and call of the sampler: 512 / 2 / 16, and 768 / 2.
PASSES = {"ocr": 16, "edit_2509": 384, "edit_2511": 16}


def get_config(argument: str = "ocr,4") -> ConfigDict:
    name, n = recipe_and_gpus(argument, PASSES, "ocr,4")
    return published(*RECIPES[name](n))
