"""SFT and diffusion DPO of the embedded shapes model on the user's own images, without sampling.

python -m examples.shapes.pairs runs/pairs-data 256
python launch/train.py --config configs/shapes_pairs.py:dpo --workdir runs/dpo \
    --config.prompts.file=runs/pairs-data/pairs.jsonl

dpo  diffusion DPO (arXiv 2311.12908) on pairs: each line of the file has "prompt", "chosen" and "rejected"
sft  the flow-matching loss of the images "chosen"

The first command renders 256 pairs as an example. Image paths are relative to the file. The reward only evaluates: with
`rewards=()` there is no evaluation. The settings are ours and were not tuned. On these pairs, with seed 0, dpo raises
the reward on held-out prompts from 0.320 to 0.519; sft changes it by less than its standard error.
"""

from ml_collections import ConfigDict

from digen_jax.config.load import complete
from digen_jax.errors import ConfigError

METHODS = {
    "dpo": dict(
        algorithm=dict(name="diffusion_dpo", from_files=True, beta=20.0),
        batch=dict(groups=36, images=2),
    ),
    "sft": dict(algorithm=dict(name="sft"), batch=dict(groups=72, images=1)),
}


def get_config(name: str = "dpo") -> ConfigDict:
    if name not in METHODS:
        raise ConfigError(
            f"the config's argument {name!r} is no method here: choose one of {', '.join(METHODS)}"
        )
    c = ConfigDict(
        dict(
            steps=32,
            model=dict(folder="assets/shapes-sd3", height=32, width=32),
            prompts=dict(file=""),
            rewards=("shapes_geneval",),
            reward_pool=dict(processes=0),
            sampler=dict(steps=8, kind="ode", noise_level=0.0, window=dict(length=0), chunk=72),
            trainer=dict(micro_batch=72, learning_rate=1e-4, ema=0.9),
            placement=dict(rollout=dict(data=0), trainer=dict(data=1), cpu_devices=2),
            evaluation=dict(prompts="assets/prompts/shapes_heldout.jsonl", every=16),
            images=dict(every=32, count=12),
            checkpoint=dict(every=16, keep=1),
        )
    )
    c.update(METHODS[name])
    return complete(c)  # so that every field can be given on the command line
