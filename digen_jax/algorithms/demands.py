"""What the runtime has to know of an algorithm, whichever it is: which policies it reads, and what it trains."""

from typing import Literal

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.algorithms.awm import AWM
from digen_jax.algorithms.decay import LinearDecay
from digen_jax.algorithms.diffusion_nft import DiffusionNFT
from digen_jax.algorithms.policy_gradient import PolicyGradient
from digen_jax.algorithms.preference import DiffusionDPO

# Those that train final images at noise levels of the forward process, whatever sampled them.
ForwardProcess = DiffusionNFT | AWM | DiffusionDPO
Algorithm = PolicyGradient | ForwardProcess


def needs(algorithm: Algorithm, advantages: AdvantageSettings) -> Literal["group", "step"]:
    """What must be scored before any of it can train; diffusion DPO reads how a group is ranked."""
    if isinstance(algorithm, DiffusionDPO):
        return advantages.ranking_needs
    return advantages.needs


def is_forward(algorithm: Algorithm) -> bool:
    """Whether it trains final images; else transitions."""
    return isinstance(algorithm, ForwardProcess)


def needs_reference(algorithm: Algorithm) -> bool:
    """Whether the policy before tuning has to be kept."""
    return isinstance(algorithm, DiffusionDPO) or algorithm.kl_coefficient > 0


def needs_behaviour(algorithm: Algorithm) -> bool:
    """Whether training reads the parameters that sampled."""
    match algorithm:
        case DiffusionNFT():
            return True
        case DiffusionDPO():
            return False
    return algorithm.old_log_probs == "recomputed"


def needs_start(algorithm: Algorithm) -> bool:
    """Whether training reads the parameters that its step began with, updates later."""
    return isinstance(algorithm, PolicyGradient) and algorithm.decoupled


def slow_copy(algorithm: Algorithm) -> LinearDecay | None:
    """How a slow copy of the trained parameters follows, once a step; None where none is kept."""
    match algorithm:
        case DiffusionNFT():
            return algorithm.old_policy
        case AWM() if algorithm.ema_kl_coefficient:
            return algorithm.ema
    return None


def samples_from_copy(algorithm: Algorithm) -> bool:
    """Whether the slow copy is the behaviour policy, which is published."""
    return isinstance(algorithm, DiffusionNFT)


def set_steps(algorithm: Algorithm) -> int:
    """Steps of a fixed set that the policy before tuning samples; 0: what is published samples anew."""
    return algorithm.set_steps if isinstance(algorithm, DiffusionDPO) else 0


def images_of_sample(algorithm: Algorithm) -> int:
    """Images that one training sample holds: a pair for diffusion DPO."""
    return 2 if isinstance(algorithm, DiffusionDPO) else 1
