"""One recipe per algorithm on the embedded shapes model, all with the same initial model and number of images.

python launch/train.py --config configs/shapes_algorithms.py:cispo --workdir runs/cispo
python launch/benchmark.py algorithms --config configs/shapes_algorithms.py --workdir runs/algorithms

flow_grpo       Flow-GRPO (arXiv 2505.05470): its SDE, clipped ratios
flow_grpo_fast  Flow-GRPO-Fast: three noisy steps at a random position in the first half; only these are trained
flow_cps        Flow-GRPO with coefficients-preserving sampling (arXiv 2509.05952)
flow_capped     Flow-GRPO with limited noise per step, GenRL's sampler (LongCat-Video, arXiv 2510.22200)
dance_grpo      DanceGRPO (arXiv 2505.07818): its SDE, shared start noise, a fraction of the steps, best and worst
tempflow_grpo   TempFlow-GRPO (arXiv 2508.04324): one noisy step, from one start noise per group; its weight is its std
flash_grpo      Flash-GRPO (arXiv 2605.15980): one noisy step, weighted so that gradients of all steps are equally large
mix_grpo        MixGRPO (arXiv 2507.21802): a window of two noisy steps that moves towards the data
grpo_guard      GRPO-Guard (arXiv 2510.22319): ratios normalized per step
flow_dppo       Flow-DPPO (arXiv 2606.11025): bounds the KL to the behavior policy instead of the ratio
gspo            GSPO's ratio (arXiv 2507.18071), of an image's complete trajectory
cispo           CISPO (MiniMax-M1, arXiv 2506.13585): the ratio as a bounded weight
topr            TOPR (arXiv 2503.14286): the weight of a bad image falls with its likelihood
weighted_topr   ROLL's TOPR, here with half the weight for bad images
tis             truncated importance sampling: half of the images have a policy lag of 1, on a separate rollout worker
decoupled       decoupled PPO (arXiv 2110.00641), the same without truncation
diffusion_nft   DiffusionNFT (arXiv 2509.16117): forward process, second-order ODE sampler
awm             AWM (arXiv 2509.25050): matching losses, weighted by advantages
crd             CRD (arXiv 2603.14128): implicit rewards of a group match its rewards; KL to the guided initial model
dgpo            DGPO (arXiv 2510.08425): contrasts the images of a group, relative to the initial model
diffusion_dpo   diffusion DPO (arXiv 2311.12908) of the best and the worst image of each group
dpo_offline     the same on a fixed set of images from the initial model

Policy gradients use two updates per step: with one, all ratios would be 1 and most of these methods equal. They differ
little even so. With flow_grpo and seed 0, ratios differ from 1 by 2e-4 on average in the first step, when Adam's
updates are largest, and by 6e-5 from the sixth step on (`ratio_deviation` in metrics.jsonl, over both updates; in the
first update all are 1). The clip range of 1e-3 affects 3% of the samples in the first step and 0.02% later. Flow-DPPO's
published bound of 1e-5 affects half of the samples, which is the complete second update, and 7% later. GRPO-Guard's
log-ratio is smaller, because it contains the steps' stds as a factor and averages over the 512 numbers of a latent,
while the published ranges (configs/sd35_medium.py) are for 65,536. 1e-4 affects 37% of the samples in the first step
and 3% to 12% from the fourth on (grpo_guard, seed 0, `clip_fraction`), with a gain of 0.078.

docs/algorithms.md has the results over three seeds, except of the configs without a row there. The settings were chosen
in single runs, most with seed 0.
"""

import math

from ml_collections import ConfigDict

from digen_jax.config.load import complete
from digen_jax.errors import ConfigError

FLOW = dict(kind="flow", noise_level=0.7)

ODE = dict(kind="dpm2", noise_level=0.0, window=dict(length=0))
CLIP = dict(clip_range=1e-3)
FORWARD = dict(updates=1, learning_rate=3e-4)
# Half of each step's images start before the previous step ends, on another device.
STALE = dict(
    sampler=dict(kind="flow", noise_level=0.7, chunk=36),
    trainer=dict(micro_batch=36),
    placement=dict(rollout=dict(data=1)),
    runtime=dict(max_policy_lag=1),
)
# One pair of images per group is trained: more groups with fewer images.
PAIRS = dict(
    sampler=ODE,
    batch=dict(groups=36, images=4),
    trainer=dict(micro_batch=36, learning_rate=2e-4),
)

# Changes to `BASE` by section.
ALGORITHMS = {
    "flow_grpo": dict(sampler=FLOW, algorithm=CLIP),
    "flow_grpo_fast": dict(
        sampler=FLOW | dict(window=dict(mode="random", length=3, end=4)), algorithm=CLIP
    ),
    "flow_cps": dict(sampler=dict(kind="cps", noise_level=0.5), algorithm=CLIP),
    "flow_capped": dict(sampler=dict(kind="flow_capped", noise_level=0.7), algorithm=CLIP),
    "dance_grpo": dict(
        sampler=dict(kind="dance", noise_level=1.4, shared_noise=True)
        | dict(window=dict(length=3, timestep_fraction=0.67)),
        advantages=dict(best_and_worst=5),
        trainer=dict(micro_batch=60),
        algorithm=CLIP,
    ),
    # 2.716 and 0.586: 1 / (mean weight of the window's steps).
    "tempflow_grpo": dict(
        sampler=FLOW | dict(shared_noise=True, window=dict(mode="random", length=1, end=7)),
        batch=dict(groups=24, images=6),
        algorithm=CLIP | dict(step_weight="tempflow", step_weight_scale=2.716),
    ),
    "flash_grpo": dict(
        sampler=dict(kind="linear", noise_level=1.0)
        | dict(window=dict(mode="random", length=1, end=4)),
        advantages=dict(std="global"),
        algorithm=CLIP | dict(step_weight="flash", step_weight_scale=0.586),
    ),
    "mix_grpo": dict(
        sampler=FLOW | dict(window=dict(mode="progressive", length=2, end=4, interval=4)),
        algorithm=CLIP,
    ),
    "grpo_guard": dict(sampler=FLOW, algorithm=dict(ratio="guard", clip_range=1e-4)),
    "flow_dppo": dict(sampler=FLOW, algorithm=dict(surrogate="divergence", kl_threshold=1e-5)),
    "gspo": dict(
        sampler=FLOW,
        trainer=dict(pack=3, micro_batch=24),
        algorithm=dict(ratio="sequence_mean", clip_range=5e-4),
    ),
    "cispo": dict(sampler=FLOW, algorithm=dict(surrogate="cispo", clip_range=1e-3)),
    "topr": dict(sampler=FLOW, algorithm=dict(surrogate="topr")),
    "weighted_topr": dict(
        sampler=FLOW, algorithm=dict(surrogate="topr", positive_weight=1.0, negative_weight=0.5)
    ),
    "tis": STALE | dict(algorithm=dict(clip_range=1e-3, importance_cap=2.0)),
    "decoupled": STALE | dict(algorithm=dict(clip_range=1e-3, importance_cap=math.inf)),
    "diffusion_nft": dict(
        sampler=ODE, algorithm=dict(name="diffusion_nft", times=dict(count=4)), trainer=FORWARD
    ),
    "awm": dict(sampler=ODE, algorithm=dict(name="awm", times=dict(count=4)), trainer=FORWARD),
    "crd": dict(
        sampler=ODE,
        advantages=dict(std="global"),
        algorithm=dict(name="crd", reference_guidance=2.5, times=dict(count=4)),
        trainer=FORWARD | dict(learning_rate=1e-4),
    ),
    "dgpo": dict(
        sampler=ODE, algorithm=dict(name="dgpo", times=dict(count=4, first=6)), trainer=FORWARD
    ),
    "diffusion_dpo": PAIRS | dict(algorithm=dict(name="diffusion_dpo", beta=20.0)),
    "dpo_offline": PAIRS | dict(algorithm=dict(name="diffusion_dpo", beta=100.0, set_steps=16)),
}


# Common settings: 32 steps of 144 images in two updates, on one device.
BASE = dict(
    steps=32,
    model=dict(folder="assets/shapes-sd3", height=32, width=32),
    prompts=dict(file="assets/prompts/shapes_train.jsonl"),
    rewards=("shapes_geneval",),
    # Sampling and scoring alternate, so a reward process would only add its start time.
    reward_pool=dict(processes=0),
    batch=dict(groups=12, images=12),
    sampler=dict(steps=8, window=dict(length=3), guidance=1.0, chunk=72),
    # With one update per step, all ratios would be 1 and half of these algorithms equal.
    trainer=dict(micro_batch=72, updates=2, learning_rate=1.5e-4, ema=0.9),
    placement=dict(rollout=dict(data=0), trainer=dict(data=1), cpu_devices=2),
    evaluation=dict(prompts="assets/prompts/shapes_heldout.jsonl", every=16),
    images=dict(every=32, count=12),
    checkpoint=dict(every=16, keep=1),
)


def get_config(name: str = "flow_grpo") -> ConfigDict:
    if name not in ALGORITHMS:
        raise ConfigError(
            f"the config's argument {name!r} is no algorithm here: choose one of {', '.join(ALGORITHMS)}"
        )
    c = ConfigDict(BASE)
    c.update(ALGORITHMS[name])
    return complete(c)  # so that every field can be given on the command line
