"""The guidance of the velocities in a forward-process loss, which may differ from the sampler's.

The loss is that of v = v(null) + guidance (v(prompt) - v(null)) (arXiv 2207.12598); with guidance 1 or less it is that
of v(prompt) alone. One guidance holds for the trained policy, the behaviour policy and the slow copy, another one for
the reference. A policy gradient has none of its own: its ratio is to the sampled policy, so it replays with the
sampler's guidance, also for the reference (yifan123/flow_grpo, scripts/train_sd3.py, 74db691, `train.cfg`). Both passes
have a gradient, as there. Commit ac4c86e stops that of the pass without the prompt, which is another objective: the
gradient of a step differs by more than its largest element.
If guidance is an input of the model, these numbers are that input; if the model also has a second pass, every
velocity has the sampler's `true_guidance`.

Public code of the other algorithms:

- yifan123/flow_grpo, scripts/train_sd3_dpo.py, commit ac4c86e: DPO samples at 4.5 and trains v(prompt), with the
  reference's v(prompt).
- NVlabs/DiffusionNFT, scripts/train_nft_sd3.py, 24af555: samples at 1 and trains v(prompt). Above 1 it would add
  the empty prompt to the texts without doubling the images, so that their numbers would differ.
- scxue/advantage_weighted_matching, advantage_weighted_matching/scripts/train_sd3_awm.py, be51372: AWM trains
  v(prompt) by default (`train.cfg` False), else policy, old policy, reference and slow copy at the sampler's guidance.
- X-GenGroup/Flow-Factory, src/flow_factory/trainers, a0b2bc5: dpo.py, nft.py and awm.py have all at the sampler's
  guidance, 1 in their examples for Stable Diffusion 3.5; dgpo.py trains v(prompt), its reference at 1 (`kl_cfg`).
- verl-project/verl-omni, verl_omni/pipelines/sd3_dpo, a1139ba: DPO and its reference at one guidance, 4 in the example.
"""

import math


def choose_guidance(guidance: float, reference: float, sampler: float) -> tuple[float, float]:
    """(guidance, the reference's guidance) of a config, whose 0 means the sampler's and `guidance`, respectively."""
    guidance = guidance or sampler
    return guidance, reference or guidance


def check_guidance(guidance: float, reference: float, has_reference: bool) -> None:
    """Raises ValueError for a guidance that cannot work; the message says what to change."""
    for name, value in (("guidance", guidance), ("reference_guidance", reference)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it must be finite and not negative")
    if reference != guidance and not has_reference:
        raise ValueError(
            f"reference_guidance is {reference} and guidance {guidance}, but with kl_coefficient 0 no "
            "reference is evaluated: leave reference_guidance at 0, or give a kl_coefficient"
        )
