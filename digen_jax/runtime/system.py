"""What a run is made of, once it is assembled: meshes, executors, parameters."""

from typing import Any, NamedTuple

import jax

from digen_jax.runtime.placement import Placement
from digen_jax.runtime.policy import Policy
from digen_jax.runtime.sampler import Sampler, Weights
from digen_jax.runtime.trainer import Trainer


class System(NamedTuple):
    """The parts of a training run, their parameters loaded."""

    placement: Placement
    policy: Policy
    sampler: Sampler
    evaluator: Sampler
    trainer: Trainer
    base: Any  # on the trainer mesh, see Policy
    start: Any  # what is tuned, before the first update; the trainer's `init` takes it over
    rollout_base: Any
    frozen: Any  # the other components, on the rollout mesh

    def publish(self, tuned: Any) -> Weights:
        """The tuned parameters resharded onto the rollout mesh, with all else the sampler needs.

        Colocated they are the trainer's own arrays, which its next update consumes.
        """
        shardings = self.placement.rollout.params(tuned)
        return Weights(jax.device_put(tuned, shardings), self.rollout_base, self.frozen)
