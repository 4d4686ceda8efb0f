"""A learned reward as a function of numpy arrays, on the device that JAX has in this process."""

import jax

from digen_jax.learned_rewards.scorer import Params
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.reward_model import RewardModel, Scorer


def on_host(scorer: Scorer, params: Params, batch: int = 16) -> RewardModel:
    """The reward on one device.

    Args:
      scorer: the network.
      params: its parameters.
      batch: pictures that are scored at once, at most.

    Raises:
      ValueError: `batch` is no number of pictures.
    """
    here = DeviceGroup(make_mesh(jax.local_devices()[:1]))
    return RewardModel("reward", scorer, params, here, batch)
