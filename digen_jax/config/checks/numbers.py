"""The ranges of a config's numbers that do not depend on other fields: a part of `checks`.

Every float must be finite, except those in `MAY_BE_INFINITE`.
"""

import math

from ml_collections import ConfigDict

from digen_jax.config.fields import flat
from digen_jax.errors import (
    LARGEST_SEED,
    LARGEST_SIDE,
    ConfigError,
    check_finite,
    check_range,
    together,
)
from digen_jax.process.launching import MOST_CPU_DEVICES

MAY_BE_INFINITE = (
    "config.trainer.clip_norm",  # gradients are never clipped
    "config.algorithm.importance_cap",  # no ratio is cut
)
POSITIVE = (0, math.inf, "least")
SHARE = (0, 1, "most")
# By field: the least and the most that it may be, and which of these two is itself excluded.
RANGES = {
    "seed": (0, LARGEST_SEED),
    "steps": (0, 10**9, "least"),
    "model.height": (0, LARGEST_SIDE, "least"),
    "model.width": (0, LARGEST_SIDE, "least"),
    "model.max_sequence_length": (0, 2**12),
    "model.source_height": (0, 2**14),
    "model.source_width": (0, 2**14),
    "prompts.store_limit": POSITIVE,
    "batch.groups": (0, 10**5, "least"),
    "batch.images": (-math.inf, 10**4),  # at least 2, see below
    "rewards[i].limit": (0, math.inf),
    "rewards[i].clip": (0, math.inf),
    "reward_pool.processes": (0, 1000),
    "reward_pool.retries": (0, 1000),
    "sampler.steps": (0, 1000, "least"),
    "sampler.guidance": (0, 1000),
    "sampler.true_guidance": (0, 1000),
    "sampler.window.interval": POSITIVE,
    "sampler.window.stride": POSITIVE,
    "sampler.chunk": POSITIVE,
    "lora.rank": (0, math.inf),
    "lora.alpha": POSITIVE,
    "trainer.micro_batch": POSITIVE,
    "trainer.pack": POSITIVE,
    "trainer.updates": POSITIVE,
    "trainer.learning_rate": POSITIVE,
    "trainer.warmup": (0, 10**9),
    "trainer.decay": (0, 10**9),
    "trainer.b1": SHARE,
    "trainer.b2": SHARE,
    "trainer.eps": POSITIVE,
    "trainer.weight_decay": (0, math.inf),
    "trainer.clip_norm": POSITIVE,
    "trainer.ema": SHARE,
    "trainer.ema_every": POSITIVE,
    "trainer.ema_repeats": POSITIVE,
    "placement.rollout.data": (0, math.inf),
    "placement.rollout.fsdp": POSITIVE,
    "placement.rollout.workers": POSITIVE,
    "placement.rollout.hosts": POSITIVE,
    "placement.rollout.max_workers": (0, math.inf),
    "placement.rollout.tensor": POSITIVE,
    "placement.rollout.sequence": POSITIVE,
    "placement.trainer.data": POSITIVE,
    "placement.trainer.fsdp": POSITIVE,
    "placement.trainer.hosts": POSITIVE,
    "placement.trainer.workers": POSITIVE,
    "placement.trainer.time": POSITIVE,
    "placement.trainer.tensor": POSITIVE,
    "placement.trainer.sequence": POSITIVE,
    "placement.cpu_devices": (0, MOST_CPU_DEVICES, "least"),
    "runtime.max_policy_lag": (0, math.inf),
    "runtime.max_off_policy_fraction": (0, 1),
    "runtime.deadline": (0, math.inf),
    "runtime.max_candidates": (0, 10**5),
    "runtime.redundant_groups": (0, 10**5),
    "runtime.max_incomplete_groups": (0, math.inf),
    "evaluation.every": POSITIVE,
    "evaluation.height": (0, LARGEST_SIDE),
    "evaluation.width": (0, LARGEST_SIDE),
    "evaluation.steps": (0, 1000),
    "evaluation.guidance": (0, 1000),
    "evaluation.true_guidance": (0, 1000),
    "evaluation.batch": (0, 10**6, "least"),
    "evaluation.images": (0, math.inf),
    "stopping.margin": (0, math.inf),
    "stopping.evaluations": POSITIVE,
    "pictures.every": POSITIVE,
    "pictures.images": (0, 1000, "least"),
    "checkpoint.every": POSITIVE,
    "checkpoint.keep": (0, 10**6, "least"),
}


def check_numbers(config: ConfigDict) -> None:
    """Refuses a number outside of its range, and a float that is not finite.

    Raises:
      ConfigError: names every such field and its range.
    """
    fields = flat(config)
    ranges = {
        f"config.{name.replace('[i]', f'[{i}]')}": limits
        for name, limits in RANGES.items()
        for i in range(len(config.rewards) if "[i]" in name else 1)
    }
    with together() as one:
        for name, limits in ranges.items():
            with one():
                check_range(name, fields[name], *limits)
        for name, value in fields.items():
            # A range has already refused NaN.
            if not (name in ranges and value != math.inf):
                with one():
                    check_finite(name, value, name in MAY_BE_INFINITE)
        if config.batch.images < 2:
            with one():
                raise ConfigError(
                    f"config.batch.images = {config.batch.images}: a group needs 2 images or more, or its "
                    "images cannot be better than one another"
                )
