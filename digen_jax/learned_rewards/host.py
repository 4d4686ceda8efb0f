"""A learned reward as a function of numpy arrays, on the device that JAX has in this process."""

import jax

from digen_jax.engine.axes import make_mesh
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.scoring import Scorer, Scoring
from digen_jax.learned_rewards.scorer import Params


def on_host(scorer: Scorer, params: Params, batch: int = 16) -> Scoring:
    """The reward on one device.

    Args:
      scorer: the network.
      params: its parameters.
      batch: pictures that are scored at once, at most.

    Raises:
      ValueError: `batch` is no number of pictures.
    """
    here = DeviceGroup(make_mesh(jax.local_devices()[:1]))
    return Scoring("reward", scorer, params, here, batch)
